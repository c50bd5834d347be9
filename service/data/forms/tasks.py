"""Requests that ask the model for no fact: chat, writing, translating, code, given texts, nonsense.

They are what the probe that tells a question of fact from the rest learns the rest from.  A kind makes a request of
templates and of lists of texts; many end in a question mark or name a city, since questions of fact do so, too.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.data.forms import task_given as given
from service.data.forms import task_handed as handed
from service.data.forms import task_making as making
from service.data.forms import task_talk as talk
from service.data.forms import task_texts as texts
from service.data.forms.texts import ENDINGS, FACTS, FORMATS, NOTES, PASSAGES, POLITE

SLOTS = {
    "topic": texts.TOPICS, "place": texts.PLACES, "person": texts.PEOPLE, "matter": texts.MATTERS, "role": texts.ROLES,
    "language": texts.LANGUAGES, "view": texts.OPINIONS, "ideas": texts.IDEAS, "trouble": texts.TROUBLES,
    "plan": texts.PLANS, "constraint": texts.CONSTRAINTS, "piece": texts.PIECES, "hello": texts.HELLOS,
    "chat": texts.CHAT, "bye": texts.BYES, "you": texts.ABOUT_YOU, "meta": texts.META, "name": given.FIRST_NAMES,
    "job": given.CODE_JOBS, "query": given.QUERIES,
}  # fmt: skip

# Wordings of questions that suit any request: were they left to the questions, they would give them away.
_AROUND_QUESTIONS = [
    one for one in (*POLITE, *FORMATS) if not any(word in one for word in ("tell me", "several answers"))
]


@dataclass(frozen=True)
class Request:
    """``topic`` is what requests of one wording, or of one text, have in common."""

    text: str
    topic: str


Make = Callable[[random.Random], Request]


@dataclass(frozen=True)
class Task:
    """``follows`` an answer to a question: it makes no sense alone."""

    name: str
    weight: float
    follows: bool
    make: Make


TASKS: dict[str, Task] = {}


def _task(weight: float = 1.0, *, follows: bool = False) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        name = make.__name__.removeprefix("_")
        TASKS[name] = Task(name, weight, follows, make)
        return make

    return add


@_task()
def _greeting(draw: random.Random) -> Request:
    return _worded(draw, talk.GREETING)


@_task()
def _chat(draw: random.Random) -> Request:
    return _worded(draw, talk.CHATTING)


@_task(0.7)
def _thanks_and_goodbye(draw: random.Random) -> Request:
    return _worded(draw, talk.LEAVING)


@_task(0.7)
def _about_you(draw: random.Random) -> Request:
    return _worded(draw, talk.ABOUT)


@_task(1.5)
def _writing(draw: random.Random) -> Request:
    return _worded(draw, making.WRITING)


@_task()
def _letter(draw: random.Random) -> Request:
    return _worded(draw, making.LETTERS)


@_task(1.5)
def _rewriting(draw: random.Random) -> Request:
    return _handed(draw, handed.REWRITING, draw.choice((*given.CLUMSY, *given.SENTENCES, *FACTS)))


@_task(1.3)
def _translating(draw: random.Random) -> Request:
    return _handed(draw, handed.TRANSLATING, draw.choice((*given.SENTENCES, *given.SENTENCES, *FACTS)))


@_task(1.2)
def _code(draw: random.Random) -> Request:
    return _worded(draw, making.CODING)


@_task()
def _code_help(draw: random.Random) -> Request:
    code = draw.choice(given.SNIPPETS)
    return _handed(draw, handed.CODE_HELP, draw.choice((code, f"```\n{code}\n```")))


@_task(1.5)
def _summary(draw: random.Random) -> Request:
    return _handed(draw, handed.SUMMARY, _text(draw), PASSAGES)


@_task()
def _extracting(draw: random.Random) -> Request:
    return _handed(draw, handed.EXTRACTING, _text(draw), PASSAGES)


@_task()
def _classifying(draw: random.Random) -> Request:
    return _handed(draw, handed.CLASSIFYING, " ".join(draw.sample(given.REVIEWS, draw.choice((1, 1, 2)))))


@_task()
def _brainstorm(draw: random.Random) -> Request:
    return _worded(draw, making.BRAINSTORM)


@_task()
def _advice(draw: random.Random) -> Request:
    return _worded(draw, talk.ADVICE)


@_task(0.7)
def _planning(draw: random.Random) -> Request:
    return _worded(draw, making.PLANNING)


@_task()
def _role_play(draw: random.Random) -> Request:
    return _worded(draw, talk.ROLE_PLAY)


@_task()
def _formatting(draw: random.Random) -> Request:
    things = draw.sample(given.THINGS, draw.randint(3, 8))
    pairs = [
        f"{name}, {draw.randint(18, 70)}, {draw.choice(texts.PLACES)}" for name in draw.sample(given.FIRST_NAMES, 3)
    ]
    shown = draw.choice((", ".join(things), "\n".join(things), " ".join(things), "\n".join(pairs), "; ".join(pairs)))
    return _handed(draw, handed.FORMATTING, shown)


@_task(0.7)
def _constraint(draw: random.Random) -> Request:
    return _worded(draw, making.CREATIVE)


@_task()
def _opinion(draw: random.Random) -> Request:
    return _worded(draw, talk.OPINION)


@_task(0.7)
def _meta(draw: random.Random) -> Request:
    return _worded(draw, talk.META_REQUESTS)


@_task(follows=True)
def _follow_up(draw: random.Random) -> Request:
    return _worded(draw, talk.FOLLOW_UPS)


@_task(0.6)
def _nonsense(draw: random.Random) -> Request:
    made = {
        "mash": lambda: " ".join("".join(draw.choices("asdfghjklq", k=5)) for _ in range(draw.randint(1, 5))),
        "letters": lambda: "".join(draw.choices(string.ascii_lowercase + "?", k=draw.randint(1, 14))),
        "marks": lambda: "".join(draw.choices("?!.,;:-#*", k=draw.randint(1, 9))),
        "repeated": lambda: draw.choice(("ha", "la", "bla ", "no ", "x", "test ", "uh ")) * draw.randint(2, 9),
        "faces": lambda: "".join(draw.choices("😀😂🎉👍🐱🌧❤🍕🙈🚀🇵🇪", k=draw.randint(1, 6))),
        "digits": lambda: "".join(draw.choices("0123456789 ", k=draw.randint(1, 12))) + draw.choice("017"),
        "salad": lambda: " ".join(draw.sample(given.THINGS, draw.randint(2, 6))) + draw.choice(("", "", "?", "...")),
        "paste": lambda: f"{draw.choice(given.FIRST_NAMES)}_{draw.randint(1, 99)}.{draw.choice(('png', 'txt'))}",
    }
    name = draw.choice(list(made))
    return Request(made[name]().strip(), name)


def _text(draw: random.Random) -> str:
    """A few sentences that belong together no more than news in brief do; a fact may be among them."""
    pool = (*given.SCENES, *NOTES, draw.choice(FACTS))
    return " ".join(draw.sample(pool, draw.choice((2, 3, 3, 4, 6, 10))))


def _worded(draw: random.Random, wordings: Sequence[str]) -> Request:
    text, topic = _filled(draw, wordings)
    return Request(_aside(draw, text), topic)


def _handed(draw: random.Random, wordings: Sequence[str], what: str, passages: Sequence[str] = ()) -> Request:
    """A request with what it is about, behind it or before it; the latter in the forms' layouts of passages, too."""
    head, topic = _filled(draw, wordings)
    if passages and draw.random() < 0.5:
        return Request(draw.choice(passages).format(p=what, q=head), topic)
    if head[-1] == "." and draw.random() < 0.6:
        head = f"{head[:-1]}:"
    elif head[-1].isalpha():
        head = f"{head}:"
    return Request(draw.choice(handed.HANDED).format(head=_aside(draw, head, 0.2), given=what), topic)


