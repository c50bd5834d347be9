from __future__ import annotations

import math

import numpy as np
import pytest

from hallutracer_research.paper.diagnostics.snr import snr_table
from service.errors import TrainingError
from tests.research.paper.diagnostics.simulate import random_intercepts


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


def test_eta_moves_with_imbalance_and_unequal_spread_only_together() -> None:
    gap = np.linspace(0.4, 1.2, 8)
    trajectory, label = random_intercepts(4000, 8, gap=gap, share=0.2, seed=3)
    eta = snr_table(trajectory, label).eta
    assert eta == pytest.approx(1.0, abs=0.03)
    trajectory[label == 1] += 3.0 * np.random.default_rng(0).standard_normal((800, 1))  # a wider level, same slope
    assert snr_table(trajectory, label).eta != pytest.approx(1.0, abs=0.1)


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
