from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group

from hallutracer_research.paper.diagnostics.fisher import fisher_gap
from service.errors import TrainingError
from tests.research.paper.diagnostics.simulate import random_intercepts


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


def test_independent_layers_recover_the_isotropic_formula() -> None:
    # Var(mean) grows with the common part; a gap of one size in every layer leaves no shape to gain from.
    trajectory, label = random_intercepts(200_000, 6, gap=0.8, seed=1)
    found = fisher_gap(trajectory, label)
    assert found.r_fisher == pytest.approx(1.0, abs=1e-3)
    assert found.theta == pytest.approx(0.0, abs=1e-3)
    # Shape r orthogonal to 1: R^2 = 1 + a |r|^2 / (sigma_eps^2 s^2) (Eq. isotropic-intuition)
    shape = np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]) * 0.3
    trajectory, label = random_intercepts(200_000, 6, gap=0.8 + shape, seed=2)
    level = (6 * 1.0 + 1.0) / (6 * 0.8**2)  # a / s^2 with a = m sigma_alpha^2 + sigma_eps^2
    expected = math.sqrt(1 + level * float(shape @ shape))
    assert fisher_gap(trajectory, label).r_fisher == pytest.approx(expected, rel=0.01)


def test_the_unbiased_ratio_takes_the_gain_from_noise_out() -> None:
    plain, corrected = [], []
    for seed in range(60):
        found = fisher_gap(*random_intercepts(300, 20, gap=0.8, seed=seed))
        assert found.r_fisher_unbiased is not None
        plain.append(found.r_fisher)
        corrected.append(found.r_fisher_unbiased)
    assert np.mean(plain) > 1.15  # the truth is 1
    assert np.mean(corrected) == pytest.approx(1.0, abs=0.03)


def test_nothing_depends_on_the_scale_of_all_logits() -> None:
    trajectory, label = random_intercepts(200, 8, seed=3)
    one, two = fisher_gap(trajectory, label), fisher_gap(trajectory * 1000 + 7, label)
    assert two.r_fisher == pytest.approx(one.r_fisher, rel=1e-9)
    assert two.chi == pytest.approx(one.chi, rel=1e-9)


def test_diagnostics_do_not_depend_on_the_basis_of_shapes() -> None:
    trajectory, label = random_intercepts(300, 5, gap=np.array([1, 0.5, 0.2, 0.9, 0.4]), seed=4)
    u = np.full((5, 1), 1 / math.sqrt(5))
    basis = np.linalg.svd(u @ u.T)[0]
    turned = ortho_group.rvs(4, random_state=0)
    whole = np.concatenate([basis[:, :1] @ (basis[:, :1].T @ u), basis[:, 1:] @ turned], axis=1)
    assert np.allclose(whole.T @ whole, np.eye(5))
    # Turning the data by U' R U with R acting on shapes only leaves level, covariance blocks' invariants, all the same.
    rotation = u @ u.T + basis[:, 1:] @ turned @ basis[:, 1:].T
    one, two = fisher_gap(trajectory, label), fisher_gap(trajectory @ rotation.T, label)
    for name in ("theta", "chi", "t", "r_fisher"):
        assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-8)


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
