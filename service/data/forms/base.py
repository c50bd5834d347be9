"""What a form is made of: a question, what may stand around it, and the function that makes messages of both."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.data.forms.texts import FACTS

Message = dict[str, str]
INSTRUCTION = re.compile(r"\s+Answer [^.?!]*\.$")  # behind a question: "Answer briefly."
STATED = 8  # other questions with a statement, from which on facts and passages are made of statements alone


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
    def reply(self) -> str:
        """A right answer, as a sentence where there is one."""
        return self.statement or self.answer

    @property
    def note(self) -> str:
        """A sentence or two that give the answer.  Raises Unfit where it is not known."""
        if not (self.statement or self.answer):
            raise Unfit
        return self.statement or f"{INSTRUCTION.sub('', self.text)} {self.answer}."


@dataclass(frozen=True)
class Company:
    """What may stand around one question: ``same`` are other questions of its kind, ``other`` those of other kinds."""

    random: random.Random
    same: Sequence[Question]
    other: Sequence[Question]

    def draw(self, count: int, *, alike: bool | None = None) -> list[Question]:
        """Different questions, of the same kind, of others, or (None) of all.  Raises Unfit where there are fewer."""
        pools = {True: self.same, False: self.other, None: [*self.same, *self.other]}
        pool = pools[alike] or pools[None]
        if len(pool) < count:
            raise Unfit
        return self.random.sample(pool, count)

    def wrong(self, question: Question) -> str:
        """An answer to another question of the kind, which is not this one's.  Raises Unfit where there is none."""
        answers = [one.answer for one in self.same or self.other if one.answer not in ("", question.answer)]
        if not answers:
            raise Unfit
        return self.random.choice(answers)

    def fact(self) -> str:
        """A true sentence that has nothing to do with the question."""
        return self.random.choice([*FACTS, *(one.note for one in self.noted[:STATED])])

    @property
    def noted(self) -> list[Question]:
        """Other questions to make notes of: those that have a statement, where there are some."""
        pool = [*self.same, *self.other]
        stated = [one for one in pool if one.statement]
        return stated if len(stated) >= STATED else pool

    def notes(self, count: int) -> list[str]:
        """Notes of different other questions.  Raises Unfit where there are fewer."""
        if len(self.noted) < count:
            raise Unfit
        return [one.note for one in self.random.sample(self.noted, count)]


class Unfit(Exception):  # noqa: N818 - not an error: the question takes another form
    """The question, or the file around it, lacks what the form needs."""


Make = Callable[[Question, Company], list[Message]]


@dataclass(frozen=True)
class Form:
    """``weight`` is its share in a mixture, beside the others'."""

    name: str
    family: str
    weight: float
    make: Make
