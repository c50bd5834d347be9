"""The structure tables: the diagnostics' numbers on the right rows, known geometries, and what a set cannot give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hallutracer_research.evaluation.results import SetResult
from hallutracer_research.evaluation.tables import Table
from hallutracer_research.paper import structure
from hallutracer_research.paper.diagnostics.geometry import expected_cosine, layer_geometry
from hallutracer_research.paper.diagnostics.shape import fisher_gap, snr_table
from hallutracer_research.paper.report import _geometry
from hallutracer_research.paper.tables import TableSpec, make_tables
from tests.research.made import FITTED, LABEL, scripted_result
from tests.research.made import blind_logits as noise


def row(spec: TableSpec, result: SetResult) -> Mapping[str, Any]:
    return spec.table([result]).rows[0]


def k_split(results: list[SetResult]) -> list[Table]:
    return make_tables((structure.READOUTS["k-split"], structure.READOUTS["k-split-variance"]), results)


def fixed_head(result: SetResult, head: int) -> SetResult:
    """The same fits, with ``head`` selected at every layer."""
    quality = np.full_like(result.splits[0].probes.auroc, 0.6)
    quality[:, head] = 0.9
    splits = [replace(split, probes=replace(split.probes, auroc=quality)) for split in result.splits]
    return replace(result, splits=splits)


def test_rows_are_the_diagnostics_of_the_out_of_fold_trajectories(result: SetResult) -> None:
    trajectory = result.trajectory(0)
    assert np.isfinite(trajectory).all()
    direct, found = snr_table(trajectory, result.label), row(structure.TRAJECTORY["snr"], result)
    assert (found["rho"], found["r_plugin"], found["eta"]) == (direct.rho, direct.r_plugin, direct.eta)
    gap, cells = fisher_gap(trajectory, result.label), row(structure.TRAJECTORY["fisher"], result)
    assert cells["r_fisher"] == gap.r_fisher
    assert cells["r_fisher"] == pytest.approx(cells["r_fisher_direct"], rel=1e-9)
    assert gap.r_fisher_unbiased is not None
    assert cells["r_fisher_unbiased"] == gap.r_fisher_unbiased < gap.r_fisher
    assert cells["shrinkage"] == 0.0


def test_a_singular_covariance_is_shrunk_and_says_so() -> None:
    logits = noise(8) + LABEL[:, None, None]
    logits[:, 5] = logits[:, 2]
    table = structure.TRAJECTORY["fisher"].table([scripted_result(logits, name="twice")])
    found = table.rows[0]
    assert 0 < found["shrinkage"] < 1  # type: ignore[operator]
    assert np.isfinite(found["r_fisher"])  # type: ignore[arg-type]
    assert found["r_fisher_unbiased"] is None
    assert any(note.startswith("twice: the covariance was shrunk") for note in table.notes)


def test_a_set_without_a_gap_costs_its_row_and_not_the_table() -> None:
    flat = noise(8)
    flat[1::4] = flat[::4]  # rows 0, 1 of every 4 are of one class: their twins of the other class follow
    flat[2::4], flat[3::4] = flat[::4], flat[1::4]
    table = structure.TRAJECTORY["snr"].table(
        [scripted_result(flat, name="flat"), scripted_result(noise(8, seed=1), name="fine")]
    )
    assert table.rows[0] == {"set": "flat"}
    assert table.rows[1]["set"] == "fine"
    assert table.rows[1]["rho"] is not None
    assert any(note.startswith("flat: left out: both classes have the same depth mean") for note in table.notes)


def test_variance_components_have_their_lags_where_the_depth_allows() -> None:
    rng = np.random.default_rng(0)
    level = rng.standard_normal((len(LABEL), 1, 1))
    deep = row(structure.TRAJECTORY["variance"], scripted_result(noise(16, seed=1) + level))
    assert deep["layers"] == 16
    assert deep["icc_unbiased"] == pytest.approx(0.5, abs=0.06)
    assert deep["acf_1"] == pytest.approx(deep["acf_floor"], abs=0.05)
    assert deep["acf_8"] == pytest.approx(-1 / 15, abs=0.05)
    table = structure.TRAJECTORY["variance"].table([scripted_result(noise(8))])
    assert table.rows[0]["acf_8"] is None
    assert any("lag 8" in note for note in table.notes)


def test_geometry_is_that_of_the_selected_heads_on_the_test_sides(result: SetResult) -> None:
    found = row(structure.READOUTS["geometry"], result)
    energy = []
    for split in result.folds(0):
        direction, _ = split.probes.of(split.probes.selected)
        for layer in range(1, 7):  # the middle 60 % of 8
            x = structure.readout_of(result, layer, int(split.probes.selected[layer]), split.test)
            energy.append(layer_geometry(x, result.label[split.test], direction[layer]).energy_fraction)
    assert found["energy"] == pytest.approx(np.mean(energy))  # type: ignore[arg-type]
    assert found["random_energy"] == 1 / FITTED.head_dim
    assert found["expected_cos"] == pytest.approx(expected_cosine(FITTED.head_dim))
    significant, whole = str(found["cq_significant"]).split("/")
    assert whole == "6"
    assert 0 <= float(significant) <= 6


def test_a_readout_is_its_heads_slice_of_the_labelled_rows(result: SetResult) -> None:
    heads = result.prepared.inputs.heads
    whole = np.fromfile(heads.file.path, "<f4").reshape(heads.file.shape)
    rows = np.array([5, 3, 200])
    assert np.array_equal(structure.readout_of(result, 4, 2, rows), whole[4, rows, 16:24])


def test_the_figures_curves_average_to_the_tables_cells(result: SetResult) -> None:
    cosines, energy, dim = structure.geometry_by_layer(result)
    found = row(structure.READOUTS["geometry"], result)
    assert (len(cosines), len(energy), dim) == (7, 8, 8)
    assert cosines[1:7].mean() == pytest.approx(found["adjacent_cos"])
    assert energy[1:7].mean() == pytest.approx(found["energy"])
    (figure,) = _geometry([result])
    assert figure.caption.startswith("made: ")


def test_isotropy_takes_the_head_with_the_best_training_auroc_of_all_layers(result: SetResult) -> None:
    for head in (0, 2):
        found = row(structure.READOUTS["isotropy"], fixed_head(result, head))
        assert found["head"] == head
        direction = result.folds(0)[0].probes.direction[:, head]
        cosines = np.abs(np.einsum("ld,ld->l", direction[:-1], direction[1:]))[1:7]
        assert found["adjacent_cos"] == pytest.approx(cosines.mean())
        assert 1 <= found["effective_rank"]["mean"] <= FITTED.head_dim


def test_isotropy_leaves_out_heads_without_a_probe_somewhere(result: SetResult) -> None:
    split = result.folds(0)[0]
    quality = split.probes.auroc.copy()
    quality[0] = [0.99, 0.99, 0.0]
    quality[1] = [0.0, 0.6, 0.99]
    lacking = replace(result, splits=[replace(split, probes=replace(split.probes, auroc=quality))])
    assert row(structure.READOUTS["isotropy"], lacking)["head"] == 1
    quality[2] = [0.9, 0.0, 0.9]
    table = structure.READOUTS["isotropy"].table([lacking])
    assert table.rows[0] == {"set": "made"}
    assert "made: left out: no head has a probe at every layer: give a larger C" in table.notes


def test_gaps_are_shares_of_that_of_k(result: SetResult) -> None:
    signal, _ = k_split([result])
    found = signal.rows[0]
    assert found["gap_k"] == pytest.approx(1.0)
    assert found["signal_k"] > found["null"] > 0.5  # type: ignore[operator]


def test_a_set_whose_k_cannot_be_split_keeps_its_place_in_both_tables(result: SetResult) -> None:
    of_one_class = [replace(split, test=split.test[result.label[split.test] == 1]) for split in result.splits]
    lacking = replace(
        result, splits=of_one_class, prepared=replace(result.prepared, rows=SimpleNamespace(name="lacking"))
    )  # type: ignore[arg-type]
    signal, varied = k_split([lacking, result])
    for table in (signal, varied):
        assert [one["set"] for one in table.rows] == ["lacking", "made"]
        assert list(table.rows[0]) == ["set"]
        assert len(table.rows[1]) == len(table.columns)
    assert any(note.startswith("lacking: left out: 0 rows are hallucinated") for note in signal.notes)
