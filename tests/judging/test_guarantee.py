"""The shape of a conversation: of every form that training rows come in, and of what callers send
besides."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from service.data.forms import FORMS, chosen, in_forms
from service.judging.guarantee import SHAPES, Shape, Turns, shape_of, shape_violations
from service.judging.passages import BESIDE, LONG, has_passage
from tests.data.test_forms import SAID, made
from tests.kit.chats import turns
from tests.kit.rows import Rows

QUESTION = {"role": "user", "content": "What is the capital of Nauru?"}
ANSWER = {"role": "assistant", "content": "Yaren."}
SYSTEM = {"role": "system", "content": "Be brief."}
ALONE = Shape("0", passage=False, system=False)
WITHOUT = {"lone", "wording", "formats", "system", "turns"}  # families of lone questions
WITH = {"passages", "long"}


def rows() -> Rows:
    """Questions with and without a question mark, with notes of a few words, and with long
    names."""
    names = (
        "the Federated and Independent Republic of the Outer Western Islands and their Dependencies"
    )
    found = []
    for number, row in enumerate(made() * 4):
        kind, name = row["kind"], row["id"]
        variant = number // len(made())
        change = (
            {},
            {"prompt": f"Name the {kind} of {name}."},
            {"statement": f"{row['answers'][0]} is in {name} today."},
            {"prompt": f"What is the {kind} of {names}, number {name}?"},
        )[variant]
        found.append(
            row | change | {"id": f"{name}/{variant}", "group": f"{row['group']}/{variant}"}
        )
    return found


@pytest.mark.parametrize("name", FORMS)
def test_of_every_form_of_training_rows(name: str) -> None:
    said = {row["id"]: SAID[row["id"].partition("/")[0]] for row in rows()}
    found = in_forms(rows(), chosen([name]), model_answers=said)
    assert len(found) == len(rows())
    for row in found:
        shape, roles = shape_of(row["messages"]), [message["role"] for message in row["messages"]]
        assert replace(shape, asks="plain") in SHAPES
        assert shape.asks not in ("small_talk", "earlier")  # a question stands in each
        assert shape.system is (roles[0] == "system")
        turns = roles.count("assistant")
        assert shape.turns == {0: "0", 1: "1", 2: "2-4", 3: "2-4", 8: "5+"}[turns]
        if FORMS[name].family in WITH | WITHOUT:
            assert shape.passage is (FORMS[name].family in WITH), row["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("answers", "turns"), [(0, "0"), (1, "1"), (2, "2-4"), (4, "2-4"), (5, "5+"), (90, "5+")]
)
def test_earlier_answers_are_counted_and_not_the_beginning_of_this_one(
    answers: int, turns: Turns
) -> None:
    before = [QUESTION, ANSWER] * answers
    assert shape_of([*before, QUESTION]) == Shape(turns, passage=False, system=False)
    assert shape_of([SYSTEM, *before, QUESTION]) == Shape(turns, passage=False, system=True)
    assert shape_of([*before, QUESTION, {"role": "assistant", "content": "The"}]).turns == turns


PASSAGES = (
    "# Context\nLand is wide.\n\nWhat is it?",
    "<document>It is so.</document> Is it?",
    "Search results: one. What is it?",
    "What is it?\r\n\r\n**Documents:**\r\nIt is so.",
    "It is so. " * (BESIDE // 10 + 1) + "\nWhat is it?",
    "\u5b83\u662f" * BESIDE + "\n\u662f\u4ec0\u4e48\uff1f",
    "w" * (LONG + 1),
)


NO_PASSAGES = (
    "",
    " \n\n ",
    ":",
    "?",
    "Hi!\n\nWhat is it?\n\nThanks a lot, Ada",
    "w" * LONG,
    "In this context: what is it?",
    "Contextual menus: what are they?",
    f"Hello,\n{'very ' * 60}much?\nAnswer:",
)


@pytest.mark.parametrize("text", PASSAGES + NO_PASSAGES)
def test_what_is_a_passage(text: str) -> None:
    assert has_passage(text) is shape_of(turns(text)).passage is (text in PASSAGES)
    earlier = shape_of([*turns(text), ANSWER, QUESTION])  # an earlier question's does not count
    assert earlier == Shape("1", passage=False, system=False)


LONG_URL = {"url": "w" * LONG * 2}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [None, 3, "user", [], {}],
        [{"role": "user"}],
        *(
            [QUESTION | {"content": content}]
            for content in (
                None,
                [],
                [None, {}, {"type": "image_url", "image_url": LONG_URL}, {"text": 3}],
                [{"type": "text", "text": "Who?"}],
            )
        ),
        [
            {"role": ["system"], "content": {"text": "w" * LONG * 2}},
            {"role": None},
            {"content": "x"},
        ],
        [{"role": "assistant", "content": "The"}],
    ],
)
def test_what_no_message_should_be_is_nothing_said(messages: list[Any]) -> None:
    shape = shape_of(messages)
    assert replace(shape, asks="plain") == ALONE
    # What has no words may hold anything.
    assert (shape.asks == "elsewhere") is ("Who?" not in str(messages))


def test_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "It is so. " * 5}, "It is so. " * 5, "Is it?"]
    found = shape_of([{"role": "developer", "content": None}, QUESTION | {"content": parts}])
    assert replace(found, asks="plain") == Shape("0", passage=True, system=True)


def test_a_guarantee_is_void_for_a_script_that_training_never_had() -> None:
    training = SimpleNamespace(shapes=None, scripts=("Latin",))
    manifest: Any = SimpleNamespace(guarantee_shapes=None, training=training)
    around = "0 earlier turns, no passage, no system prompt"
    other = f"conversation: {around}, letters mostly Han; the calibration had none like it"
    for text, violations in (("What does 東京 mean?", ()), ("法国的首都是哪里?", (other,))):
        assert shape_violations(manifest, [shape_of(turns(text))]) == violations
