"""The share of hallucinations from unlabelled rows, found with an interval that holds it; prior shift passes, a shift
of another kind, which would give a wrong share, does not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit, logit

from service.fitting.recalibration import (
    LEVELS,
    NEGLIGIBLE,
    LabelledRisks,
    Traffic,
    estimate_share,
    most_likely_share,
    number_together,
    prior_shift_test,
    shift_to,
)
from tests.fitting.made import APART, PRIOR, rows


def em(risk: np.ndarray, prior: float, wrong: int, right: int) -> float:
    """Saerens, Latinne and Decaestecker 2002, as they wrote it; labelled rows keep their class in every step."""
    share = prior
    for _ in range(3_000):
        odds = risk / (1 - risk) * share / (1 - share) * (1 - prior) / prior
        share = float((np.sum(odds / (1 + odds)) + wrong) / (len(risk) + wrong + right))
    return share


def seen(rng: np.random.Generator, groups: int, share: float, size: int = 1) -> Traffic:
    risk, _, group = rows(rng, groups, share, size=size)
    return Traffic(risk, group)


def source(rng: np.random.Generator, groups: int = 600, size: int = 1) -> LabelledRisks:
    return LabelledRisks(*rows(rng, groups, PRIOR, size=size))


def width(traffic: Traffic, *labelled: np.ndarray) -> float:
    found = estimate_share(traffic, PRIOR, *labelled)
    return found.high - found.low


@pytest.mark.parametrize(("count", "labels", "within"), [(400, 0, 1e-6), (400, 30, 1e-6), (20 * LEVELS, 0, 1e-4)])
def test_it_is_the_fixed_point_of_em_also_where_many_rows_are_binned(count: int, labels: int, within: float) -> None:
    rng = np.random.default_rng(0)
    traffic, label = seen(rng, count, 0.6), rows(rng, labels, 0.6)[1]
    found = most_likely_share(traffic, PRIOR, label)
    assert found == pytest.approx(em(traffic.risk, PRIOR, int((label == 0).sum()), int(label.sum())), abs=within)


@pytest.mark.parametrize(("share", "groups", "size", "labels"), [(0.7, 150, 1, 0), (0.15, 150, 1, 30), (0.6, 80, 4, 0)])
def test_the_interval_holds_the_truth_as_often_as_it_says(share: float, groups: int, size: int, labels: int) -> None:
    held, widths, repeats = 0, [], 60
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        traffic, label = seen(rng, groups, share, size), rows(rng, labels, share)[1]
        found = estimate_share(traffic, PRIOR, label, groups + np.arange(labels))
        assert found.low <= found.value <= found.high
        held += found.low <= share <= found.high
        widths.append(found.high - found.low)
    assert held / repeats >= 0.88  # 0.95, less 2.5 standard errors
    assert np.mean(widths) < 0.4


def test_groups_widen_the_interval_and_labels_narrow_it_by_their_groups() -> None:
    rng = np.random.default_rng(3)
    traffic = seen(rng, 60, 0.6, 6)
    assert width(traffic) > 1.5 * width(Traffic(traffic.risk, np.arange(360)))
    traffic, label = seen(rng, 100, 0.6), rows(rng, 200, 0.6)[1]
    apart, one_group = 100 + np.arange(200), np.full(200, 100)
    assert width(traffic, label, apart) < 0.6 * width(traffic)
    assert width(traffic, label, one_group) > width(traffic, label, apart)
    values = [estimate_share(traffic, PRIOR, label, group).value for group in (apart, one_group)]
    assert values[0] == values[1]


def test_the_map_gives_the_risks_of_the_new_share_and_one_at_the_end_no_certainty() -> None:
    x = np.linspace(-4, 4, 9)
    moved = shift_to(0.8, PRIOR, 1_000)(expit(APART * x + logit(PRIOR)))
    np.testing.assert_allclose(moved, expit(APART * x + logit(0.8)), rtol=1e-9)
    np.testing.assert_allclose(shift_to(PRIOR, PRIOR, 10)(moved), moved, rtol=1e-9)
    for risk, share in ((0.001, 0.0), (0.999, 1.0)):
        found = most_likely_share(Traffic(np.full(50, risk), np.arange(50)), PRIOR)
        assert found == pytest.approx(share, abs=1e-9)
        assert 0 < shift_to(found, PRIOR, 50)(risk) < 1
        assert abs(shift_to(found, PRIOR, 50).c) < 6


def test_groups_of_two_files_are_numbered_together() -> None:
    assert [numbers.tolist() for numbers in number_together(["a", "b", "a"], ["c", "b"])] == [[0, 1, 0], [2, 1]]


# --- does prior shift hold ---


@pytest.mark.parametrize(("share", "size"), [(0.1, 1), (PRIOR, 1), (0.8, 1), (0.6, 4)])
def test_prior_shift_is_rarely_refused(share: float, size: int) -> None:
    found = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        traffic = seen(rng, 300 // size, share, size)
        found.append(prior_shift_test(source(rng, 600 // size, size), traffic))
    assert sum(not one.explained for one in found) <= 3  # of 30 at a level of 1 %: P(more than 3) is below 0.001
    assert np.mean([one.share for one in found]) == pytest.approx(share, abs=0.05)


def test_other_questions_are_refused_and_their_share_would_have_been_wrong() -> None:
    """Covariate shift: x is distributed otherwise, around the middle, and P(hallucinated | x) stays."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        risk = expit(APART * (0.5 + 0.5 * rng.standard_normal(300)) + logit(PRIOR))
        wrong, traffic = rng.random(300) < risk, Traffic(risk, np.arange(300))
        found = prior_shift_test(source(rng), traffic)
        assert not found.explained
        assert found.distance > NEGLIGIBLE
        share = estimate_share(traffic, PRIOR)
        assert not share.low <= np.mean(wrong) <= share.high  # without the test nothing would have said so


def test_rows_of_a_group_are_no_evidence_of_their_own() -> None:
    """The same rows, each fifteen times: taken as rows of their own they refuse what is nothing but chance."""
    refused = np.zeros(2, int)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        known, risk = source(rng), np.repeat(rows(rng, 40, 0.6)[0], 15)
        for place, group in enumerate((np.repeat(np.arange(40), 15), np.arange(600))):
            refused[place] += not prior_shift_test(known, Traffic(risk, group)).explained
    assert refused[0] <= 1
    assert refused[1] >= 5


def test_a_large_traffic_is_not_refused_for_a_hair_and_both_classes_are_needed() -> None:
    """Refitted probes separate the classes a little better than cross-fitted ones."""
    rng = np.random.default_rng(0)
    known, traffic = source(rng, 20_000), seen(rng, 20_000, 0.6)
    found = prior_shift_test(known, Traffic(1 / (1 + (1 / traffic.risk - 1) ** 1.04), traffic.group))
    assert found.explained
    assert found.limit == NEGLIGIBLE
    with pytest.raises(ValueError, match="both classes"):
        prior_shift_test(LabelledRisks(np.array([0.1, 0.2]), np.ones(2, int), np.arange(2)), traffic)
