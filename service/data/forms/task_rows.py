"""Requests that ask for no fact as rows: alone, or in the company that questions of fact are asked in.

The forms of ``registry.py`` make that company, so that it tells nothing: only the last request decides.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from service.data.forms.base import Company, Form, Message, Question, Unfit
from service.data.forms.registry import chosen
from service.data.forms.task_asked import ASKED
from service.data.forms.tasks import TASKS, Request, Task

ALONE = 0.45
AROUND = ("system", "turns", "few_shot", "facts", "passage_unrelated", "context_1k")
BEFORE_FOLLOW_UP = ("turn_right", "turn_wrong", "turn_own", "turns_own", "turns_mixed")


def task_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """So many rows that ask for no fact; the same seed gives the same.  A row of more rows is not one of fewer."""
    draw = random.Random(f"{seed} tasks")
    tasks = draw.choices(list(TASKS.values()), [task.weight for task in TASKS.values()], k=count)
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    for number, task in enumerate(tasks):
        request = _new(draw, task, seen)
        name = f"task/{task.name}"
        rows.append(
            {
                "id": f"{name}/{number}",
                "messages": _conversation(draw, task, request),
                "group": f"{name}/{request.topic}",
                "kind": name,
                "form": "task",
                "applies": False,
            }
        )
    return rows


def _new(draw: random.Random, task: Task, seen: set[str]) -> Request:
    """A request that was not made before, unless there is hardly a new one left."""
    request = task.make(draw)
    for _ in range(30):
        if request.text.lower() not in seen:
            break
        request = task.make(draw)
    seen.add(request.text.lower())
    return request


def _conversation(draw: random.Random, task: Task, request: Request) -> list[Message]:
    if not task.follows and draw.random() < ALONE:
        return [{"role": "user", "content": request.text}]
    forms = chosen(BEFORE_FOLLOW_UP if task.follows else AROUND)
    asked = Question(id="", text=request.text, answer="", said="", statement="", group="", kind="task")
    others = [
        Question("", text, answer, said, said, text, "fact") for text, answer, said in draw.sample(ASKED, len(ASKED))
    ]
    return _in_form(forms, asked, Company(draw, same=others[::2], other=others[1::2]))


def _in_form(forms: Sequence[Form], asked: Question, company: Company) -> list[Message]:
    while True:  # a form with a long passage is unfit for half of its draws: the answer, which there is none of
        [form] = company.random.choices(forms, [one.weight for one in forms])
        try:
            return form.make(asked, company)
        except Unfit:
            continue