def _filled(draw: random.Random, wordings: Sequence[str]) -> tuple[str, str]:
    """A wording with its gaps filled, and its topic: its place, or what fills it where it has no words of its own."""
    place = draw.randrange(len(wordings))
    parts: list[str] = []
    filled: list[str] = []
    for words, slot, *_ in string.Formatter().parse(wordings[place]):
        parts.append(words)
        if slot:
            filled.append(draw.choice([one for one in SLOTS[slot] if one not in filled]))
            parts.append(filled[-1])
    text = "".join(parts)
    own = sum(character.isalpha() for words in parts if words not in filled for character in words)
    topic = f"{place}" if own else filled[-1].lower()
    if wordings[place][0].islower():
        upper, lower = text[0].upper() + text[1:], text
        return draw.choice(talk.LEADS).format(upper=upper, lower=lower), topic
    return (text[0].upper() + text[1:] if own else text), topic


def _aside(draw: random.Random, text: str, share: float = 0.4) -> str:
    """The text as somebody in a hurry, or somebody talkative, writes it; most often as it is."""
    if draw.random() > share:
        return text
    if draw.random() < 0.4:
        junk = "".join(draw.choices(string.ascii_lowercase + "!.;[]=+/ ", k=draw.randint(4, 24)))
        wording = draw.choice((*talk.ASIDES, *talk.ASIDES, *ENDINGS, *_AROUND_QUESTIONS))
        return wording.format(q=text, j=junk)
    return draw.choice((text.lower(), text.lower().rstrip("?.! "), text.rstrip(".?! "), f"{text} :)", f"Hey! {text}"))
