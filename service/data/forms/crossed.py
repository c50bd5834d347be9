"""Asks each question in several wordings, so that a probe cannot mistake a wording for knowledge.

``relations.toml`` holds the wordings.  A row that names its ``relation`` and ``subject`` gets
phrases, questions and key words of that relation.  A rule changes any other question.  A family is
a set of frames that look alike; held-out families are for test rows alone."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from service.data.forms import INSTRUCTION, Row, Unfit
from service.data.near_duplicates import FILLER

_TEXTS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("relations.toml").read_text(encoding="utf-8")
)
WORDING = "wording_"  # the form's name of a reworded question is this and the family's name
PLAIN_WORDING = f"{WORDING}plain"  # the family that asks in the relation's own questions
WORDS = 2  # content words that a question must have to be asked in key words
TRIES = 20  # draws of a wording of one family, until one is new for its question
_MARKS = ".?!:;, "
_QUESTION_WORDS = frozenset(("who", "whom", "whose", "where", "when", "why", "how", "many", "much"))
_AUXILIARY = r"(?:is|are|was|were|do|does|did|has|have|had|can|will|would|should)"
# an imperative can replace these beginnings; any other question is put behind a lead
_SUBJECT_QUESTIONS = (
    (
        re.compile(r"(?:what|which) (?:is|are|was|were) ((?:the|a|an) .+)", re.IGNORECASE),
        "Name {0}.",
    ),
    (re.compile(r"who (?:is|are|was|were) (the .+)", re.IGNORECASE), "Name {0}."),
    (re.compile(rf"who (?!{_AUXILIARY}\b)(.+)", re.IGNORECASE), "Name the person who {0}."),
    (
        re.compile(
            r"(?:what|which) ([a-z]+) ((?:won|wrote|made|became|invented|plays|played) .+)",
            re.IGNORECASE,
        ),
        "Name the {0} that {1}.",
    ),
    (re.compile(rf"how many ((?!.*\b{_AUXILIARY}\b).+)", re.IGNORECASE), "Say how many {0}."),
)
_LEADS = (
    "Tell me: {0}",
    "Answer this. {0}",
    "Please answer: {0}",
    "Find the answer: {0}",
    "Give me the answer to this: {0}",
)


@dataclass(frozen=True)
class Relation:
    """The wordings of one relation; ``relations.toml`` explains each field."""

    phrases: tuple[str, ...]
    keys: tuple[str, ...]
    subject: str
    questions: tuple[str, ...]
    gaps: tuple[str, ...]
    its: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """Frames that look alike.  ``weight`` is its share of the wordings, relative to the other
    families' weights."""

    name: str
    fact: tuple[str, ...]
    any: tuple[str, ...]
    weight: float = 1.0
    rule: str = ""  # name in RULES, for a question without a relation
    case: tuple[str, ...] = ("as_is",)  # names in CASES, of which one is drawn
    held_out: bool = False  # for test rows alone


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


RELATIONS: Mapping[str, Relation] = MappingProxyType(
    {name: Relation(**_tuples(values)) for name, values in _TEXTS["relation"].items()}
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: Family(name, **_tuples(values)) for name, values in _TEXTS["family"].items()}
)
CASES: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {"as_is": str, "lower": str.lower, "upper": str.upper, "title": str.title}
)


def training_families() -> list[Family]:
    """Return the families for training rows."""
    return [family for family in FAMILIES.values() if not family.held_out]


def held_out_families() -> list[Family]:
    """Return the families that are left out of training."""
    return [family for family in FAMILIES.values() if family.held_out]


