"""TruthfulQA in both readings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hallutracer_research.data.truthfulqa import TABLE, TASK
from service.data import judges as references
from service.errors import DataError
from tests.research.data.samples import damage, read, write_truthfulqa


def test_a_question_with_its_correct_and_incorrect_answers(tmp_path: Path) -> None:
    rows, counts = read("truthfulqa", write_truthfulqa(tmp_path))
    kite, hammer = rows
    assert kite["prompt"] == "Can a kite fly without wind?"
    assert (kite["kind"], kite["type"]) == ("Toys", "Adversarial")
    assert references.split_answers(kite["answers"]) == (
        ["No, it needs wind", "It cannot fly", "I have no comment."],
        ["Yes, it always flies", "Yes, a kite has an engine"],
    )
    assert hammer["prompt"] == "What is a hammer for?"  # the space at its end is no part of the question
    assert counts == {"read": 2, "correct": 4, "incorrect": 3}


def test_reference_answers_carry_their_own_label_and_the_categories_of_the_table(tmp_path: Path) -> None:
    rows, counts = read("truthfulqa-reference", write_truthfulqa(tmp_path))
    assert counts == {"read": 7, "questions": 2}
    found = {row["prompt"]: (row["label"], row["kind"]) for row in rows}
    assert found["Q: Can a kite fly without wind? A: It cannot fly"] == (1, "Toys")
    assert found["Q: What is a hammer for? A: Cutting bread"] == (0, "Tools")
    assert len({row["id"] for row in rows}) == 7


def test_a_question_is_the_same_group_in_both_readings(tmp_path: Path) -> None:
    write_truthfulqa(tmp_path)
    groups = [{row["group"] for row in read(name, tmp_path)[0]} for name in ("truthfulqa", "truthfulqa-reference")]
    assert groups[0] == groups[1]
    assert len(groups[0]) == 2


def test_the_task_file_may_lie_where_the_repository_has_it(tmp_path: Path) -> None:
    write_truthfulqa(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / TASK).rename(tmp_path / "data" / TASK)
    assert len(read("truthfulqa-reference", tmp_path)[0]) == 7


def test_damage_is_named(tmp_path: Path) -> None:
    write_truthfulqa(tmp_path)
    lines = (tmp_path / TABLE).read_text(encoding="utf-8-sig").splitlines()
    (tmp_path / TABLE).write_text("\n".join([*lines, "Adversarial,Toys,Why?,Because,Because,,made"]))
    with pytest.raises(DataError, match="TruthfulQA.csv line 4:"):
        read("truthfulqa", tmp_path)
    tasks = json.loads((tmp_path / TASK).read_text())
    tasks[0]["question"] = "Another question?"
    tasks[1]["mc2_targets"] = {"It cannot fly": "yes"}
    (tmp_path / TASK).write_text(json.dumps(tasks))
    damaged = damage("truthfulqa-reference", tmp_path)
    assert damaged == [f"{TASK} question 1", f"{TASK} question 2"]
    (tmp_path / TABLE).write_text("Question\nWhy?\n")
    with pytest.raises(DataError, match="columns Type,Category,Question"):
        read("truthfulqa", tmp_path)
