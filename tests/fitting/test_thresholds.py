"""The threshold: by cost it is 1 / (1 + K); a target is met at its exact boundary, with ties, or said to be missed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import TrainingError
from service.fitting.scores import at_threshold
from service.fitting.thresholds import (
    COSTS,
    LEAST_ANSWERED,
    Chosen,
    Target,
    WrongCosts,
    by_wrong_costs,
    choose_threshold,
)


def made(*levels: tuple[float, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Of each level its risk, right rows and wrong rows -> label [n], risk [1, n], in a shuffled order."""
    label = np.concatenate([[1] * right + [0] * wrong for _, right, wrong in levels])
    risk = np.concatenate([[level] * (right + wrong) for level, right, wrong in levels])
    order = np.random.default_rng(0).permutation(len(label))
    return label[order].astype(np.int64), risk[order][None]


def target(text: str, label: np.ndarray, risk: np.ndarray) -> Chosen:
    return choose_threshold(Target.parse(text), label, risk)


@pytest.mark.parametrize("k", [0.25, 0.5, 1.0, 3.0, 99.0])
def test_by_cost_it_is_one_over_one_plus_k_whatever_the_rows_are(k: float) -> None:
    for rows in (made((0.1, 30, 0), (0.9, 0, 30)), made((0.1, 3, 30), (0.9, 1, 30))):
        found = choose_threshold(WrongCosts(k), *rows)
        assert found.threshold == 1 / (1 + k)
        assert found.reached
        assert found.document() == {"rule": "wrong_costs", "wrong_costs": k, "threshold": 1 / (1 + k)}


def test_the_default_answers_what_is_more_likely_right_than_wrong() -> None:
    assert WrongCosts().threshold == 0.5


@given(st.integers(0, 2**31), st.sampled_from(COSTS))
@settings(max_examples=30, deadline=None)
def test_on_a_calibrated_risk_no_other_threshold_costs_less(seed: int, k: float) -> None:
    """Expected costs, by the risk itself: K for a wrong answer, 1 for a right one that is withheld."""
    risk = np.random.default_rng(seed).random(200)

    def cost(threshold: float) -> float:
        answered = risk < threshold
        return float(k * risk[answered].sum() + (1 - risk[~answered]).sum())

    assert cost(WrongCosts(k).threshold) <= min(cost(other) for other in np.linspace(0, 1, 101)) + 1e-9


@pytest.mark.parametrize("k", [1e-30, 1e30])
def test_an_extreme_cost_stays_inside(k: float) -> None:
    assert 0 < WrongCosts(k).threshold < 1


@pytest.mark.parametrize("k", [0.0, -1.0, float("inf"), float("nan")])
def test_a_cost_is_a_positive_number(k: float) -> None:
    with pytest.raises(TrainingError, match="wrong_costs must be a positive number") as caught:
        WrongCosts(k)
    assert caught.value.param == "wrong_costs"


@pytest.mark.parametrize(
    ("text", "measure", "share"),
    [("wrong<=0.2", "wrong", 0.2), ("answered>=0.5", "answered", 0.5), (" wrong <= .05 ", "wrong", 0.05),
     ("wrong<=0", "wrong", 0.0), ("answered>=1", "answered", 1.0)],
)  # fmt: skip
def test_a_target_is_read_as_it_is_written(text: str, measure: str, share: float) -> None:
    found = Target.parse(text)
    assert (found.measure, found.share) == (measure, share)
    assert Target.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    ["", "wrong", "0.2", "wrong>=0.2", "answered<=0.5", "wrong<0.2", "wrong=0.2", "wrong<=20%", "wrong<=1", "wrong<=2",
     "answered>=0", "answered>=1.1", "wrong<=-0.1", "wrong<=nan", "right<=0.2", "wrong<=0.2,answered>=0.5",
     "wrong<=\N{ARABIC-INDIC DIGIT ZERO}"],
)  # fmt: skip
def test_a_target_that_is_none_is_an_error_with_the_cure(text: str) -> None:
    with pytest.raises(TrainingError) as caught:
        Target.parse(text)
    assert caught.value.param == "target"
    for words in ("target must be", "wrong<=SHARE", "answered>=SHARE", repr(text), '--target "wrong<=0.2"'):
        assert words in caught.value.message


# 20 rows at 0.1 of which 2 are wrong; with those at 0.3, 6 of 30; with those at 0.6, 16 of 50; all: 56 of 100.
LEVELS = ((0.1, 18, 2), (0.3, 6, 4), (0.6, 10, 10), (0.9, 10, 40))


@pytest.mark.parametrize(
    ("share", "threshold", "reached"),
    [(0.1, 0.2, True), (0.19, 0.2, True), (0.2, 0.45, True), (0.31, 0.45, True), (0.32, 0.75, True), (0.55, 0.75, True),
     (0.56, 0.95, True), (0.0999, 0.2, False), (0.0, 0.2, False)],
)  # fmt: skip
def test_wrong_answers_exactly_at_the_boundary(share: float, threshold: float, reached: bool) -> None:
    found = target(f"wrong<={share}", *made(*LEVELS))
    assert found.threshold == pytest.approx(threshold)
    assert found.reached is reached
    assert (found.gate["wrong_among_answered"] <= share) is reached
    assert found.document()["reached"] is reached


