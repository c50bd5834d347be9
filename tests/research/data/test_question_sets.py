"""OpenTriviaQA, NQ-Open and both readings of TruthfulQA, on made samples of their formats."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hallutracer_research.data.files import question_group
from hallutracer_research.data.question_sets import TABLE, TASK
from service.data import judges as references
from service.data.judges import contains, regex
from service.errors import DataError
from tests.research.data.samples import TRIVIA, damage, read, write_nq_open, write_opentriviaqa, write_truthfulqa


def test_a_question_is_asked_freely_without_its_options(tmp_path: Path) -> None:
    rows, counts = read("opentriviaqa", write_opentriviaqa(tmp_path))
    assert counts == {"read": 22, "left out: needs its options": 11, "left out: repeated": 0}
    assert rows[0] == {
        "id": "opentriviaqa-animals-2",
        "prompt": "What pulls a sledge on animals? Name one. Answer briefly.",
        "answers": ["A big dog"],
        "group": "question/what pulls a sledge on animals name one",
        "kind": "animals",
    }
    assert contains("", "It is a big dog.", rows[0]["answers"])
    assert not contains("", "It is a small cat.", rows[0]["answers"])


@pytest.mark.parametrize(
    "words", ["Which of these flies?", "Which of the following is it?", "All of these fly except?"]
)
def test_a_question_that_needs_its_options_is_not_asked_without(tmp_path: Path, words: str) -> None:
    asked = TRIVIA.replace("What pulls a sledge on {category}?\r\n\r\nName one.", words)
    rows, counts = read("opentriviaqa", write_opentriviaqa(tmp_path, world=asked))
    assert counts["left out: needs its options"] == 12
    assert "world" not in {row["kind"] for row in rows}


def test_a_repeated_question_is_asked_once(tmp_path: Path) -> None:
    again = TRIVIA.replace("{category}", "animals").replace("sledge", "SLEDGE!")
    rows, counts = read("opentriviaqa", write_opentriviaqa(tmp_path, general=again))
    assert counts["left out: repeated"] == 1
    assert len({row["group"] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("answer", "right"),
    [("B", True), ("b.", True), ("B. A big dog", True), ("The answer is B", True), ("The correct answer is: (B)", True),
     ("A", False), ("Because", False), ("A big dog is B", False), ("", False)],
)  # fmt: skip
def test_a_choice_is_judged_by_its_letter(tmp_path: Path, answer: str, right: bool) -> None:
    rows, _ = read("opentriviaqa-choice", write_opentriviaqa(tmp_path))
    assert rows[0]["prompt"].endswith("A. A small cat\nB. A big dog\nC. A fish\nD. Two birds\nAnswer with one letter.")
    assert rows[1]["prompt"].endswith("A. True\nB. False\nAnswer with one letter.")
    assert regex("", answer, rows[0]["answers"]) is right


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "latin-1"])
def test_each_file_has_an_encoding_of_its_own(tmp_path: Path, encoding: str) -> None:
    text = TRIVIA.replace(
        "sledge", "Schlittenhündin" if encoding == "utf-8" else "Hündin" + "\x81" * (encoding == "latin-1")
    )
    rows, _ = read("opentriviaqa", write_opentriviaqa(tmp_path, animals=text.encode(encoding)))
    assert "ündin" in rows[0]["prompt"]


@pytest.mark.parametrize(
    ("block", "line"),
    [("#Q What?\nA one\nB two\n", 1), ("#Q What?\n^ three\nA one\nB two\n", 1), ("#Q\n^ one\nA one\nB two\n", 1),
     ("#Q Fine?\n^ one\nA one\nB two\n\n#Q What?\n^\nA one\n", 6)],
)  # fmt: skip
def test_a_damaged_block_is_named(tmp_path: Path, block: str, line: int) -> None:
    assert damage("opentriviaqa", write_opentriviaqa(tmp_path, history=block)) == [f"history line {line}"]


def test_search_queries_become_questions(tmp_path: Path) -> None:
    rows, counts = read("nq-open", write_nq_open(tmp_path))
    assert counts == {"read": 2, "left out: repeated": 0, "left out: no answer with a word": 0}
    assert rows[0] == {
        "id": "nq-open-dev-1",
        "prompt": "Who flew the first kite? Answer briefly.",
        "answers": ["Ann Nobody", "Nobody"],
        "group": "question/who flew the first kite",
        "kind": "dev",
    }


def test_an_answer_without_a_word_is_dropped_and_a_question_with_no_other_counted(tmp_path: Path) -> None:
    marks = {"question": "what is written on page one", "answer": ["*", "a star"]}
    none = {"question": "what is written on page two", "answer": ["*", ","]}
    rows, counts = read("nq-open", write_nq_open(tmp_path, marks, none))
    assert counts["left out: no answer with a word"] == 1
    assert rows[0]["answers"] == ["a star"]
    assert "page two" not in "".join(row["prompt"] for row in rows)


@pytest.mark.parametrize(
    "row", [{"question": "a"}, {"question": " ", "answer": ["b"]}, {"question": "a", "answer": []},
            {"question": "a", "answer": "b"}, {"question": 1, "answer": ["b"]}, {"question": "a", "answer": [" "]}],
)  # fmt: skip
def test_a_damaged_query_is_named(tmp_path: Path, row: dict[str, object]) -> None:
    [place] = damage("nq-open", write_nq_open(tmp_path, row))
    assert re.search(r"line 1$", place)


def test_a_question_has_one_group_in_all_sets() -> None:
    assert question_group("Who flew  the first KITE?") == question_group("who flew the first kite")


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
