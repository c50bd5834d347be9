"""Variance components, slope against mean, and the Fisher gap, against simulation and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hallutracer_research.paper.diagnostics.shape import fisher_gap, snr_table, variance_components
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
    assert found.acf_floor == -1 / 5


def test_few_layers_have_few_lags() -> None:
    trajectory, label = random_intercepts(30, 3, seed=3)
    assert len(variance_components(trajectory, label).residual_acf) == 1
    assert len(variance_components(*random_intercepts(30, 40, seed=3)).residual_acf) == 12
    with pytest.raises(TrainingError, match="at least 3"):
        variance_components(trajectory[:, :2], label)


def test_no_variance_is_none_with_a_reason() -> None:
    found = variance_components(np.tile([[1.0, 2.0, 3.0]], (4, 1)), [0, 0, 1, 1])
    assert found.icc is None
    assert found.icc_unbiased is None
    assert found.residual_acf == (None,)
    assert len(found.notes) == 2


def test_the_model_gives_the_proposition_back() -> None:
    m = 12
    gap = 1.0 + 0.05 * np.arange(m)
    found = snr_table(*random_intercepts(200_000, m, alpha=1.2, epsilon=0.7, gap=gap, seed=0))
    rho, gamma = 0.05 * m / gap.mean(), math.sqrt(1 + m * 1.2**2 / 0.7**2)
    expected = rho * gamma / math.sqrt(12) * math.sqrt(1 - 1 / m**2)
    assert found.rho == pytest.approx(rho, rel=0.03)
    assert found.gamma == pytest.approx(gamma, rel=0.01)
    assert found.r_independent == pytest.approx(expected, rel=0.03)
    assert found.r_plugin == pytest.approx(expected, rel=0.03)
    assert found.gamma_plugin is not None
    assert found.gamma_plugin > gamma  # Var(alpha-hat) holds sigma_eps^2 / m as well


def test_rho_shape_of_a_known_gap() -> None:
    gap = np.array([1.0, 2.0, 3.0, 2.0])
    trajectory, label = random_intercepts(40, 4, gap=0.0, seed=1)
    trajectory[label == 1] += gap - trajectory[label == 1].mean(axis=0) + trajectory[label == 0].mean(axis=0)
    assert snr_table(trajectory, label).rho_shape == pytest.approx(math.sqrt(2) / (2 * 2))


def test_eta_is_one_on_balanced_classes_by_algebra() -> None:
    trajectory, label = random_intercepts(500, 8, gap=np.linspace(0.4, 1.2, 8), seed=2)
    trajectory[label == 1] *= np.linspace(1, 3, 8)  # unequal spread: still no difference
    assert snr_table(trajectory, label).eta == pytest.approx(1.0, rel=1e-10)


def test_measured_ratio_is_that_of_two_scalars() -> None:
    trajectory, label = random_intercepts(300, 6, gap=np.linspace(0.2, 1.0, 6), share=0.3, seed=4)
    slope = np.polyfit(np.arange(6), trajectory.T, 1)[0]
    ratio = []
    for scalar in (slope, trajectory.mean(axis=1)):
        one, zero = scalar[label == 1], scalar[label == 0]
        ratio.append(abs(one.mean() - zero.mean()) / math.sqrt((one.var(ddof=1) + zero.var(ddof=1)) / 2))
    assert snr_table(trajectory, label).r_empirical == pytest.approx(ratio[0] / ratio[1], rel=1e-10)


def test_parallel_trajectories_leave_gaps_with_reasons() -> None:
    rng = np.random.default_rng(5)
    label = np.repeat([0, 1], 20)
    # Exact halves and quarters, so that equal trajectories stay equal in floating point.
    trajectory = rng.integers(-8, 8, (40, 1)) + label[:, None] * np.array([1.0, 2.0, 4.0, 1.0])
    for offset in (0.0, 0.1):  # exact, and with rounding
        found = snr_table(trajectory + offset, label)
        assert found.gamma is None
        assert found.r_plugin is None
        assert found.eta is None
        assert len(found.notes) == 2


def test_no_mean_gap_is_refused() -> None:
    with pytest.raises(TrainingError, match="same depth mean"):
        snr_table(np.ones((6, 4)), [0, 1, 0, 1, 0, 1])


def direct(trajectory: np.ndarray, label: np.ndarray) -> float:
    """d' Sigma^-1 d / (SNR of the mean)^2, from the definitions alone."""
    one, zero = trajectory[label == 1], trajectory[label == 0]
    share = label.mean()
    sigma = share * np.cov(one, rowvar=False) + (1 - share) * np.cov(zero, rowvar=False)
    d, u = one.mean(axis=0) - zero.mean(axis=0), np.ones(trajectory.shape[1])
    return float(d @ np.linalg.inv(sigma) @ d / ((u @ d) ** 2 / (u @ sigma @ u)))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 24), st.integers(0, 10_000))
