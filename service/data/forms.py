"""Forms of conversation: the same question alone, in a chat, under a system prompt, behind a passage, in other wording.

A form makes of a question the messages in which somebody asks it.  What stands around it comes from lists here and from
the other questions of the file, never from the question's own group.  The group stays the question's, so that no fold
has one question on both sides, and the row names its form; the label is the model's answer in that form.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.data.company import (
    BEFORE,
    BEHIND,
    CHATTER,
    FACTS,
    FORMATS,
    GREETINGS,
    LONG_SYSTEM,
    NOTES,
    PASSAGES,
    PERSONAS,
    POLITE,
    REFUSALS,
    RULES,
    SHORT_SYSTEM,
    SMALL_TALK,
)
from service.data.rows import check_text, objects
from service.errors import DataError, HalluTracerError

Message = dict[str, str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One row that asks something by itself.  Texts are "" where they are not known."""

    id: str
    text: str
    answer: str  # the first accepted one
    said: str  # what the model answered when it was asked alone
    statement: str  # a sentence that gives the answer
    group: str
    kind: str

    @property
    def note(self) -> str:
        """A sentence or two that give the answer."""
        return self.statement or f"{self.text} {self.answer}."


@dataclass(frozen=True)
class Company:
    """What may stand around one question: ``same`` are other questions of its kind, ``other`` those of other kinds."""

    random: random.Random
    same: Sequence[Question]
    other: Sequence[Question]

    def draw(self, count: int, *, alike: bool | None = None) -> list[Question]:
        """Different questions, of the same kind, of others, or (None) of all.  Raises _Unfit where there are fewer."""
        pools = {True: self.same, False: self.other, None: [*self.same, *self.other]}
        pool = pools[alike] or pools[None]
        if len(pool) < count:
            raise _Unfit
        return self.random.sample(pool, count)

    def fact(self) -> str:
        """A true sentence that has nothing to do with the question."""
        return self.random.choice([*FACTS, *(one.note for one in self.draw(min(8, len(self.same) + len(self.other))))])


class _Unfit(Exception):  # noqa: N818 - not an error: the question takes another form
    """The question, or the file around it, lacks what the form needs."""


Make = Callable[[Question, Company], list[Message]]


@dataclass(frozen=True)
class Form:
    """``weight`` is its share in a mixture, beside the others'."""

    name: str
    family: str
    weight: float
    make: Make


FORMS: dict[str, Form] = {}


def _form(family: str, weight: float = 1.0) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        name = make.__name__.removeprefix("_")
        FORMS[name] = Form(name, family, weight, make)
        return make

    return add


def families() -> list[str]:
    """What a mixture can be made of, in the order of the registry."""
    return list(dict.fromkeys(form.family for form in FORMS.values()))


def chosen(names: Iterable[str]) -> list[Form]:
    """The forms of these names and families, each once.  Raises HalluTracerError naming those that there are."""
    found: dict[str, Form] = {}
    for name in names:
        own = {form.name: form for form in FORMS.values() if name in (form.name, form.family, "all")}
        if not own:
            raise HalluTracerError(
                f"no form is called {name!r}: all, {', '.join(families())}, or one of {', '.join(FORMS)}"
            )
        found |= own
    return list(found.values())


def in_forms(
    rows: Sequence[Row], forms: Sequence[Form], *, per_row: int = 1, seed: int = 0, said: dict[str, str] | None = None
) -> list[Row]:
    """Each row in ``per_row`` different forms, drawn by their weights; the same seed and rows give the same.

    ``said`` is what the model answered, by id, for the forms with its own earlier answers.  A row that has ``messages``
    is what it is: it stays, once.  A row that fits none of the forms is left out.
    """
    questions = {row["id"]: _question(row, said or {}) for row in rows if "prompt" in row}
    by_kind: dict[str, list[Question]] = defaultdict(list)
    for question in questions.values():
        by_kind[question.kind].append(question)
    every = list(questions.values())
    found: list[Row] = []
    for row in rows:
        if row["id"] not in questions:
            found.append(row | {"form": "messages"})
            continue
        question = questions[row["id"]]
        draw = random.Random(f"{seed} {question.id}")
        same = _others(question, by_kind[question.kind], draw)
        other = [one for one in _others(question, every, draw) if one.kind != question.kind]
        found += _rows(row, question, Company(draw, same, other), forms, per_row)
    return found


def read_said(path: Path) -> dict[str, str]:
    """What the model answered, by id, of a run's ``answers.jsonl``.  Raises DataError."""
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


def _rows(row: Row, question: Question, company: Company, forms: Sequence[Form], per_row: int) -> list[Row]:
    found: list[Row] = []
    left = list(forms)
    while left and len(found) < per_row:
        [form] = company.random.choices(left, [one.weight for one in left])
        left.remove(form)
        try:
            messages = form.make(question, company)
        except _Unfit:
            continue
        kept = {key: value for key, value in row.items() if key != "prompt"}
        name = {"id": f"{row['id']}+{form.name}", "group": question.group, "form": form.name}
        found.append(kept | name | {"messages": messages})
    return found


