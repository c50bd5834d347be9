"""The share of hallucinations from unlabelled rows, found with an interval that holds it; prior shift passes, a shift
of another kind, which would give a wrong share, does not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit, logit

from service.fitting.prior_shift import (
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
from tests.fitting.shifted import APART, PRIOR, other_questions, rows

REPEATS = 60


def em(risk: np.ndarray, prior: float, wrong: int, right: int) -> float:
    """Saerens, Latinne and Decaestecker 2002, as they wrote it; labelled rows keep their class in every step."""
    share = prior
    for _ in range(3_000):
        odds = risk / (1 - risk) * share / (1 - share) * (1 - prior) / prior
        share = float((np.sum(odds / (1 + odds)) + wrong) / (len(risk) + wrong + right))
    return share


@pytest.mark.parametrize("labels", [0, 30])
def test_it_is_the_fixed_point_of_em(labels: int) -> None:
    rng = np.random.default_rng(0)
    risk, _, group = rows(rng, 400, 0.6)
    label = rows(rng, labels, 0.6)[1]
    found = most_likely_share(Traffic(risk, group), PRIOR, label)
    assert found == pytest.approx(em(risk, PRIOR, int((label == 0).sum()), int(label.sum())), abs=1e-6)


def test_many_rows_are_binned_without_loss() -> None:
    risk, _, group = rows(np.random.default_rng(1), 20 * LEVELS, 0.6)
    assert most_likely_share(Traffic(risk, group), PRIOR) == pytest.approx(em(risk, PRIOR, 0, 0), abs=1e-4)


@pytest.mark.parametrize(("share", "groups", "size", "labels"), [(0.7, 150, 1, 0), (0.15, 150, 1, 30), (0.6, 80, 4, 0)])
def test_the_interval_holds_the_truth_as_often_as_it_says(share: float, groups: int, size: int, labels: int) -> None:
    held = widths = 0.0
    for seed in range(REPEATS):
        rng = np.random.default_rng(seed)
        risk, _, group = rows(rng, groups, share, size=size)
        label = rows(rng, labels, share)[1]
        found = estimate_share(Traffic(risk, group), PRIOR, label, group.max() + 1 + np.arange(labels))
        assert found.low <= found.value <= found.high
        held += found.low <= share <= found.high
        widths += found.high - found.low
    assert held / REPEATS >= 0.88  # 0.95, less 2.5 standard errors
    assert widths / REPEATS < 0.4


def test_groups_make_the_interval_wider() -> None:
    risk, _, group = rows(np.random.default_rng(2), 60, 0.6, size=6)
    by_group = estimate_share(Traffic(risk, group), PRIOR)
    by_row = estimate_share(Traffic(risk, np.arange(len(risk))), PRIOR)
    assert by_group.high - by_group.low > 1.5 * (by_row.high - by_row.low)


def test_labels_narrow_it_and_count_with_their_groups() -> None:
    rng = np.random.default_rng(3)
    risk, _, group = rows(rng, 100, 0.6)
    label = rows(rng, 200, 0.6)[1]
    alone, apart, one_group = (
        estimate_share(Traffic(risk, group), PRIOR),
        estimate_share(Traffic(risk, group), PRIOR, label, 100 + np.arange(200)),
        estimate_share(Traffic(risk, group), PRIOR, label, np.full(200, 100)),
    )
    assert apart.high - apart.low < 0.6 * (alone.high - alone.low)
    assert apart.value == one_group.value
    assert one_group.high - one_group.low > apart.high - apart.low


def test_the_map_gives_the_risks_of_the_new_share() -> None:
    x = np.linspace(-4, 4, 9)
    moved = shift_to(0.8, PRIOR, 1_000)(expit(APART * x + logit(PRIOR)))
    np.testing.assert_allclose(moved, expit(APART * x + logit(0.8)), rtol=1e-9)
    np.testing.assert_allclose(shift_to(PRIOR, PRIOR, 10)(moved), moved, rtol=1e-9)


@pytest.mark.parametrize(("risk", "share"), [(0.001, 0.0), (0.999, 1.0)])
def test_a_share_at_the_end_gives_no_certainty(risk: float, share: float) -> None:
    found = most_likely_share(Traffic(np.full(50, risk), np.arange(50)), PRIOR)
    assert found == pytest.approx(share, abs=1e-9)
    assert 0 < shift_to(found, PRIOR, 50)(risk) < 1
    assert abs(shift_to(found, PRIOR, 50).c) < 6


def test_groups_of_two_files_are_numbered_together() -> None:
    one, other = number_together(["a", "b", "a"], ["c", "b"])
    assert one.tolist() == [0, 1, 0]
    assert other.tolist() == [2, 1]


def source(rng: np.random.Generator, groups: int = 600, size: int = 1) -> LabelledRisks:
    risk, label, group = rows(rng, groups, PRIOR, size=size)
    return LabelledRisks(risk, label, group)


@pytest.mark.parametrize(("share", "size"), [(0.1, 1), (PRIOR, 1), (0.8, 1), (0.6, 4)])
def test_prior_shift_is_rarely_refused(share: float, size: int) -> None:
    refused, shares = 0, []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        risk, _, group = rows(rng, 300 // size, share, size=size)
        found = prior_shift_test(source(rng, 600 // size, size), Traffic(risk, group))
        refused += not found.explained
        shares.append(found.share)
    assert refused <= 3  # of 30 at a level of 1 %: P(more than 3) is below 0.001
    assert np.mean(shares) == pytest.approx(share, abs=0.05)


def test_other_questions_are_refused_and_their_share_would_have_been_wrong() -> None:
    refused, wrong = 0, 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        risk, label, group = other_questions(rng, 300)
        found = prior_shift_test(source(rng), Traffic(risk, group))
        refused += not found.explained
        share = estimate_share(Traffic(risk, group), PRIOR)
        wrong += not share.low <= np.mean(label == 0) <= share.high
        assert found.distance > NEGLIGIBLE
    assert refused == 10
    assert wrong == 10  # without the test nothing would have said so


def test_rows_of_a_group_are_no_evidence_of_their_own() -> None:
    """The same rows, each fifteen times: taken as rows of their own they refuse what is nothing but chance."""
    refused = {"groups": 0, "rows": 0}
    for seed in range(10):
        rng = np.random.default_rng(seed)
        known = source(rng)
        risk = np.repeat(rows(rng, 40, 0.6)[0], 15)
        for what, group in (("groups", np.repeat(np.arange(40), 15)), ("rows", np.arange(600))):
            refused[what] += not prior_shift_test(known, Traffic(risk, group)).explained
    assert refused["groups"] <= 1
    assert refused["rows"] >= 5


def test_a_large_traffic_is_not_refused_for_a_hair() -> None:
    """Refitted probes separate the classes a little better than cross-fitted ones."""
    rng = np.random.default_rng(0)
    known = source(rng, 20_000)
    risk, _, group = rows(rng, 20_000, 0.6)
    moved = 1 / (1 + (1 / risk - 1) ** 1.04)
    found = prior_shift_test(known, Traffic(moved, group))
    assert found.explained
    assert found.limit == NEGLIGIBLE


def test_it_needs_both_classes() -> None:
    with pytest.raises(ValueError, match="both classes"):
        prior_shift_test(
            LabelledRisks(np.array([0.1, 0.2]), np.ones(2, int), np.arange(2)), Traffic(np.ones(3), np.arange(3))
        )
