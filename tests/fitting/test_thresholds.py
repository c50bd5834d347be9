"""The threshold: by cost 1 / (1 + K); a target met at its exact boundary or said to be missed; a
guarantee that holds as often as it says, where rows of a group are alike, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy.stats import binom

from service.errors import TrainingError
from service.fitting import thresholds
from service.fitting.decisions import at_threshold
from service.fitting.thresholds import (
    Target,
    WrongCosts,
    by_wrong_costs,
    certify,
    choose_threshold,
    first_answered,
)
from tests.fitting.made import rows
from tests.kit.tables import cells, lines


def made(levels: str) -> tuple[np.ndarray, np.ndarray]:
    """Return label [n] and risk [1, n], in a shuffled order, of levels with commas between them: a
    risk, its right rows and its wrong ones."""
    label, risk = list[int](), list[float]()
    for level in levels.split(", "):
        at, right, wrong = level.split()
        label += [1] * int(right) + [0] * int(wrong)
        risk += [float(at)] * (int(right) + int(wrong))
    order = np.random.default_rng(0).permutation(len(label))
    return np.array(label)[order], np.array(risk)[order][None]


def target(text: str, label: np.ndarray, risk: np.ndarray) -> thresholds.ChosenThreshold:
    return choose_threshold(Target.parse(text), label, risk)


def test_by_cost_it_is_one_over_one_plus_k_whatever_the_rows_are() -> None:
    for k in (0.25, 0.5, 1.0, 3.0, 99.0):
        for data in (made("0.1 30 0, 0.9 0 30"), made("0.1 3 30, 0.9 1 30")):
            found = choose_threshold(WrongCosts(k), *data)
            document = {"rule": "wrong_costs", "wrong_costs": k, "threshold": 1 / (1 + k)}
            assert (found.reached, found.document()) == (True, document)
    label, risk = made(LEVELS)
    rows_of = by_wrong_costs(label, risk)
    assert [row["wrong_costs"] for row in rows_of] == [0.25, 0.5, 1, 2, 4]
    for row in rows_of:
        assert row["threshold"] == pytest.approx(1 / (1 + row["wrong_costs"]))
        assert row.items() >= at_threshold(label, risk[0], row["threshold"]).items()
    assert WrongCosts().threshold == 0.5
    assert 0 < WrongCosts(1e30).threshold < WrongCosts(1e-30).threshold < 1


TARGETS = cells(
    """
    wrong<=0.2 | wrong | 0.2
    wrong <= .05 | wrong | 0.05
    wrong<=0 | wrong | 0
    answered>=0.5 | answered | 0.5
    answered>=1 | answered | 1
    """
)


NO_TARGETS = lines(
    """
    wrong
    0.2
    wrong>=0.2
    answered<=0.5
    wrong<0.2
    wrong=0.2
    wrong<=20%
    wrong<=1
    wrong<=2
    answered>=0
    answered>=1.1
    wrong<=-0.1
    wrong<=nan
    right<=0.2
    wrong<=0.2,answered>=0.5
    wrong<=\N{ARABIC-INDIC DIGIT ZERO}
    """
)


def test_a_target_is_read_as_it_is_written_and_one_or_a_cost_that_is_none_is_an_error() -> None:
    for text, measure, share in TARGETS:
        parsed = Target.parse(f" {text} ")
        assert (parsed.measure, parsed.share) == (measure, float(share))
        assert Target.parse(str(parsed)) == parsed
    calls = [
        *(("target", Target.parse, text) for text in ("", *NO_TARGETS)),
        *(("wrong_costs", WrongCosts, k) for k in (0.0, -1.0, float("inf"), float("nan"))),
    ]
    for param, call, value in calls:
        with pytest.raises(TrainingError) as caught:
            call(value)
        assert (caught.value.param, repr(value) in caught.value.message) == (param, True)


# 20 rows at 0.1 of which 2 are wrong; with those at 0.3, 6 of 30; with those at 0.6, 16 of 50; all:
# 56 of 100.
LEVELS = "0.1 18 2, 0.3 6 4, 0.6 10 10, 0.9 10 40"


# Targets, the threshold that is taken, and whether it reaches them: exactly at the boundary, and a
# hair beside it.
OF_LEVELS = cells(
    """
    wrong<=0.1 | 0.2 | reached
    wrong<=0.19 | 0.2 | reached
    wrong<=0.2 | 0.45 | reached
    wrong<=0.31 | 0.45 | reached
    wrong<=0.32 | 0.75 | reached
    wrong<=0.55 | 0.75 | reached
    wrong<=0.56 | 0.95 | reached
    wrong<=0.0999 | 0.2 | missed
    wrong<=0 | 0.2 | missed
    answered>=0.01 | 0.2 | reached
    answered>=0.2 | 0.2 | reached
    answered>=0.201 | 0.45 | reached
    answered>=0.3 | 0.45 | reached
    answered>=0.5 | 0.75 | reached
    answered>=0.51 | 0.95 | reached
    answered>=1 | 0.95 | reached
    """
)
# The same for other levels.  Rows of one risk are answered together or not at all: not the first
# ten of the second level.  The largest threshold counts though a smaller one misses: 10 of 25 wrong
# below 0.15, 10 of 100 below 0.25.  Fewer than twenty answered rows meet no target.  Out of reach:
# the lowest share (16 of 40, as 32 of 80), of equals the largest threshold.
OF_OTHERS = cells(
    """
    wrong<=0.3 | 0.15 | reached | 0.1 19 1, 0.2 10 30
    answered>=0.34 | 0.6 | reached | 0.1 19 1, 0.2 10 30
    wrong<=0.1 | 0.25 | reached | 0.1 15 10, 0.2 75 0, 0.3 0 50
    wrong<=0.1 | 0.3 | reached | 0.1 20 0, 0.5 1 60
    wrong<=0.1 | 0.75 | missed | 0.1 19 0, 0.5 1 60
    wrong<=0.1 | 0.7 | missed | 0.1 8 12, 0.3 16 4, 0.5 24 16, 0.9 0 30
    """
)


@pytest.mark.parametrize("case", OF_LEVELS + OF_OTHERS)
def test_which_threshold_is_taken(case: list[str]) -> None:
    text, threshold, end, *levels = case
    chosen = target(text, *made(*levels or [LEVELS]))
    assert chosen.threshold == pytest.approx(float(threshold))
    assert chosen.reached is chosen.document()["reached"] is (end == "reached")


def test_seeds_are_stacked() -> None:
    """Too few rows for a target on wrong answers: tests/trainer/test_cards.py."""
    assert target("answered>=0.5", *made("0.1 10 0, 0.5 4 5")).reached
    label, risk = made(LEVELS)
    for text in ("wrong<=0.2", "answered>=0.3"):
        assert target(text, label, np.concatenate([risk, risk])) == target(text, label, risk)
    short, once = made("0.1 10 0, 0.5 0 40")  # ten rows, however many seeds
    assert not target("wrong<=0.1", short, np.repeat(once, 3, axis=0)).reached
    # A seed that ranks the other way round counts as well.
    both = np.stack([np.where(label == 1, 0.1, 0.9), np.where(label == 1, 0.9, 0.1)])
    assert target("wrong<=0.5", label, both[:1]).gate["wrong_among_answered"] == 0
    assert target("wrong<=0.5", label, both).gate["wrong_among_answered"] == pytest.approx(0.56)


# --- a guarantee ---

ALPHA, DELTA = 0.2, 0.1
Drawn = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw(rng: np.random.Generator, groups: int, size: int = 1) -> Drawn:
    """Labels, risks and groups of rows; those of a group are of one class."""
    risk, label, group = rows(rng, groups, 0.4, size=size)
    return label, risk, group


def truth_of(size: int) -> Callable[[float], float]:
    """The share of wrong ones among random answered rows of random answering groups, by
    threshold."""
    data = draw(np.random.default_rng(99), 20_000, size)
    order = np.random.default_rng(1).permutation(len(data[0]))

    @cache
    def share(threshold: float) -> float:
        groups, wrong = first_answered(*data, threshold, order)
        return wrong / groups

    return share


@pytest.mark.parametrize(
    ("groups", "size"), [(60, 8), pytest.param(400, 8, marks=pytest.mark.long), (300, 1)]
)
def test_the_guarantee_is_broken_no_more_often_than_delta(groups: int, size: int) -> None:
    rng = np.random.default_rng(0)
    profile = thresholds.gate_profile(*draw(rng, 300, size))
    strictest = thresholds.threshold_sequence(profile, ALPHA, DELTA, groups)[0]
    # Up to 1: the profile may be wrong about these rows.
    levels = [at for at in profile.thresholds if at >= strictest]
    truth = truth_of(size)
    draws, broken, served, by_row = 300, 0, 0, 0
    for seed in range(draws):
        label, risk, group = draw(rng, groups, size)
        found = certify(label, risk, group, levels, ALPHA, DELTA, seed).threshold
        served += found is not None
        broken += found is not None and truth(found) > ALPHA
        alone = certify(label, risk, np.arange(len(label)), levels, ALPHA, DELTA, seed).threshold
        by_row += alone is not None and truth(alone) > ALPHA
    assert broken <= binom.ppf(0.999, draws, DELTA)
    assert served > draws * 0.5
    if size > 1:
        assert by_row > 2 * DELTA * draws  # rows taken as independent break it


def test_the_sequence_goes_from_strict_to_loose_and_never_sees_the_calibration_rows() -> None:
    label, risk, group = draw(np.random.default_rng(0), 300, 4)
    profile = thresholds.gate_profile(label, risk, group)
    levels = thresholds.threshold_sequence(profile, ALPHA, DELTA, 200)
    assert levels == sorted(set(levels))
    order = np.random.default_rng(0).permutation(len(label))
    groups, wrong = first_answered(label, risk, group, levels[0], order)
    assert wrong <= 0.5 * ALPHA * groups
    assert groups / 300 * 200 >= 1.2 * thresholds.least_groups(ALPHA, DELTA)
    few = thresholds.threshold_sequence(profile, ALPHA, DELTA, 5)
    assert few == [pytest.approx(1.0)], "too few groups for any"


def test_a_group_counts_once_with_its_first_answered_row() -> None:
    label = np.array([0, 1, 1, 0, 1])
    risk = np.array([0.9, 0.1, 0.2, 0.1, 0.8])
    group = np.array([0, 0, 1, 1, 2])
    expected = {(0.5, 1): (2, 0), (0.5, -1): (2, 1), (0.95, 1): (3, 1), (0.05, 1): (0, 0)}
    for (threshold, step), counts in expected.items():
        assert first_answered(label, risk, group, threshold, np.arange(5)[::step]) == counts


def test_it_stops_at_the_first_failure_and_says_what_is_missing() -> None:
    assert thresholds.least_groups(0.1, 0.05) == 29
    assert binom.cdf(0, 29, 0.1) <= 0.05 < binom.cdf(0, 28, 0.1)
    steps = [
        thresholds.GuaranteeStep(0.5, groups, wrong, groups, wrong, 1.0)
        for groups, wrong in ((29, 0), (28, 0), (3, 3))
    ]
    bounds = [thresholds.GuaranteeTest(0.1, 0.05, (step,)).least_alpha for step in steps]
    assert bounds[0] < 0.1 < bounds[1] < bounds[2] == 1.0
    label = np.ones(100, int)
    risk = np.linspace(0.01, 1, 100)
    group = np.arange(100)
    label[70:] = 0
    found = certify(label, risk, group, [0.5, 0.705, 0.95, 1.1], 0.1, 0.05)
    assert [step.p_value <= 0.05 for step in found.steps] == [True, True, False]
    assert found.threshold == 0.705
    few, bad = (certify(label[:n], risk[:n], group[:n], [1.1], 0.1, 0.05) for n in (20, 100))
    assert few.threshold is bad.threshold is None
    assert few.least_alpha == pytest.approx(1 - 0.05 ** (1 / 20))
    assert (few.groups_wanted, bad.groups_wanted) == (29, -1)


def test_the_sequence_ends_where_the_profile_has_a_larger_share_of_wrong_than_alpha() -> None:
    """So that rows above its last threshold need no label."""
    profile = thresholds.gate_profile(*draw(np.random.default_rng(0), 2000))
    counts = zip(profile.thresholds, profile.groups, profile.wrong, strict=True)
    share = {at: (wrong + 0.5) / (answered + 1) for at, answered, wrong in counts}
    for alpha in (0.1, 0.2, 0.3):
        levels = thresholds.threshold_sequence(profile, alpha, DELTA, 400)
        assert len(levels) > 10
        looser = min(at for at in profile.thresholds if at > levels[-1])
        assert share[levels[-1]] <= alpha < share[looser]
        assert levels[-1] < 0.9
    assert thresholds.threshold_sequence(profile, 0.9, DELTA, 400)[-1] == 1.0
    # No threshold is good enough for any alpha.
    never = thresholds.GateProfile(100, (0.5, 1.0), (50, 100), (50, 100))
    assert len(thresholds.threshold_sequence(never, 0.1, DELTA, 400)) == 1
