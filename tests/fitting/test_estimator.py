"""The estimator: out of fold means out of fold, what it keeps of scikit-learn's contract, arrays
are enough."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.utils.estimator_checks import check_estimator

from service.errors import NoDirection, TrainingError
from service.fitting.estimator import (
    DepthMeanProbe,
    extra_signals,
    fit_classifier,
    scale_shift,
    signal_matrix,
)
from service.fitting.nested_cv import FUSED
from service.fitting.scores import auroc, ece, risk_auroc
from tests.fitting.made import readouts

PROBE = DepthMeanProbe(c_grid=(0.03, 0.3), seeds=(0,))
EVERY = np.arange(240)


def noise(count: int = 240, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, 3 layers, 2 heads, 30] that know nothing of label [n]."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, 3, 60)).astype(np.float32).reshape(count, 3, 2, 30)
    return rows, (rng.random(count) < 0.5).astype(np.int64)


def signal(count: int = 240, strength: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rows, label = noise(count, seed)
    rows[:, :, 0, 3] += strength * label[:, None]
    return rows, label


# --- as scikit-learn has it ---


def test_it_keeps_scikit_learn_s_contract() -> None:
    check_estimator(
        DepthMeanProbe(0.3, folds=2, seeds=(0,)), on_skip=None
    )  # of ten rows five folds cannot be made


def test_it_learns_from_arrays_of_heads_of_layers_and_of_one_layer() -> None:
    rows, label = signal(300, 1.5)
    group = np.arange(300) // 2
    train, test = np.arange(200), np.arange(200, 300)
    for x in (rows, rows.reshape(300, 3, 60), rows[:, 0, 0]):
        probe = DepthMeanProbe(c_grid=(0.03, 0.3)).fit(x[train], label[train], groups=group[train])
        assert probe.trajectory(x[test]).shape == (100, 1 if x.ndim == 2 else 3)
        risk = probe.predict_proba(x[test])
        np.testing.assert_allclose(risk.sum(axis=1), 1.0)
        assert risk_auroc(label[test], risk[:, 0]) > 0.8
        assert probe.out_of_fold_risk_.shape == (3, 200)
        assert probe.C_ in (0.03, 0.3)
    assert probe.probes_.head.tolist() == [0]
    fixed = DepthMeanProbe(0.3, seeds=(0,), folds=3)
    found = cross_val_score(fixed, rows, label, groups=group, cv=GroupKFold(3), scoring="roc_auc")
    assert found.min() > 0.8


def test_the_larger_class_is_the_factual_one_whatever_its_name() -> None:
    rows, label = signal()
    names = np.where(label == 1, "right", "hallucinated")
    by_name, by_number = (DepthMeanProbe(0.3, seeds=(0,)).fit(rows, y) for y in (names, label))
    assert by_name.classes_.tolist() == ["hallucinated", "right"]
    assert np.array_equal(by_name.predict_proba(rows), by_number.predict_proba(rows))
    assert np.mean(by_name.predict(rows) == names) > 0.7


@pytest.mark.parametrize("scale", ["unit_norm", "standardized", "joint"])
def test_a_layer_s_logit_is_that_of_its_served_probe(scale: Any) -> None:
    rows, label = signal()
    probe = DepthMeanProbe(0.3, seeds=(0, 1), logit_scale=scale).fit(rows, label)
    a = rows[:, np.arange(3), probe.probes_.head].astype(np.float64)
    expected = (
        np.einsum("nld,ld->nl", a, probe.probes_.direction) + probe.probes_.bias
    ) / probe.scale_
    for found in (probe.trajectory(rows), probe.scaled_[probe.logit_scale].trajectory):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_further_signals_are_read_beside_the_depth_mean() -> None:
    rows, label = signal()
    x = signal_matrix(
        np.arange(12.0).reshape(2, 3, 2), extra_signals(FUSED, -np.arange(6.0).reshape(3, 2))
    )
    assert (x.shape, x[1, 2].tolist()) == ((2, 3, 3), [10.5, -4.0, -5.0])  # [seeds, n, signals]
    assert extra_signals(FUSED[:1], np.zeros((3, 2))) is None
    telling = np.random.default_rng(1).standard_normal((240, 2)) + 3 * label[:, None]
    probe = DepthMeanProbe(0.3, seeds=(0,)).fit(rows, label, extra=telling)
    assert auroc(label, probe.predict_proba(rows, extra=telling)[:, 1]) > 0.98
    for wrong in (None, telling[:, :1]):
        with pytest.raises(ValueError, match="extra"):
            probe.predict_proba(rows, extra=wrong)


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    rows, label = signal()
    probe = DepthMeanProbe(0.3, seeds=(0,)).fit(rows, label)
    calls = {
        "groups": lambda: probe.fit(rows, label, groups=EVERY[:9]),
        "extra": lambda: probe.fit(rows, label, extra=np.zeros((9, 1))),
        "shape": lambda: probe.predict_proba(rows[:, :, :, :9]),
        "dimensions": lambda: probe.fit(rows[None].transpose(1, 0, 2, 3, 4), label),
        "class": lambda: probe.fit(rows, np.arange(240) % 3),
    }
    for word, call in calls.items():
        with pytest.raises(ValueError, match=word):
            call()
    with pytest.raises(TrainingError, match="5 .* need 5 groups"):
        DepthMeanProbe(0.3).fit(rows, label, groups=EVERY % 3)


# --- its stages, as training runs them ---


def test_rows_of_a_group_do_not_vouch_for_each_other() -> None:
    """Each group's rows are copies with one label: a fold that splits a group would score far above
    chance."""
    rows, _ = noise(60)
    label = np.repeat(np.random.default_rng(3).integers(0, 2, 60), 4)
    copies = readouts(np.repeat(rows, 4, axis=0), label)
    together, split = (
        risk_auroc(label, -PROBE.cross_fit(copies, group, EVERY, 1.0).unit_norm[0].mean(axis=1))
        for group in (EVERY // 4, EVERY)
    )
    assert together < 0.68
    assert split > 0.85


def test_c_is_the_best_of_the_grid_and_one_without_a_direction_is_out() -> None:
    given = readouts(*signal())

    def choose(*grid: float, c: Any = "auto", **options: Any) -> Any:
        return DepthMeanProbe(c, c_grid=grid).choose_c(given, EVERY, EVERY, 0, **options)

    chosen = choose(0.03, 0.3)
    assert chosen.auroc.keys() == {"0.03", "0.3"}
    known = [value for value in chosen.auroc.values() if value is not None]
    assert chosen.auroc[f"{chosen.c:g}"] == max(known)
    chosen = choose(1e-6, 0.3)
    assert (chosen.c, chosen.auroc["1e-06"]) == (0.3, None)
    with pytest.raises(NoDirection, match="layer 0"):
        choose(1e-7, 1e-6)
    assert choose(1e-7, 1e-6, must=False).c == 1e-6
    assert choose(0.1, 1.0, c=0.7) == (0.7, {})
    rows, label = signal()
    rows[:, 2] = 3.0  # no C helps
    for c in list[Any](("auto", 0.3)):
        with pytest.raises(NoDirection, match="layer 2"):
            DepthMeanProbe(c, c_grid=(0.1, 0.3), seeds=(0,)).fit(rows, label)


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


def test_refitted_probes_keep_the_scale_of_the_cross_fitted_ones() -> None:
    """On rows that neither has seen: unit norm makes 80 % of the rows and all of them speak in one
    unit."""
    rows, label = noise(1600, seed=8)
    strength = 0.6 * np.random.default_rng(8).uniform(0.5, 1, 3)
    rows[:, :, 0, 3:6] += (2 * label[:, None, None] - 1) * strength
    given, train, fresh = readouts(rows, label), np.arange(800), np.arange(800, 1600)
    whole, part = (
        PROBE.refit(given, side, fresh, 0.1).trajectory.mean(axis=1)
        for side in (train, train[:640])
    )
    crossed = PROBE.cross_fit(given, np.arange(1600), train, 0.1).unit_norm.mean(axis=2)
    for value in (0, 1):
        of_all, of_part = (mean[label[fresh] == value] for mean in (whole, part))
        of_folds, spread = crossed[:, label[train] == value], of_all.std()
        assert spread == pytest.approx(of_part.std(), rel=0.05)
        assert of_all.mean() == pytest.approx(of_part.mean(), abs=0.15 * spread)
        assert of_all.mean() == pytest.approx(of_folds.mean(), abs=0.2 * spread)
    shift = scale_shift(crossed, whole, label[train])
    factual = crossed[0, label[train] == 1]
    assert shift["factual"]["cross_fitted_std"] == pytest.approx(factual.std())
