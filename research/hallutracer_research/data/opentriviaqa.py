"""OpenTriviaQA: 20,550 questions by volunteers in 11 category files, CC BY-SA 4.0, in two readings.

``read_opentriviaqa``: the question alone, answered freely.  Left out, and counted: questions of two options (true or
false), and those that make no sense without their options ("Which of these ..").

``read_opentriviaqa_choice``: the question with its options, answered by a letter.

Group = the question's words, under the same name in every set that asks questions; kind = category.  Some answers are
wrong or dated, so nothing can be predicted perfectly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hallutracer_research.data.files import Row
from hallutracer_research.data.questions import BRIEFLY, question_group

CATEGORIES = (
    "animals", "entertainment", "general", "geography", "history", "humanities", "literature", "people",
    "religion-faith", "science-technology", "world",
)  # fmt: skip
ROWS = 20_550
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
        "id": f"{name}-{question.category}-{question.line}",
        "prompt": prompt,
        "answers": answers,
        "group": question_group(question.text),
        "kind": question.category,
    }


def _questions(folder: Path, problems: list[str]) -> Iterator[Question]:
    for category in CATEGORIES:
        text = _text_of(folder / category, problems)
        for start, block in _blocks(text):
            question = _parse(category, start, block)
            if question is None:
                problems.append(f"{category} line {start}: expected '#Q question', '^ answer' and options with it")
            else:
                yield question


def _text_of(path: Path, problems: list[str]) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
        return ""
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return ""
    for encoding in _ENCODINGS:
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise AssertionError("latin-1 decodes everything")


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
