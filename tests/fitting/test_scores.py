"""Measures against brute force; intervals against brute force, DeLong, simulation and known
answers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.special import expit, logit
from scipy.stats import beta, kstest
from sklearn.metrics import average_precision_score

from hallutracer_research.evaluation.results import delong
from service.fitting import scores as measures
from service.fitting.scores import (
    Floats,
    Index,
    Tests,
    auroc_interval,
    gain,
    risk_auroc,
    share_interval,
    t_interval,
)
from tests.fitting.made import PRIOR, rows


def labelled(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 41))
    return np.r_[0, 1, rng.integers(0, 2, size - 2)], rng.integers(0, 13, size) / 12


@pytest.mark.parametrize("seed", range(50))
def test_auroc_is_the_share_of_ordered_pairs_and_within_a_stratum_of_its_own(seed: int) -> None:
    (label, risk), strata = labelled(seed), np.random.default_rng(seed).integers(0, 4, 40).tolist()
    pairs = [
        (np.sign(risk[i] - risk[j]) / 2 + 0.5, strata[i] == strata[j])
        for i, j in itertools.product(np.flatnonzero(label == 0), np.flatnonzero(label == 1))
    ]
    assert risk_auroc(label, risk) == pytest.approx(np.mean([won for won, _ in pairs]))
    assert measures.auroc(label, -risk) == risk_auroc(label, risk)
    inside = [won for won, same in pairs if same]
    found = measures.within_stratum_auroc(label, risk, strata[: len(label)])
    assert found == (pytest.approx(np.mean(inside)) if inside else None)


@pytest.mark.parametrize("seed", range(60))
def test_ece_by_hand_and_independent_of_row_order(seed: int) -> None:
    (label, risk), bins = labelled(seed), 1 + seed % 15
    values, gaps = sorted(risk.tolist()), np.zeros(bins)
    for value, truth in zip(risk.tolist(), label.tolist(), strict=True):
        gaps[values.index(value) * bins // len(values)] += value - 1 + truth
    expected = np.abs(gaps).sum() / len(values)
    for places in (slice(None), np.random.default_rng(seed).permutation(len(label))):
        assert measures.ece(label[places], risk[places], bins) == pytest.approx(expected)


def test_the_debiased_error_by_hand_and_without_each_group() -> None:
    rng = np.random.default_rng(5)
    risk = rng.uniform(0, 1, 600)
    label = (rng.random(600) >= expit(0.5 * logit(risk))).astype(int)
    predicted, observed, size = measures.reliability(label, risk)
    assert size.tolist() == [40] * 15
    noise = observed * (1 - observed) / (size - 1)
    by_hand = (size * ((predicted - observed) ** 2 - noise)).sum() / 600
    squared, without = measures.squared_calibration_error(label, risk, np.arange(600) // 3)
    assert squared == pytest.approx(by_hand, abs=1e-9)
    error = measures.debiased_calibration_error(label, risk)
    assert np.sqrt(squared) == pytest.approx(error, abs=1e-9)
    assert (len(without), without.mean()) == (200, pytest.approx(squared, rel=0.02))
    assert np.ptp(without) > 0
    bins_of_one_row = measures.debiased_calibration_error(np.array([0, 1]), np.array([0.2, 0.7]))
    assert bins_of_one_row == 0.0


def test_the_average_precision_is_scikit_learns_to_the_bit() -> None:
    for seed in range(50):
        label, risk = labelled(seed)
        for rounded in (risk, risk.astype(np.float32), risk + np.linspace(0, 0.01, len(risk))):
            for positive, score in ((0, rounded), (1, -rounded)):
                expected = average_precision_score(label == positive, score)
                assert measures.auprc(label, rounded, positive=positive) == expected
    assert measures.auprc(np.ones(3, int), np.array([0.1, 0.2, 0.3]), positive=0) == 0.0


# --- intervals ---


def test_the_summary_has_every_measure_and_needs_both_classes() -> None:
    label, risk = np.array([0, 1, 1, 0]), np.array([0.8, 0.3, 0.4, 0.6])
    summary = measures.summary(label, risk)
    assert (tuple(summary), summary["auroc"]) == (measures.SUMMARY, 1)
    assert summary["brier"] == pytest.approx((0.04 + 0.09 + 0.16 + 0.16) / 4)
    with pytest.raises(ValueError, match="both classes"):
        measures.summary(np.ones(4, int), risk)


def whole(risk: Floats) -> Tests:
    """One test side of all rows."""
    return [(np.arange(len(risk)), risk)]


def test_it_covers_with_forty_groups_and_rows_as_independent_would_not() -> None:
    """The interval is of the AUROC of other groups: 300 data sets of one population."""
    rng = np.random.default_rng(0)
    risk, label, _ = rows(rng, 200_000, PRIOR)
    truth = risk_auroc(label, risk)
    covered = {"groups": 0, "rows": 0}
    for _ in range(300):
        risk, label, group = rows(rng, 40, PRIOR, size=10)
        for unit, groups in (("groups", group), ("rows", np.arange(len(label)))):
            low, high = auroc_interval(label, groups, whole(risk))
            covered[unit] += low <= truth <= high
    assert covered["groups"] / 300 > 0.91  # 95 % nominal
    assert covered["rows"] / 300 < 0.7


def mean_auroc(label: Index, tests: Tests, keep: np.ndarray, kind: Index) -> float:
    values = []
    for side, of_side in tests:
        rows, risk = side[keep[side]], of_side[keep[side]]
        values.append(measures.within_stratum_auroc(label[rows], risk, kind[rows].tolist()))
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else float("nan")


@pytest.mark.parametrize("kinds", [1, 3])  # 3: of pairs inside a kind
@pytest.mark.parametrize("levels", [4, 10_000])  # 4: many ties
def test_the_interval_is_that_of_the_mean_without_each_group(levels: int, kinds: int) -> None:
    rng = np.random.default_rng(levels)
    for _ in range(40):
        count = int(rng.integers(30, 60))
        label, group = rng.integers(0, 2, count), rng.integers(0, 12, count)
        risk = (rng.integers(0, levels, count) - label * levels / 4) / levels
        tests = [(side, risk[side]) for side in np.array_split(rng.permutation(count), 3)]
        kind = rng.integers(0, kinds, count)
        every = np.ones(count, bool)
        left_out = [mean_auroc(label, tests, group != name, kind) for name in np.unique(group)]
        value = mean_auroc(label, tests, every, kind)
        assert measures.mean_auroc(label, tests, kind) == pytest.approx(value)
        strata = kind if kinds > 1 else None
        ends = logit(auroc_interval(label, group, tests, strata))
        other = [(side, rng.random(len(side))) for side, _ in tests]
        found = gain(label, group, tests, other, strata)
        assert found.difference == pytest.approx(value - mean_auroc(label, other, every, kind))
        # The log odds are symmetric around the value's; three test sides: variance times 1 / (1 -
        # 1/3).
        assert ends.mean() == pytest.approx(logit(value))
        raw = t_interval(value, np.array(left_out), folds=3)
        assert ends[1] - ends[0] == pytest.approx((raw.high - raw.low) / (value * (1 - value)))


def test_on_independent_rows_the_error_of_a_difference_is_delong_s() -> None:
    rng = np.random.default_rng(1)
    label = np.repeat([0, 1], 200)
    common = rng.standard_normal(400)
    first, second = (common + rng.standard_normal(400) + gap * (1 - label) for gap in (1.2, 0.8))
    ours = gain(label, np.arange(400), whole(first), whole(second))
    known = delong(label, first, second)
    assert known.z is not None
    difference = known.auc_a - known.auc_b
    assert ours.difference == pytest.approx(difference, abs=1e-12)
    assert (ours.low + ours.high) / 2 == pytest.approx(difference)
    assert (ours.high - ours.low) / (2 * 1.966) == pytest.approx(difference / known.z, rel=0.01)
    assert ours.p_value == pytest.approx(known.p_value, rel=0.2)


def test_equal_scores_are_told_apart_at_the_level_of_the_test() -> None:
    rng = np.random.default_rng(3)
    p_values = []
    for _ in range(300):
        risk, label, group = rows(rng, 40, 0.5, size=5)
        noise = rng.standard_normal((2, 40))[:, group] + rng.standard_normal((2, 200))
        one, other = logit(risk) + noise
        p_values.append(gain(label, group, whole(one), whole(other)).p_value)
    assert 0.02 < np.mean(np.less(p_values, 0.05)) < 0.09
    assert kstest(p_values, "uniform").pvalue > 0.01


def test_where_nothing_is_known_the_interval_says_so() -> None:
    """Of one class, of a class in one group, of one group."""
    risk = np.linspace(0, 1, 6)
    for label, group in (("111111", "012345"), ("001111", "001234"), ("010101", "000000")):
        labels, groups = np.array([*map(int, label)]), np.array([*map(int, group)])
        assert auroc_interval(labels, groups, whole(risk)) == (0.0, 1.0)
        assert gain(labels, groups, whole(risk), whole(-risk))[1:] == (-1.0, 1.0, 1.0)


def test_a_perfect_score_on_few_groups_is_not_certain() -> None:
    label, rows = np.array([0] * 10 + [1] * 30), np.arange(40)
    jeffreys = pytest.approx(0.2172, abs=1e-4)  # 0 of 10
    low, high = auroc_interval(label, rows, whole(1.0 - label))
    assert (1 - low, high) == (jeffreys, 1.0)
    assert (
        auroc_interval(label, rows, whole(label * 1.0))
        == share_interval(0.0, np.arange(10))
        == (0.0, jeffreys)
    )
    assert gain(label, rows, whole(1.0 - label), whole(np.zeros(40))) == (0.5, -1.0, 1.0, 1.0)


def test_the_error_of_a_mean_is_the_textbook_s() -> None:
    values = np.random.default_rng(0).standard_normal(50)
    without = np.array([np.delete(values, place).mean() for place in range(50)])
    error = values.std(ddof=1) / np.sqrt(50)
    assert measures.standard_error(without) == pytest.approx(error)
    assert t_interval(0.0, without) == pytest.approx((-2.0096 * error, 2.0096 * error), rel=1e-4)


def test_a_gain_over_itself_is_none() -> None:
    risk, label, group = rows(np.random.default_rng(8), 90, PRIOR, size=2)
    assert gain(label, group, whole(risk), whole(risk)) == (0.0, 0.0, 0.0, 1.0)


def test_equal_groups_count_whole_and_one_large_group_for_little() -> None:
    assert measures.effective_groups(np.repeat(np.arange(40), 10)) == pytest.approx(40)
    one_large = np.concatenate([np.zeros(500, int), np.arange(1, 501)])
    assert measures.effective_groups(one_large) == pytest.approx(1000**2 / (500**2 + 500))
    copied, alone = np.repeat(np.arange(10), 7), np.arange(10)
    jeffreys = pytest.approx(beta.ppf([0.025, 0.975], 3.5, 7.5))
    assert share_interval(0.3, copied) == share_interval(0.3, alone) == jeffreys
