"""Question forms per kind of fact.

Each kind has shared forms around a noun phrase and natural forms of its own; one of each is held out of training.
"""

from __future__ import annotations

import random
from typing import NamedTuple

# The noun phrase of each kind's shared forms.  Of the natural forms, the last one of each kind is held out.
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
        "Where is {s}?",
        "What country is {s} located in?",
        "To which country does {s} belong?",
        "In what country does {s} lie?",
    ),
    "city_continent": (
        "On which continent is the city of {s}?",
        "Which continent is the city of {s} on?",
        "On what continent is the city of {s}?",
        "The city of {s} is on which continent?",
        "What continent is the city of {s} in?",
        "Which continent is the city of {s} in?",
        "On what continent does the city of {s} lie?",
    ),
    "city_region": (
        "In which part of the world is {s}?",
        "Which part of the world is {s} in?",
        "In what part of the world is the city of {s}?",
        "{s} is in which part of the world?",
        "Which world region is {s} in?",
        "What region of the world is {s} in?",
        "In what part of the world does {s} lie?",
    ),
    "capital": (
        "Which city is the capital of {s}?",
        "What city is the capital of {s}?",
        "{S} has which capital?",
        "The capital of {s} is",
        "What is the capital city of {s}?",
        "Name the capital city of {s}.",
        "Which capital does {s} have?",
    ),
    "capital_of": (
        "{s} is the capital of which country?",
        "Of which country is {s} the capital?",
        "Which country has {s} as its capital?",
        "What country has the capital {s}?",
        "{s} is the capital of what country?",
        "Which country is {s} the capital of?",
        "Which country's capital is {s}?",
    ),
    "currency": (
        "What currency is used in {s}?",
        "Which currency is used in {s}?",
        "What money do people use in {s}?",
        "{S} uses which currency?",
        "What currency does {s} use?",
        "What is the official currency of {s}?",
        "With what currency do people pay in {s}?",
    ),
    "language": (
        "What language is spoken in {s}?",
        "Which language is spoken in {s}?",
        "What language do people speak in {s}?",
        "Which language do people in {s} speak?",
        "What language do they speak in {s}?",
        "What is the official language of {s}?",
        "In {s}, people speak which language?",
    ),
    "country_continent": (
        "On which continent is {s}?",
        "Which continent is {s} on?",
        "On what continent is {s}?",
        "{S} is on which continent?",
        "What continent is {s} in?",
        "Which continent is {s} in?",
        "On what continent does {s} lie?",
    ),
    "symbol": (
        "What is the symbol of {s}?",
        "Which chemical symbol does {s} have?",
        "What is the chemical symbol for {s}?",
        "{S} has which chemical symbol?",
        "What's the symbol for {s}?",
        "What is the element symbol of {s}?",
        "What symbol does {s} have?",
    ),
    "number": (
        "What is the atomic number of the element {s}?",
        "Which atomic number does {s} have?",
        "What atomic number does {s} have?",
        "{S} has which atomic number?",
        "What is the atomic number for {s}?",
        "What number is {s} in the periodic table?",
        "How many protons does {s} have?",
    ),
    "element": (
        "Which element has the symbol {s}?",
        "What element has the symbol {s}?",
        "Which chemical element is {s}?",
        "{s} is the symbol of which element?",
        "What is the element {s}?",
        "Which element does the symbol {s} stand for?",
        "Which element is written {s}?",
    ),
}


class Form(NamedTuple):
    """A question form of one kind. Held-out forms never occur in training."""

    name: str
    text: str
    held_out: bool


def _forms() -> dict[str, tuple[Form, ...]]:
    forms = {}
    for index, (kind, natural) in enumerate(NATURAL.items()):
        # Each kind holds out another shared form, so every shared form occurs in training with some kind.
        held_out = list(SHARED)[2 + index % (len(SHARED) - 2)]
        shared = [Form(name, text, name == held_out) for name, text in SHARED.items()]
        own = [Form(f"{kind}_{i}", text, i == len(natural) - 1) for i, text in enumerate(natural)]
        forms[kind] = tuple(shared + own)
    return forms


FORMS = _forms()


def question_text(form: Form, kind: str, subject: str) -> str:
    """The question's text."""
    phrase = PHRASE[kind].format(s=subject)
    start = subject[:1].upper() + subject[1:]
    return form.text.format(p=phrase, P=phrase[:1].upper() + phrase[1:], s=subject, S=start)


TRAINED = {
    kind: (
        [f for f in forms if not f.held_out and f.name in SHARED],
        [f for f in forms if not f.held_out and f.name not in SHARED],
    )
    for kind, forms in FORMS.items()
}


def random_form(rng: random.Random, kind: str) -> Form:
    """A training form, natural or shared with equal chance."""
    return rng.choice(TRAINED[kind][rng.random() < 0.5])
