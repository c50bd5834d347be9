"""Out of fold means out of fold; nothing of a test side reaches the training side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.data.run_folder import RowsFile
from service.errors import NoDirection
from service.fitting import nested_cv as evaluating
from service.fitting.calibration import (
    FitOptions,
    choose_c,
    cross_fit,
    fit_classifier,
    refit,
    scale_shift,
    signal_matrix,
    stacked,
)
from service.fitting.fit import Readouts
from service.fitting.nested_cv import CONTEXT_NAMES, NAMES, Inputs, evaluate, probe_columns
from service.fitting.scores import auroc, ece, risk_auroc
from service.readout import Geometry, Site

GEOMETRY = Geometry(num_layers=3, num_heads=2, head_dim=30, hidden_size=60)
OPTIONS = FitOptions("weights", 3, None, (0.03, 0.3), 1)


def inputs(
    tmp_path: Path,
    rows: np.ndarray,
    label: np.ndarray,
    group: np.ndarray | None = None,
    site: Site = Site.ATTENTION_HEAD,
) -> Inputs:
    path = tmp_path / "rows.f32"
    np.ascontiguousarray(rows.transpose(1, 0, 2), "<f4").tofile(path)
    file = RowsFile(path, GEOMETRY, site, len(rows))
    rng = np.random.default_rng(5)
    return Inputs(
        Readouts(file, np.arange(len(rows)), label),
        np.arange(len(rows)) if group is None else group,
        np.c_[-rng.random(len(rows)), rng.random(len(rows))],
        rng.integers(5, 9, len(rows)),
        tuple({"kind": "ab"[int(k)]} for k in rng.integers(0, 2, len(rows))),
    )


def noise(count: int = 240, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 3, 60)).astype(np.float32), (rng.random(count) < 0.5).astype(np.int64)


def test_a_memorising_probe_gets_chance_out_of_fold(tmp_path: Path) -> None:
    """60 free columns on 240 rows of noise fit the training labels well; out of fold nothing may be left of it."""
    rows, label = noise()
    given = inputs(tmp_path, rows, label)
    everything = np.arange(len(label))
    inside = refit(given.readouts, everything, everything, 1.0, OPTIONS).trajectory.mean(axis=1)
    outside = cross_fit(given.readouts, given.group, everything, 1.0, 5, (0, 1), OPTIONS)
    assert risk_auroc(label, -inside) > 0.75
    for trajectory in outside.unit_norm:
        assert 0.35 < risk_auroc(label, -trajectory.mean(axis=1)) < 0.62
    assert np.all(np.isfinite(outside.standardized))
    assert np.all(np.isfinite(outside.best_head))


def test_rows_of_a_group_do_not_vouch_for_each_other(tmp_path: Path) -> None:
    """Each group's rows are copies with one label: a fold that splits a group would score far above chance."""
    rows, _ = noise(60)
    rng = np.random.default_rng(3)
    label = rng.integers(0, 2, 60)
    copies = inputs(tmp_path, np.repeat(rows, 4, axis=0), np.repeat(label, 4), np.repeat(np.arange(60), 4))
    found = cross_fit(copies.readouts, copies.group, np.arange(240), 1.0, 5, (0,), OPTIONS)
    assert risk_auroc(copies.label, -found.unit_norm[0].mean(axis=1)) < 0.68
    split = cross_fit(copies.readouts, np.arange(240), np.arange(240), 1.0, 5, (0,), OPTIONS)
    assert risk_auroc(copies.label, -split.unit_norm[0].mean(axis=1)) > 0.85


@pytest.mark.parametrize("site", list(Site))
def test_out_of_fold_logits_do_not_depend_on_the_rows_own_label(tmp_path: Path, site: Site) -> None:
    """Poison: rows of one test side are replaced by huge values; their fold's probes must not notice."""
    rows, label = noise()
    rows[:, :, 3] += label[:, None]
    given = inputs(tmp_path, rows, label, site=site)
    train, test = np.arange(0, 180), np.arange(180, 240)
    before = refit(given.readouts, train, test, 0.3, OPTIONS)
    rows[test] = 1e6
    label = label.copy()
    label[test] = 1 - label[test]
    after = refit(inputs(tmp_path, rows, label, site=site).readouts, train, test, 0.3, OPTIONS)
    assert before.direction.tobytes() == after.direction.tobytes()
    assert before.scale.tobytes() == after.scale.tobytes()
    assert before.head.tolist() == after.head.tolist()


