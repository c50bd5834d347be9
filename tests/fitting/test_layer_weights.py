"""Weights over layers: found where layers differ, the paper's rule where not, and never fitted on
their own rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

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
def test_the_weights_minimise_the_objective_of_the_module(third: float) -> None:
    trajectory, label = made([1, 0.5, third, 0.2], [1, 2, 3, 1])
    # What the third layer's negative weight would take away.
    trajectory[:, 0] += 0.6 * trajectory[:, 2]
    sigma, strength = trajectory.std(axis=0), 0.1
    paper = sigma / np.linalg.norm(sigma)

    def objective(point: np.ndarray) -> float:
        v, intercept = point[:-1], point[-1]
        away = v - (paper @ v) * paper
        margin = (2 * label - 1) * (trajectory / sigma @ v + intercept)
        return float(np.logaddexp(0, -margin).mean() + strength / 2 * away @ away)

    bounds = [(0, None)] * 4 + [(None, None)]
    least = minimize(objective, np.full(5, 0.1), bounds=bounds, method="SLSQP", tol=1e-12).x
    expected = least[:-1] / sigma
    [weight] = layer_weights._path(trajectory, label, [strength])
    np.testing.assert_allclose(weight, expected / expected.mean(), atol=0.02)
