"""Passages in front of the demonstration's questions: what a retriever would hand to a model that can read.

A passage states the fact in question among two others of the same kind, in plain sentences.  The controls have the same
length: one states three other facts of the kind, one gives the subject the answer of another.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from service.demo import Passage
from service.demo.world import Fact, build_world

SENTENCES = {
    "city_country": "{S} is a city in {a}.",
    "city_continent": "The city of {s} lies in {a}.",
    "city_region": "The city of {s} is in {a}.",
    "capital": "The capital of {s} is {a}.",
    "capital_of": "{S} is the capital of {a}.",
    "currency": "The currency of {s} is the {a}.",
    "language": "The language of {s} is {a}.",
    "country_continent": "{S} is a country in {a}.",
    "symbol": "The chemical symbol of {s} is {a}.",
    "number": "The atomic number of {s} is {a}.",
    "element": "{S} is the chemical symbol of {a}.",
}
COUNT = 3  # sentences of a passage


def sentence(fact: Fact, answer: str) -> str:
    """One sentence that gives ``answer`` for the fact's subject."""
    subject = fact.subject[:1].upper() + fact.subject[1:]
    return SENTENCES[fact.kind].format(s=fact.subject, S=subject, a=answer)


def passage(fact: Fact, which: Passage) -> str:
    """The passage, the same each time.  No other fact in it has the fact's group or one of its answers."""
    rng = random.Random(f"passage {fact.key}")
    others = _others(fact, rng)
    lines = [sentence(other, other.answers[0]) for other in others]
    if which != "unrelated":
        answer = fact.answers[0] if which == "right" else others[-1].answers[0]
        lines[rng.randrange(COUNT)] = sentence(fact, answer)
    return " ".join(lines[:COUNT])


def with_passages(rows: Sequence[dict[str, Any]], wanted: Sequence[Passage]) -> list[dict[str, Any]]:
    """Each row once for each of ``wanted``; where there is a passage, ``passage``, id and kind say which."""
    facts = {fact.key: fact for fact in build_world().facts}
    found = []
    for row in rows:
        fact = facts[row["id"].rpartition(":")[0]]
        for which in wanted:
            if which == "none":
                found.append(row)
                continue
            asked = {"prompt": f"{passage(fact, which)}\n\n{row['prompt']}", "passage": which}
            found.append(row | asked | {"id": f"{row['id']}+{which}", "kind": f"{row['kind']}+{which}"})
    return found


def _others(fact: Fact, rng: random.Random) -> list[Fact]:
    """Facts of the kind about other subjects with other answers, one more than a passage has sentences."""
    pool = _by_kind()[fact.kind, fact.split]
    found: list[Fact] = []
    while len(found) <= COUNT:
        other = rng.choice(pool)
        taken = {fact.group, *(one.group for one in found)}
        if other.group not in taken and not set(other.answers) & set(fact.answers) and other not in found:
            found.append(other)
    return found


@lru_cache(maxsize=1)
def _by_kind() -> dict[tuple[str, str], list[Fact]]:
    pools: dict[tuple[str, str], list[Fact]] = defaultdict(list)
    for fact in build_world().facts:
        pools[fact.kind, fact.split].append(fact)
    return dict(pools)
