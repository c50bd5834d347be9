"""Makes rows whose question of fact does not stand alone: several in one message, follow-ups, tasks
with a fact.

``several.toml`` holds the texts.  The last message asks for the row's own fact: directly, by
referring to an earlier message, or inside a task.  If it asks for more than one fact, ``answers``
has parts, and the answer must hold each. The other facts come from ``partners``: rows that are in
no training file, each used once.  So the label of a row never depends on a fact of another fold.
``no_fact_rows`` makes requests that look alike and ask for no fact."""

from __future__ import annotations

import random
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from service.data.forms import INSTRUCTION, TURNS, Message, Row, Unfit
from service.data.forms.crossed import (
    RELATIONS,
    filled,
    held_out_families,
    started,
    training_families,
    worded,
)
from service.data.judges import parts

TEXTS: Mapping[str, Any] = MappingProxyType(
    tomllib.loads(Path(__file__).with_name("several.toml").read_text(encoding="utf-8"))
)
TASK_KINDS = ("code", "letter", "verse", "text")
LONG_ANSWER = (
    64  # tokens for the answer to a task or to several parts; other answers take the caller's limit
)
ALONE = 0.6  # share of small talk and requests without earlier messages


@dataclass
class Company:
    """Rows to combine with a row: ``siblings`` are about the same subject, ``partners`` are of
    other groups."""

    random: random.Random
    siblings: Mapping[tuple[str, str], Sequence[Row]]  # by group and subject
    partners: Iterator[Row]
    pairs: Mapping[str, Iterator[Row]]  # partners by their relation
    test: bool  # use the texts and wordings that are held out of training

    def text(self, name: str) -> Any:
        """Return one of the texts of this name."""
        return self.random.choice(TEXTS[f"test_{name}" if self.test else name])

    def partner(self, relation: str = "") -> Row:
        """Return an unused row of another group.  Raises Unfit if none is left."""
        row = next(self.pairs.get(relation, iter(())) if relation else self.partners, None)
        if row is None:
            raise Unfit
        return row

    def sibling(self, row: Row) -> Row:
        """Return a row about the same subject.  Raises Unfit if there is none."""
        pool = [
            candidate
            for candidate in self.siblings.get(_subject(row), ())
            if candidate["relation"] != row["relation"]
        ]
        if not pool:
            raise Unfit
        return self.random.choice(pool)

    def asked(self, row: Row) -> str:
        """Return the row's question as a sentence."""
        return filled("{q}", row, self.random) if "relation" in row else plain(row)

    def wording(self, row: Row) -> str:
        """Return the row's question in any wording."""
        families = held_out_families() if self.test else training_families()
        # ends: every row suits the training family "plain", and each held-out family without a rule
        while True:
            [drawn] = self.random.choices(families, [family.weight for family in families])
            with suppress(Unfit):
                return worded(row, drawn, self.random)


Made = tuple[list[Message], list[str]]  # messages, and the answers of the row
Make = Callable[[Row, Company], Made]


class RequestForm(NamedTuple):
    """One form; ``weight`` is its share.  ``facts``: it needs rows that name a relation."""

    name: str
    weight: float
    make: Make
    facts: bool = False
    long: bool = False  # its answers need LONG_ANSWER tokens


def plain(row: Row) -> str:
    """Return the prompt of a row without an instruction behind it."""
    return INSTRUCTION.sub("", str(row["prompt"]).strip())


def several_rows(
    rows: Sequence[Row],
    partners: Sequence[Row],
    *,
    per_row: int = 1,
    seed: int = 0,
    test: bool = False,
    every: bool = False,
) -> list[Row]:
    """Return each row in ``per_row`` forms, drawn by weight; with ``every`` in each form that suits
    it.

    A row whose answer is longer than usual has ``answer_tokens``.  The ``rows`` need a ``prompt``,
    ``answers`` and a ``group``; with a ``relation`` they need a ``subject`` and a ``statement``,
    too.  The same seed, rows and partners give the same.  ``test`` uses the texts that are held out
    of training."""
    draw = random.Random(f"{seed} several")
    siblings: dict[tuple[str, str], list[Row]] = defaultdict(list)
    pairs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "relation" in row:
            siblings[_subject(row)].append(row)
    order = draw.sample(partners, len(partners))
    for row in order[::2]:
        pairs[row.get("relation", "")].append(row)
    by_relation = {name: iter(of_relation) for name, of_relation in pairs.items() if name}
    company = Company(draw, siblings, iter(order[1::2]), by_relation, test)
    made_rows: list[Row] = []
    for row in rows:
        left = [form for form in FORMS if "relation" in row or not form.facts]
        count = 0
        while left and (every or count < per_row):
            [form] = draw.choices(left, [candidate.weight for candidate in left])
            left.remove(form)
            with suppress(Unfit):
                messages, answers = form.make(row, company)
                fields = {
                    key: value for key, value in row.items() if key not in ("prompt", "answers")
                }
                more = {"answer_tokens": LONG_ANSWER} if form.long else {}
                name = {"id": f"{row['id']}+{form.name}", "form": form.name}
                made_rows.append(fields | name | {"messages": messages, "answers": answers} | more)
                count += 1
    return made_rows


