"""Groups: their effective number, and the interval of a share."""

from __future__ import annotations

import numpy as np
import pytest

from service.fitting.group_statistics import effective_groups, largest_share, share_interval


def test_equal_groups_count_whole_and_one_large_group_counts_for_little() -> None:
    assert effective_groups(np.repeat(np.arange(40), 10)) == pytest.approx(40)
    assert largest_share(np.repeat(np.arange(40), 10)) == pytest.approx(1 / 40)
    one_large = np.concatenate([np.zeros(500, int), np.arange(1, 501)])
    assert effective_groups(one_large) == pytest.approx(1000**2 / (500**2 + 500))
    assert largest_share(one_large) == 0.5


def test_the_interval_of_a_share_counts_groups_and_covers() -> None:
    assert share_interval(0.0, np.arange(10)) == (0.0, pytest.approx(0.2172, abs=1e-4))  # Jeffreys, 0 of 10
    assert share_interval(0.3, np.repeat(np.arange(10), 7)) == pytest.approx(share_interval(0.3, np.arange(10)))
    rng = np.random.default_rng(0)
    group, truth, hits = np.repeat(np.arange(60), 5), 0.2, 0
    for _ in range(300):
        one = rng.random(60) < truth
        low, high = share_interval(float(one[group].mean()), group)
        hits += low <= truth <= high
    assert hits / 300 > 0.91
