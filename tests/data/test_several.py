"""Questions that do not stand alone: beside others, in follow-ups, inside tasks; and what only
looks like them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from service.data.forms import Row
from service.data.forms.several import FORMS, LONG_ANSWER, TEXTS, no_fact_rows, several_rows
from service.data.judges import parts_of
from service.demo.questions import fact_rows

COUNTRIES = ("capital", "currency", "language", "country_continent")
FACTS = [row for row in fact_rows("train") if row["relation"] in COUNTRIES][:240]
TRIVIA: list[Row] = [
    {
        "id": f"t{number}",
        "prompt": f"Who built the tower of Place{number}? Answer briefly.",
        "kind": "trivia",
        "answers": [f"Builder{number}"],
        "group": f"trivia{number}",
    }
    for number in range(60)
]
PARTNERS = [row for row in fact_rows("dev") if row["relation"] in COUNTRIES] + TRIVIA[30:]
ROWS = [*FACTS, *TRIVIA[:30]]
NAMES = [form.name for form in FORMS]


def text(row: Row) -> str:
    return "\n".join(message["content"] for message in row["messages"])


@pytest.fixture(scope="module")
def made() -> list[Row]:
    partners = PARTNERS * 40  # so that no form lacks one
    return several_rows(ROWS, partners, every=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_form_asks_for_the_rows_own_fact_in_a_conversation(made: list[Row], name: str) -> None:
    [form] = [form for form in FORMS if form.name == name]
    own = [row for row in made if row["form"] == name]
    assert len(own) >= 20
    by_id = {row["id"]: row for row in ROWS}
    for row in own:
        before = by_id[row["id"].removesuffix(f"+{name}")]
        assert (row["group"], row["kind"]) == (before["group"], before["kind"])
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        subject = before.get("subject") or before["prompt"].split()[5].rstrip("?")
        assert subject.removeprefix("the ").lower() in text(row).lower()
        assert not re.search(r"\{[a-zA-Z]\}", text(row))
        assert row.get("answer_tokens") == (LONG_ANSWER if form.long else None)
        several = parts_of(row["answers"])
        assert (several is not None) == (
            name
            in ("two_questions", "three_questions", "easy_before", "easy_behind", "both_relations")
        )
        assert before["answers"] in (several or [row["answers"]])


def test_an_easy_question_stands_before_or_behind(made: list[Row]) -> None:
    easy = {asked for question in TEXTS["easy"] for asked in question["texts"]}
    easy_answers = [question["answers"] for question in TEXTS["easy"]]
    for name, place in (("easy_before", 0), ("easy_behind", 1)):
        for row in (row for row in made if row["form"] == name):
            several = parts_of(row["answers"])
            assert several is not None
            assert several[place] in easy_answers
            assert any(asked in text(row) for asked in easy)


def test_an_earlier_answer_about_another_subject_is_not_the_wanted_one(made: list[Row]) -> None:
    for row in (row for row in made if row["form"] == "same_relation"):
        assert not any(answer in row["messages"][1]["content"] for answer in row["answers"])


def test_the_same_arguments_give_the_same_and_forms_follow_their_weights() -> None:
    rows = several_rows(ROWS, PARTNERS, seed=1)
    assert rows == several_rows(ROWS, PARTNERS, seed=1)
    assert rows != several_rows(ROWS, PARTNERS, seed=2)
    assert len(rows) == len(ROWS)  # one form each
    assert len({row["id"] for row in rows}) == len(rows)
    shares = Counter(row["form"] for row in rows)
    assert set(shares) <= set(NAMES)
    assert shares["go_on"] > shares["both_relations"]


def test_rows_to_test_with_have_texts_of_their_own(made: list[Row]) -> None:
    for name, texts in TEXTS.items():
        if name.startswith("test_"):
            assert not {str(one) for one in texts} & {
                str(one) for one in TEXTS[name.removeprefix("test_")]
            }
    held_out = several_rows(ROWS[:60], PARTNERS, test=True, every=True)
    assert len(held_out) > 60
    assert not {text(row) for row in held_out} & {text(row) for row in made}
    trained = {*TEXTS["go_on"], *TEXTS["yes"], *(texts[-1] for texts in TEXTS["waiting"])}
    followed = [row for row in held_out if row["form"] in ("go_on", "offered", "waiting")]
    assert followed
    assert not {row["messages"][-1]["content"] for row in followed} & trained
    tasks = [text(row) for row in held_out if row["form"].startswith("inside_")]
    for name, frames in TEXTS["around"].items():
        if not name.startswith("test_"):
            starts = tuple(frame.partition("{")[0] for frame in frames)
            assert not [task for task in tasks if task.startswith(starts)]


def test_requests_for_no_fact_have_no_answer_and_end_in_no_question_of_fact() -> None:
    rows = no_fact_rows(400, FACTS)
    assert rows == no_fact_rows(400, FACTS)
    assert len({text(row) for row in rows}) == len({row["id"] for row in rows}) == 400
    kinds = Counter(row["kind"] for row in rows)
    assert set(kinds) == {
        f"task/{name}"
        for name in ("key_words", "request", "small_talk", "after_request", "closing")
    }
    assert min(kinds.values()) > 40
    subjects = {row["subject"] for row in FACTS if len(row["subject"]) > 4}
    for row in rows:
        assert row["applies"] is False
        assert "answers" not in row
        assert not any(subject in row["messages"][-1]["content"] for subject in subjects)
        assert not re.search(r"\{[a-z]+\}", text(row))
    closings = [row for row in rows if row["kind"] == "task/closing"]
    assert all(len(row["messages"]) == 3 for row in closings)