def _subject(row: Row) -> tuple[str, str]:
    return str(row["group"]), str(row.get("subject", ""))


def _conversation(*texts: str) -> list[Message]:
    """Return a conversation that begins and ends with the user."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


def _together(frame: str, *facts: tuple[str, Sequence[str]]) -> Made:
    questions = dict(zip("abc", (text for text, _ in facts), strict=False))
    return _conversation(frame.format(**questions)), [parts(*(answers for _, answers in facts))]


def _fact_of(row: Row, company: Company) -> tuple[str, Sequence[str]]:
    return company.asked(row), row["answers"]


def _easy(company: Company) -> tuple[str, Sequence[str]]:
    question = company.random.choice(TEXTS["easy"])
    return company.random.choice(question["texts"]), question["answers"]


def _shuffled(row: Row, company: Company, name: str, partners: int) -> Made:
    facts = [
        _fact_of(row, company),
        *(_fact_of(company.partner(), company) for _ in range(partners)),
    ]
    return _together(company.text(name), *company.random.sample(facts, len(facts)))


def _both(row: Row, company: Company) -> Made:
    pair = company.random.sample([row, company.sibling(row)], 2)
    p, r = (filled("{p}", member, company.random) for member in pair)
    text = company.text("both").format(p=p, r=r, P=started(p), R=started(r))
    return _conversation(text), [parts(*(member["answers"] for member in pair))]


def _go_on(row: Row, company: Company) -> Made:
    question, refusal = company.wording(row), company.random.choice(TEXTS["refused"])
    return _conversation(question, refusal, company.text("go_on")), row["answers"]


def _offered(row: Row, company: Company) -> Made:
    question, offer = company.wording(row), company.random.choice(TEXTS["offered"])
    return _conversation(question, offer, company.text("yes")), row["answers"]


def _waiting(row: Row, company: Company) -> Made:
    first, reply, last = company.text("waiting")
    return _conversation(first.format(q=company.wording(row)), reply, last), row["answers"]


def _same_relation(row: Row, company: Company) -> Made:
    partner = company.partner(row["relation"])
    if set(partner["answers"]) & set(row["answers"]):  # its statement would give the answer
        raise Unfit
    text = company.text("same_relation").format(s=row["subject"], S=started(row["subject"]))
    return _conversation(company.wording(partner), partner["statement"], text), row["answers"]


def _other_relation(row: Row, company: Company) -> Made:
    sibling = company.sibling(row)
    key = company.random.choice(RELATIONS[row["relation"]].keys[:2])
    text = company.text("other_relation").format(k=key, K=started(key))
    return _conversation(company.wording(sibling), sibling["statement"], text), row["answers"]


def _task(name: str) -> Make:
    def make(row: Row, company: Company) -> Made:
        frame = company.random.choice(TEXTS["around"]["test_fact" if company.test else name])
        return _conversation(filled(frame, row, company.random)), row["answers"]

    return make


def _any_task(row: Row, company: Company) -> Made:
    frame = company.random.choice(TEXTS["around"]["test_any" if company.test else "any_question"])
    return _conversation(frame.format(q=company.asked(row))), row["answers"]


FORMS: Sequence[RequestForm] = (
    RequestForm(
        "two_questions", 2.0, lambda row, company: _shuffled(row, company, "two", 1), long=True
    ),
    RequestForm(
        "three_questions", 1.0, lambda row, company: _shuffled(row, company, "three", 2), long=True
    ),
    RequestForm(
        "easy_before",
        2.0,
        lambda row, company: _together(company.text("two"), _easy(company), _fact_of(row, company)),
        long=True,
    ),
    RequestForm(
        "easy_behind",
        1.5,
        lambda row, company: _together(company.text("two"), _fact_of(row, company), _easy(company)),
        long=True,
    ),
    RequestForm("both_relations", 1.0, _both, facts=True, long=True),
    RequestForm("go_on", 2.0, _go_on),
    RequestForm("offered", 2.0, _offered),
    RequestForm("waiting", 1.0, _waiting),
    RequestForm("same_relation", 1.5, _same_relation, facts=True),
    RequestForm("other_relation", 1.5, _other_relation, facts=True),
    *(
        RequestForm(f"inside_{name}", 1.0, _task(name), facts=True, long=True)
        for name in TASK_KINDS
    ),
    RequestForm("inside_task", 1.0, _any_task, long=True),
)


def no_fact_rows(count: int, answered: Sequence[Row], seed: int = 0) -> list[Row]:
    """Return ``count`` rows that ask for no fact but look like rows that do; the same arguments
    give the same.

    ``answered`` are rows of facts with a statement, for the messages before the request; without
    them small talk."""
    draw = random.Random(f"{seed} no fact")
    kinds = list(_NO_FACT)
    made_rows: list[Row] = []
    seen: set[str] = set()
    while len(made_rows) < count:
        kind = draw.choice(kinds)
        messages, topic = _NO_FACT[kind](draw, answered)
        if (key := repr(messages)) in seen:
            continue
        seen.add(key)
        name = f"task/{kind}"
        made_rows.append(
            {
                "id": f"{name}/several-{len(made_rows)}",
                "group": f"{name}/{topic}",
                "kind": name,
                "form": "task",
                "messages": messages,
                "applies": False,
            }
        )
    return made_rows


def _filled(draw: random.Random, name: str) -> tuple[str, str]:
    """Return a text of ``no_fact`` with its gaps filled, and its topic."""
    topic: str = draw.choice(TEXTS["no_fact"][name])
    thing, person = (draw.choice(TEXTS["no_fact"][slot]) for slot in ("things", "people"))
    return topic.format(thing=thing, person=person), topic


def _dressed(draw: random.Random, text: str) -> str:
    """Return the text, sometimes in small letters or without its final mark."""
    cases: tuple[Callable[[str], str], ...] = (
        str,
        str,
        str,
        str.lower,
        lambda text: text.rstrip(".!?"),
    )
    return draw.choice(cases)(text)


def _keys(draw: random.Random, _: Sequence[Row]) -> tuple[list[Message], str]:
    text, topic = _filled(draw, "key_words")
    words = text.split()
    if draw.random() < 0.3:
        words = draw.sample(words, len(words))
    case = draw.choice((str, str, str.upper, str.title))
    return _conversation(case(" ".join(words)) + draw.choice(("", "", "", ":", "?", " pls"))), topic


def _open(name: str) -> Callable[[random.Random, Sequence[Row]], tuple[list[Message], str]]:
    def make(draw: random.Random, answered: Sequence[Row]) -> tuple[list[Message], str]:
        text, topic = _filled(draw, name)
        before = [] if draw.random() < ALONE else _exchange(draw, answered)
        return _conversation(*before, _dressed(draw, text)), topic

    return make


def _exchange(draw: random.Random, answered: Sequence[Row]) -> list[str]:
    """Return a question and its answer: a fact or small talk."""
    if not answered or draw.random() < 0.3:
        return list(draw.choice([*TURNS["small_talk"], *TURNS["greetings"]]))
    row = draw.choice(answered)
    families = training_families()
    [drawn] = draw.choices(families, [family.weight for family in families])
    reply = draw.choice(
        (row["statement"], row["statement"], row["answers"][0], draw.choice(TEXTS["refused"]))
    )
    return [worded(row, drawn, draw), reply]


def _follow_up(draw: random.Random, _: Sequence[Row]) -> tuple[list[Message], str]:
    request, _topic = _filled(draw, draw.choice(("requests", "requests", "key_words")))
    text, topic = _filled(draw, "follow_ups")
    return _conversation(
        request, draw.choice(TEXTS["no_fact"]["made"]), _dressed(draw, text)
    ), topic


def _closing(draw: random.Random, answered: Sequence[Row]) -> tuple[list[Message], str]:
    text, topic = _filled(draw, "closings")
    more = _filled(draw, "closings")[0] if draw.random() < 0.2 else ""
    return _conversation(
        *_exchange(draw, answered), _dressed(draw, f"{text} {more}".strip())
    ), topic


_NO_FACT: Mapping[str, Callable[[random.Random, Sequence[Row]], tuple[list[Message], str]]] = (
    MappingProxyType(
        {
            "key_words": _keys,
            "request": _open("requests"),
            "small_talk": _open("talk"),
            "after_request": _follow_up,
            "closing": _closing,
        }
    )
)
