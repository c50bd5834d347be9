"""Groups: their effective number, and intervals that widen with them."""

from __future__ import annotations

import numpy as np
import pytest

from service.fitting import group_statistics
from service.fitting.group_statistics import (
    auroc_interval,
    effective_groups,
    largest_share,
    share_interval,
    weighted_auroc,
)
from service.fitting.scores import risk_auroc


def test_equal_groups_count_whole_and_one_large_group_counts_for_little() -> None:
    assert effective_groups(np.repeat(np.arange(40), 10)) == pytest.approx(40)
    assert largest_share(np.repeat(np.arange(40), 10)) == pytest.approx(1 / 40)
    one_large = np.concatenate([np.zeros(500, int), np.arange(1, 501)])
    assert effective_groups(one_large) == pytest.approx(1000**2 / (500**2 + 500))
    assert largest_share(one_large) == 0.5


def test_weights_repeat_rows() -> None:
    rng = np.random.default_rng(0)
    label, risk = rng.integers(0, 2, 60), rng.integers(0, 9, 60) / 10
    weight = rng.integers(0, 4, 60)
    rows = np.repeat(np.arange(60), weight)
    level = np.unique(risk, return_inverse=True)[1]
    found = weighted_auroc(label == 0, level, weight.astype(float))
    assert found == pytest.approx(risk_auroc(label[rows], risk[rows]))
    assert weighted_auroc(label == 0, level, (label == 0).astype(float)) is None


def draw(rng: np.random.Generator, groups: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows whose groups share most of their label and of their risk's error."""
    group = np.repeat(np.arange(groups), size)
    bad = (rng.random(groups) < 0.5)[group] ^ (rng.random(groups * size) < 0.1)
    risk = bad * 1.0 + (rng.standard_normal(groups) * 0.9)[group] + rng.standard_normal(groups * size) * 0.5
    return 1 - bad.astype(int), group, risk


def test_the_interval_covers_what_it_should_with_the_fits_held_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_statistics, "RESAMPLES", 200)
    rng = np.random.default_rng(0)
    label, _, risk = draw(rng, 200_000, 1)
    truth = risk_auroc(label, risk)
    hits, naive = 0, 0
    draws = 120
    for seed in range(draws):
        label, group, risk = draw(rng, 40, 10)
        tests = [(np.arange(len(label)), risk)]
        low, high = auroc_interval(label, group, tests, seed)
        hits += low <= truth <= high
        low, high = auroc_interval(label, np.arange(len(label)), tests, seed)
        naive += low <= truth <= high
    assert hits / draws > 0.88  # 95 % nominal; 120 draws
    assert naive / draws < 0.7  # rows as if they were independent


def test_a_test_side_without_a_class_is_left_out_and_where_all_are_nothing_is_known() -> None:
    label = np.array([0, 1, 0, 1, 1, 1])
    group = np.arange(6)
    tests = [(np.arange(4), np.array([0.9, 0.1, 0.8, 0.2])), (np.array([4, 5]), np.array([0.5, 0.6]))]
    assert auroc_interval(label, group, tests) == (1.0, 1.0)
    assert auroc_interval(np.ones(6, int), group, tests) == (0.0, 1.0)


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
