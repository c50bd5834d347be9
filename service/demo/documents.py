"""Question forms and training documents.

A document is a rendered chat. Facts are stated exactly `exposures` times, whatever the seed. Refusal documents never
state a fact: they are a refusal, or only the opening words of an answer, so they teach whether to answer and not what.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from service.demo.world import Fact, World

BRIEF = "Be brief."
CAREFUL = "Be careful."
REFUSAL = " I am not sure."
FRAMES = (" It is ", " The answer is ")
BRIEF_SHARE = 0.4

# A noun phrase per kind makes the shared forms; natural forms follow, the last one of each kind is held out.
PHRASE = {
    "city_country": "the country of the city of {s}",
    "city_continent": "the continent of the city of {s}",
    "city_region": "the part of the world of the city of {s}",
    "capital": "the capital of {s}",
    "capital_of": "the country with the capital {s}",
    "currency": "the currency of {s}",
    "language": "the language of {s}",
    "country_continent": "the continent of {s}",
    "symbol": "the chemical symbol of {s}",
    "number": "the atomic number of {s}",
    "element": "the element with the symbol {s}",
}
SHARED = {
    "what": "What is {p}?",
    "name": "Name {p}.",
    "tell": "Tell me {p}.",
    "please": "Please give me {p}.",
    "know": "Do you know {p}?",
    "could": "Could you tell me {p}?",
    "like": "I would like to know {p}.",
    "can": "Can you say what {p} is?",
    "bare": "{P}?",
    "whats": "What's {p}?",
    "wonder": "I wonder what {p} is.",
}
NATURAL = {
    "city_country": (
        "In which country is the city of {s}?",
        "Which country is {s} in?",
        "What country is {s} in?",
        "In which country is {s}?",
        "{s} is a city in which country?",
        "The city of {s} is in the country of",
        "In what country does {s} lie?",
    ),
    "city_continent": (
        "On which continent is the city of {s}?",
        "Which continent is the city of {s} on?",
        "On what continent is the city of {s}?",
        "The city of {s} is on which continent?",
        "On what continent does the city of {s} lie?",
    ),
    "city_region": (
        "In which part of the world is {s}?",
        "Which part of the world is {s} in?",
        "In what part of the world is the city of {s}?",
        "{s} is in which part of the world?",
        "In what part of the world does {s} lie?",
    ),
    "capital": (
        "Which city is the capital of {s}?",
        "What city is the capital of {s}?",
        "{S} has which capital?",
        "The capital of {s} is",
        "Which capital does {s} have?",
    ),
    "capital_of": (
        "{s} is the capital of which country?",
        "Of which country is {s} the capital?",
        "Which country has {s} as its capital?",
        "What country has the capital {s}?",
        "Which country's capital is {s}?",
    ),
    "currency": (
        "What currency is used in {s}?",
        "Which currency is used in {s}?",
        "What money do people use in {s}?",
        "{S} uses which currency?",
        "With what currency do people pay in {s}?",
    ),
    "language": (
        "What language is spoken in {s}?",
        "Which language is spoken in {s}?",
        "What language do people speak in {s}?",
        "Which language do people in {s} speak?",
        "In {s}, people speak which language?",
    ),
    "country_continent": (
        "On which continent is {s}?",
        "Which continent is {s} on?",
        "On what continent is {s}?",
        "{S} is on which continent?",
        "On what continent does {s} lie?",
    ),
    "symbol": (
        "What is the symbol of {s}?",
        "Which chemical symbol does {s} have?",
        "What is the chemical symbol for {s}?",
        "{S} has which chemical symbol?",
        "What symbol does {s} have?",
    ),
    "number": (
        "What is the atomic number of the element {s}?",
        "Which atomic number does {s} have?",
        "What atomic number does {s} have?",
        "{S} has which atomic number?",
        "How many protons does {s} have?",
    ),
    "element": (
        "Which element has the symbol {s}?",
        "What element has the symbol {s}?",
        "Which chemical element is {s}?",
        "{s} is the symbol of which element?",
        "Which element is written {s}?",
    ),
}
MADE_UP = ("al ba bel bor ca chi da del dor el fa gan gor ha hel in ja ka kel ko la lo ma mi mor na ne no o pa per ra "
           "ri ro sa san shi so ta ten tor u va vel vi wa yan za zi").split()  # fmt: skip


class Form(NamedTuple):
    """A question form of one kind. Held-out forms never occur in training."""

    name: str
    text: str
    held_out: bool


class Document(NamedTuple):
    """A chat with one user turn. The loss is on `completion` (and on the end token where `ends`)."""

    system: str | None
    question: str
    completion: str
    ends: bool
    group: str | None  # None: about a place that has no facts


def _forms() -> dict[str, tuple[Form, ...]]:
    forms = {}
    for index, (kind, natural) in enumerate(NATURAL.items()):
        # A different shared form is held out for each kind, so no held-out form is unheard of altogether.
        unseen = list(SHARED)[2 + index % (len(SHARED) - 2)]
        shared = [Form(name, text, name == unseen) for name, text in SHARED.items()]
        own = [Form(f"{kind}_{i}", text, i == len(natural) - 1) for i, text in enumerate(natural)]
        forms[kind] = tuple(shared + own)
    return forms


FORMS = _forms()


def ask(form: Form, kind: str, subject: str) -> str:
    """The question's text."""
    phrase = PHRASE[kind].format(s=subject)
    start = subject[:1].upper() + subject[1:]
    return form.text.format(p=phrase, P=phrase[:1].upper() + phrase[1:], s=subject, S=start)


