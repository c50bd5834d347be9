"""Makes rows that ask for no fact: chat, writing, translating, code, work on a text, nonsense.

The probe that recognises questions of fact learns the other class from them.  A kind combines
wordings with lists of texts.  Many requests end in a question mark or name a city, as questions of
fact do.  They stand alone, or in the same forms of conversation as questions, so that the form
reveals nothing.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from service.data.forms import TURNS, WORDINGS, Message, Question, Surroundings, Unfit, chosen

_SLOTS = {
    "topic": "topics",
    "place": "places",
    "person": "people",
    "matter": "matters",
    "role": "roles",
    "language": "languages",
    "view": "opinions",
    "ideas": "ideas",
    "trouble": "troubles",
    "plan": "plans",
    "constraint": "constraints",
    "piece": "pieces",
    "hello": "hellos",
    "chat": "chat",
    "bye": "byes",
    "you": "about_you",
    "meta": "meta",
    "name": "first_names",
    "job": "code_jobs",
    "query": "queries",
}
SLOTS: dict[str, list[str]] = {slot: WORDINGS[name] for slot, name in _SLOTS.items()}
WRITTEN = Path(__file__).with_name("requests.txt").read_text(encoding="utf-8").splitlines()
ALONE = 0.45
AROUND = ("system", "turns", "few_shot", "facts", "passage_unrelated", "context_1k")
BEFORE_FOLLOW_UP = ("turn_right", "turn_wrong", "turn_own", "turns_own", "turns_mixed")

# Wordings that suit any request. If questions alone had them, a probe could recognise a question by
# its wording.
_AROUND_QUESTIONS = [
    wording
    for wording in (*WORDINGS["polite"], *WORDINGS["formats"])
    if "tell me" not in wording and "several answers" not in wording
]


class TaskRequest(NamedTuple):
    """A request.  Requests with the same wording, or with the same text, have the same
    ``topic``."""

    text: str
    topic: str


Make = Callable[[random.Random], TaskRequest]


class Task(NamedTuple):
    """A kind of request.  One that ``follows`` an answer makes no sense alone."""

    name: str
    weight: float
    follows: bool
    make: Make


def task_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``count`` rows that ask for no fact; the same seed and count give the same."""
    draw = random.Random(f"{seed} tasks")
    tasks = draw.choices(list(TASKS.values()), [task.weight for task in TASKS.values()], k=count)
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    for number, task in enumerate(tasks):
        request = _new(draw, task, seen)
        messages = _conversation(draw, request.text, follows=task.follows)
        rows.append(_row(task.name, number, messages, request.topic))
    return rows


