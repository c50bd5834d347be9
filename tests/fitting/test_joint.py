"""Directions that are fitted together: what all layers share counts once, and a layer is served as
any other."""

from __future__ import annotations

import numpy as np
import pytest

from service.errors import NoDirection
from service.fitting.estimator import DepthMeanProbe
from service.fitting.joint import fit_joint
from service.fitting.scores import auroc

LAYERS = 12


def in_wordings(count: int, seed: int, wordings: float) -> tuple[np.ndarray, np.ndarray]:
    """Return activations [n, 12 layers, 1 head, 8] and labels: knowledge stands in a column of its
    own, faint at each layer, and the wording, which goes with the label in training alone
    (``wordings``), loudly in another."""
    rng = np.random.default_rng(seed)
    label = (rng.random(count) < 0.5).astype(np.int64)
    rows = rng.standard_normal((count, LAYERS, 1, 8)).astype(np.float32)
    wording = wordings * (2 * label - 1) + rng.standard_normal(count)
    rows[:, :, 0, 0] += 0.35 * (2 * label - 1)[:, None]
    rows[:, :, 0, 1] += wording[:, None]
    return rows, label


def test_what_all_layers_share_counts_once() -> None:
    rows, label = in_wordings(1500, 0, 0.5)
    others, truth = in_wordings(1500, 1, 0.0)
    each, together = (
        DepthMeanProbe(0.3, seeds=(0,), logit_scale=scale)
        .fit(rows, label)
        .decision_function(others)
        for scale in ("unit_norm", "joint")
    )
    assert auroc(truth, together) > auroc(truth, each) + 0.05


def test_the_mean_over_layers_is_the_regression() -> None:
    rows, label = in_wordings(400, 2, 0.5)
    activations = rows[:, :, 0]
    fit = fit_joint(activations, label, "weights")
    np.testing.assert_allclose(np.linalg.norm(fit.direction, axis=1), 1.0)
    odds = (fit.trajectory(activations) / fit.scale).mean(axis=1)
    weights = np.where(label == 1, 0.5 / label.mean(), 0.5 / (1 - label.mean()))
    expected = 1 / (1 + np.exp(-odds))
    assert np.average(expected, weights=weights) == pytest.approx(
        0.5, abs=1e-6
    )  # the intercept's own equation
    moved = activations * np.float32(3) + np.float32(5)  # standardised away
    again = fit_joint(moved, label, "weights")
    np.testing.assert_allclose(
        (again.trajectory(moved) / again.scale).mean(axis=1), odds, atol=1e-3
    )


def test_a_layer_that_is_constant_has_no_direction() -> None:
    rows, label = in_wordings(100, 3, 0.5)
    activations = rows[:, :, 0].copy()
    activations[:, 4] = 2.0
    with pytest.raises(NoDirection, match="layer 4"):
        fit_joint(activations, label, "weights")
    fit = fit_joint(activations, label, "weights", zero_layers=True)
    assert not fit.direction[4].any()
    assert np.all(np.isfinite(fit.trajectory(activations) / fit.scale))


def test_classes_of_unequal_size_weigh_alike() -> None:
    rows, label = in_wordings(1000, 4, 0.0)
    few = np.flatnonzero((label == 0) | (np.arange(1000) % 8 == 0))
    for balance in ("weights", "downsample"):
        fit = fit_joint(rows[few, :, 0], label[few], balance)
        odds = (fit.trajectory(rows[:, :, 0]) / fit.scale).mean(axis=1)
        assert abs(np.median(odds[label == 1]) + np.median(odds[label == 0])) < 0.2
