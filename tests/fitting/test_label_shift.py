"""Prior shift passes as often as it should; a shift of another kind, which would give a wrong share, does not."""

from __future__ import annotations

import numpy as np
import pytest

from service.fitting.label_shift import NEGLIGIBLE, Source, label_shift_test
from service.fitting.prior_shift import Traffic, estimate_share
from tests.fitting.shifted import PRIOR, other_questions, rows

REPEATS = 30


def source(rng: np.random.Generator, groups: int = 600, size: int = 1) -> Source:
    risk, label, group = rows(rng, groups, PRIOR, size=size)
    return Source(risk, label, group)


@pytest.mark.parametrize(("share", "size"), [(0.1, 1), (PRIOR, 1), (0.8, 1), (0.6, 4)])
def test_prior_shift_is_rarely_refused(share: float, size: int) -> None:
    refused, shares = 0, []
    for seed in range(REPEATS):
        rng = np.random.default_rng(seed)
        risk, _, group = rows(rng, 300 // size, share, size=size)
        found = label_shift_test(source(rng, 600 // size, size), Traffic(risk, group))
        refused += not found.explained
        shares.append(found.share)
    assert refused <= 3  # of 30 at a level of 1 %: P(more than 3) is below 0.001
    assert np.mean(shares) == pytest.approx(share, abs=0.05)


def test_other_questions_are_refused_and_their_share_would_have_been_wrong() -> None:
    refused, wrong = 0, 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        risk, label, group = other_questions(rng, 300)
        found = label_shift_test(source(rng), Traffic(risk, group))
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
            refused[what] += not label_shift_test(known, Traffic(risk, group)).explained
    assert refused["groups"] <= 1
    assert refused["rows"] >= 5


def test_a_large_traffic_is_not_refused_for_a_hair() -> None:
    """Refitted probes separate the classes a little better than cross-fitted ones."""
    rng = np.random.default_rng(0)
    known = source(rng, 20_000)
    risk, _, group = rows(rng, 20_000, 0.6)
    moved = 1 / (1 + (1 / risk - 1) ** 1.04)
    found = label_shift_test(known, Traffic(moved, group))
    assert found.explained
    assert found.limit == NEGLIGIBLE


def test_it_needs_both_classes() -> None:
    with pytest.raises(ValueError, match="both classes"):
        label_shift_test(Source(np.array([0.1, 0.2]), np.ones(2, int), np.arange(2)), Traffic(np.ones(3), np.arange(3)))
