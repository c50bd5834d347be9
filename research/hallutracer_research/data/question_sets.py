"""TruthfulQA, OpenTriviaQA and NQ-Open: questions with accepted answers.

Group = the question's words, under the same name in every set that asks questions, but for TruthfulQA's own name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hallutracer_research.data.files import BRIEFLY, Row, csv_table, json_document, json_lines, question_group, text_of
from service.data import judges as references
from service.data.judges import normalise

TABLE, TASK = "TruthfulQA.csv", "mc_task.json"
TRUTHFULQA_ROWS = 817
REFERENCE_ROWS = 6_204
NO_COMMENT = "I have no comment."

_TABLE_COLUMNS = ("Type", "Category", "Question", "Best Answer", "Correct Answers", "Incorrect Answers")


def read_truthfulqa(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, prompt, answers, group, kind, type) for generated labels, and counts {read, correct, incorrect}."""
    rows, counts = [], {"read": 0, "correct": 0, "incorrect": 0}
    for place, (number, row) in enumerate(csv_table(folder, TABLE, _TABLE_COLUMNS, problems)):
        question = row["Question"].strip()
        correct = _listed(row["Correct Answers"])
        false = _listed(row["Incorrect Answers"])
        if not (question and correct and false):
            problems.append(f"{TABLE} line {number}: a question, correct and incorrect answers are needed")
            continue
        counts["read"] += 1
        counts["correct"] += len(correct)
        counts["incorrect"] += len(false)
        accepted = list(dict.fromkeys([row["Best Answer"].strip() or correct[0], *correct, NO_COMMENT]))
        rows.append(
            {
                "id": f"truthfulqa-{place}", "prompt": question,
                "answers": [*accepted, *map(references.incorrect, dict.fromkeys(false))], "group": _group(question),
                "kind": row["Category"].strip(), "type": row["Type"].strip(),
            }
        )  # fmt: skip
    return rows, counts


def read_truthfulqa_reference(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, prompt, label, group, kind) of every answer in ``mc2_targets``, and counts {read, questions}.

    The categories are the table's, joined on the question: the two files are in different orders.
    """
    table = csv_table(folder, TABLE, _TABLE_COLUMNS, problems)
    categories = {row["Question"].strip(): row["Category"].strip() for _, row in table}
    task = TASK if (folder / TASK).is_file() else f"data/{TASK}"
    rows = []
    questions = json_document(folder, task, list, problems)
    for place, value in enumerate(questions):
        question = value.get("question") if isinstance(value, dict) else None
        targets = value.get("mc2_targets") if isinstance(value, dict) else None
        if not isinstance(question, str) or not isinstance(targets, dict) or not _are_labels(targets):
            problems.append(f"{task} question {place + 1}: 'question' and 'mc2_targets' with labels 0 or 1 are needed")
            continue
        question = question.strip()
        if categories and question not in categories:
            problems.append(f"{task} question {place + 1}: {question!r} is not in {TABLE}: take both of one version")
            continue
        for number, (answer, label) in enumerate(targets.items()):
            rows.append(
                {
                    "id": f"truthfulqa-reference-{place}-{number}", "prompt": f"Q: {question} A: {answer.strip()}",
                    "label": label, "group": _group(question), "kind": categories.get(question, ""),
                }
            )  # fmt: skip
    return rows, {"read": len(rows), "questions": len(questions)}


def _listed(text: str) -> list[str]:
    """The semicolon-separated answers of a cell."""
    return [part.strip() for part in text.split(";") if part.strip()]


def _group(question: str) -> str:
    return f"truthfulqa/{question}"


def _are_labels(targets: dict[str, object]) -> bool:
    return all(type(label) is int and label in (0, 1) for label in targets.values())


CATEGORIES = (
    "animals", "entertainment", "general", "geography", "history", "humanities", "literature", "people",
    "religion-faith", "science-technology", "world",
)  # fmt: skip
OPENTRIVIAQA_ROWS = 20_550
LETTERS = "ABCD"

_ENCODINGS = ("utf-8", "cp1252", "latin-1")  # the first that decodes the whole file
_NEEDS_OPTIONS = re.compile(
    r"\b(?:which|what|who|one|all|none|each|any|two|three|some) of (?:these|those|the following|the above|them)\b"
    r"|\b(?:following|listed|mentioned below|given below|true or false)\b|\bis (?:not|n't)\b|\bEXCEPT\b|^these\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Question:
    """One block of a file; ``answer`` is one of ``options``."""

    category: str
    line: int
    text: str
    answer: str
    options: tuple[str, ...]


def read_opentriviaqa(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, prompt, answers, group, kind) for generated labels, and counts {read, without options, repeated}."""
    rows, seen = [], set()
    counts = {"read": 0, "left out: needs its options": 0, "left out: repeated": 0}
    for question in _questions(folder, problems):
        counts["read"] += 1
        if len(question.options) < len(LETTERS) or _NEEDS_OPTIONS.search(question.text):
            counts["left out: needs its options"] += 1
        elif (group := question_group(question.text)) in seen:
            counts["left out: repeated"] += 1
        else:
            seen.add(group)
            rows.append(_row(question, f"{question.text}{BRIEFLY}", [question.answer], "opentriviaqa"))
    return rows, counts


