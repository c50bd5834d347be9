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

QUESTION = {"role": "user", "content": "What is the capital of Nauru?"}
ANSWER = {"role": "assistant", "content": "Yaren."}
SYSTEM = {"role": "system", "content": "Be brief."}
ALONE = Shape("0", passage=False, system=False)
WITHOUT = {
    "lone",
    "wording",
    "formats",
    "system",
    "turns",
}  # families whose question stands alone in its message
WITH = {"passages", "long"}


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def rows() -> list[dict[str, Any]]:
    """Questions with and without a question mark, with notes of a few words, and with long
    names."""
    short = [row | {"prompt": f"Name the {row['kind']} of {row['id']}."} for row in made()]
    stated = [
        row | {"statement": f"{row['answers'][0]} is in {row['id']} today."} for row in made()
    ]
    names = (
        "the Federated and Independent Republic of the Outer Western Islands and their Dependencies"
    )
    long = [
        row | {"prompt": f"What is the {row['kind']} of {names}, number {row['id']}?"}
        for row in made()
    ]
    kinds = (made(), short, stated, long)
    return [
        row | {"id": f"{row['id']}/{n}", "group": f"{row['group']}/{n}"}
        for n, kind in enumerate(kinds)
        for row in kind
    ]


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


@pytest.mark.parametrize(
    ("text", "passage"),
    [
        *(
            (text, True)
            for text in (
                "# Context\nLand is wide.\n\nWhat is it?",
                "<document>It is so.</document> Is it?",
                "Search results: one. What is it?",
                "What is it?\r\n\r\n**Documents:**\r\nIt is so.",
                "It is so. " * (BESIDE // 10 + 1) + "\nWhat is it?",
                "\u5b83\u662f" * BESIDE + "\n\u662f\u4ec0\u4e48\uff1f",
                "w" * (LONG + 1),
            )
        ),
        *(
            (text, False)
            for text in (
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
        ),
    ],
)
def test_what_is_a_passage(text: str, passage: bool) -> None:
    assert has_passage(text) is passage
    assert shape_of(asked(text)).passage is passage
    earlier = shape_of(
        [*asked(text), ANSWER, QUESTION]
    )  # that of an earlier question does not count
    assert earlier == Shape("1", passage=False, system=False)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [None, 3, "user", [], {}],
        [{"role": "user"}],
        *(
            [{"role": "user", "content": content}]
            for content in (
                None,
                [],
                [
                    None,
                    {},
                    {"type": "image_url", "image_url": {"url": "w" * LONG * 2}},
                    {"text": 3},
                ],
            )
        ),
        [
            {"role": ["system"], "content": {"text": "w" * LONG * 2}},
            {"role": None},
            {"content": "x"},
        ],
        [{"role": "assistant", "content": "The"}],
        [QUESTION | {"content": [{"type": "text", "text": "Who?"}]}],
    ],
)
def test_what_no_message_should_be_is_nothing_said(messages: list[Any]) -> None:
    shape = shape_of(messages)
    assert replace(shape, asks="plain") == ALONE
    assert (shape.asks == "inside") is (
        "Who?" not in str(messages)
    )  # what has no words may hold anything


def test_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "It is so. " * 5}, "It is so. " * 5, "Is it?"]
    found = shape_of([{"role": "developer", "content": None}, QUESTION | {"content": parts}])
    assert replace(found, asks="plain") == Shape("0", passage=True, system=True)


def test_a_guarantee_is_void_for_a_script_that_training_never_had() -> None:
    training = SimpleNamespace(shapes=None, scripts=("Latin",))
    manifest: Any = SimpleNamespace(guarantee_shapes=None, training=training)
    around = "0 earlier turns, no passage, no system prompt"
    for text, violations in (
        ("What does 東京 mean?", ()),
        (
            "法国的首都是哪里?",
            (f"conversation: {around}, letters mostly Han; the calibration had none like it",),
        ),
    ):
        shape = shape_of([{"role": "user", "content": text}])
        assert shape_violations(manifest, [shape]) == violations
