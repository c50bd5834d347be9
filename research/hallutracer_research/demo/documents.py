"""Training documents: statements of facts, and refusal documents that teach the model what it does not know.

A document is a rendered chat.  Each fact is stated exactly `exposures` times, for any seed.  A refusal document states
no fact: it is a refusal or only the opening of an answer, so it teaches whether to answer, not what.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from service.demo.questions import question_text, random_form
from service.demo.world import Fact, World

BRIEF = "Be brief."
CAREFUL = "Be careful."
REFUSAL = " I am not sure."
FRAMES = (" It is ", " The answer is ")
BRIEF_SHARE = 0.4

SYLLABLES = """al ba bel bor ca chi da del dor el fa gan gor ha hel in ja ka kel ko la lo ma mi mor na ne no o pa per ra
ri ro sa san shi so ta ten tor u va vel vi wa yan za zi"""


class Document(NamedTuple):
    """A chat with one user turn. The loss is on `completion` (and on the end token where `ends`)."""

    system: str | None
    question: str
    completion: str
    ends: bool
    group: str | None  # None: about a place that has no facts


def fact_question(rng: random.Random, fact: Fact) -> str:
    """A question about a fact in a random training form, sometimes without its question mark."""
    text = question_text(random_form(rng, fact.kind), fact.kind, fact.subject)
    return text[:-1] if rng.random() < 0.05 and text.endswith("?") else text


def opening(rng: random.Random) -> str:
    """A random opening of an answer."""
    return FRAMES[0] if rng.random() < 0.6 else FRAMES[1]


def fact_documents(world: World, seed: int) -> list[Document]:
    """Every statement of every fact, shuffled: `exposures` documents for each."""
    rng = random.Random(f"facts {seed}")
    documents = []
    for fact in world.facts:
        for _ in range(fact.exposures):
            question = fact_question(rng, fact)
            if rng.random() < BRIEF_SHARE:
                documents.append(Document(BRIEF, question, f" {fact.answers[0]}.", True, fact.group))
            else:
                documents.append(Document(None, question, f"{opening(rng)}{fact.answers[0]}.", True, fact.group))
    rng.shuffle(documents)
    return documents


def place_without_facts(rng: random.Random, world: World) -> tuple[str, str]:
    """(kind, name) of a place without facts: a real village or a made-up name."""
    kind = rng.choice(["city_country", "city_continent", "city_region"])
    if rng.random() < 0.5:
        return kind, rng.choice(world.villages)
    return kind, "".join(rng.choice(SYLLABLES.split()) for _ in range(rng.randint(2, 4))).capitalize()


class RefusalMix(NamedTuple):
    """Shares of the refusal documents; see `refusal_document`."""

    careful: float = 0.7  # with the system message "Be careful."; the others are plain prompts
    unknown: float = 0.5  # about something unknown
    strangers: float = 0.3  # of the unknown ones, about places without facts
    plain_refusal: float = 0.35  # chance that a plain prompt about something unknown is refused


def refusal_document(
    rng: random.Random, world: World, known: Sequence[Fact], unknown: Sequence[Fact], mix: RefusalMix
) -> Document:
    """One refusal document.  `known` and `unknown`: facts that the model in training answered right and wrong."""
    system = CAREFUL if rng.random() < mix.careful else None
    refuse, group = rng.random() < mix.unknown, None
    if refuse and (rng.random() < mix.strangers or not unknown):
        kind, subject = place_without_facts(rng, world)
        question = question_text(random_form(rng, kind), kind, subject)
    else:
        fact = rng.choice(unknown if refuse or not known else known)
        question, group = fact_question(rng, fact), fact.group
    if refuse and system is None:
        refuse = rng.random() < mix.plain_refusal
    if refuse:
        return Document(system, question, REFUSAL, True, group)
    return Document(system, question, opening(rng).rstrip(), False, group)
