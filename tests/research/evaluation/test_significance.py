"""DeLong against brute force, simulation and cases with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from hallutracer_research.evaluation.significance import delong
from service.errors import TrainingError
from service.fitting.scores import risk_auroc

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw(rng: np.random.Generator, count: int = 200, gain: float = 0.0, shared: float = 0.6) -> Arrays:
    """Two risks of the same rows with correlated noise; the first separates the classes better by ``gain``."""
    label = np.repeat([0, 1], count // 2)
    common = rng.standard_normal(count) * shared
    noise = rng.standard_normal((2, count)) * np.sqrt(1 - shared**2)
    risk_a, risk_b = common + noise + np.array([[0.8 + gain], [0.8]]) * (1 - label)
    return label, risk_a, risk_b


def kernel(bad: float, good: float) -> float:
    return 1.0 if bad > good else 0.5 if bad == good else 0.0


def by_definition(label: np.ndarray, risk_a: np.ndarray, risk_b: np.ndarray) -> tuple[float, float, float]:
    """AUROCs and the variance of their difference from all pairs, as DeLong et al. (1988) write it."""
    bad, good = np.flatnonzero(label == 0), np.flatnonzero(label == 1)
    psi = np.array([[[kernel(risk[i], risk[j]) for j in good] for i in bad] for risk in (risk_a, risk_b)])
    of_bad, of_good = psi.mean(axis=2), psi.mean(axis=1)  # [2, bad], [2, good]
    covariance = np.cov(of_bad) / len(bad) + np.cov(of_good) / len(good)
    contrast = np.array([1.0, -1.0])
    return float(psi[0].mean()), float(psi[1].mean()), float(contrast @ covariance @ contrast)


@pytest.mark.parametrize("decimals", [1, 12])  # 1: many ties
def test_delong_equals_its_definition(decimals: int) -> None:
    label, risk_a, risk_b = draw(np.random.default_rng(0), 60, 0.7)
    risk_a, risk_b = np.round(risk_a, decimals), np.round(risk_b, decimals)
    auc_a, auc_b, variance = by_definition(label, risk_a, risk_b)
    found = delong(label, risk_a, risk_b)
    assert found.auc_a == pytest.approx(auc_a, abs=1e-12)
    assert found.auc_b == pytest.approx(auc_b, abs=1e-12)
    assert found.z == pytest.approx((auc_a - auc_b) / np.sqrt(variance), rel=1e-9)
    assert found.p_value is not None
    assert 0 < found.p_value < 1


def test_null_p_values_are_uniform() -> None:
    rng = np.random.default_rng(2)
    p_values = [delong(*draw(rng)).p_value for _ in range(600)]
    assert kstest(p_values, "uniform").pvalue > 0.01
    assert 0.025 < np.mean([p is not None and p < 0.05 for p in p_values]) < 0.08


def test_a_real_difference_is_found_and_its_sign_kept() -> None:
    label, risk_a, risk_b = draw(np.random.default_rng(4), 600, 1.0)
    forward, backward = delong(label, risk_a, risk_b), delong(label, risk_b, risk_a)
    assert forward.z is not None
    assert backward.z is not None
    assert forward.z > 4
    assert backward.z == pytest.approx(-forward.z)
    assert backward.p_value == pytest.approx(forward.p_value)


def test_equal_rankings_give_one() -> None:
    label, risk, _ = draw(np.random.default_rng(5))
    for other in (risk, np.exp(risk), 3 * risk - 7):
        assert delong(label, risk, other)[2:] == (0.0, 1.0)


def test_no_variance_and_another_auroc_has_no_p_value() -> None:
    label = np.array([0, 0, 0, 1, 1, 1])
    perfect = np.array([0.9, 0.8, 0.7, 0.3, 0.2, 0.1])
    assert delong(label, perfect, np.full(6, 0.5)) == (1.0, 0.5, None, None)
    assert delong(np.array([0, 1, 1]), perfect[:3], perfect[:3])[2:] == (None, None)  # one row of a class


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=30))
def test_aurocs_are_the_measure_s(rows: list[tuple[int, int, int]]) -> None:
    label, risk_a, risk_b = np.array(rows).T
    if len(set(label)) < 2:
        with pytest.raises(TrainingError, match="both of them"):
            delong(label, risk_a, risk_b)
        return
    found = delong(label, risk_a, risk_b)
    assert found.auc_a == pytest.approx(risk_auroc(label, risk_a))
    assert found.auc_b == pytest.approx(risk_auroc(label, risk_b))
    assert found.p_value is None or 0 <= found.p_value <= 1


def test_refusals_name_what_is_wrong() -> None:
    label, risk, other = draw(np.random.default_rng(8), 20)
    with pytest.raises(TrainingError, match="risk_b is not finite at row 3"):
        delong(label, risk, np.where(np.arange(20) == 3, np.nan, other))
    with pytest.raises(TrainingError, match=r"risk_a has shape \(19,\)"):
        delong(label, risk[1:], other)
    with pytest.raises(TrainingError, match="nothing else"):
        delong(label + 1, risk, other)
