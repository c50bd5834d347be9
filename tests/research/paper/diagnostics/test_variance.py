from __future__ import annotations

import numpy as np
import pytest

from hallutracer_research.paper.diagnostics.variance import variance_components
from service.errors import TrainingError
from tests.research.paper.diagnostics.simulate import random_intercepts


@pytest.mark.parametrize(("alpha", "epsilon"), [(1.0, 1.0), (1.3, 0.9), (0.3, 2.0)])
def test_components_of_simulated_random_intercepts(alpha: float, epsilon: float) -> None:
    m = 10
    found = variance_components(*random_intercepts(60_000, m, alpha=alpha, epsilon=epsilon, seed=0))
    truth = alpha**2 / (alpha**2 + epsilon**2)
    assert found.icc_unbiased == pytest.approx(truth, abs=0.01)
    assert found.sigma_alpha2 == pytest.approx(alpha**2, rel=0.05)
    assert found.sigma_epsilon2 == pytest.approx(epsilon**2, rel=0.01)
    # The paper's plug-in: Var(alpha-hat) = sigma_alpha^2 + sigma_eps^2 / m, and the residual loses that much.
    total = alpha**2 + epsilon**2
    assert found.icc == pytest.approx((alpha**2 + epsilon**2 / m) / total, abs=0.01)
    assert found.icc_factual == pytest.approx(found.icc, abs=0.02)


def test_plug_in_is_exactly_equation_icc() -> None:
    trajectory, label = random_intercepts(37, 6, share=0.4, seed=1)
    alpha, epsilon = np.empty(37), np.empty((37, 6))
    for value in (0, 1):
        rows = label == value
        away = trajectory[rows] - trajectory[rows].mean(axis=0)
        alpha[rows] = away.mean(axis=1)
        epsilon[rows] = away - alpha[rows][:, None]
    found = variance_components(trajectory, label)
    assert found.icc == pytest.approx(alpha.var() / (alpha.var() + epsilon.var()), rel=1e-12)
    ones = label == 1
    expected = alpha[ones].var() / (alpha[ones].var() + epsilon[ones].var())
    assert found.icc_factual == pytest.approx(expected, rel=1e-12)
    correlation = np.corrcoef(epsilon[ones], rowvar=False)
    acf = [np.mean(np.diagonal(correlation, lag)) for lag in range(1, 5)]
    assert found.residual_acf == pytest.approx(acf, rel=1e-10)


def test_autoregressive_residuals_decay_and_independent_ones_lie_at_the_floor() -> None:
    rng = np.random.default_rng(2)
    n, m, phi = 20_000, 40, 0.6
    noise = rng.standard_normal((n, m))
    residual = noise.copy()
    for layer in range(1, m):
        residual[:, layer] = phi * residual[:, layer - 1] + np.sqrt(1 - phi**2) * noise[:, layer]
    label = np.arange(n) % 2
    chained = variance_components(residual + rng.standard_normal((n, 1)) + label[:, None], label).residual_acf
    free = variance_components(noise + rng.standard_normal((n, 1)) + label[:, None], label)
    assert len(chained) == 12
    assert chained[0] is not None
    assert chained[1] is not None
    assert 0.5 < chained[0] < 0.6
    assert chained[0] > chained[1] > 0.2
    assert free.residual_acf == pytest.approx([free.acf_floor] * 12, abs=0.01)


def test_few_layers_have_few_lags() -> None:
    trajectory, label = random_intercepts(30, 3, seed=3)
    assert len(variance_components(trajectory, label).residual_acf) == 1
    with pytest.raises(TrainingError, match="at least 3"):
        variance_components(trajectory[:, :2], label)


def test_no_variance_is_none_with_a_reason() -> None:
    found = variance_components(np.tile([[1.0, 2.0, 3.0]], (4, 1)), [0, 0, 1, 1])
    assert found.icc is None
    assert found.icc_unbiased is None
    assert found.residual_acf == (None,)
    assert len(found.notes) == 2
