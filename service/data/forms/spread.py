"""Rows of questions as rows in forms: each question in one form or several, drawn by weight."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from service.data.forms.registry import Form, Message, Question, Surroundings, Unfit
from service.data.judges import split_answers
from service.data.rows import check_text, objects
from service.errors import DataError

Row = dict[str, Any]
Fits = Callable[[Form, list[Message]], bool]


def in_forms(
    rows: Sequence[Row],
    forms: Sequence[Form],
    *,
    per_row: int = 1,
    seed: int = 0,
    said: dict[str, str] | None = None,
    fits: Fits | None = None,
) -> list[Row]:
    """Return each row in ``per_row`` different forms, drawn by their weights; the same seed and rows give the same.

    ``said`` is what the model answered, by id, for the forms with its own earlier answers.  A row that has ``messages``
    is what it is: it stays, once, and so does one that does not apply.  A row that fits none of the forms is left out;
    ``fits`` says whether the model can be asked messages of a form, and where not, the row takes another one.
    """
    questions = {row["id"]: _question(row, said or {}) for row in rows if _is_question(row)}
    by_kind: dict[str, list[Question]] = defaultdict(list)
    for question in questions.values():
        by_kind[question.kind].append(question)
    every = list(questions.values())
    found: list[Row] = []
    for row in rows:
        if row["id"] not in questions:
            found.append({"form": "messages" if row.get("applies", True) else "task"} | row)
            continue
        question = questions[row["id"]]
        draw = random.Random(f"{seed} {question.id}")
        same = _others(question, by_kind[question.kind], draw)
        other = [one for one in _others(question, every, draw) if one.kind != question.kind]
        found += _rows(row, question, Surroundings(draw, same, other), forms, per_row, fits)
    return found


def read_said(path: Path) -> dict[str, str]:
    """Return what the model answered, by id, of a run's ``answers.jsonl``.  Raises DataError."""
    problems: list[str] = []
    said: dict[str, str] = {}
    for line, value in objects(path, problems):
        found = [*check_text(value, "id", required=True), *_check_answer(value)]
        problems += [f"line {line}: {problem}" for problem in found]
        if not found:
            said[value["id"]] = value["answer"]
    if problems:
        raise DataError(str(path), problems)
    return said


def _check_answer(value: Row) -> Iterator[str]:
    if not isinstance(value.get("answer"), str):
        yield "'answer' must be a string: answers.jsonl of a run folder is expected"


def _is_question(row: Row) -> bool:
    return "prompt" in row and row.get("applies") is not False


def _rows(
    row: Row, question: Question, around: Surroundings, forms: Sequence[Form], per_row: int, fits: Fits | None
) -> list[Row]:
    found: list[Row] = []
    left = list(forms)
    while left and len(found) < per_row:
        [form] = around.random.choices(left, [one.weight for one in left])
        left.remove(form)
        try:
            messages = form.make(question, around)
        except Unfit:
            continue
        if fits is not None and not fits(form, messages):
            continue
        kept = {key: value for key, value in row.items() if key != "prompt"}
        name = {"id": f"{row['id']}+{form.name}", "group": question.group, "form": form.name}
        found.append(kept | name | {"messages": messages})
    return found


def _others(question: Question, pool: Sequence[Question], draw: random.Random) -> list[Question]:
    """Return up to 40 of the pool, of other groups and with other answers, which are known."""
    some = draw.sample(pool, min(len(pool), 60))
    return [one for one in some if one.group != question.group and one.answer not in ("", question.answer)][:40]


def _question(row: Row, said: dict[str, str]) -> Question:
    accepted, _ = split_answers(
        [str(one) for one in row.get("answers") or ()]
    )  # what else a judge needs is no text to state
    return Question(
        id=str(row["id"]),
        text=str(row["prompt"]).strip(),
        answer=accepted[0] if accepted else "",
        said=said.get(str(row["id"]), "").strip(),
        statement=str(row.get("statement", "")),
        group=str(row.get("group") or row["id"]),
        kind=str(row.get("kind", "")),
    )
