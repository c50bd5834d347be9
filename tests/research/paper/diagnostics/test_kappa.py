from __future__ import annotations

import math

import numpy as np
import pytest

from hallutracer_research.paper.diagnostics.kappa import kappa_table


def test_columns_of_known_spreads() -> None:
    rng = np.random.default_rng(0)
    n = 100_000
    label = (np.arange(n) < n // 4).astype(int)
    w = rng.standard_normal((n, 9))
    w[label == 1] *= 2  # variances 4 and 1, shares 1/4 and 3/4
    w += 0.7 * label[:, None]
    found = kappa_table(w, label)
    assert found.kappa_mean == pytest.approx(4, rel=0.03)
    assert found.kappa_median == pytest.approx(4, rel=0.03)
    assert found.effect_size == pytest.approx(0.7 / math.sqrt(0.25 * 4 + 0.75), rel=0.05)
    assert found.worst_case_snr == pytest.approx(0.35, rel=0.05)
    assert found.degradation == pytest.approx(1 - math.sqrt(1.75 / 4), abs=0.02)
    assert found.factual_wider == 1
    assert found.transitions == 6  # of 10 layers, the middle ones


def test_the_sandwich_holds() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        w, label = rng.standard_normal((30, 4)) * rng.uniform(0.5, 2, (30, 1)), rng.permutation(np.arange(30) % 2)
        found = kappa_table(w, label)
        assert found.effect_size is not None
        assert found.worst_case_snr is not None
        assert found.kappa_by_layer[0] is not None
        worst = max(kappa for kappa in found.kappa_by_layer if kappa is not None)
        assert found.effect_size / math.sqrt(worst) <= found.worst_case_snr <= found.effect_size


def test_a_class_without_spread_is_counted_out() -> None:
    w = np.random.default_rng(2).standard_normal((10, 4))
    label = np.arange(10) % 2
    w[label == 0, 1] = 3.0
    found = kappa_table(w, label)
    assert found.kappa_by_layer[1] is None
    assert "1 of" in found.notes[0]
    assert kappa_table(np.zeros((4, 3)), [0, 0, 1, 1]).kappa_mean is None
