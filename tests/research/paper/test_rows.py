"""The rows of the paper's own tables: known answers from scripted logits, the diagnostics' numbers
of a real fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from hallutracer_research.evaluation.methods import RESIDUAL
from hallutracer_research.evaluation.page import Table
from hallutracer_research.evaluation.results import SetResult
from hallutracer_research.paper import ablations, structure
from hallutracer_research.paper.diagnostics.geometry import expected_cosine, layer_geometry
from hallutracer_research.paper.diagnostics.shape import fisher_gap, snr_table, variance_components
from hallutracer_research.paper.report import SECTIONS, _geometry
from hallutracer_research.paper.tables import make_tables
from service.readout import Pooling, Site
from tests.research.made import FITTED, LABEL, scripted_result
from tests.research.made import blind_logits as noise


def mean(cell: Any) -> float:
    return float(cell["mean"])


SPECS = {name: spec for specs in SECTIONS.values() for name, spec in specs.items()}


def table_of(name: str, results: list[SetResult]) -> Table:
    return make_tables([SPECS[name]], results)[0]


def row(name: str, result: SetResult) -> Mapping[str, Any]:
    return table_of(name, [result]).rows[0]


def noted(table: Table, text: str) -> bool:
    return any(text in note for note in table.notes)


def test_the_mean_is_scored_split_by_split(result: SetResult) -> None:
    by_split = [
        roc_auc_score(result.label[one.test], one.test_trajectory.mean(axis=1))
        for one in result.splits
    ]
    cell = row("mean-dominance", result)["mean"]
    assert cell == pytest.approx({"mean": np.mean(by_split), "std": np.std(by_split)})
    table = table_of("location", [result])
    assert table.rows[0]["trimmed_mean"] == table.rows[0]["mean"] == cell
    assert noted(table, "8 layers is none")
    assert row("logit-scale", result)["unit_norm"] == cell
    assert row("top-heads", result)["top_1"] == cell
    assert row("readout-site", result)["head"] == pytest.approx(cell)


def test_too_few_layers_for_source_features_cost_their_row_and_a_note() -> None:
    short = scripted_result(noise(4), name="short")
    first, second = make_tables(
        [SPECS["mean-dominance"], SPECS["mean-dominance-source"]],
        [short, scripted_result(noise(9), name="long")],
    )
    assert set(first.rows[0]) > {"mean", "shape"}
    assert second.rows[0] == {"set": "short"}
    assert "source" in second.rows[1]
    assert any(note.startswith("short: left out: 4 layers") for note in second.notes)
    sets = table_of("feature-sets", [short])
    assert sets.rows[0]["source"] is None
    assert mean(sets.rows[0]["full"]) > 0
    assert any(note.startswith("short: 13-D is left out: 4 layers") for note in sets.notes)


def test_the_median_and_the_trimmed_mean_resist_one_wild_layer() -> None:
    logits = noise(20, seed=1) + LABEL[:, None, None]
    logits[:, 3] = 200 * noise(1, seed=2)[:, 0]
    found = row("location", scripted_result(logits))
    assert mean(found["median"]) > 0.95
    assert mean(found["trimmed_mean"]) > 0.95
    assert mean(found["mean"]) < 0.65
    assert abs(found["correlation"]) < 0.5


def test_standardised_logits_silence_a_layer_of_large_scale() -> None:
    logits = noise(9, seed=3) + LABEL[:, None, None]
    logits[:, 8] = 100 * noise(1, seed=4)[:, 0]
    scale = np.ones((9, 1))
    scale[8] = 100
    found = row("logit-scale", scripted_result(logits, scale=scale))
    assert mean(found["unit_norm"]) < 0.6
    assert mean(found["standardized"]) > 0.9
    assert mean(found["difference"]) == pytest.approx(
        mean(found["standardized"]) - mean(found["unit_norm"])
    )


def test_the_depth_curve_takes_the_best_training_layer_then_spaced_ones_then_all() -> None:
    logits = noise(12, seed=5)
    quality = np.full((12, 1), 0.6)
    quality[7] = 0.9
    result = scripted_result(logits, quality=quality, name="curve")
    sizes, means, stds = ablations.depth_curve([result])["curve"]
    assert sizes == [1, 2, 4, 12]
    for size, layers in ((1, [7]), (2, [3, 9]), (4, [3, 5, 7, 9]), (12, range(12))):
        by_fold = [
            roc_auc_score(LABEL[i::2], logits[i::2][:, list(layers), 0].astype("f4").mean(axis=1))
            for i in (0, 1)
        ]
        assert means[sizes.index(size)] == pytest.approx(np.mean(by_fold), abs=1e-6)
        assert stds[sizes.index(size)] == pytest.approx(np.std(by_fold), abs=1e-6)
    table = table_of("depth-subsampling", [result])
    assert [table.rows[0][ablations.depth_key(size)] for size in sizes] == [
        {"mean": a, "std": b} for a, b in zip(means, stds, strict=True)
    ]
    assert "too few for 8" in table.notes[0]


def test_heads_are_taken_by_training_auroc_and_one_without_a_probe_never_is() -> None:
    logits = np.zeros((len(LABEL), 6, 4))
    logits[:, :, 2] = (
        3 * (LABEL[:, None] - 0.5) + 0.01 * noise(6, seed=6)[:, :, 0]
    )  # the best, and it is perfect
    logits[:, :, 0] = noise(6, seed=7)[:, :, 0]
    logits[:, :, 1] = -logits[:, :, 2]  # the worst: wrong throughout
    quality = np.tile([0.6, 0.4, 0.9, 0.0], (6, 1))
    table = table_of("top-heads", [scripted_result(logits, quality=quality)])
    found = table.rows[0]
    assert mean(found["top_1"]) == 1.0
    assert mean(found["bottom_1"]) == 0.0
    # Heads 1 and 2 cancel: what is left of the mean of three is a third of the noise of head 0.
    third = [
        roc_auc_score(LABEL[i::2], logits[i::2, :, 0].astype("f4").mean(axis=1)) for i in (0, 1)
    ]
    assert mean(found["top_5"]) == pytest.approx(np.mean(third), abs=0.01)
    assert 0.2 < mean(found["random_1"]) < 0.8
    assert found["random_1"]["std"] > 0.1  # type: ignore[index, operator]
    assert found["difference"] == pytest.approx(mean(found["random_1"]) - 1.0)
    assert noted(table, "12 of 48 probes are all zeros")
    assert noted(table, "has 4 heads")


def test_a_probe_that_is_all_zeros_counts_as_chance_among_heads() -> None:
    logits = noise(6, heads=3, seed=9)
    logits[:, :, 2] = 0.0
    table = table_of(
        "head-distribution", [scripted_result(logits, quality=np.tile([0.7, 0.6, 0.0], (6, 1)))]
    )
    expected = np.std([0.7, 0.6, 0.5]) / np.mean([0.7, 0.6, 0.5])
    assert table.rows[0]["auc_cv"] == pytest.approx(expected)
    assert noted(table, "6 heads have constant scores")


def test_the_residual_difference_is_its_auroc_less_the_heads_and_a_run_without_it_says_so(
    result: SetResult,
) -> None:
    found = row("readout-site", result)
    residual = [
        roc_auc_score(1 - result.label[one.test], one.score) for one in result.scores[RESIDUAL]
    ]
    assert mean(found["residual"]) == pytest.approx(np.mean(residual))
    assert mean(found["difference"]) == pytest.approx(mean(found["residual"]) - mean(found["head"]))
    without = replace(
        result, scores={name: scores for name, scores in result.scores.items() if name != RESIDUAL}
    )
    table = table_of("readout-site", [without])
    assert table.rows[0] == {"set": "made"}
    assert RESIDUAL in table.notes[0]


def test_poolings_are_compared_with_last_1_on_the_folds_of_the_first_seed(
    result: SetResult,
) -> None:
    same = [one.test_trajectory.mean(axis=1) for one in result.folds(0)]
    pooled = {
        (Site.ATTENTION_HEAD, Pooling.LAST_4): same,
        (Site.ATTENTION_HEAD, Pooling.MEAN): [-score for score in same],
        (Site.ATTENTION_HEAD, Pooling.MAX): same[:-1],
    }
    table = table_of("readout-position", [replace(result, pooled=pooled)])
    found = table.rows[0]
    last = [
        roc_auc_score(result.label[one.test], score)
        for one, score in zip(result.folds(0), same, strict=True)
    ]
    assert found["last_1"] == pytest.approx({"mean": np.mean(last), "std": np.std(last)})
    assert found["last_4"] == pytest.approx({"mean": 0.0, "std": 0.0})
    assert mean(found["mean"]) == pytest.approx(1 - 2 * np.mean(last))
    assert "max" not in found
    assert "made: max: scores of 2 of 3 folds, left out" in table.notes


def k_split(results: list[SetResult]) -> list[Table]:
    return make_tables((SPECS["k-split"], SPECS["k-split-variance"]), results)


def fixed_head(result: SetResult, head: int) -> SetResult:
    """The same fits, with ``head`` selected at every layer."""
    quality = np.full_like(result.splits[0].probes.auroc, 0.6)
    quality[:, head] = 0.9
    splits = [
        replace(split, probes=replace(split.probes, auroc=quality)) for split in result.splits
    ]
    return replace(result, splits=splits)


def test_rows_are_the_diagnostics_of_the_out_of_fold_trajectories(result: SetResult) -> None:
    trajectory = result.trajectory(0)
    assert np.isfinite(trajectory).all()
    direct, found = snr_table(trajectory, result.label), row("snr", result)
    assert (found["rho"], found["r_plugin"], found["eta"]) == (
        direct.rho,
        direct.r_plugin,
        direct.eta,
    )
    gap, cells = fisher_gap(trajectory, result.label), row("fisher", result)
    assert cells["r_fisher"] == gap.r_fisher
    assert cells["r_fisher"] == pytest.approx(cells["r_fisher_direct"], rel=1e-9)
    assert cells["r_fisher_unbiased"] == gap.r_fisher_unbiased < gap.r_fisher
    assert cells["shrinkage"] == 0.0


def test_a_singular_covariance_is_shrunk_and_says_so() -> None:
    logits = noise(8) + LABEL[:, None, None]
    logits[:, 5] = logits[:, 2]
    table = table_of("fisher", [scripted_result(logits, name="twice")])
    found = table.rows[0]
    assert 0 < found["shrinkage"] < 1  # type: ignore[operator]
    assert np.isfinite(found["r_fisher"])  # type: ignore[arg-type]
    assert found["r_fisher_unbiased"] is None
    assert any(note.startswith("twice: the covariance was shrunk") for note in table.notes)


def test_a_set_without_a_gap_costs_its_row_and_not_the_table() -> None:
    flat = noise(8)
    flat[1::4] = flat[
        ::4
    ]  # rows 0, 1 of every 4 are of one class: their twins of the other class follow
    flat[2::4], flat[3::4] = flat[::4], flat[1::4]
    table = table_of(
        "snr", [scripted_result(flat, name="flat"), scripted_result(noise(8, seed=1), name="fine")]
    )
    assert table.rows[0] == {"set": "flat"}
    assert table.rows[1]["set"] == "fine"
    assert table.rows[1]["rho"] is not None
    assert any(
        note.startswith("flat: left out: both classes have the same depth mean")
        for note in table.notes
    )


def test_variance_components_have_their_lags_where_the_depth_allows() -> None:
    deep = scripted_result(noise(16, seed=1))
    parts, cells = variance_components(deep.trajectory(0), LABEL), row("variance", deep)
    assert (cells["layers"], cells["icc_unbiased"]) == (16, parts.icc_unbiased)
    assert (cells["acf_1"], cells["acf_8"]) == (parts.residual_acf[0], parts.residual_acf[7])
    assert cells["acf_floor"] == -1 / 15
    table = table_of("variance", [scripted_result(noise(8))])
    assert table.rows[0]["acf_8"] is None
    assert noted(table, "lag 8")


def test_geometry_is_that_of_the_selected_heads_on_the_test_sides(result: SetResult) -> None:
    found, heads = row("geometry", result), result.prepared.inputs.heads
    shape = (*heads.file.shape[:2], FITTED.num_heads, -1)
    of_heads = np.fromfile(heads.file.path, "<f4").reshape(shape)[:, heads.index]
    energy = []
    for split in result.folds(0):
        selected = split.probes.selected
        direction, _ = split.probes.of(selected)
        for layer in range(1, 7):  # the middle 60 % of 8
            x = of_heads[layer, split.test, selected[layer]]
            energy.append(
                layer_geometry(x, result.label[split.test], direction[layer]).energy_fraction
            )
    assert found["energy"] == pytest.approx(np.mean(energy))  # type: ignore[arg-type]
    assert found["random_energy"] == 1 / FITTED.head_dim
    assert found["expected_cos"] == pytest.approx(expected_cosine(FITTED.head_dim))
    significant, whole = str(found["cq_significant"]).split("/")
    assert whole == "6"
    assert 0 <= float(significant) <= 6


def test_the_figures_curves_average_to_the_tables_cells(result: SetResult) -> None:
    cosines, energy, dim = structure.geometry_by_layer(result)
    found = row("geometry", result)
    assert (len(cosines), len(energy), dim) == (7, 8, 8)
    assert cosines[1:7].mean() == pytest.approx(found["adjacent_cos"])
    assert energy[1:7].mean() == pytest.approx(found["energy"])
    (figure,) = _geometry([result])
    assert figure.caption.startswith("made: ")


def test_isotropy_takes_the_head_with_the_best_training_auroc_of_all_layers(
    result: SetResult,
) -> None:
    for head in (0, 2):
        found = row("isotropy", fixed_head(result, head))
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
    assert row("isotropy", lacking)["head"] == 1
    quality[2] = [0.9, 0.0, 0.9]
    table = table_of("isotropy", [lacking])
    assert table.rows[0] == {"set": "made"}
    assert "made: left out: no head has a probe at every layer: give a larger C" in table.notes


def test_a_set_whose_k_cannot_be_split_keeps_its_place_in_both_tables(result: SetResult) -> None:
    of_one_class = [
        replace(split, test=split.test[result.label[split.test] == 1]) for split in result.splits
    ]
    lacking = replace(
        result,
        splits=of_one_class,
        prepared=replace(result.prepared, rows=SimpleNamespace(name="lacking")),
    )  # type: ignore[arg-type]
    signal, varied = k_split([lacking, result])
    for table in (signal, varied):
        assert [one["set"] for one in table.rows] == ["lacking", "made"]
        assert list(table.rows[0]) == ["set"]
        assert len(table.rows[1]) == len(table.columns)
    found = signal.rows[1]
    assert found["gap_k"] == pytest.approx(1.0)
    assert found["signal_k"] > found["null"] > 0.5  # type: ignore[operator]
    assert any(
        note.startswith("lacking: left out: 0 rows are hallucinated") for note in signal.notes
    )
