"""Requests that ask for no fact: of many kinds, nearly all different, alone and in the company of questions of fact."""

from __future__ import annotations

import json
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from service.data.forms import WORDINGS
from service.data.forms.tasks import SLOTS, TASKS, task_rows
from tests.command_line import run

ROWS = task_rows(1500)
HERE = Path(__file__).parent


def last(row: dict[str, Any]) -> str:
    return str(row["messages"][-1]["content"])


def roles(row: dict[str, Any]) -> list[str]:
    return [message["role"] for message in row["messages"]]


def test_rows_are_conversations_that_end_with_the_user() -> None:
    assert len({row["id"] for row in ROWS}) == len(ROWS) == 1500
    for row in ROWS:
        assert list(row) == ["id", "messages", "group", "kind", "form", "applies"]
        assert (row["form"], row["applies"]) == ("task", False)
        assert row["id"].startswith(f"{row['kind']}/")
        assert row["group"].startswith(f"{row['kind']}/")
        turns = roles(row)[1:] if roles(row)[0] == "system" else roles(row)
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]
        assert all(message["content"].strip() for message in row["messages"])


def test_the_seed_decides() -> None:
    assert task_rows(80) == task_rows(80)
    assert task_rows(80) != task_rows(80, 1)


def test_hardly_a_request_is_made_twice() -> None:
    assert len({last(row) for row in ROWS}) > 0.95 * len(ROWS)
    assert Counter(row["group"] for row in ROWS).most_common(1)[0][1] < 0.02 * len(ROWS)
    openings = Counter(" ".join(last(row).lower().split()[:2]) for row in ROWS if row["kind"] != "task/nonsense")
    assert openings.most_common(1)[0][1] < 0.05 * len(ROWS)


def test_every_kind_is_there_by_its_weight() -> None:
    assert len(TASKS) >= 16
    found = Counter(row["kind"] for row in ROWS)
    weight = sum(task.weight for task in TASKS.values())
    for name, task in TASKS.items():
        expected = len(ROWS) * task.weight / weight
        assert abs(found[f"task/{name}"] - expected) < 5 * expected**0.5, name


def test_many_look_like_questions_of_fact() -> None:
    asking = [row for row in ROWS if last(row).rstrip().endswith("?")]
    assert 0.2 < len(asking) / len(ROWS) < 0.6
    openings = Counter(last(row).lower().split()[0] for row in ROWS)
    for word in ("what", "how", "who", "which", "can", "is", "do"):
        assert openings[word] >= 5, word
    for name in ("Oslo", "Peru", "Napoleon", "helium", "Lima"):
        assert any(name.lower() in last(row).lower() for row in ROWS), name


def test_company_has_its_share() -> None:
    alone = sum(len(row["messages"]) == 1 for row in ROWS) / len(ROWS)
    assert 0.5 < alone < 0.65  # beside a fact or a passage is one message, too
    assert 0.1 < sum(roles(row)[0] == "system" for row in ROWS) / len(ROWS) < 0.22
    questions = {question for question, *_ in WORDINGS["asked"]}
    asked = [row for row in ROWS if questions & {message["content"] for message in row["messages"][:-1]}]
    assert 0.2 < len(asked) / len(ROWS) < 0.35
    assert all(len(row["messages"]) > 2 for row in ROWS if row["kind"] == "task/follow_up")
    assert max(len(row["messages"]) for row in ROWS) >= 17


HANDED_OVER = ["sentences", "clumsy", "scenes", "reviews", "things", "first_names", "code_jobs", "queries", "snippets"]
TEMPLATES = [
    "greeting",
    "chatting",
    "leaving",
    "about",
    "opinion",
    "advice",
    "role_play",
    "meta_requests",
    "follow_ups",
    "writing",
    "letters",
    "creative",
    "coding",
    "brainstorm",
    "planning",
    "rewriting",
    "translating",
    "code_help",
    "summary",
    "extracting",
    "classifying",
    "formatting",
]


def test_texts_and_templates_are_many_and_without_doubles() -> None:
    for entries in (*SLOTS.values(), *(WORDINGS[name] for name in HANDED_OVER)):
        assert len(entries) >= (30 if entries is SLOTS["language"] else 40)
        assert len(set(entries)) == len(entries)
        assert all(entries)
    for name in TEMPLATES:
        wordings = WORDINGS[name]
        assert len(wordings) >= 8, name
        assert len(set(wordings)) == len(wordings), name
        used = {slot for wording in wordings for _, slot, *_ in string.Formatter().parse(wording) if slot}
        assert used <= set(SLOTS), name


@pytest.mark.parametrize("name", ["no_fact_prompts.txt", "fact_prompts.txt"])
def test_what_is_measured_on_is_not_generated(name: str) -> None:
    prompts = (HERE / name).read_text(encoding="utf-8").splitlines()
    assert len(set(prompts)) == len(prompts) == 80
    plain = {_plain(prompt) for prompt in prompts}
    for seed in range(3):
        assert plain.isdisjoint(
            _plain(message["content"]) for row in task_rows(3000, seed) for message in row["messages"]
        )


def _plain(text: str) -> str:
    return text.lower().strip(" .?!") or text


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "tasks", "--count", "30", "--seed", "2") == 0
    printed = capsys.readouterr()
    assert [json.loads(line) for line in printed.out.splitlines()] == task_rows(30, 2)
    assert printed.err.startswith("30 rows (")
