"""The judges that need more than accepted answers, and the others on the same rows."""

from __future__ import annotations

import pytest

from service.data import references
from service.data.judges import answer_problems, make_judge
from service.data.options import JudgeName, JudgeOptions

KITE = ["No, it needs wind", "I have no comment.", references.incorrect("Yes, it always flies")]
CALL = {"name": "area", "arguments": {"base": [3]}, "optional": []}
AREA = [references.expectation("calls", calls=[CALL])]


@pytest.mark.parametrize(
    ("answer", "factual"),
    [
        ("No, a kite needs some wind.", True),
        ("I have no comment.", True),
        ("Yes, it always flies", False),
        ("Bananas", False),  # nearer to neither
    ],
)
def test_similarity(answer: str, factual: bool) -> None:
    assert make_judge(JudgeOptions("similarity"))("", answer, KITE) is factual


def test_calls() -> None:
    judge = make_judge(JudgeOptions("calls"))
    assert judge("", "[area(base=3)]", AREA)
    assert not judge("", "[area(base=4)]", AREA)
    assert not judge("", "It cannot be done.", AREA)


def test_an_answer_pattern_applies_to_them_too() -> None:
    judge = make_judge(JudgeOptions("calls", answer_pattern=r"Answer: (.*)"))
    assert judge("", "First I think. Answer: area(base=3)", AREA)


@pytest.mark.parametrize("name", ["exact", "contains", "regex"])
def test_other_judges_are_not_shown_incorrect_answers(name: JudgeName) -> None:
    judge = make_judge(JudgeOptions(name))
    assert judge("", "No, it needs wind", KITE)
    assert not judge("", "Yes, it always flies", KITE)
    assert answer_problems(JudgeOptions(name), KITE) == []


@pytest.mark.parametrize("name", ["exact", "contains", "regex", "openai", "similarity"])
def test_other_judges_refuse_expectations(name: JudgeName) -> None:
    assert "for the judge 'calls'" in answer_problems(JudgeOptions(name), AREA)[0]


def test_what_the_new_judges_cannot_use_is_said_before_a_model_is_loaded() -> None:
    calls, similarity = JudgeOptions("calls"), JudgeOptions("similarity")
    assert answer_problems(calls, AREA) == answer_problems(similarity, KITE) == []
    assert "needs one answer that says what to expect" in answer_problems(calls, ["Paris"])[0]
    assert "needs one answer" in answer_problems(calls, [*AREA, "Paris"])[0]
    assert "damaged: 'texts'" in answer_problems(calls, [references.expectation("text", texts=[])])[0]
    assert "needs an incorrect answer too" in answer_problems(similarity, ["Paris"])[0]
    assert "has no word" in answer_problems(similarity, ["...", references.incorrect("Rome")])[0]
    assert "an accepted one is needed" in answer_problems(JudgeOptions("exact"), [references.incorrect("Rome")])[0]


def test_the_manifest_names_the_measure() -> None:
    assert JudgeOptions("similarity").judged_by == "similarity:rouge-l"
    assert JudgeOptions("calls").judged_by == "calls:bfcl"
    assert JudgeOptions("contains").judged_by == "contains"
    assert JudgeOptions("openai", "http://x", "grader").judged_by == "openai:grader"
