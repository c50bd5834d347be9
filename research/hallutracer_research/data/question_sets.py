"""TruthfulQA, OpenTriviaQA and NQ-Open: questions with accepted answers.  Group = the question's
words, under the same name in every set that asks questions, but for TruthfulQA's own name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from annotated_types import MinLen
from pydantic import BaseModel

from hallutracer_research.data.files import (
    BRIEFLY,
    Label,
    Rows,
    SetFiles,
    Text,
    question_group,
)
from hallutracer_research.documents import Row
from service.data import judges as references
from service.data.judges import normalise

TABLE, TASK = "TruthfulQA.csv", "mc_task.json"
_TABLE_COLUMNS = (
    "Type",
    "Category",
    "Question",
    "Best Answer",
    "Correct Answers",
    "Incorrect Answers",
)


def _parts(cell: str) -> list[str]:
    """Return the answers that a cell of the table lists."""
    return [part.strip() for part in cell.split(";") if part.strip()]


def read_truthfulqa(files: SetFiles) -> Rows:
    """Return rows (id, prompt, answers, group, kind, type) for generated labels; counts {read,
    correct, incorrect}."""
    rows, counts = [], {"read": 0, "correct": 0, "incorrect": 0}
    for position, (number, row) in enumerate(files.csv_table(TABLE, _TABLE_COLUMNS)):
        question = row["Question"].strip()
        correct, false = map(_parts, (row["Correct Answers"], row["Incorrect Answers"]))
        if not (question and correct and false):
            files.problems.append(
                f"{TABLE} line {number}: a question, correct and incorrect answers are needed"
            )
            continue
        counts["read"] += 1
        counts["correct"] += len(correct)
        counts["incorrect"] += len(false)
        best = row["Best Answer"].strip() or correct[0]
        accepted = dict.fromkeys([best, *correct, "I have no comment."])
        rows.append(
            {
                "id": f"truthfulqa-{position}",
                "prompt": question,
                "answers": [*accepted, *map(references.incorrect, dict.fromkeys(false))],
                "group": f"truthfulqa/{question}",
                "kind": row["Category"].strip(),
                "type": row["Type"].strip(),
            }
        )
    return rows, counts


class _ReferenceAnswers(BaseModel):
    question: Text
    mc2_targets: dict[str, Label]


def read_truthfulqa_reference(files: SetFiles) -> Rows:
    """Return rows (id, prompt, label, group, kind) of every answer in ``mc2_targets``, and counts
    {read, questions}. The categories are the table's, joined on the question: the two files are in
    different orders."""
    table = files.csv_table(TABLE, _TABLE_COLUMNS)
    categories = {row["Question"].strip(): row["Category"].strip() for _, row in table}
    task = TASK if (files.folder / TASK).is_file() else f"data/{TASK}"
    rows = []
    questions = files.json_document(task, list)
    for position, value in enumerate(questions):
        where = f"{task} question {position + 1}"
        if (reference := files.checked(_ReferenceAnswers, value, where)) is None:
            continue
        question = reference.question.strip()
        if categories and question not in categories:
            files.problems.append(
                f"{where}: {question!r} is not in {TABLE}: take both of one version"
            )
            continue
        rows += [
            {
                "id": f"truthfulqa-reference-{position}-{number}",
                "prompt": f"Q: {question} A: {answer.strip()}",
                "label": label,
                "group": f"truthfulqa/{question}",
                "kind": categories.get(question, ""),
            }
            for number, (answer, label) in enumerate(reference.mc2_targets.items())
        ]
    return rows, {"read": len(rows), "questions": len(questions)}


CATEGORIES = (
    "animals",
    "entertainment",
    "general",
    "geography",
    "history",
    "humanities",
    "literature",
    "people",
    "religion-faith",
    "science-technology",
    "world",
)
LETTERS = "ABCD"
_ENCODINGS = ("utf-8", "cp1252", "latin-1")  # the first that decodes the whole file
_NEEDS_OPTIONS = re.compile(
    r"\b(?:which|what|who|one|all|none|each|any|two|three|some) of (?:these|those|the following|the"
    r" above|them)\b"
    r"|\b(?:following|listed|mentioned below|given below|true or false)\b|\bis"
    r" (?:not|n't)\b|\bEXCEPT\b|^these\b",
    re.IGNORECASE,
)


class Question(NamedTuple):
    """One block of a file; ``answer`` is one of ``options``."""

    category: str
    line: int
    text: str
    answer: str
    options: tuple[str, ...]

    def row(self, name: str, prompt: str, answers: list[str]) -> Row:
        """Return the training row of the set ``name``."""
        return {
            "id": f"{name}-{self.category}-{self.line}",
            "prompt": prompt,
            "answers": answers,
            "group": question_group(self.text),
            "kind": self.category,
        }


def read_opentriviaqa(files: SetFiles) -> Rows:
    """Return rows (id, prompt, answers, group, kind) for generated labels; counts {read, without
    options, repeated}."""
    rows: dict[str, Row] = {}
    counts = {"read": 0, "left out: needs its options": 0, "left out: repeated": 0}
    for question in _questions(files):
        counts["read"] += 1
        row = question.row("opentriviaqa", f"{question.text}{BRIEFLY}", [question.answer])
        if len(question.options) < len(LETTERS) or _NEEDS_OPTIONS.search(question.text):
            counts["left out: needs its options"] += 1
        elif rows.setdefault(row["group"], row) is not row:
            counts["left out: repeated"] += 1
    return list(rows.values()), counts


def read_opentriviaqa_choice(files: SetFiles) -> Rows:
    """Return rows (id, prompt, answers, group, kind) whose answers are patterns for the judge
    ``regex``; {read}."""
    rows = []
    for question in _questions(files):
        letter = LETTERS[question.options.index(question.answer)]
        listed = "\n".join(
            f"{name}. {option}" for name, option in zip(LETTERS, question.options, strict=False)
        )
        pattern = rf"^\W*(?:the (?:correct )?answer is:?\W*)?(?:option )?{letter}(?:\W|$)"
        prompt = f"{question.text}\n{listed}\nAnswer with one letter."
        rows.append(question.row("opentriviaqa-choice", prompt, [pattern]))
    return rows, {"read": len(rows)}


def _questions(files: SetFiles) -> Iterator[Question]:
    for category in CATEGORIES:
        for start, block in _blocks(files.text(category, _ENCODINGS) or ""):
            question = _parse(category, start, block)
            if question is None:
                files.problems.append(
                    f"{category} line {start}: expected '#Q question', '^ answer' and options"
                    " with it"
                )
            else:
                yield question


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and lines of each question; blank lines may stand within its text, not
    behind its answer."""
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
    caret = next((number for number, line in enumerate(block) if line.startswith("^")), None)
    if caret is None:
        return None
    text = " ".join([block[0].removeprefix("#Q").strip(), *block[1:caret]]).strip()
    answer = block[caret][1:].strip()
    options: list[str] = []
    for line in block[caret + 1 :]:
        if len(options) < len(LETTERS) and re.match(rf"{LETTERS[len(options)]}(?:\s|$)", line):
            options.append(line[1:].strip())
        elif options:
            options[-1] = f"{options[-1]} {line}"
        else:
            answer = f"{answer} {line}"
    fits = text and answer and answer in options
    return (
        Question(category, start, " ".join(text.split()), answer, tuple(options)) if fits else None
    )


