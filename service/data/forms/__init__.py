"""Puts a question into forms of conversation: alone, in a chat, under a system prompt, behind a
passage, reworded.

A form turns a question into messages.  The text around the question comes from ``wordings.toml``
and from the other questions of the file, never from the question's own group.  ``in_forms`` makes
rows to train on."""

from __future__ import annotations

import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from service.data.judges import split_answers
from service.data.rows import check_text, objects
from service.errors import DataError, HalluTracerError

_TEXTS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("wordings.toml").read_text(encoding="utf-8")
)
WORDINGS: Mapping[str, list[str]] = _TEXTS
TURNS: Mapping[str, list[list[str]]] = (
    _TEXTS  # its entries of several texts: messages of the user and answers
)
Message = dict[str, str]
Row = dict[str, Any]
INSTRUCTION = re.compile(r"\s+Answer [^.?!]*\.$")  # behind a question: "Answer briefly."
STATED = (
    8  # with so many other questions that have a statement, facts and passages use statements alone
)


@dataclass(frozen=True)
class Question:
    """One row with a question.  Unknown texts are ""."""

    id: str
    text: str
    answer: str  # the first accepted one
    model_answer: str  # the model's answer to the question alone
    statement: str  # a sentence that gives the answer
    group: str
    kind: str

    @property
    def reply(self) -> str:
        """Return a right answer, as a sentence if there is one."""
        return self.statement or self.answer

    @property
    def note(self) -> str:
        """Return a sentence or two that give the answer.  Raises Unfit if it is not known."""
        if not (self.statement or self.answer):
            raise Unfit
        return self.statement or f"{INSTRUCTION.sub('', self.text)} {self.answer}."


@dataclass(frozen=True)
class Surroundings:
    """The other questions that may stand around one question."""

    random: random.Random
    same_kind: Sequence[Question]
    other_kinds: Sequence[Question]

    def draw(self, count: int, *, alike: bool | None = None) -> list[Question]:
        """Return different questions: of the same kind, of other kinds, or (None) of all.  Raises
        Unfit for fewer."""
        every = [*self.same_kind, *self.other_kinds]
        pool = (every if alike is None else self.same_kind if alike else self.other_kinds) or every
        if len(pool) < count:
            raise Unfit
        return self.random.sample(pool, count)

    def wrong(self, question: Question) -> str:
        """Return an answer to another question of the kind, not to this one.  Raises Unfit if there
        is none."""
        answers = [
            neighbour.answer
            for neighbour in self.same_kind or self.other_kinds
            if neighbour.answer not in ("", question.answer)
        ]
        if not answers:
            raise Unfit
        return self.random.choice(answers)

    def facts(self, count: int) -> str:
        """Return true sentences that have nothing to do with the question."""
        pool = [*WORDINGS["facts"], *(neighbour.note for neighbour in self.noted[:STATED])]
        return " ".join(self.random.choice(pool) for _ in range(count))

    def one_of(self, *texts: Any) -> Any:
        """Return one of them."""
        return self.random.choice(texts)

    @property
    def noted(self) -> list[Question]:
        """Return other questions for notes: those with a statement if there are enough of them,
        else all."""
        pool = [*self.same_kind, *self.other_kinds]
        stated = [neighbour for neighbour in pool if neighbour.statement]
        return stated if len(stated) >= STATED else pool

    def notes(self, count: int) -> list[str]:
        """Return notes of different other questions.  Raises Unfit if there are fewer."""
        if len(self.noted) < count:
            raise Unfit
        return [neighbour.note for neighbour in self.random.sample(self.noted, count)]


class Unfit(Exception):  # noqa: N818 - no error: the caller chooses another form
    """The question, or the file around it, lacks what the form needs."""


Make = Callable[[Question, Surroundings], list[Message]]


class Form(NamedTuple):
    """A form.  ``weight`` is its share in a mixture, relative to the weights of the other forms."""

    name: str
    family: str
    weight: float
    make: Make


def families() -> list[str]:
    """Return the names of the families, in the order of FORMS."""
    return list(dict.fromkeys(form.family for form in FORMS.values()))


def chosen(names: Iterable[str]) -> list[Form]:
    """Return the forms of these names and families, each once.  Raises HalluTracerError for an
    unknown name."""
    forms: dict[str, Form] = {}
    for name in names:
        matching = {
            form.name: form for form in FORMS.values() if name in (form.name, form.family, "all")
        }
        if not matching:
            raise HalluTracerError(
                f"no form is called {name!r}: all, {', '.join(families())}, or one of"
                f" {', '.join(FORMS)}"
            )
        forms |= matching
    return list(forms.values())