def _others(question: Question, pool: Sequence[Question], draw: random.Random) -> list[Question]:
    """Up to 40 of the pool, of other groups and with other answers."""
    some = draw.sample(pool, min(len(pool), 60))
    return [one for one in some if one.group != question.group and one.answer != question.answer][:40]


def _question(row: Row, said: dict[str, str]) -> Question:
    answers = row.get("answers") or [""]
    return Question(
        id=str(row["id"]),
        text=str(row["prompt"]).strip(),
        answer=str(answers[0]),
        said=said.get(str(row["id"]), "").strip(),
        statement=str(row.get("statement", "")),
        group=str(row.get("group") or row["id"]),
        kind=str(row.get("kind", "")),
    )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _turn(question: Question, answer: str) -> list[Message]:
    return [_user(question.text), _assistant(answer)]


def _filled(templates: Sequence[str], question: Question, company: Company, **texts: str) -> str:
    return company.random.choice(templates).format(q=question.text, **texts)


# Alone, in other words.


@_form("lone", 4.0)
def _lone(question: Question, company: Company) -> list[Message]:
    return [_user(question.text)]


@_form("wording")
def _polite(question: Question, company: Company) -> list[Message]:
    return [_user(_filled(POLITE, question, company))]


@_form("wording")
def _chatter(question: Question, company: Company) -> list[Message]:
    return [_user(_filled(CHATTER, question, company))]


@_form("wording")
def _lower(question: Question, company: Company) -> list[Message]:
    return [_user(question.text.lower().rstrip("?.! "))]


@_form("wording")
def _typos(question: Question, company: Company) -> list[Message]:
    """Two neighbouring letters swapped, or one left out, in one or two words; names are left as they are."""
    words = question.text.split(" ")
    places = [place for place, word in enumerate(words) if len(word) > 3 and word.islower()]
    if not places:
        raise _Unfit
    for place in company.random.sample(places, min(len(places), company.random.choice((1, 2)))):
        word, at = words[place], company.random.randrange(1, len(words[place]) - 1)
        swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        words[place] = company.random.choice((swapped, word[:at] + word[at + 1 :]))
    return [_user(" ".join(words))]


@_form("formats")
def _format(question: Question, company: Company) -> list[Message]:
    return [_user(_filled(FORMATS, question, company))]


# Under a system prompt.


@_form("system")
def _system_short(question: Question, company: Company) -> list[Message]:
    return [_system(company.random.choice(SHORT_SYSTEM)), _user(question.text)]


@_form("system")
def _system_persona(question: Question, company: Company) -> list[Message]:
    return [_system(company.random.choice(PERSONAS)), _user(question.text)]


@_form("system")
def _system_rules(question: Question, company: Company) -> list[Message]:
    rules = company.random.sample(RULES, company.random.randint(2, 5))
    text = company.random.choice(SHORT_SYSTEM) + "\n" + "\n".join(f"- {rule}" for rule in rules)
    return [_system(text), _user(question.text)]


@_form("system")
def _system_long(question: Question, company: Company) -> list[Message]:
    return [_system(company.random.choice(LONG_SYSTEM)), _user(question.text)]


@_form("system")
def _system_facts(question: Question, company: Company) -> list[Message]:
    facts = " ".join(company.fact() for _ in range(company.random.randint(1, 3)))
    return [_system(f"{company.random.choice(SHORT_SYSTEM)} {facts}"), _user(question.text)]


# After earlier turns.


@_form("turns")
def _greeting(question: Question, company: Company) -> list[Message]:
    hello, answer = company.random.choice(GREETINGS)
    return [_user(hello), _assistant(answer), _user(question.text)]


@_form("turns")
def _small_talk(question: Question, company: Company) -> list[Message]:
    turns = [one for pair in company.random.sample(SMALL_TALK, company.random.randint(1, 2)) for one in pair]
    said = [_assistant(text) if place % 2 else _user(text) for place, text in enumerate(turns)]
    return [*said, _user(question.text)]


@_form("turns")
def _turn_right(question: Question, company: Company) -> list[Message]:
    [other] = company.draw(1, alike=company.random.random() < 0.5)
    return [*_turn(other, other.statement or other.answer), _user(question.text)]


@_form("turns")
def _turn_wrong(question: Question, company: Company) -> list[Message]:
    other, third = company.draw(2, alike=True)
    return [*_turn(other, third.answer), _user(question.text)]


