"""Forms of conversation: the same question alone, in a chat, under a system prompt, behind a passage, in other wording.

A form makes of a question the messages in which somebody asks it.  What stands around it comes from ``wordings.toml``
and from the other questions of the file, never from the question's own group.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.errors import HalluTracerError

_TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text(encoding="utf-8"))
WORDINGS: Mapping[str, list[str]] = _TEXTS
TURNS: Mapping[str, list[list[str]]] = _TEXTS  # its entries of several texts: what was said, and the answers
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
        """Return a right answer, as a sentence where there is one."""
        return self.statement or self.answer

    @property
    def note(self) -> str:
        """Return a sentence or two that give the answer.  Raises Unfit where it is not known."""
        if not (self.statement or self.answer):
            raise Unfit
        return self.statement or f"{INSTRUCTION.sub('', self.text)} {self.answer}."


@dataclass(frozen=True)
class Surroundings:
    """What may stand around one question: ``same`` are other questions of its kind, ``other`` those of other kinds."""

    random: random.Random
    same: Sequence[Question]
    other: Sequence[Question]

    def draw(self, count: int, *, alike: bool | None = None) -> list[Question]:
        """Return different questions, of the same kind, of others, or (None) of all.  Raises Unfit for fewer."""
        pools = {True: self.same, False: self.other, None: [*self.same, *self.other]}
        pool = pools[alike] or pools[None]
        if len(pool) < count:
            raise Unfit
        return self.random.sample(pool, count)

    def wrong(self, question: Question) -> str:
        """Return an answer to another question of the kind, not to this one.  Raises Unfit where there is none."""
        answers = [one.answer for one in self.same or self.other if one.answer not in ("", question.answer)]
        if not answers:
            raise Unfit
        return self.random.choice(answers)

    def fact(self) -> str:
        """Return a true sentence that has nothing to do with the question."""
        return self.random.choice([*WORDINGS["facts"], *(one.note for one in self.noted[:STATED])])

    @property
    def noted(self) -> list[Question]:
        """Return other questions to make notes of: those that have a statement, where there are some."""
        pool = [*self.same, *self.other]
        stated = [one for one in pool if one.statement]
        return stated if len(stated) >= STATED else pool

    def notes(self, count: int) -> list[str]:
        """Return notes of different other questions.  Raises Unfit where there are fewer."""
        if len(self.noted) < count:
            raise Unfit
        return [one.note for one in self.random.sample(self.noted, count)]


class Unfit(Exception):  # noqa: N818 - not an error: the question takes another form
    """The question, or the file around it, lacks what the form needs."""


Make = Callable[[Question, Surroundings], list[Message]]


@dataclass(frozen=True)
class Form:
    """``weight`` is its share in a mixture, beside the others'."""

    name: str
    family: str
    weight: float
    make: Make


def families() -> list[str]:
    """Return what a mixture can be made of, in the order of the registry."""
    return list(dict.fromkeys(form.family for form in FORMS.values()))


def chosen(names: Iterable[str]) -> list[Form]:
    """Return the forms of these names and families, each once.  Raises HalluTracerError naming those that there are."""
    found: dict[str, Form] = {}
    for name in names:
        own = {form.name: form for form in FORMS.values() if name in (form.name, form.family, "all")}
        if not own:
            raise HalluTracerError(
                f"no form is called {name!r}: all, {', '.join(families())}, or one of {', '.join(FORMS)}"
            )
        found |= own
    return list(found.values())


def is_one_message(form: Form) -> bool:
    """Return whether a form is a single message, which a model without a chat template can be asked, too."""
    return form.family not in ("system", "turns")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _system(text: str, question: Question) -> list[Message]:
    return [{"role": "system", "content": text}, _user(question.text)]


def _turn(question: Question, answer: str) -> list[Message]:
    return [_user(question.text), _assistant(answer)]


def _asked(wordings: str, question: Question, around: Surroundings, **texts: str) -> list[Message]:
    """Return the question in one of the wordings of this name."""
    return [_user(around.random.choice(WORDINGS[wordings]).format(q=question.text, **texts))]


def _typos(question: Question, around: Surroundings) -> list[Message]:
    """Swap two neighbouring letters, or leave one out, in one or two words; names are left as they are."""
    words = question.text.split(" ")
    places = [place for place, word in enumerate(words) if len(word) > 3 and word.islower()]
    if not places:
        raise Unfit
    for place in around.random.sample(places, min(len(places), around.random.choice((1, 2)))):
        word, at = words[place], around.random.randrange(1, len(words[place]) - 1)
        swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        words[place] = around.random.choice((swapped, word[:at] + word[at + 1 :]))
    return [_user(" ".join(words))]