def is_one_message(form: Form) -> bool:
    """Return whether a form is a single message, which a model without a chat template can take,
    too."""
    return form.family not in ("system", "turns")


def _ask(text: str, *turns: Sequence[str], system: str = "") -> list[Message]:
    before = [{"role": "system", "content": system}] if system else []
    for user, assistant in turns:
        before += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*before, {"role": "user", "content": text}]


def _system(question: Question, text: str) -> list[Message]:
    return _ask(question.text, system=text)


def _asked(wordings: str, question: Question, around: Surroundings, **texts: str) -> list[Message]:
    return _ask(around.random.choice(WORDINGS[wordings]).format(q=question.text, **texts))


def _typos(question: Question, around: Surroundings) -> list[Message]:
    """Swap two neighbouring letters, or leave out a letter, in one or two words that are not
    names."""
    words = question.text.split(" ")
    positions = [
        position for position, word in enumerate(words) if len(word) > 3 and word.islower()
    ]
    if not positions:
        raise Unfit
    for position in around.random.sample(
        positions, min(len(positions), around.random.choice((1, 2)))
    ):
        word, at = words[position], around.random.randrange(1, len(words[position]) - 1)
        swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        words[position] = around.one_of(swapped, word[:at] + word[at + 1 :])
    return _ask(" ".join(words))


def _ending(question: Question, around: Surroundings) -> list[Message]:
    junk = "".join(
        around.random.choices("abcdefghijklmnopqrstuvwxyz!.;[]=+/ ", k=around.random.randint(4, 24))
    )
    return _asked("endings", question, around, j=junk)


def _junk(question: Question, around: Surroundings) -> list[Message]:
    """Put pieces that make no sense behind the question, seldom before it: markup, symbols, parts
    of words."""
    choice = around.random.choice
    words = [word for neighbour in around.draw(4) for word in neighbour.text.split()]

    def cut() -> str:
        word, second = choice(words), choice(words)
        half = len(word) // 2
        return choice(
            (word, word.upper(), word.lower(), word[:half], word[half:], word + second.title())
        )

    pieces = [
        choice((choice(WORDINGS["marks"]), cut())) for _ in range(around.random.randint(2, 24))
    ]
    junk = "".join(piece + choice(("", " ", " ")) for piece in pieces).strip()
    return _asked("junk", question, around, j=junk)


def _system_rules(question: Question, around: Surroundings) -> list[Message]:
    rules = around.random.sample(WORDINGS["rules"], around.random.randint(2, 5))
    return _system(question, "\n- ".join([around.one_of(*WORDINGS["short_system"]), *rules]))


def _system_facts(question: Question, around: Surroundings) -> list[Message]:
    facts = around.facts(around.random.randint(1, 3))
    return _system(question, f"{around.one_of(*WORDINGS['short_system'])} {facts}")


def _small_talk(question: Question, around: Surroundings) -> list[Message]:
    return _ask(
        question.text, *around.random.sample(TURNS["small_talk"], around.random.randint(1, 2))
    )


def _turn(
    question: Question, around: Surroundings, answer: Callable[[Question], str]
) -> list[Message]:
    [earlier] = around.draw(1, alike=around.random.random() < 0.5)
    return _ask(question.text, (earlier.text, answer(earlier)))


def _turn_right(question: Question, around: Surroundings) -> list[Message]:
    return _turn(question, around, lambda earlier: earlier.reply)


def _turn_wrong(question: Question, around: Surroundings) -> list[Message]:
    [earlier] = around.draw(1, alike=True)
    return _ask(question.text, (earlier.text, around.wrong(earlier)))


def _greeting(question: Question, around: Surroundings) -> list[Message]:
    return _ask(question.text, around.one_of(*TURNS["greetings"]))


def _turns_own(
    question: Question, around: Surroundings, counts: Sequence[int] = (2, 3, 8)
) -> list[Message]:
    count = around.random.choice(counts) if len(counts) > 1 else counts[0]
    pool = [earlier for earlier in (*around.same_kind, *around.other_kinds) if earlier.model_answer]
    if len(pool) < count:
        raise Unfit
    return _ask(
        question.text,
        *((earlier.text, earlier.model_answer) for earlier in around.random.sample(pool, count)),
    )


def _turns_mixed(question: Question, around: Surroundings) -> list[Message]:
    before = []
    for earlier in around.draw(around.random.choice((2, 3, 3, 8))):
        answers = (
            earlier.reply,
            earlier.reply,
            around.wrong(earlier),
            around.one_of(*WORDINGS["refusals"]),
        )
        before.append((earlier.text, around.random.choice(answers)))
    return _ask(question.text, *before)