def written_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of up to ``count`` requests that were written one by one, alone and in
    conversations as those of ``task_rows``; the same seed and count give the same.

    No wording is used twice, so a probe learns from them what a request asks for, not its words
    (benchmarks/LOG.md)."""
    draw = random.Random(f"{seed} written")
    texts = draw.sample(WRITTEN, min(count, len(WRITTEN)))
    return [
        _row("written", number, _conversation(draw, text, follows=False), text)
        for number, text in enumerate(texts)
    ]


def _row(task: str, number: int, messages: list[Message], topic: str) -> dict[str, Any]:
    """Return the row of a request; those with the same topic are of one group."""
    kind = f"task/{task}"
    return {
        "id": f"{kind}/{number}",
        "messages": messages,
        "group": f"{kind}/{topic}",
        "kind": kind,
        "form": "task",
        "applies": False,
    }


def _new(draw: random.Random, task: Task, seen: set[str]) -> TaskRequest:
    for _ in range(31):
        request = task.make(draw)
        if request.text.lower() not in seen:
            break
    seen.add(request.text.lower())
    return request


def _conversation(draw: random.Random, request: str, *, follows: bool) -> list[Message]:
    if not follows and draw.random() < ALONE:
        return [{"role": "user", "content": request}]
    forms = chosen(BEFORE_FOLLOW_UP if follows else AROUND)
    question = Question(
        id="", text=request, answer="", model_answer="", statement="", group="", kind="task"
    )
    pool = draw.sample(TURNS["asked"], len(TURNS["asked"]))
    neighbours = [
        Question("", text, answer, reply, reply, text, "fact") for text, answer, reply in pool
    ]
    around = Surroundings(draw, same_kind=neighbours[::2], other_kinds=neighbours[1::2])
    while True:  # a long passage may need an answer, which a request has not: draw again
        [form] = draw.choices(forms, [candidate.weight for candidate in forms])
        with suppress(Unfit):
            return form.make(question, around)


def _code_help(draw: random.Random) -> TaskRequest:
    code = draw.choice(WORDINGS["snippets"])
    return _handed(draw, "code_help", draw.choice((code, f"```\n{code}\n```")))


def _formatting(draw: random.Random) -> TaskRequest:
    things = draw.sample(WORDINGS["things"], draw.randint(3, 8))
    names = draw.sample(WORDINGS["first_names"], 3)
    pairs = [f"{name}, {draw.randint(18, 70)}, {draw.choice(WORDINGS['places'])}" for name in names]
    shown = draw.choice(
        (", ".join(things), "\n".join(things), " ".join(things), "\n".join(pairs), "; ".join(pairs))
    )
    return _handed(draw, "formatting", shown)


def _nonsense(draw: random.Random) -> TaskRequest:
    makers = {
        "mash": lambda: " ".join(
            "".join(draw.choices("asdfghjklq", k=5)) for _ in range(draw.randint(1, 5))
        ),
        "letters": lambda: "".join(
            draw.choices(string.ascii_lowercase + "?", k=draw.randint(1, 14))
        ),
        "marks": lambda: "".join(draw.choices("?!.,;:-#*", k=draw.randint(1, 9))),
        "repeated": lambda: (
            draw.choice(("ha", "la", "bla ", "no ", "x", "test ", "uh ")) * draw.randint(2, 9)
        ),
        "faces": lambda: "".join(draw.choices("😀😂🎉👍🐱🌧❤🍕🙈🚀🇵🇪", k=draw.randint(1, 6))),
        "digits": lambda: (
            "".join(draw.choices("0123456789 ", k=draw.randint(1, 12))) + draw.choice("017")
        ),
        "salad": lambda: (
            " ".join(draw.sample(WORDINGS["things"], draw.randint(2, 6)))
            + draw.choice(("", "", "?", "..."))
        ),
        "paste": lambda: (
            f"{draw.choice(WORDINGS['first_names'])}_{draw.randint(1, 99)}."
            f"{draw.choice(('png', 'txt'))}"
        ),
    }
    name = draw.choice(list(makers))
    return TaskRequest(makers[name]().strip(), name)


def _one_of(draw: random.Random, *wordings: str) -> str:
    return draw.choice([text for name in wordings for text in WORDINGS[name]])


def _reviews(draw: random.Random) -> str:
    return " ".join(draw.sample(WORDINGS["reviews"], draw.choice((1, 1, 2))))


def _text(draw: random.Random) -> str:
    """Return a few unrelated sentences; one may be a fact."""
    pool = (*WORDINGS["scenes"], *WORDINGS["notes"], draw.choice(WORDINGS["facts"]))
    return " ".join(draw.sample(pool, draw.choice((2, 3, 3, 4, 6, 10))))


def _worded(draw: random.Random, wordings: str) -> TaskRequest:
    text, topic = _filled(draw, WORDINGS[wordings])
    return TaskRequest(_aside(draw, text), topic)


def _handed(
    draw: random.Random, wordings: str, what: str, *, in_passages: bool = False
) -> TaskRequest:
    """Return a request with the text it is about: behind it, before it, or laid out as a passage of
    the forms."""
    head, topic = _filled(draw, WORDINGS[wordings])
    if in_passages and draw.random() < 0.5:
        return TaskRequest(draw.choice(WORDINGS["passages"]).format(p=what, q=head), topic)
    if head[-1] == "." and draw.random() < 0.6:
        head = f"{head[:-1]}:"
    elif head[-1].isalpha():
        head = f"{head}:"
    return TaskRequest(
        draw.choice(WORDINGS["handed"]).format(head=_aside(draw, head, 0.2), given=what), topic
    )


def _filled(draw: random.Random, wordings: Sequence[str]) -> tuple[str, str]:
    """Return a wording with its gaps filled, and its topic: its number, or its last filler if it is
    only gaps."""
    number = draw.randrange(len(wordings))
    parts: list[str] = []
    filled: list[str] = []
    for words, slot, *_ in string.Formatter().parse(wordings[number]):
        parts.append(words)
        if slot:
            filled.append(draw.choice([filler for filler in SLOTS[slot] if filler not in filled]))
            parts.append(filled[-1])
    text = "".join(parts)
    own_letters = sum(
        character.isalpha() for words in parts if words not in filled for character in words
    )
    topic = f"{number}" if own_letters else filled[-1].lower()
    if wordings[number][0].islower():
        upper, lower = text[0].upper() + text[1:], text
        return draw.choice(WORDINGS["leads"]).format(upper=upper, lower=lower), topic
    return (text[0].upper() + text[1:] if own_letters else text), topic


def _aside(draw: random.Random, text: str, share: float = 0.4) -> str:
    """Return the text, with probability ``share`` with chatter or junk around it, or carelessly
    written."""
    if draw.random() > share:
        return text
    if draw.random() < 0.4:
        junk = "".join(draw.choices(string.ascii_lowercase + "!.;[]=+/ ", k=draw.randint(4, 24)))
        wording = draw.choice(
            (*WORDINGS["asides"], *WORDINGS["asides"], *WORDINGS["endings"], *_AROUND_QUESTIONS)
        )
        return wording.format(q=text, j=junk)
    return draw.choice(
        (
            text.lower(),
            text.lower().rstrip("?.! "),
            text.rstrip(".?! "),
            f"{text} :)",
            f"Hey! {text}",
        )
    )


def _of(wordings: str) -> Make:
    return lambda draw: _worded(draw, wordings)


_TASKS: Sequence[tuple[str, float, Make]] = (
    ("greeting", 1.0, _of("greeting")),
    ("chat", 1.0, _of("chatting")),
    ("thanks_and_goodbye", 0.7, _of("leaving")),
    ("about_you", 0.7, _of("about")),
    ("writing", 1.5, _of("writing")),
    ("letter", 1.0, _of("letters")),
    (
        "rewriting",
        1.5,
        lambda draw: _handed(draw, "rewriting", _one_of(draw, "clumsy", "sentences", "facts")),
    ),
    (
        "translating",
        1.3,
        lambda draw: _handed(draw, "translating", _one_of(draw, "sentences", "sentences", "facts")),
    ),
    ("code", 1.2, _of("coding")),
    ("code_help", 1.0, _code_help),
    ("summary", 1.5, lambda draw: _handed(draw, "summary", _text(draw), in_passages=True)),
    ("extracting", 1.0, lambda draw: _handed(draw, "extracting", _text(draw), in_passages=True)),
    ("classifying", 1.0, lambda draw: _handed(draw, "classifying", _reviews(draw))),
    ("brainstorm", 1.0, _of("brainstorm")),
    ("advice", 1.0, _of("advice")),
    ("planning", 0.7, _of("planning")),
    ("role_play", 1.0, _of("role_play")),
    ("formatting", 1.0, _formatting),
    ("constraint", 0.7, _of("creative")),
    ("opinion", 1.0, _of("opinion")),
    ("meta", 0.7, _of("meta_requests")),
    ("follow_up", 1.0, _of("follow_ups")),
    ("nonsense", 0.6, _nonsense),
)
TASKS = {name: Task(name, weight, name == "follow_up", make) for name, weight, make in _TASKS}