FILES = {"dev": "NQ-open.dev.jsonl", "efficientqa": "NQ-open.efficientqa.dev.1.1.jsonl"}


class _Query(BaseModel):
    question: Text
    answer: Annotated[list[Text], MinLen(1)]


def read_nq_open(files: SetFiles) -> Rows:
    """Return rows (id, prompt, answers, group, kind) for generated labels; counts {read, repeated,
    without a word}.  An accepted answer without a word, such as "*", is dropped: no judge could
    find it in an answer."""
    rows, seen = [], set()
    counts = {"read": 0, "left out: repeated": 0, "left out: no answer with a word": 0}
    for kind, name in FILES.items():
        for number, value in files.json_lines(name):
            if (query := files.checked(_Query, value, f"{name} line {number}")) is None:
                continue
            counts["read"] += 1
            group = question_group(query.question)
            accepted = [answer.strip() for answer in query.answer if normalise(answer)]
            if group in seen or not accepted:
                counts[f"left out: {'repeated' if group in seen else 'no answer with a word'}"] += 1
            else:
                question = query.question.strip().rstrip("?").strip()
                rows.append(
                    {
                        "id": f"nq-open-{kind}-{number}",
                        "prompt": f"{question[:1].upper()}{question[1:]}?{BRIEFLY}",
                        "answers": list(dict.fromkeys(accepted)),
                        "group": group,
                        "kind": kind,
                    }
                )
            seen.add(group)
    return rows, counts
