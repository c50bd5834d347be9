"""Intervals by leaving out groups: against brute force, DeLong, simulation and cases with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kstest

from hallutracer_research.evaluation.results import delong
from service.fitting.jackknife import (
    Floats,
    Index,
    Tests,
    auroc_interval,
    gain,
    standard_error,
    t_interval,
)
from service.fitting.scores import risk_auroc

Drawn = tuple[Index, Index, Floats]


def draw(rng: np.random.Generator, groups: int, size: int) -> Drawn:
    """Label, group and risk; rows of a group share most of their label and of their risk's error."""
    group = np.repeat(np.arange(groups), size)
    bad = (rng.random(groups) < 0.5)[group] ^ (rng.random(groups * size) < 0.1)
    risk = bad * 1.0 + (rng.standard_normal(groups) * 0.9)[group] + rng.standard_normal(groups * size) * 0.5
    return 1 - bad.astype(np.int64), group, risk


def whole(risk: Floats) -> Tests:
    """One test side of all rows."""
    return [(np.arange(len(risk)), risk)]


def mean_auroc(label: Index, tests: Tests, keep: np.ndarray) -> float:
    sides = [(label[rows][keep[rows]], risk[keep[rows]]) for rows, risk in tests]
    values = [risk_auroc(own, risk) for own, risk in sides if 0 < own.sum() < len(own)]
    return float(np.mean(values)) if values else float("nan")


def brute_force(label: Index, group: Index, tests: Tests) -> Floats:
    """The mean AUROC without each group."""
    return np.array([mean_auroc(label, tests, group != name) for name in np.unique(group)])


@pytest.mark.parametrize("levels", [4, 10_000])  # 4: many ties
def test_the_interval_is_that_of_the_mean_without_each_group(levels: int) -> None:
    rng = np.random.default_rng(levels)
    for _ in range(40):
        count = int(rng.integers(30, 60))
        label, group = rng.integers(0, 2, count), rng.integers(0, 12, count)
        risk = (rng.integers(0, levels, count) - label * levels / 4) / levels
        tests = [(side, risk[side]) for side in np.array_split(rng.permutation(count), 3)]
        without = brute_force(label, group, tests)
        value = mean_auroc(label, tests, np.ones(count, bool))
        low, high = auroc_interval(label, group, tests)
        # The log odds are symmetric around the value's; three test sides: variance times 1 / (1 - 1/3).
        ends = np.log([low / (1 - low), high / (1 - high)])
        assert ends.mean() == pytest.approx(np.log(value / (1 - value)))
        raw = t_interval(value, without, folds=3)
        assert ends[1] - ends[0] == pytest.approx((raw.high - raw.low) / (value * (1 - value)))


def test_on_independent_rows_the_error_of_a_difference_is_delong_s() -> None:
    rng = np.random.default_rng(1)
    label = np.repeat([0, 1], 200)
    common = rng.standard_normal(400)
    one, other = (common + rng.standard_normal(400) + gap * (1 - label) for gap in (1.2, 0.8))
    found, known = gain(label, np.arange(400), whole(one), whole(other)), delong(label, one, other)
    assert found.difference == pytest.approx(known.auc_a - known.auc_b, abs=1e-12)
    assert known.z is not None
    assert (found.high - found.low) / (2 * 1.966) == pytest.approx((known.auc_a - known.auc_b) / known.z, rel=0.01)
    assert found.p_value == pytest.approx(known.p_value, rel=0.2)


def test_it_covers_with_forty_groups_and_rows_as_independent_would_not() -> None:
    rng = np.random.default_rng(0)
    label, _, risk = draw(rng, 200_000, 1)
    truth = risk_auroc(label, risk)
    hits, naive, draws = 0, 0, 300
    for _ in range(draws):
        label, group, risk = draw(rng, 40, 10)
        low, high = auroc_interval(label, group, whole(risk))
        hits += low <= truth <= high
        low, high = auroc_interval(label, np.arange(len(label)), whole(risk))
        naive += low <= truth <= high
    assert hits / draws > 0.91  # 95 % nominal
    assert naive / draws < 0.7


def test_equal_scores_are_told_apart_at_the_level_of_the_test() -> None:
    rng = np.random.default_rng(3)
    p_values = []
    for _ in range(300):
        label, group, one = draw(rng, 40, 5)
        noise = rng.standard_normal((2, 40))[:, group] + rng.standard_normal((2, 200))
        p_values.append(gain(label, group, whole(one + noise[0]), whole(one + noise[1])).p_value)
    assert 0.02 < np.mean(np.less(p_values, 0.05)) < 0.09
    assert kstest(p_values, "uniform").pvalue > 0.01


def test_copies_of_a_row_are_no_new_evidence() -> None:
    label, _, risk = draw(np.random.default_rng(6), 100, 1)
    other = risk + np.random.default_rng(7).standard_normal(100)
    group = np.arange(100)
    again = [np.repeat(column, 5) for column in (label, group, risk, other)]
    assert auroc_interval(*again[:2], whole(again[2])) == pytest.approx(auroc_interval(label, group, whole(risk)))
    copied, once = gain(*again[:2], whole(again[2]), whole(again[3])), gain(label, group, whole(risk), whole(other))
    assert copied == pytest.approx(once)


def test_a_gain_turns_with_its_sides_and_over_oneself_is_nothing() -> None:
    label, group, risk = draw(np.random.default_rng(8), 90, 2)
    worse = risk + np.random.default_rng(9).standard_normal(180) * 5
    sides = np.array_split(np.arange(180), 2)
    one, other = ([(side, score[side]) for side in sides] for score in (risk, worse))
    assert gain(label, group, one, one) == (0.0, 0.0, 0.0, 1.0)
    found, turned = gain(label, group, one, other), gain(label, group, other, one)
    assert found.low > 0
    assert turned == pytest.approx((-found.difference, -found.high, -found.low, found.p_value))


@pytest.mark.parametrize(
    ("label", "group"),
    [([1] * 6, range(6)), ([0, 0, 1, 1, 1, 1], [0, 0, 1, 2, 3, 4]), ([0, 1, 0, 1, 0, 1], [0] * 6)],
    ids=["one class", "a class in one group", "one group"],
)
def test_where_nothing_is_known_the_interval_says_so(label: list[int], group: list[int]) -> None:
    labels, groups, risk = np.array(label), np.array(list(group)), np.linspace(0, 1, 6)
    assert auroc_interval(labels, groups, whole(risk)) == (0.0, 1.0)
    assert gain(labels, groups, whole(risk), whole(-risk))[1:] == (-1.0, 1.0, 1.0)


def test_a_perfect_score_on_few_groups_is_not_certain() -> None:
    label = np.array([0] * 10 + [1] * 30)
    low, high = auroc_interval(label, np.arange(40), whole(1.0 - label))
    assert high == 1.0
    assert low == pytest.approx(1 - 0.2172, abs=1e-4)  # Jeffreys, 0 of 10
    assert auroc_interval(label, np.arange(40), whole(label * 1.0)) == (0.0, pytest.approx(0.2172, abs=1e-4))
    assert gain(label, np.arange(40), whole(1.0 - label), whole(np.zeros(40))) == (0.5, -1.0, 1.0, 1.0)


def test_the_error_of_a_mean_is_the_textbook_s() -> None:
    values = np.random.default_rng(0).standard_normal(50)
    without = np.array([np.delete(values, place).mean() for place in range(50)])
    error = values.std(ddof=1) / np.sqrt(50)
    assert standard_error(without) == pytest.approx(error)
    assert t_interval(0.0, without) == pytest.approx((-2.0096 * error, 2.0096 * error), rel=1e-4)
