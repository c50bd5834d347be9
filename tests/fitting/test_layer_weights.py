"""Weights over layers: found where layers differ, the paper's rule where not, and never fitted on
their own rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from service.fitting import layer_weights
from service.fitting.layer_weights import FLOOR, LayerWeights, fit_layer_weights
from service.fitting.scores import auroc


def made(signal: list[float], spread: list[float], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Trajectories [900, m]: each layer's separation of the classes, in its own deviations, and its
    deviation."""
    rng = np.random.default_rng(seed)
    label = (rng.random(900) < 0.4).astype(np.int64)
    rows = rng.standard_normal((900, len(signal))) + np.array(signal) * (2 * label[:, None] - 1) / 2
    return rows * np.array(spread), label


def fit(trajectory: np.ndarray, label: np.ndarray, seed: int = 0) -> LayerWeights:
    return fit_layer_weights(trajectory, label, np.arange(900) // 3, folds=3, seed=seed)


def test_a_layer_that_knows_outweighs_louder_ones_and_no_weight_is_negative() -> None:
    trajectory, label = made([1.5, 0, 0, 0, 0, 0], [1, 4, 4, 4, 4, 4])
    found = fit(trajectory, label)
    assert math.isfinite(found.strength)
    assert found.weight.argmax() == 0
    assert found.weight.mean() == pytest.approx(1)
    assert found.weight.min() >= FLOOR * 0.9
    assert (
        auroc(label, found.out_of_fold.mean(axis=1)) > auroc(label, trajectory.mean(axis=1)) + 0.15
    )
    misled = fit(*made([1, 1, -1], [1, 1, 1])).weight
    assert 0 < misled[2] < 0.05
    assert np.all(misled > 0)


def test_equal_layers_are_left_equal() -> None:
    """The best of seven strengths looks better than none by chance more often than not."""
    strengths = []
    for seed in range(6):
        trajectory, label = made([0.5] * 12, [1] * 12, seed)
        found = fit(trajectory, label, seed)
        assert (
            auroc(label, trajectory.mean(axis=1)) - auroc(label, found.out_of_fold.mean(axis=1))
            < 0.01
        )
        strengths.append(found.strength)
        if math.isinf(found.strength):
            assert found.weight.tolist() == [1.0] * 12
    assert sum(map(math.isinf, strengths)) >= 5


def test_rows_have_weights_that_were_fitted_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_weights, "STRENGTHS", (0.01,))
    trajectory, label = made([1, 0, 0.5], [1, 1, 1])
    ratio = fit(trajectory, label).out_of_fold / trajectory
    folds = np.unique(ratio.round(9), axis=0, return_inverse=True)[1]
    assert len(np.unique(folds)) == 3
    mine = folds == folds[0]
    changed = np.where(mine[:, None], trajectory[:, ::-1] * 7, trajectory)
    again = fit(changed, label).out_of_fold / changed
    np.testing.assert_allclose(again[mine], ratio[mine])
    assert np.abs(again[~mine] - ratio[~mine]).max() > 0.05


@pytest.mark.parametrize("third", [0, -1.5])
def test_no_admissible_step_lowers_the_objective(third: float) -> None:
    trajectory, label = made([1, 0.5, third, 0.2], [1, 2, 3, 1])
    trajectory[:, 0] += (
        0.6 * trajectory[:, 2]
    )  # what the third layer's negative weight would take away
    sigma = trajectory.std(axis=0)
    paper = sigma / np.linalg.norm(sigma)
    rows = trajectory / sigma
    sign = 2 * label - 1
    strength = 0.1

    def objective(weight: np.ndarray) -> float:
        """The least over the level of the weights and the intercept."""
        best = math.inf
        for level in np.geomspace(0.05, 5, 60):
            v = level * weight * sigma
            away = v - (paper @ v) * paper
            base = rows @ v
            for intercept in np.linspace(-2, 1, 40) - base.mean():
                loss = np.logaddexp(0, -sign * (base + intercept)).mean()
                best = min(best, loss + strength / 2 * away @ away)
        return best

    [weight] = layer_weights._path(trajectory, label, [strength])
    found = objective(weight)
    for layer, factor in np.ndindex(4, 2):
        other = weight.copy()
        other[layer] = max(other[layer] * (0.6, 1.7)[factor], 0.05)
        assert objective(other / other.mean()) > found - 1e-4
    assert objective(np.ones(4)) > found + 1e-3