def test_parts_and_direct_ratio_agree_for_any_covariance(m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    label = (np.arange(120) < 45).astype(int)
    trajectory = rng.standard_normal((120, m)) @ rng.standard_normal((m, m)) + np.outer(
        label, rng.standard_normal(m) + 1
    )
    found = fisher_gap(trajectory, label)
    digits = max(1e-9, 16 * np.finfo(np.float64).eps * found.condition)
    assert found.r_fisher**2 == pytest.approx(found.r_fisher_direct**2, rel=digits)
    assert found.r_fisher_direct**2 == pytest.approx(direct(trajectory, label), rel=max(1e-6, digits))
    assert found.r_fisher >= 1 - 1e-9
    assert 0 <= found.theta < 1
    assert abs(found.t) <= math.sqrt(found.theta) * found.chi * (1 + 1e-9)


def test_the_unbiased_ratio_takes_the_gain_from_noise_out() -> None:
    plain, corrected = [], []
    for seed in range(60):
        found = fisher_gap(*random_intercepts(300, 20, gap=0.8, seed=seed))
        assert found.r_fisher_unbiased is not None
        plain.append(found.r_fisher)
        corrected.append(found.r_fisher_unbiased)
    assert np.mean(plain) > 1.15  # the truth is 1
    assert np.mean(corrected) == pytest.approx(1.0, abs=0.03)


def test_a_singular_covariance_is_refused_and_shrinkage_named() -> None:
    trajectory, label = random_intercepts(20, 24, seed=5)
    with pytest.raises(TrainingError, match=r"24 layers from 20 trajectories is singular \(rank 18 of 24.*ledoit_wolf"):
        fisher_gap(trajectory, label)
    found = fisher_gap(trajectory, label, "ledoit_wolf")
    assert found.shrinkage_rule == "ledoit_wolf"
    assert 0 < found.shrinkage <= 1
    assert found.r_fisher_unbiased is None
    assert found.notes
    trajectory, label = random_intercepts(200, 5, seed=5)
    with pytest.raises(TrainingError, match="singular"):
        fisher_gap(np.concatenate([trajectory, trajectory[:, :1]], axis=1), label)


def test_full_shrinkage_is_a_scaled_identity() -> None:
    gap = np.array([1.0, 0.2, 0.6])
    trajectory, label = random_intercepts(400, 3, gap=gap, seed=6)
    found = fisher_gap(trajectory, label, 1.0)
    d = trajectory[label == 1].mean(axis=0) - trajectory[label == 0].mean(axis=0)
    assert found.theta == pytest.approx(0, abs=1e-20)
    assert found.r_fisher**2 == pytest.approx(3 * float(d @ d) / d.sum() ** 2)
    with pytest.raises(TrainingError, match="between 0 and 1"):
        fisher_gap(trajectory, label, 1.5)


def test_equal_depth_means_have_no_ratio() -> None:
    trajectory, label = random_intercepts(100, 4, seed=7)
    trajectory[label == 1] += trajectory[label == 0].mean() - trajectory[label == 1].mean()
    with pytest.raises(TrainingError, match="same depth mean"):
        fisher_gap(trajectory, label)
