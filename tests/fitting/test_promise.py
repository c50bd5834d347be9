"""The promise: kept as often as it says, where rows of a group are alike, too."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from service.fitting.promise import (
    calibrate,
    first_answered,
    least_groups,
    risk_control,
    sequence,
    upper_bound,
)

ALPHA, DELTA = 0.2, 0.1


def draw(rng: np.random.Generator, groups: int, size: int, icc: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, risks that know half of it, groups: rows of a group share a part ``icc`` of both."""
    group = np.repeat(np.arange(groups), size)
    knows = np.sqrt(icc) * rng.standard_normal(groups)[group] + np.sqrt(1 - icc) * rng.standard_normal(groups * size)
    label = (knows + 0.3 > 0).astype(int)
    risk = 1 / (1 + np.exp(1.5 * knows + rng.standard_normal(groups * size)))
    return label, risk, group


class Truth:
    """The share of wrong ones among random answered rows of random answering groups, by threshold."""

    def __init__(self, size: int, icc: float) -> None:
        self.data = draw(np.random.default_rng(99), 20_000, size, icc)
        self.order = np.random.default_rng(1).permutation(len(self.data[0]))
        self.known: dict[float, float] = {}

    def __call__(self, threshold: float) -> float:
        if threshold not in self.known:
            groups, wrong = first_answered(*self.data, threshold, self.order)
            self.known[threshold] = wrong / groups
        return self.known[threshold]


@pytest.mark.parametrize(
    ("groups", "size", "icc"), [(60, 8, 0.6), pytest.param(400, 8, 0.3, marks=pytest.mark.long), (300, 1, 0.0)]
)
def test_the_promise_is_broken_no_more_often_than_delta(groups: int, size: int, icc: float) -> None:
    rng = np.random.default_rng(0)
    thresholds = sequence(*draw(rng, 300, size, icc), ALPHA, DELTA, groups)
    truth = Truth(size, icc)
    draws, broken, served, by_row = 300, 0, 0, 0
    for seed in range(draws):
        data = draw(rng, groups, size, icc)
        promise = calibrate(*data, thresholds, ALPHA, DELTA, seed)
        if promise.threshold is not None:
            served += 1
            broken += truth(promise.threshold) > ALPHA
        label, risk, _ = data
        rows = calibrate(label, risk, np.arange(len(label)), thresholds, ALPHA, DELTA, seed)
        by_row += rows.threshold is not None and truth(rows.threshold) > ALPHA
    assert broken <= binom.ppf(0.999, draws, DELTA)
    assert served > draws * 0.5
    if icc > 0.5:
        assert by_row > 2 * DELTA * draws  # rows taken as independent break it


def test_the_sequence_goes_from_strict_to_loose_and_never_sees_the_calibration_rows() -> None:
    data = draw(np.random.default_rng(0), 300, 4, 0.3)
    thresholds = sequence(*data, ALPHA, DELTA, 200)
    assert thresholds == sorted(set(thresholds))
    label, risk, group = data
    groups, wrong = first_answered(label, risk, group, thresholds[0], np.random.default_rng(0).permutation(len(label)))
    assert wrong <= 0.5 * ALPHA * groups
    assert groups / 300 * 200 >= 1.2 * least_groups(ALPHA, DELTA)
    assert sequence(*data, ALPHA, DELTA, 5) == [pytest.approx(1.0)]  # too few groups for any


def test_a_group_counts_once_with_its_first_answered_row() -> None:
    label, risk, group = np.array([0, 1, 1, 0, 1]), np.array([0.9, 0.1, 0.2, 0.1, 0.8]), np.array([0, 0, 1, 1, 2])
    assert first_answered(label, risk, group, 0.5, np.arange(5)) == (2, 0)
    assert first_answered(label, risk, group, 0.5, np.arange(5)[::-1]) == (2, 1)
    assert first_answered(label, risk, group, 0.95, np.arange(5)) == (3, 1)
    assert first_answered(label, risk, group, 0.05, np.arange(5)) == (0, 0)


def test_numbers_that_are_known() -> None:
    assert least_groups(0.1, 0.05) == 29
    assert binom.cdf(0, 29, 0.1) <= 0.05 < binom.cdf(0, 28, 0.1)
    assert upper_bound(0, 29, 0.05) < 0.1 < upper_bound(0, 28, 0.05)
    assert upper_bound(3, 3, 0.05) == 1.0


def test_it_stops_at_the_first_failure_and_says_what_is_missing() -> None:
    label, risk, group = np.ones(100, int), np.linspace(0.01, 1, 100), np.arange(100)
    label[70:] = 0
    promise = calibrate(label, risk, group, [0.5, 0.705, 0.95, 1.1], 0.1, 0.05)
    assert [step.p_value <= 0.05 for step in promise.steps] == [True, True, False]
    assert promise.threshold == 0.705
    few = calibrate(label[:20], risk[:20], group[:20], [1.1], 0.1, 0.05)
    assert few.threshold is None
    assert few.least_alpha == pytest.approx(1 - 0.05 ** (1 / 20))
    assert few.groups_wanted == 29
    bad = calibrate(label, risk, group, [1.1], 0.1, 0.05)
    assert bad.threshold is None
    assert bad.groups_wanted == -1


def test_conformal_risk_control_keeps_its_mean() -> None:
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(200):
        threshold = risk_control(*draw(rng, 80, 5, 0.5), 0.1)
        label, risk, _ = draw(rng, 200, 5, 0.5)
        losses.append(0.0 if threshold is None else float(np.mean((risk < threshold) & (label == 0))))
    assert np.mean(losses) <= 0.1 + 3 * np.std(losses) / np.sqrt(200)
    assert np.mean(losses) > 0.07
    assert risk_control(np.zeros(5, int), np.full(5, 0.5), np.arange(5), 0.1) is None
