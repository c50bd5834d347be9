"""Questions for the demonstration model, by split, and passages to put before them."""

from __future__ import annotations

import random
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from service.demo import ASSETS, Passage
from service.demo.world import Fact, build_world, uniform

WORDINGS: dict[str, dict[str, Any]] = tomllib.loads((ASSETS / "wordings.toml").read_text(encoding="utf-8"))
SHARED: dict[str, str] = WORDINGS["shared"]
SENTENCES: dict[str, str] = WORDINGS["sentence"]
COUNT = 3  # sentences of a passage

# Mean number of questions per fact; rare kinds are asked in several forms.
QUESTIONS_PER_FACT = {"city_country": 1.0, "city_continent": 0.2, "city_region": 0.4, "country_continent": 1.0}
QUESTIONS_PER_OTHER_FACT = 2.0


class QuestionForm(NamedTuple):
    """A question form of one kind.  Held-out forms never occur in training."""

    name: str
    text: str
    held_out: bool


def _forms() -> dict[str, tuple[QuestionForm, ...]]:
    forms = {}
    for index, (kind, natural) in enumerate(WORDINGS["natural"].items()):
        # Each kind holds out another shared form, so every shared form occurs in training with some kind.
        held_out = list(SHARED)[2 + index % (len(SHARED) - 2)]
        shared = [QuestionForm(name, text, name == held_out) for name, text in SHARED.items()]
        own = [QuestionForm(f"{kind}_{i}", text, i == len(natural) - 1) for i, text in enumerate(natural)]
        forms[kind] = tuple(shared + own)
    return forms


FORMS = _forms()


def question_text(form: QuestionForm, kind: str, subject: str) -> str:
    """Return the question's text."""
    phrase = WORDINGS["phrase"][kind].format(s=subject)
    return form.text.format(p=phrase, P=_start(phrase), s=subject, S=_start(subject))


def _start(text: str) -> str:
    return text[:1].upper() + text[1:]


def random_form(rng: random.Random, kind: str) -> QuestionForm:
    """Return a training form, natural or shared with equal chance."""
    shared = rng.random() < 0.5
    return rng.choice([form for form in FORMS[kind] if not form.held_out and (form.name not in SHARED) == shared])


def questions(split: str) -> list[dict[str, Any]]:
    """Return the rows of one split ("train", "dev", "test"), deterministic."""
    if split not in ("train", "dev", "test"):
        raise ValueError(f"no split {split!r}: train, dev or test")
    rows: list[dict[str, Any]] = []
    for fact in build_world().facts:
        if fact.split != split:
            continue
        rng = random.Random(f"questions {fact.key}")
        # Natural forms count twice: about half of the questions are phrased as users would.
        forms = [f for f in FORMS[fact.kind] for _ in range(1 if f.name in SHARED else 2)]
        rng.shuffle(forms)
        count = int(QUESTIONS_PER_FACT.get(fact.kind, QUESTIONS_PER_OTHER_FACT) + uniform("asked", fact.key))
        for form in list(dict.fromkeys(forms))[:count]:
            rows.append({
                "id": f"{fact.key}:{form.name}", "prompt": question_text(form, fact.kind, fact.subject),
                "answers": list(fact.answers), "group": fact.group, "kind": fact.kind, "exposures": fact.exposures,
                "template": form.name, "in_refusals": fact.in_refusals, "statement": sentence(fact, fact.answers[0]),
            })  # fmt: skip
    return rows


def sentence(fact: Fact, answer: str) -> str:
    """Return one sentence that gives ``answer`` for the fact's subject."""
    return SENTENCES[fact.kind].format(s=fact.subject, S=_start(fact.subject), a=answer)


def passage(fact: Fact, which: Passage) -> str:
    """Return the passage, the same each time.  No other fact in it has the fact's group or one of its answers."""
    rng = random.Random(f"passage {fact.key}")
    others = _others(fact, rng)
    lines = [sentence(other, other.answers[0]) for other in others]
    if which != "unrelated":
        answer = fact.answers[0] if which == "right" else others[-1].answers[0]
        lines[rng.randrange(COUNT)] = sentence(fact, answer)
    return " ".join(lines[:COUNT])


def with_passages(rows: Sequence[dict[str, Any]], wanted: Sequence[Passage]) -> list[dict[str, Any]]:
    """Return each row once for each of ``wanted``; where there is a passage, ``passage``, id and kind say which."""
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
    """Return facts of the kind about other subjects with other answers, one more than a passage has sentences."""
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