def _ending(question: Question, around: Surroundings) -> list[Message]:
    """Put behind the question what asks for nothing more: "Answer:", three dots, a few letters."""
    junk = "".join(around.random.choices("abcdefghijklmnopqrstuvwxyz!.;[]=+/ ", k=around.random.randint(4, 24)))
    return _asked("endings", question, around, j=junk)


def _junk(question: Question, around: Surroundings) -> list[Message]:
    """Put pieces that make no sense behind the question, seldom before it: markup, symbols, parts of words."""
    words = [word for other in around.draw(4) for word in other.text.split()]
    count = around.random.randint(2, 24)
    choice = around.random.choice
    pieces = [choice((choice(WORDINGS["marks"]), _cut(words, around))) for _ in range(count)]
    junk = "".join(piece + choice(("", " ", " ")) for piece in pieces).strip()
    return _asked("junk", question, around, j=junk)


def _cut(words: Sequence[str], around: Surroundings) -> str:
    """Return a word of them, half of one, or two in one, in some case."""
    word, other = around.random.choice(words), around.random.choice(words)
    changed = (word, word.upper(), word.lower(), word[: len(word) // 2], word[len(word) // 2 :], word + other.title())
    return around.random.choice(changed)


def _system_rules(question: Question, around: Surroundings) -> list[Message]:
    rules = around.random.sample(WORDINGS["rules"], around.random.randint(2, 5))
    text = around.random.choice(WORDINGS["short_system"]) + "\n" + "\n".join(f"- {rule}" for rule in rules)
    return _system(text, question)


def _system_facts(question: Question, around: Surroundings) -> list[Message]:
    facts = " ".join(around.fact() for _ in range(around.random.randint(1, 3)))
    return _system(f"{around.random.choice(WORDINGS['short_system'])} {facts}", question)


def _greeting(question: Question, around: Surroundings) -> list[Message]:
    hello, answer = around.random.choice(TURNS["greetings"])
    return [_user(hello), _assistant(answer), _user(question.text)]


def _small_talk(question: Question, around: Surroundings) -> list[Message]:
    pairs = around.random.sample(TURNS["small_talk"], around.random.randint(1, 2))
    said = [message for hello, answer in pairs for message in (_user(hello), _assistant(answer))]
    return [*said, _user(question.text)]


def _turn_right(question: Question, around: Surroundings) -> list[Message]:
    [other] = around.draw(1, alike=around.random.random() < 0.5)
    return [*_turn(other, other.reply), _user(question.text)]


def _turn_wrong(question: Question, around: Surroundings) -> list[Message]:
    [other] = around.draw(1, alike=True)
    return [*_turn(other, around.wrong(other)), _user(question.text)]


def _turn_refused(question: Question, around: Surroundings) -> list[Message]:
    [other] = around.draw(1, alike=around.random.random() < 0.5)
    return [*_turn(other, around.random.choice(WORDINGS["refusals"])), _user(question.text)]


def _turns_own(question: Question, around: Surroundings, counts: Sequence[int] = (2, 3, 8)) -> list[Message]:
    """Return earlier questions with what the model answered to each."""
    count = around.random.choice(counts) if len(counts) > 1 else counts[0]
    pool = [one for one in (*around.same, *around.other) if one.said]
    if len(pool) < count:
        raise Unfit
    before = [message for one in around.random.sample(pool, count) for message in _turn(one, one.said)]
    return [*before, _user(question.text)]


def _turns_mixed(question: Question, around: Surroundings) -> list[Message]:
    """Return right, wrong and refused ones, in any order."""
    before: list[Message] = []
    for other in around.draw(around.random.choice((2, 3, 3, 8))):
        answers = (other.reply, other.reply, around.wrong(other), around.random.choice(WORDINGS["refusals"]))
        before += _turn(other, around.random.choice(answers))
    return [*before, _user(question.text)]


def _turns_with_system(question: Question, around: Surroundings) -> list[Message]:
    system = around.random.choice([*WORDINGS["short_system"], *WORDINGS["personas"]])
    turns = around.random.choice((_turn_right, _greeting, _small_talk))(question, around)
    return [{"role": "system", "content": system}, *turns]


def _few_shot(question: Question, around: Surroundings) -> list[Message]:
    shots = around.draw(around.random.choice((2, 3, 5)), alike=around.random.random() < 0.7)
    lead, ask, reply = around.random.choice((("", "Q: ", "A: "), ("Some examples:\n", "Question: ", "Answer: ")))
    lines = [f"{ask}{one.text}\n{reply}{one.answer}" for one in shots]
    return [_user(lead + "\n\n".join([*lines, f"{ask}{question.text}\n{reply.strip()}"]))]


def _fact_behind(question: Question, around: Surroundings) -> list[Message]:
    facts = " ".join(around.fact() for _ in range(around.random.choice((1, 1, 1, 2, 3))))
    return _asked("behind", question, around, f=facts)


def _passage(question: Question, around: Surroundings, notes: list[str]) -> list[Message]:
    return _asked("passages", question, around, p=_shuffled(notes, around))


def _passage_contradicting(question: Question, around: Surroundings) -> list[Message]:
    if not question.answer:
        raise Unfit
    wrong = around.wrong(question)
    note = question.note.replace(question.answer, wrong) if question.answer in question.note else f"{wrong}."
    return _passage(question, around, [note, *around.notes(2)])


def _passages_several(question: Question, around: Surroundings) -> list[Message]:
    """Return two to four, of which one may have the answer."""
    parts = [around.notes(around.random.randint(2, 4)) for _ in range(around.random.randint(2, 4))]
    if around.random.random() < 0.5:
        around.random.choice(parts).append(question.note)
    numbered = [f"[{number}] {_shuffled(part, around)}" for number, part in enumerate(parts, 1)]
    return _asked("passages", question, around, p="\n".join(numbered))


def _long(question: Question, around: Surroundings, words: int) -> list[Message]:
    """Return notes of so many words; in half of the cases one has the answer.  A word is about 1.4 tokens."""
    notes = [question.note] if around.random.random() < 0.5 else []
    pool = [*WORDINGS["notes"], *WORDINGS["facts"], *(one.note for one in around.noted)]
    left = words - sum(len(note.split()) for note in notes)
    while left > 0:
        notes.append(around.random.choice(pool))
        left -= len(notes[-1].split())
    return _passage(question, around, notes)


def _shuffled(notes: Sequence[str], around: Surroundings) -> str:
    return " ".join(around.random.sample(notes, len(notes)))


_FORMS: Sequence[tuple[str, str, float, Make]] = (
    ("lone", "lone", 4.0, lambda q, around: [_user(q.text)]),
    ("polite", "wording", 1.0, lambda q, around: _asked("polite", q, around)),
    ("chatter", "wording", 1.0, lambda q, around: _asked("chatter", q, around)),
    ("lower", "wording", 1.0, lambda q, around: [_user(q.text.lower().rstrip("?.! "))]),
    ("typos", "wording", 1.0, _typos),
    ("ending", "wording", 1.0, _ending),
    ("junk", "junk", 1.0, _junk),
    ("format", "formats", 1.0, lambda q, around: _asked("formats", q, around)),
    ("system_short", "system", 1.0, lambda q, around: _system(around.random.choice(WORDINGS["short_system"]), q)),
    ("system_persona", "system", 1.0, lambda q, around: _system(around.random.choice(WORDINGS["personas"]), q)),
    ("system_rules", "system", 1.0, _system_rules),
    ("system_long", "system", 1.0, lambda q, around: _system(around.random.choice(WORDINGS["long_system"]), q)),
    ("system_facts", "system", 1.0, _system_facts),
    ("greeting", "turns", 1.0, _greeting),
    ("small_talk", "turns", 1.0, _small_talk),
    ("turn_right", "turns", 1.0, _turn_right),
    ("turn_wrong", "turns", 1.0, _turn_wrong),
    ("turn_refused", "turns", 1.0, _turn_refused),
    ("turn_own", "turns", 2.0, lambda q, around: _turns_own(q, around, (1,))),
    ("turns_own", "turns", 1.5, _turns_own),
    ("turns_mixed", "turns", 1.5, _turns_mixed),
    ("turns_with_system", "turns", 1.0, _turns_with_system),
    ("few_shot", "few_shot", 1.0, _few_shot),
    ("fact_before", "facts", 1.5, lambda q, around: _asked("before", q, around, f=around.fact())),
    ("fact_behind", "facts", 2.5, _fact_behind),
    ("passage_right", "passages", 2.0, lambda q, around: _passage(q, around, [q.note, *around.notes(2)])),
    ("passage_unrelated", "passages", 1.5, lambda q, around: _passage(q, around, around.notes(3))),
    ("passage_contradicting", "passages", 0.1, _passage_contradicting),
    ("passages_several", "passages", 1.5, _passages_several),
    ("context_1k", "long", 0.6, lambda q, around: _long(q, around, 700)),
    ("context_4k", "long", 0.1, lambda q, around: _long(q, around, 2800)),
)
FORMS = {name: Form(name, family, weight, make) for name, family, weight, make in _FORMS}
