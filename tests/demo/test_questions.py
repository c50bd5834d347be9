"""Passages in front of questions: what they state, and what they must not."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from service.demo import Passage
from service.demo.questions import (
    SENTENCES,
    build_world,
    passage,
    questions,
    sentence,
    with_passages,
)
from tests.command_line import hallutracer

FACTS = [fact for fact in build_world().facts if fact.split == "test"]


def test_a_passage_states_the_fact_or_does_not() -> None:
    assert {fact.kind for fact in FACTS} == set(SENTENCES)
    for fact in FACTS[::7]:
        own = sentence(fact, fact.answers[0])
        right, unrelated, contradicting = (
            passage(fact, which) for which in ("right", "unrelated", "contradicting")
        )
        assert own in right
        assert own not in unrelated
        assert own not in contradicting
        before, _, after = sentence(fact, "\0").partition("\0")
        assert before not in unrelated or not before
        assert before in contradicting
        assert after in contradicting
        assert right == passage(fact, "right")


def is_part_of_a_longer(text: str, texts: list[str]) -> bool:
    return any(text in longer for longer in texts if longer != text)


def test_other_facts_of_a_passage_are_of_its_split_and_give_no_answer_away() -> None:
    by_sentence = {sentence(fact, fact.answers[0]): fact for fact in build_world().facts}
    for fact in FACTS[::11]:
        unrelated = passage(fact, "unrelated")
        occurring = [text for text in by_sentence if text in unrelated]
        stated = [text for text in occurring if not is_part_of_a_longer(text, occurring)]
        assert len(stated) == 3
        for other in map(by_sentence.__getitem__, stated):
            assert other.split == "test"
            assert other.group != fact.group
            assert not set(other.answers) & set(fact.answers)


def test_each_row_comes_once_for_each_passage() -> None:
    rows = questions("dev")[:50]
    assert with_passages(rows, ("none",)) == rows
    all_of_them = with_passages(rows, get_args(Passage))
    assert len({row["id"] for row in all_of_them}) == 200
    assert {row["group"] for row in all_of_them} == {row["group"] for row in rows}
    right = next(row for row in all_of_them if row.get("passage") == "right")
    assert right["prompt"].endswith(f"\n\n{rows[0]['prompt']}")
    assert right["kind"] == f"{rows[0]['kind']}+right"


def test_the_command_prints_them() -> None:
    done = hallutracer(
        "demo", "questions", "--split", "dev", "--passages", "right", "--passages", "none"
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(questions("dev"))
    assert sum(row.get("passage") == "right" for row in rows) == len(questions("dev"))


@pytest.mark.parametrize("which", ["wrong", ""])
def test_an_unknown_passage_is_refused(which: str) -> None:
    assert hallutracer("demo", "questions", "--passages", which).returncode == 2