@pytest.mark.parametrize(
    ("share", "threshold"), [(0.01, 0.2), (0.2, 0.2), (0.201, 0.45), (0.3, 0.45), (0.5, 0.75), (0.51, 0.95), (1, 0.95)]
)
def test_answers_exactly_at_the_boundary(share: float, threshold: float) -> None:
    found = target(f"answered>={share}", *made(*LEVELS))
    assert found.threshold == pytest.approx(threshold)
    assert found.reached
    assert found.gate["answered"] >= share


def test_rows_of_one_risk_are_answered_together_or_not_at_all() -> None:
    rows = made((0.1, 19, 1), (0.2, 10, 30))
    assert target("wrong<=0.3", *rows).gate["answered"] == pytest.approx(1 / 3)  # not the first ten of the second
    assert target("answered>=0.34", *rows).gate["answered"] == 1


def test_the_largest_threshold_counts_even_if_a_smaller_one_misses_the_target() -> None:
    rows = made((0.1, 15, 10), (0.2, 75, 0), (0.3, 0, 50))
    found = target("wrong<=0.1", *rows)
    assert found.threshold == pytest.approx(0.25)  # 10 of 25 wrong below 0.15, 10 of 100 below 0.25


def test_fewer_than_twenty_answered_rows_meet_no_target() -> None:
    few, enough = made((0.1, 19, 0), (0.5, 1, 60)), made((0.1, 20, 0), (0.5, 1, 60))
    assert target("wrong<=0.1", *enough).threshold == pytest.approx(0.3)
    found = target("wrong<=0.1", *few)
    assert not found.reached
    assert found.threshold == pytest.approx(0.75)
    assert found.gate["answered"] == 1


def test_out_of_reach_the_lowest_share_is_taken_and_of_equals_the_largest_threshold() -> None:
    found = target("wrong<=0.1", *made((0.1, 8, 12), (0.3, 16, 4), (0.5, 24, 16), (0.9, 0, 30)))
    # wrong: 12 of 20, 16 of 40, 32 of 80, 62 of 110
    assert not found.reached
    assert found.threshold == pytest.approx(0.7)
    assert found.gate["wrong_among_answered"] == 0.4


def test_too_few_rows_for_a_target_are_an_error_with_the_cure() -> None:
    with pytest.raises(TrainingError, match=r"needs 20 answered rows, and there are 19 .*--wrong-costs") as caught:
        target("wrong<=0.2", *made((0.1, 10, 0), (0.5, 4, 5)))
    assert caught.value.param == "target"
    assert target("answered>=0.5", *made((0.1, 10, 0), (0.5, 4, 5))).reached


def test_seeds_are_stacked() -> None:
    label, risk = made(*LEVELS)
    twice = np.concatenate([risk, risk])
    for text in ("wrong<=0.2", "answered>=0.3"):
        assert target(text, label, twice) == target(text, label, risk)
    assert LEAST_ANSWERED == 20
    short, once = made((0.1, 10, 0), (0.5, 0, 40))  # ten rows, however many seeds
    assert not target("wrong<=0.1", short, np.repeat(once, 3, axis=0)).reached
    # A seed that ranks the other way round counts as well.
    both = np.stack([np.where(label == 1, 0.1, 0.9), np.where(label == 1, 0.9, 0.1)])
    assert target("wrong<=0.5", label, both[:1]).gate["wrong_among_answered"] == 0
    assert target("wrong<=0.5", label, both).gate["wrong_among_answered"] == pytest.approx(0.56)


@given(st.integers(0, 2**31), st.integers(1, 3), st.sampled_from(["wrong<=0.2", "wrong<=0.4", "answered>=0.3"]))
@settings(max_examples=60, deadline=None)
def test_no_other_threshold_does_better(seed: int, seeds: int, text: str) -> None:
    """Against every threshold of a fine grid, on risks with many ties."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, 60)
    risk = np.round(np.clip(0.5 - 0.3 * (label - 0.5) + 0.3 * rng.normal(size=(seeds, 60)), 0, 0.98), 1)
    found, wanted = target(text, label, risk), Target.parse(text)
    gates = [at_threshold(label, risk, float(cut)) for cut in np.linspace(0.005, 0.995, 199)]
    answered = [gate for gate in gates if gate["answered"] * 60 >= (20 if wanted.measure == "wrong" else 0)]
    meets = [
        gate
        for gate in answered
        if (
            gate["wrong_among_answered"] <= wanted.share
            if wanted.measure == "wrong"
            else gate["answered"] >= wanted.share
        )
    ]
    assert found.reached is bool(meets)
    if not meets:
        assert found.gate["wrong_among_answered"] == min(gate["wrong_among_answered"] for gate in answered)
    elif wanted.measure == "wrong":
        assert found.gate["answered"] == max(gate["answered"] for gate in meets)
    else:
        assert found.gate["answered"] == min(gate["answered"] for gate in meets)


def test_the_table_of_costs_is_what_gates_at_these_thresholds_do() -> None:
    label, risk = made(*LEVELS)
    rows = by_wrong_costs(label, risk)
    assert [(row["wrong_costs"], row["threshold"]) for row in rows] == [
        (0.25, 0.8), (0.5, pytest.approx(2 / 3)), (1, 0.5), (2, pytest.approx(1 / 3)), (4, 0.2)
    ]  # fmt: skip
    for row in rows:
        assert {key: row[key] for key in ("answered", "wrong_among_answered", "right_withheld")} == at_threshold(
            label, risk[0], row["threshold"]
        )