def test_columns_of_the_nested_classifiers_are_out_of_fold(tmp_path: Path) -> None:
    """Of probes that memorise noise, columns of rows that they were fitted on would rank these rows well."""
    rows, label = noise()
    given, train, test = inputs(tmp_path, rows, label), np.arange(200), np.arange(200, 240)
    _, columns = probe_columns(
        given.readouts, given.group, given.first_token, train, test, 0, FitOptions("weights", 3, 1.0, (1.0,), 1)
    )
    assert len(columns) == 11
    for name, (of_train, _) in columns:
        assert auroc(label[train], of_train[:, 0]) < 0.65, name


def test_c_is_chosen_inside_the_training_rows(tmp_path: Path) -> None:
    rows, label = noise(300)
    rows[:, :, 3] += 1.5 * label[:, None]
    given = inputs(tmp_path, rows, label)
    train = np.arange(0, 200)
    choice = choose_c(given.readouts, given.group, train, 0, OPTIONS)
    assert choice.auroc.keys() == {"0.03", "0.3"}
    assert choice.auroc[f"{choice.c:g}"] == max(value for value in choice.auroc.values() if value is not None)
    rows[200:] = 1e6
    assert choose_c(inputs(tmp_path, rows, 1 - label).readouts, given.group, train, 0, OPTIONS).c in (0.03, 0.3)
    poisoned = inputs(tmp_path, rows, np.r_[label[:200], 1 - label[200:]])
    assert choose_c(poisoned.readouts, given.group, train, 0, OPTIONS) == choice


def test_a_c_without_a_direction_is_out(tmp_path: Path) -> None:
    rows, label = noise()
    rows[:, :, 3] += label[:, None]
    given = inputs(tmp_path, rows, label)
    everything = np.arange(240)
    choice = choose_c(given.readouts, given.group, everything, 0, FitOptions("weights", 3, None, (1e-6, 0.3), 1))
    assert choice.c == 0.3
    assert choice.auroc["1e-06"] is None
    with pytest.raises(NoDirection, match="layer 0"):
        choose_c(given.readouts, given.group, everything, 0, FitOptions("weights", 3, None, (1e-7, 1e-6), 1))
    weak = FitOptions("weights", 3, None, (1e-7, 1e-6), 1)
    assert choose_c(given.readouts, given.group, everything, 0, weak, must=False).c == 1e-6
    fixed = choose_c(given.readouts, given.group, everything, 0, FitOptions("weights", 3, 0.7, (0.1, 1.0), 1))
    assert (fixed.c, fixed.auroc) == (0.7, {})


def test_the_classifier_is_calibrated_in_raw_units() -> None:
    rng = np.random.default_rng(0)
    x = np.c_[rng.normal(3, 20, 20000), rng.normal(-1, 0.01, 20000)]
    truth = 1 / (1 + np.exp(-(0.1 * x[:, 0] + 90 * x[:, 1] + 90)))
    label = (rng.random(20000) < truth).astype(np.int64)
    classifier = fit_classifier(x, label)
    np.testing.assert_allclose(classifier.weight, [0.1, 90], rtol=0.08)
    assert ece(label, classifier.risk(x)) < 0.02
    separable = fit_classifier(np.r_[np.zeros((9, 1)), np.ones((9, 1))], np.repeat([0, 1], 9))
    assert np.isfinite(separable.weight).all()


def test_signals_and_stacking() -> None:
    trajectory = np.arange(12.0).reshape(2, 3, 2)  # [seeds, n, m]
    first = np.array([[-1.0, 10.0], [-2.0, 20.0], [-3.0, 30.0]])
    x = signal_matrix(trajectory, first, ("depth_mean", "log_max_prob", "entropy"))
    assert x.shape == (2, 3, 3)
    assert x[1, 2].tolist() == [10.5, -3.0, 30.0]
    rows, label = stacked(x, np.array([1, 0, 1]))
    assert rows.shape == (6, 3)
    assert label.tolist() == [1, 0, 1, 1, 0, 1]