@_form("turns")
def _turn_refused(question: Question, company: Company) -> list[Message]:
    [other] = company.draw(1, alike=company.random.random() < 0.5)
    return [*_turn(other, company.random.choice(REFUSALS)), _user(question.text)]


@_form("turns", 2.0)
def _turn_own(question: Question, company: Company) -> list[Message]:
    other = _said(company, 1)
    return [*_turn(other[0], other[0].said), _user(question.text)]


@_form("turns", 1.5)
def _turns_own(question: Question, company: Company) -> list[Message]:
    before = [message for one in _said(company, company.random.choice((2, 3, 8))) for message in _turn(one, one.said)]
    return [*before, _user(question.text)]


@_form("turns", 1.5)
def _turns_mixed(question: Question, company: Company) -> list[Message]:
    """Right, wrong and refused ones, in any order."""
    before: list[Message] = []
    for other in company.draw(company.random.choice((2, 3, 3, 8))):
        wrong = company.draw(1, alike=True)[0].answer
        right = other.statement or other.answer
        before += _turn(other, company.random.choice((right, right, wrong, company.random.choice(REFUSALS))))
    return [*before, _user(question.text)]


@_form("turns")
def _turns_with_system(question: Question, company: Company) -> list[Message]:
    system = company.random.choice([*SHORT_SYSTEM, *PERSONAS])
    return [_system(system), *company.random.choice((_turn_right, _greeting, _small_talk))(question, company)]


def _said(company: Company, count: int) -> list[Question]:
    pool = [one for one in (*company.same, *company.other) if one.said]
    if len(pool) < count:
        raise _Unfit
    return company.random.sample(pool, count)


@_form("few_shot")
def _few_shot(question: Question, company: Company) -> list[Message]:
    shots = company.draw(company.random.choice((2, 3, 5)), alike=company.random.random() < 0.7)
    lead, ask, reply = company.random.choice((("", "Q: ", "A: "), ("Some examples:\n", "Question: ", "Answer: ")))
    lines = [f"{ask}{one.text}\n{reply}{one.answer}" for one in shots]
    return [_user(lead + "\n\n".join([*lines, f"{ask}{question.text}\n{reply.strip()}"]))]


# Beside a fact or a passage.


@_form("facts", 1.5)
def _fact_before(question: Question, company: Company) -> list[Message]:
    return [_user(_filled(BEFORE, question, company, f=company.fact()))]


@_form("facts", 2.5)
def _fact_behind(question: Question, company: Company) -> list[Message]:
    return [_user(_filled(BEHIND, question, company, f=company.fact()))]


@_form("passages", 2.0)
def _passage_right(question: Question, company: Company) -> list[Message]:
    return _passage(question, company, [question.note, *_notes(company, 2)])


@_form("passages", 1.5)
def _passage_unrelated(question: Question, company: Company) -> list[Message]:
    return _passage(question, company, _notes(company, 3))


@_form("passages")
def _passage_contradicting(question: Question, company: Company) -> list[Message]:
    wrong = company.draw(1, alike=True)[0].answer
    if not question.answer or not wrong:
        raise _Unfit
    note = question.note.replace(question.answer, wrong) if question.answer in question.note else f"{wrong}."
    return _passage(question, company, [note, *_notes(company, 2)])


@_form("passages", 1.5)
def _passages_several(question: Question, company: Company) -> list[Message]:
    """Two to four, of which one may have the answer."""
    parts = [_notes(company, company.random.randint(2, 4)) for _ in range(company.random.randint(2, 4))]
    if company.random.random() < 0.5:
        company.random.choice(parts).append(question.note)
    numbered = [f"[{number}] {_shuffled(part, company)}" for number, part in enumerate(parts, 1)]
    return [_user(_filled(PASSAGES, question, company, p="\n".join(numbered)))]


@_form("long", 0.6)
def _context_1k(question: Question, company: Company) -> list[Message]:
    return _passage(question, company, _long(question, company, 700))


@_form("long", 0.1)
def _context_4k(question: Question, company: Company) -> list[Message]:
    return _passage(question, company, _long(question, company, 2800))


def _passage(question: Question, company: Company, notes: list[str]) -> list[Message]:
    return [_user(_filled(PASSAGES, question, company, p=_shuffled(notes, company)))]


def _notes(company: Company, count: int) -> list[str]:
    return [one.note for one in company.draw(count)]


def _long(question: Question, company: Company, words: int) -> list[str]:
    """Notes of so many words; in half of the cases one has the answer.  A word is about 1.4 tokens."""
    notes = [question.note] if company.random.random() < 0.5 else []
    pool = [*NOTES, *FACTS, *(one.note for one in (*company.same, *company.other))]
    while sum(len(note.split()) for note in notes) < words:
        notes.append(company.random.choice(pool))
    return notes


def _shuffled(notes: Sequence[str], company: Company) -> str:
    return " ".join(company.random.sample(notes, len(notes)))
