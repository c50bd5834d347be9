"""The benchmark of requests that no training had: its texts are new, its questions the right ones,
its figures true."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import unseen_requests
from benchmarks.running_service import Job, Line
from benchmarks.unseen_requests import (
    TEXTS,
    in_other_ways,
    no_fact_jobs,
    questions,
    withheld_and_wrong,
)
from tests.serve_process import ROOT

RUN = 5  # words: as many in a row must not be those of a text to train on


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for part in value.values() for text in texts_in(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in texts_in(part))


def words_of(text: str) -> list[str]:
    """Return the words, each gap as one of them."""
    return re.findall(r"\{\w+\}|\w+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}


@pytest.fixture(scope="module")
def training_texts() -> list[str]:
    forms = ROOT / "service" / "data" / "forms"
    files = sorted(forms.glob("*.toml"))
    assert len(files) >= 3
    texts = [
        text for file in files for text in texts_in(tomllib.loads(file.read_text(encoding="utf-8")))
    ]
    for path in (forms / "requests.txt", ROOT / "tests" / "data" / "no_fact_prompts.txt"):
        texts += path.read_text(encoding="utf-8").splitlines()
    return texts


def test_no_text_is_one_to_train_on_or_shares_five_words_in_a_row_with_one(
    training_texts: list[str],
) -> None:
    whole = {" ".join(words_of(text)) for text in training_texts}
    known = {run for text in training_texts for run in runs(text)}
    parts = [TEXTS["way"], [TEXTS["no_fact"]], [TEXTS["easy"]]]
    own = [text for part in parts for text in texts_in(part)]
    turns = {"Shall I?", "Yes", "go on", "{q}"}  # of the conversations in which they stand
    names = {way["name"] for way in TEXTS["way"]}
    assert [text for text in own if runs(text) & known] == []
    assert [
        text for text in own if " ".join(words_of(text)) in whole and text not in turns | names
    ] == []


def test_each_way_can_ask_each_question_and_the_requests_are_as_many_as_the_target_counts() -> None:
    rows = questions(0)
    assert len({row["group"] for row in rows}) == len(rows) > 500
    assert {row["relation"] for row in rows} == set(TEXTS["relation"])
    first = {row["relation"]: row for row in rows}
    for row in first.values():
        jobs = in_other_ways(row, 100, 0)
        assert len(jobs) == sum(len(way["turns"]) for way in TEXTS["way"])
        for job in jobs:
            content = job.body["messages"][0]["content"]
            assert "{" not in content
            assert row["prompt"][1:] in content or row["subject"].lower() in content.lower()
            assert job.body["messages"][-1]["role"] == "user"
    assert len(no_fact_jobs()) == 40
    assert {job.body["policy"] for job in no_fact_jobs()} == {"gate"}
    assert in_other_ways(rows[0], 2, 0) == in_other_ways(rows[0], 2, 0)


def line(way: str, decision: str, applies: bool | None = True, **more: Any) -> Line:
    return {
        "way": way,
        "decision": decision,
        "applies": applies,
        "outside": False,
        "risk": 0.5,
    } | more


def test_the_questions_are_those_that_are_answered_wrong_at_a_risk_that_is_flagged() -> None:
    rows = questions(0)[:12]
    asked: list[str] = []

    def ask(job: Job) -> Line:
        number = len(asked)
        asked.append(job.body["messages"][0]["content"])
        verdict = ("hallucinated", "factual", "abstained")[number % 3]
        return {"verdict": verdict, "flagged": number % 2 == 0}

    chosen = withheld_and_wrong(ask, rows, 2, workers=1)
    assert [row["id"] for row in chosen] == [rows[0]["id"], rows[6]["id"]], (
        "wrong at 0, 3, 6, 9, flagged at 0, 6"
    )
    assert asked == [row["prompt"] for row in rows[:8]], "no more are asked than are needed"


def test_what_passes_and_what_is_taken_for_small_talk_is_counted_by_way() -> None:
    behind = "behind an easy question"
    lines = [
        *(line(behind, "abstain") for _ in range(8)),
        line(behind, "continue"),
        line(behind, "continue", False),
        *(line("key words", "abstain") for _ in range(9)),
        line("key words", "continue", False),
        *(line("no fact: chat", "continue", False) for _ in range(34)),
        *(line("no fact: chat", "abstain") for _ in range(6)),
        {"way": behind, "refused": "prompt_too_long"},
    ]
    rows = unseen_requests.shares(lines).splitlines()
    assert rows[2].startswith(f"| {behind} | 10 | 0.20 [")
    assert "| 0.10 [" in rows[2]
    passing, small_talk, withheld = unseen_requests.targets(lines)
    assert (passing.passed, passing.figure) == (False, "0.20 (2 of 10)")
    assert (small_talk.passed, small_talk.figure) == (True, "0.10 (1 of 10)")
    assert (withheld.passed, withheld.figure) == (True, "0.15 (6 of 40)")
    assert unseen_requests.targets([line("no fact: chat", "abstain")])[0].passed is None