def read_opentriviaqa_choice(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, prompt, answers, group, kind) whose answers are patterns, for the judge ``regex``; count {read}."""
    rows = []
    for question in _questions(folder, problems):
        lettered = dict(zip(LETTERS, question.options, strict=False))
        letter = next(letter for letter, option in lettered.items() if option == question.answer)
        listed = "\n".join(f"{name}. {option}" for name, option in lettered.items())
        pattern = rf"^\W*(?:the (?:correct )?answer is:?\W*)?(?:option )?{letter}(?:\W|$)"
        rows.append(
            _row(question, f"{question.text}\n{listed}\nAnswer with one letter.", [pattern], "opentriviaqa-choice")
        )
    return rows, {"read": len(rows)}


def _row(question: Question, prompt: str, answers: list[str], name: str) -> Row:
    return {
        "id": f"{name}-{question.category}-{question.line}", "prompt": prompt, "answers": answers,
        "group": question_group(question.text), "kind": question.category,
    }  # fmt: skip


def _questions(folder: Path, problems: list[str]) -> Iterator[Question]:
    for category in CATEGORIES:
        text = text_of(folder, category, problems, _ENCODINGS) or ""
        for start, block in _blocks(text):
            question = _parse(category, start, block)
            if question is None:
                problems.append(f"{category} line {start}: expected '#Q question', '^ answer' and options with it")
            else:
                yield question


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and lines of each question; blank lines may stand within a question's text, not behind its answer."""
    block: list[str] = []
    start = 0
    for number, raw in enumerate(text.replace("\r", "").split("\n"), 1):
        line = raw.strip()
        if line.startswith("#Q"):
            if block:
                yield start, block
            block, start = [line], number
        elif block and line:
            block.append(line)
    if block:
        yield start, block


def _parse(category: str, start: int, block: list[str]) -> Question | None:
    place = next((number for number, line in enumerate(block) if line.startswith("^")), None)
    if place is None:
        return None
    text = " ".join([block[0].removeprefix("#Q").strip(), *block[1:place]]).strip()
    answer = block[place][1:].strip()
    options: list[str] = []
    for line in block[place + 1 :]:
        if len(options) < len(LETTERS) and re.match(rf"{LETTERS[len(options)]}(?:\s|$)", line):
            options.append(line[1:].strip())
        elif options:
            options[-1] = f"{options[-1]} {line}"
        else:
            answer = f"{answer} {line}"
    fits = text and answer and answer in options
    return Question(category, start, " ".join(text.split()), answer, tuple(options)) if fits else None


FILES = {"dev": "NQ-open.dev.jsonl", "efficientqa": "NQ-open.efficientqa.dev.1.1.jsonl"}
NQ_OPEN_ROWS = 5_410


def read_nq_open(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, prompt, answers, group, kind) for generated labels, and counts {read, repeated, without a word}.

    An accepted answer without a word, such as "*", is dropped: no judge could find it in an answer.
    """
    rows, seen, counts = [], set(), {"read": 0, "left out: repeated": 0, "left out: no answer with a word": 0}
    for kind, name in FILES.items():
        for number, value in json_lines(folder, name, problems):
            question, answers = value.get("question"), value.get("answer")
            if (
                not isinstance(question, str)
                or not question.strip()
                or not isinstance(answers, list)
                or not answers
                or not all(isinstance(answer, str) and answer.strip() for answer in answers)
            ):
                problems.append(f"{name} line {number}: 'question' and a list 'answer' of texts are needed")
                continue
            counts["read"] += 1
            if (group := question_group(question)) in seen:
                counts["left out: repeated"] += 1
                continue
            seen.add(group)
            accepted = [answer.strip() for answer in answers if normalise(answer)]
            if not accepted:
                counts["left out: no answer with a word"] += 1
                continue
            asked = question.strip().rstrip("?").strip()
            rows.append(
                {
                    "id": f"nq-open-{kind}-{number}", "prompt": f"{asked[:1].upper()}{asked[1:]}?{BRIEFLY}",
                    "answers": list(dict.fromkeys(accepted)), "group": group, "kind": kind,
                }
            )  # fmt: skip
    return rows, counts