def test_refitted_probes_keep_the_scale_of_the_cross_fitted_ones(tmp_path: Path) -> None:
    """On rows that neither has seen: unit norm makes 80 % of the rows and all of them speak in one unit."""
    rng = np.random.default_rng(8)
    rows, label = noise(1600, seed=8)
    rows[:, :, 3:6] += 0.6 * (2 * label[:, None, None] - 1) * rng.uniform(0.5, 1, 3)
    given = inputs(tmp_path, rows, label)
    train, fresh = np.arange(0, 800), np.arange(800, 1600)
    whole = refit(given.readouts, train, fresh, 0.1, OPTIONS).trajectory.mean(axis=1)
    part = refit(given.readouts, train[:640], fresh, 0.1, OPTIONS).trajectory.mean(axis=1)
    crossed = cross_fit(given.readouts, given.group, train, 0.1, 5, (0,), OPTIONS).unit_norm.mean(axis=2)
    for value in (0, 1):
        one, other = whole[label[fresh] == value], part[label[fresh] == value]
        assert one.std() == pytest.approx(other.std(), rel=0.05)
        assert one.mean() == pytest.approx(other.mean(), abs=0.15 * one.std())
        assert one.mean() == pytest.approx(crossed[:, label[train] == value].mean(), abs=0.2 * one.std())
    shift = scale_shift(crossed, whole[:800], label[train])
    assert shift["factual"]["cross_fitted_std"] == pytest.approx(crossed[0, label[train] == 1].std())


def small(tmp_path: Path, strength: float) -> Inputs:
    rows, label = noise(300, seed=4)
    rows[:, :, 3] += strength * (2 * label[:, None] - 1)
    return inputs(tmp_path, rows, label, np.arange(300) // 2)


def test_the_nested_evaluation_finds_a_signal_and_none_where_there_is_none(tmp_path: Path) -> None:
    for strength, low, high in ((0.8, 0.8, 1.0), (0.0, 0.38, 0.6)):
        found = evaluate(small(tmp_path, strength), folds=4, seeds=(0, 1), options=OPTIONS)
        signals = found.document["signals"]
        assert tuple(signals) == tuple(name for name in NAMES if name not in CONTEXT_NAMES)
        assert len(found.document["folds"]) == 8
        for name in ("depth_mean_unit_norm", "depth_mean_standardized", "fused_unit_norm"):
            assert low <= signals[name]["auroc"]["mean"] <= high
            assert signals[name]["auroc_within_kind"] is not None
            assert np.all(np.isfinite(found.risk[name]))
        assert signals["prompt_length"]["auroc"]["mean"] < 0.6


def test_every_fit_of_an_outer_fold_stays_on_its_training_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = small(tmp_path, 0.8)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    original = evaluating._signals

    def watched(inputs: Inputs, train: np.ndarray, test: np.ndarray, seed: int, options: FitOptions):  # type: ignore[no-untyped-def]  # noqa: E501
        chosen, signals = original(inputs, train, test, seed, options)
        path = inputs.readouts.file.path
        rows = np.fromfile(path, "<f4").reshape(3, -1, 60)
        kept = rows.copy()
        rows[:, test] = -7.0
        rows.tofile(path)
        flipped = inputs.label.copy()
        flipped[test] = 1 - flipped[test]
        again = Inputs(
            Readouts(inputs.readouts.file, inputs.readouts.index, flipped),
            inputs.group,
            inputs.first_token,
            inputs.prompt_tokens,
            inputs.strata,
        )
        chosen_again, signals_again = original(again, train, test, seed, options)
        kept.tofile(path)
        assert chosen == chosen_again
        for (name, (one, _)), (_, (other, _)) in zip(signals, signals_again, strict=True):
            assert np.array_equal(one, other), name
        seen.append((train, test))
        return chosen, signals

    monkeypatch.setattr(evaluating, "_signals", watched)
    evaluate(given, folds=3, seeds=(0,), options=OPTIONS)
    assert len(seen) == 3
    for train, test in seen:
        assert not set(given.group[train]) & set(given.group[test])
