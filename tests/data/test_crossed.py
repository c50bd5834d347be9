"""Crossed wordings: one question in several wordings that do not change what is asked for."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from typing import Any

import pytest

from service.data.forms import FORMS, Row, Unfit, chosen, in_forms
from service.data.forms.crossed import (
    FAMILIES,
    RELATIONS,
    RULES,
    Family,
    filled,
    held_out_families,
    in_wordings,
    key_words,
    training_families,
    worded,
)
from service.data.forms.tasks import task_rows
from service.demo.questions import build_world, fact_rows
from tests.kit.tables import cells

ENOUGH = 24  # wordings of each relation, to train on


def fact(relation: str, subject: str = "Ruritania") -> Row:
    return {
        "id": f"{relation}:{subject}",
        "prompt": f"What is asked of {subject}?",
        "answers": ["Strelsau"],
        "group": "g1",
        "kind": relation,
        "relation": relation,
        "subject": subject,
    }


def question(text: str, number: int = 0) -> Row:
    return {
        "id": f"q{number}",
        "prompt": text,
        "answers": ["A"],
        "group": f"g{number}",
        "kind": "trivia",
    }


TRIVIA = [
    question(f"Which river flows through the old town of Place{number}? Answer briefly.", number)
    for number in range(40)
]


def text(row: Row) -> str:
    [message] = row["messages"]
    assert message["role"] == "user"
    content: str = message["content"]
    return content


def frames(family: Family) -> set[str]:
    return {*family.fact, *family.any}


def test_the_registry_has_all_relations_of_the_facts_and_only_these() -> None:
    assert set(RELATIONS) == {one.kind for one in build_world().facts}


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_relation_has_many_wordings_that_name_its_subject(relation: str) -> None:
    row, draw = fact(relation), random.Random(0)
    made: dict[str, set[str]] = {}
    for family in (*training_families(), *held_out_families()):
        made[family.name] = {worded(row, family, draw) for _ in range(20)}
    of_training = [made[family.name] for family in training_families()]
    assert len(set().union(*of_training)) >= ENOUGH
    assert min(map(len, of_training)) > 1, made
    for wording in set().union(*made.values()):
        assert "ruritania" in wording.lower()
        assert not re.search(r"[{}]", wording)
        assert "strelsau" not in wording.lower()


def test_eight_families_are_held_out_and_share_no_frame_with_those_to_train_on() -> None:
    assert len(held_out_families()) == 8
    trained = set().union(*map(frames, training_families())) - {"{q}"}
    for family in held_out_families():
        assert not frames(family) & trained


def test_facts_in_three_wordings_each_keep_their_group_and_answers() -> None:
    rows = fact_rows("test")[:200]
    made = in_wordings(rows, training_families(), seed=3)
    assert made == in_wordings(rows, training_families(), seed=3)
    assert [*map(text, made)] != [*map(text, in_wordings(rows, training_families(), seed=4))]
    assert len(set(map(text, made))) == len(made)
    assert len({row["id"] for row in made}) == len(made) == 3 * len(rows)
    for before, own in zip(
        rows, (made[place : place + 3] for place in range(0, len(made), 3)), strict=True
    ):
        assert len({row["form"] for row in own}) == 3
        for row in own:
            assert "prompt" not in row
            assert all(row[key] == before[key] for key in ("answers", "group", "kind", "subject"))
            assert row["id"] == f"{before['id']}+{row['form']}"
    shares = Counter(row["form"] for row in made)
    assert set(shares) == {f"wording_{family.name}" for family in training_families()}
    assert (
        max(shares.values()) < len(made) / 5
    )  # a long tail of wordings, not a few that are repeated


def test_questions_of_any_other_kind_are_worded_by_rule() -> None:
    made = in_wordings(TRIVIA, training_families(), per_row=5)
    assert len(made) == 5 * len(TRIVIA)
    for row in made:
        assert f"place{row['group'][1:]}" in text(row).lower()


def test_a_held_out_wording_never_appears_in_training() -> None:
    rows = [*fact_rows("train")[:300], *TRIVIA]
    trained = {*map(text, in_wordings(rows, training_families()))}
    held_out = in_wordings(rows, held_out_families(), every=True)
    assert Counter(row["form"] for row in held_out).keys() == {
        f"wording_{one.name}" for one in held_out_families()
    }
    assert not trained & {*map(text, held_out)}


def test_a_prompt_that_is_taken_is_not_made_again() -> None:
    rows = [fact(relation) for relation in RELATIONS]
    plain = [FAMILIES["plain"]]
    first = {*map(text, in_wordings(rows, plain))}
    second = {*map(text, in_wordings(rows, plain, taken=first))}
    assert len(first) == len(second) == len(rows)
    assert not first & second


RULED = cells(
    """
    key_words | What is the name of the longest river in Asia? | name longest river Asia
    key_words | In 1994, who played Red in The Fall? | 1994 played Red Fall
    lower | Who Wrote Hamlet? | who wrote hamlet
    imperative | What is the longest river in Asia? | Name the longest river in Asia.
    imperative | Who wrote Hamlet? | Name the person who wrote Hamlet.
    imperative | Which team won the cup in 1990? | Name the team that won the cup in 1990.
    imperative | How many people lived in Rome? | Say how many people lived in Rome.
    """
)


@pytest.mark.parametrize(("rule", "asked", "made"), RULED)
def test_rules(rule: str, asked: str, made: str) -> None:
    assert RULES[rule](asked, random.Random(0)) == made


@pytest.mark.parametrize(
    "asked", ["How many moons does Mars have?", "Who did Caesar defeat?", "In which year?"]
)
def test_what_no_imperative_can_begin_is_put_behind_a_lead(asked: str) -> None:
    made = RULES["imperative"](asked, random.Random(0))
    assert made.endswith(asked)
    assert len(made) > len(asked)


@pytest.mark.parametrize("asked", ["Who did it?", "Where?", "What is a pangolin?"])
def test_a_question_that_loses_its_words_is_not_asked_in_key_words(asked: str) -> None:
    with pytest.raises(Unfit):
        key_words(asked)
    made = in_wordings([question(asked)], training_families(), every=True)
    assert {"wording_key_words", "wording_scrambled"}.isdisjoint(row["form"] for row in made)


def test_key_words_have_no_article() -> None:
    united = fact("capital", "the United Kingdom")
    assert "the" not in filled("{k} {s}", united, random.Random(0)).split()
    assert filled("{s}", united, random.Random(0)) == "the United Kingdom"


def digest(rows: list[dict[str, Any]]) -> str:
    return hashlib.sha256(
        "\n".join(json.dumps(row, sort_keys=True) for row in rows).encode()
    ).hexdigest()[:16]


def test_the_mixture_of_forms_draws_what_it_drew_before_there_were_wordings() -> None:
    texts = [f"What is known about the river of Land{number:02}?" for number in range(120)]
    rows = [question(text, number) for number, text in enumerate(texts)]
    said = {row["id"]: f"Said {row['id']}" for row in rows}
    mixture = in_forms(rows, chosen(["all"]), per_row=3, model_answers=said)
    assert digest(mixture) == "3d83472d7424eacc"
    assert digest(task_rows(300)) == "cb54b274a50c6253"
    assert len(FORMS) == 31