def any_form(rng: random.Random, kind: str) -> Form:
    """A training form: half the time a natural one, half the time a shared one."""
    own = rng.random() < 0.5
    return rng.choice([f for f in FORMS[kind] if not f.held_out and (f.name not in SHARED) == own])


def question_of(rng: random.Random, fact: Fact) -> str:
    """A question about a fact in a random training form; sometimes without its question mark, as people type."""
    text = ask(any_form(rng, fact.kind), fact.kind, fact.subject)
    return text[:-1] if rng.random() < 0.05 and text.endswith("?") else text


def opening(rng: random.Random) -> str:
    """How an answer starts."""
    return FRAMES[0] if rng.random() < 0.6 else FRAMES[1]


def fact_documents(world: World, seed: int) -> list[Document]:
    """Every statement of every fact, shuffled: `exposures` documents for each."""
    rng = random.Random(f"facts {seed}")
    documents = []
    for fact in world.facts:
        for _ in range(fact.exposures):
            question = question_of(rng, fact)
            if rng.random() < BRIEF_SHARE:
                documents.append(Document(BRIEF, question, f" {fact.answers[0]}.", True, fact.group))
            else:
                documents.append(Document(None, question, f"{opening(rng)}{fact.answers[0]}.", True, fact.group))
    rng.shuffle(documents)
    return documents


def stranger(rng: random.Random, world: World) -> tuple[str, str]:
    """(kind, name) of something no document tells about: a real village or a made-up place."""
    kind = rng.choice(["city_country", "city_continent", "city_region"])
    if rng.random() < 0.5:
        return kind, rng.choice(world.villages)
    return kind, "".join(rng.choice(MADE_UP) for _ in range(rng.randint(2, 4))).capitalize()


class RefusalMix(NamedTuple):
    """Shares of the refusal documents; see `refusal_document`."""

    careful: float = 0.7  # with the system message "Be careful."; the others are plain prompts
    unknown: float = 0.5  # of these, about something unknown
    strangers: float = 0.3  # of the unknown ones, about places that have no facts
    plain_refusal: float = 0.35  # chance that a plain prompt about something unknown is refused


def refusal_document(
    rng: random.Random, world: World, known: Sequence[Fact], unknown: Sequence[Fact], mix: RefusalMix
) -> Document:
    """One document that teaches to tell known from unknown.

    `known` and `unknown` are facts that the model being trained just answered rightly and wrongly.
    """
    system = CAREFUL if rng.random() < mix.careful else None
    refuse, group = rng.random() < mix.unknown, None
    if refuse and (rng.random() < mix.strangers or not unknown):
        kind, subject = stranger(rng, world)
        question = ask(any_form(rng, kind), kind, subject)
    else:
        fact = rng.choice(unknown if refuse or not known else known)
        question, group = question_of(rng, fact), fact.group
    if refuse and system is None:
        refuse = rng.random() < mix.plain_refusal
    if refuse:
        return Document(system, question, REFUSAL, True, group)
    return Document(system, question, opening(rng).rstrip(), False, group)