def in_wordings(
    rows: Sequence[Row],
    families: Sequence[Family],
    *,
    per_row: int = 3,
    seed: int = 0,
    every: bool = False,
    taken: Collection[str] = (),
) -> list[Row]:
    """Return each question in ``per_row`` wordings of different families, drawn by weight.

    With ``every`` each family gives a wording.  The same seed and rows give the same.  ``rows``
    have a ``prompt``.  A wording is one message of the user; the row's id and its ``form`` name the
    family.  A question that suits fewer families has fewer wordings.  All prompts of the result
    differ, and none is in ``taken``."""
    seen = set(taken)
    worded_rows: list[Row] = []
    for row in rows:
        draw = random.Random(f"{seed} wordings {row['id']}")
        left, count = list(families), 0
        while left and (every or count < per_row):
            [family] = draw.choices(left, [_weight(candidate, row) for candidate in left])
            left.remove(family)
            text = _new_wording(row, family, draw, seen)
            if text is None:
                continue
            seen.add(text)
            fields = {key: value for key, value in row.items() if key != "prompt"}
            form = f"{WORDING}{family.name}"
            name = {"id": f"{row['id']}+{form}", "form": form}
            worded_rows.append(fields | name | {"messages": [{"role": "user", "content": text}]})
            count += 1
    return worded_rows


def _weight(family: Family, row: Row) -> float:
    """Return the family's weight for a row; smaller without a relation, where a heavy family has
    few wordings."""
    return family.weight if "relation" in row else min(family.weight, 1.5)


def _new_wording(row: Row, family: Family, draw: random.Random, seen: set[str]) -> str | None:
    """Return a wording that is not in ``seen``, or None if the family has none for the row."""
    for _ in range(TRIES):
        try:
            text = worded(row, family, draw)
        except Unfit:
            return None
        if text not in seen:
            return text
    return None


def worded(row: Row, family: Family, draw: random.Random) -> str:
    """Return one wording of a question.  Raises Unfit for a question that does not suit the
    family's rule."""
    case = CASES[draw.choice(family.case)]
    if "relation" in row:
        return case(filled(draw.choice(family.fact), row, draw))
    question, instruction = str(row["prompt"]).strip(), ""
    if (match := INSTRUCTION.search(question)) is not None:
        question, instruction = question[: match.start()], match[0]
    frame = draw.choice(family.any)
    question = RULES[family.rule](question, draw) if family.rule else question
    text = case(frame.format(q=question))
    wants_instruction = not family.rule and frame.endswith("{q}") and draw.random() < 0.5
    return text + instruction if wants_instruction else text


def filled(frame: str, row: Row, draw: random.Random) -> str:
    """Return a frame of ``fact`` with its gaps filled by wordings of the row's relation and by its
    subject."""
    relation, subject = RELATIONS[row["relation"]], str(row["subject"])
    if "{k}" in frame or "{K}" in frame:  # key words have no article
        subject = subject.removeprefix("the ")
    texts = {
        "p": draw.choice(relation.phrases),
        "q": draw.choice(relation.questions),
        "g": draw.choice(relation.gaps),
        "k": draw.choice(relation.keys),
        "i": draw.choice(relation.its),
        "t": relation.subject,
        "s": subject,
    }
    texts = {name: text.format(s=subject, S=started(subject)) for name, text in texts.items()}
    return frame.format(**texts, **{name.upper(): started(text) for name, text in texts.items()})


def started(text: str) -> str:
    """Return the text with a capital letter."""
    return text[:1].upper() + text[1:]


def _imperative(question: str, draw: random.Random) -> str:
    if "?" in question[:-1]:
        raise Unfit
    for pattern, order in _SUBJECT_QUESTIONS:
        if (match := pattern.fullmatch(question.rstrip(_MARKS))) is not None:
            return order.format(*match.groups())
    return draw.choice(_LEADS).format(question)


def key_words(question: str) -> list[str]:
    """Return a question's words without function words.  Raises Unfit if fewer than ``WORDS`` are
    left."""
    words = re.findall(r"[\w$%&+'\u2019.-]*\w", question)
    content = [
        word for word in words if word.lower() not in FILLER and word.lower() not in _QUESTION_WORDS
    ]
    if len(content) < WORDS:
        raise Unfit
    return content


def _scrambled(question: str, draw: random.Random) -> str:
    words = key_words(question)
    return " ".join(draw.sample(words, len(words)))


RULES: Mapping[str, Callable[[str, random.Random], str]] = MappingProxyType(
    {
        "imperative": _imperative,
        "key_words": lambda question, _: " ".join(key_words(question)),
        "scrambled": _scrambled,
        "lower": lambda question, _: question.lower().rstrip(_MARKS),
    }
)