def _turns_with_system(question: Question, around: Surroundings) -> list[Message]:
    system = around.one_of(*WORDINGS["short_system"], *WORDINGS["personas"])
    return [
        {"role": "system", "content": system},
        *around.one_of(_turn_right, _greeting, _small_talk)(question, around),
    ]


def _few_shot(question: Question, around: Surroundings) -> list[Message]:
    shots = around.draw(around.random.choice((2, 3, 5)), alike=around.random.random() < 0.7)
    lead, ask, reply = around.random.choice(
        (("", "Q: ", "A: "), ("Some examples:\n", "Question: ", "Answer: "))
    )
    lines = [f"{ask}{shot.text}\n{reply}{shot.answer}" for shot in shots]
    return _ask(lead + "\n\n".join([*lines, f"{ask}{question.text}\n{reply.strip()}"]))


def _passage(question: Question, around: Surroundings, notes: list[str]) -> list[Message]:
    return _asked("passages", question, around, p=_shuffled(notes, around))


def _passage_contradicting(question: Question, around: Surroundings) -> list[Message]:
    if not question.answer:
        raise Unfit
    wrong = around.wrong(question)
    note = (
        question.note.replace(question.answer, wrong)
        if question.answer in question.note
        else f"{wrong}."
    )
    return _passage(question, around, [note, *around.notes(2)])


def _passages_several(question: Question, around: Surroundings) -> list[Message]:
    parts = [around.notes(around.random.randint(2, 4)) for _ in range(around.random.randint(2, 4))]
    if around.random.random() < 0.5:
        around.random.choice(parts).append(question.note)
    numbered = [f"[{number}] {_shuffled(part, around)}" for number, part in enumerate(parts, 1)]
    return _asked("passages", question, around, p="\n".join(numbered))


def _long(question: Question, around: Surroundings, words: int) -> list[Message]:
    """Put notes of about ``words`` words before the question.  In half of the cases a note gives
    the answer.

    A word is about 1.4 tokens."""
    notes = [question.note] if around.random.random() < 0.5 else []
    pool = [*WORDINGS["notes"], *WORDINGS["facts"], *(neighbour.note for neighbour in around.noted)]
    left = words - sum(len(note.split()) for note in notes)
    while left > 0:
        notes.append(around.random.choice(pool))
        left -= len(notes[-1].split())
    return _passage(question, around, notes)


def _shuffled(notes: Sequence[str], around: Surroundings) -> str:
    return " ".join(around.random.sample(notes, len(notes)))


_FORMS: Sequence[tuple[str, str, float, Make]] = (
    ("lone", "lone", 4.0, lambda q, around: _ask(q.text)),
    ("polite", "wording", 1.0, partial(_asked, "polite")),
    ("chatter", "wording", 1.0, partial(_asked, "chatter")),
    ("lower", "wording", 1.0, lambda q, around: _ask(q.text.lower().rstrip("?.! "))),
    ("typos", "wording", 1.0, _typos),
    ("ending", "wording", 1.0, _ending),
    ("junk", "junk", 1.0, _junk),
    ("format", "formats", 1.0, partial(_asked, "formats")),
    (
        "system_short",
        "system",
        1.0,
        lambda q, around: _system(q, around.one_of(*WORDINGS["short_system"])),
    ),
    (
        "system_persona",
        "system",
        1.0,
        lambda q, around: _system(q, around.one_of(*WORDINGS["personas"])),
    ),
    ("system_rules", "system", 1.0, _system_rules),
    (
        "system_long",
        "system",
        1.0,
        lambda q, around: _system(q, around.one_of(*WORDINGS["long_system"])),
    ),
    ("system_facts", "system", 1.0, _system_facts),
    ("greeting", "turns", 1.0, _greeting),
    ("small_talk", "turns", 1.0, _small_talk),
    ("turn_right", "turns", 1.0, _turn_right),
    ("turn_wrong", "turns", 1.0, _turn_wrong),
    (
        "turn_refused",
        "turns",
        1.0,
        lambda q, around: _turn(q, around, lambda _: around.one_of(*WORDINGS["refusals"])),
    ),
    ("turn_own", "turns", 2.0, partial(_turns_own, counts=(1,))),
    ("turns_own", "turns", 1.5, _turns_own),
    ("turns_mixed", "turns", 1.5, _turns_mixed),
    ("turns_with_system", "turns", 1.0, _turns_with_system),
    ("few_shot", "few_shot", 1.0, _few_shot),
    ("fact_before", "facts", 1.5, lambda q, around: _asked("before", q, around, f=around.facts(1))),
    (
        "fact_behind",
        "facts",
        2.5,
        lambda q, around: _asked("behind", q, around, f=around.facts(around.one_of(1, 1, 1, 2, 3))),
    ),
    (
        "passage_right",
        "passages",
        2.0,
        lambda q, around: _passage(q, around, [q.note, *around.notes(2)]),
    ),
    ("passage_unrelated", "passages", 1.5, lambda q, around: _passage(q, around, around.notes(3))),
    ("passage_contradicting", "passages", 0.1, _passage_contradicting),
    ("passages_several", "passages", 1.5, _passages_several),
    ("context_1k", "long", 0.6, partial(_long, words=700)),
    ("context_4k", "long", 0.1, partial(_long, words=2800)),
)
FORMS = {row[0]: Form(*row) for row in _FORMS}


