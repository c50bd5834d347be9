"""Maps of the risk: what they find, and that they keep the order of risks whatever the rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from probes_store.bundle import render
from probes_store.manifest import sealed
from probes_store.records import Recalibration
from service.fitting.risk_maps import FITS, fit_beta, fit_intercept, fit_isotonic, fit_platt
from tests.probes_store.factory import make_draft

MANIFEST = render(make_draft())[0]


def drawn(truth: Recalibration, count: int = 40_000) -> tuple[np.ndarray, np.ndarray]:
    """Labels by ``truth`` of risks, and the risks."""
    rng = np.random.default_rng(0)
    risk = rng.beta(1.2, 1.6, count)
    return (rng.random(count) >= truth(risk)).astype(int), risk


def test_the_intercept_makes_the_mean_risk_the_share() -> None:
    label, risk = drawn(Recalibration("intercept", c=1.3))
    found = fit_intercept(label, risk)
    assert found is not None
    assert found.c == pytest.approx(1.3, abs=0.05)
    assert (found.a, found.b) == (1.0, 1.0)
    assert found(risk).mean() == pytest.approx(np.mean(label == 0), abs=1e-9)


def test_platt_finds_slope_and_intercept() -> None:
    found = fit_platt(*drawn(Recalibration("platt", 0.6, 0.6, -0.5)))
    assert found is not None
    assert (found.a, found.b, found.c) == pytest.approx((0.6, 0.6, -0.5), abs=0.05)


def test_beta_finds_its_three_numbers() -> None:
    found = fit_beta(*drawn(Recalibration("beta", 0.5, 1.4, 0.4)))
    assert found is not None
    assert (found.a, found.b, found.c) == pytest.approx((0.5, 1.4, 0.4), abs=0.1)


def test_a_negative_coefficient_of_beta_is_0() -> None:
    rng = np.random.default_rng(1)
    risk = rng.uniform(0.02, 0.98, 20_000)
    truth = expit(1.2 * np.log(risk) + 0.5 * np.log1p(-risk) + 0.8)  # falls again near 1
    found = fit_beta((rng.random(20_000) >= truth).astype(int), risk)
    assert found is not None
    assert found.b == 0.0
    assert found.a > 0.5


def test_isotonic_follows_a_step() -> None:
    rng = np.random.default_rng(2)
    risk = rng.uniform(0, 1, 20_000)
    truth = np.where(risk < 0.5, 0.1, 0.7)
    found = fit_isotonic((rng.random(20_000) >= truth).astype(int), risk)
    assert found is not None
    np.testing.assert_allclose(found(np.array([0.2, 0.45, 0.55, 0.8])), [0.1, 0.1, 0.7, 0.7], atol=0.04)


def test_a_block_without_an_error_is_no_certainty() -> None:
    found = fit_isotonic(np.array([1] * 10 + [0] * 10), np.linspace(0.1, 0.9, 20))
    assert found is not None
    assert found(np.array([0.0, 0.1, 0.9, 1.0])) == pytest.approx([0.024, 0.024, 0.976, 0.976], abs=0.001)


@pytest.mark.parametrize("name", ["platt", "beta", "isotonic"])
def test_risks_that_fall_with_hallucination_have_no_map(name: str) -> None:
    rng = np.random.default_rng(3)
    risk = rng.uniform(0.05, 0.95, 2_000)
    assert FITS[name]((rng.random(2_000) < risk).astype(int), risk) is None  # type: ignore[index]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(4, 60), st.integers(1, 4))
def test_every_map_is_strictly_increasing(seed: int, count: int, digits: int) -> None:
    rng = np.random.default_rng(seed)
    risk = rng.uniform(0, 1, count).round(digits)  # also ties, 0 and 1
    label = np.append([0, 1], rng.integers(0, 2, count - 2))
    grid = np.linspace(0.001, 0.999, 200)
    for fit in FITS.values():
        found = fit(label, risk)
        if found is not None:
            sealed(dataclasses.replace(MANIFEST, recalibration=found))  # a bundle may have it
            made = found(np.concatenate([[0.0], grid, [1.0]]))
            assert np.all(np.diff(made) >= 0)
            assert np.all((made >= 0) & (made <= 1))
            steep = max(found.a, found.b, abs(found.c)) > 5  # then doubles are all alike at the ends
            assert steep or np.all(np.diff(found(grid)) > 0)