def in_forms(
    rows: Sequence[Row],
    forms: Sequence[Form],
    *,
    per_row: int = 1,
    seed: int = 0,
    model_answers: dict[str, str] | None = None,
    fits: Callable[[Form, list[Message]], bool] | None = None,
) -> list[Row]:
    """Return each row in ``per_row`` different forms, drawn by their weights; the same seed and
    rows give the same.

    ``model_answers`` has the model's answers by id, for the forms with its own earlier answers.  A
    row that has ``messages``, or does not apply, stays as it is, once.  A row that fits none of the
    forms is left out.  ``fits`` decides whether the model can be asked the messages of a form; if
    not, the row takes another form."""
    asking = [row for row in rows if "prompt" in row and row.get("applies") is not False]
    questions = {row["id"]: _question(row, model_answers or {}) for row in asking}
    by_kind: dict[str, list[Question]] = defaultdict(list)
    for question in questions.values():
        by_kind[question.kind].append(question)
    every = list(questions.values())
    made_rows: list[Row] = []
    for row in rows:
        if row["id"] not in questions:
            made_rows.append({"form": "messages" if row.get("applies", True) else "task"} | row)
            continue
        question = questions[row["id"]]
        draw = random.Random(f"{seed} {question.id}")
        same_kind = _others(question, by_kind[question.kind], draw)
        other_kinds = [
            neighbour
            for neighbour in _others(question, every, draw)
            if neighbour.kind != question.kind
        ]
        around = Surroundings(draw, same_kind, other_kinds)
        left = list(forms)
        count = 0
        while left and count < per_row:
            [form] = draw.choices(left, [candidate.weight for candidate in left])
            left.remove(form)
            with suppress(Unfit):
                messages = form.make(question, around)
                if fits is None or fits(form, messages):
                    fields = {key: value for key, value in row.items() if key != "prompt"}
                    name = {
                        "id": f"{row['id']}+{form.name}",
                        "group": question.group,
                        "form": form.name,
                    }
                    made_rows.append(fields | name | {"messages": messages})
                    count += 1
    return made_rows


def read_model_answers(path: Path) -> dict[str, str]:
    """Return the model's answers by id, from a run's ``answers.jsonl``.  Raises DataError."""
    problems: list[str] = []
    answers: dict[str, str] = {}
    for line, value in objects(path, problems):
        line_problems = list(check_text(value, "id", required=True))
        if not isinstance(value.get("answer"), str):
            line_problems.append(
                "'answer' must be a string: answers.jsonl of a run folder is expected"
            )
        problems += [f"line {line}: {problem}" for problem in line_problems]
        if not line_problems:
            answers[value["id"]] = value["answer"]
    if problems:
        raise DataError(str(path), problems)
    return answers


def _others(question: Question, pool: Sequence[Question], draw: random.Random) -> list[Question]:
    """Return up to 40 questions of the pool that have another group and another, known answer."""
    some = draw.sample(pool, min(len(pool), 60))
    return [
        neighbour
        for neighbour in some
        if neighbour.group != question.group and neighbour.answer not in ("", question.answer)
    ][:40]


def _question(row: Row, model_answers: dict[str, str]) -> Question:
    accepted, _ = split_answers([str(answer) for answer in row.get("answers") or ()])
    return Question(
        id=str(row["id"]),
        text=str(row["prompt"]).strip(),
        answer=accepted[0] if accepted else "",
        model_answer=model_answers.get(str(row["id"]), "").strip(),
        statement=str(row.get("statement", "")),
        group=str(row.get("group") or row["id"]),
        kind=str(row.get("kind", "")),
    )
