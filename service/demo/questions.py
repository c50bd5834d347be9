"""Makes the facts of the demonstration model, questions about them by split, and passages to put
before a question.

Every choice is a hash of a name, so the world is the same everywhere.  ``assets/ATTRIBUTION.md``
names the three public sources of the facts."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

from scipy.cluster.hierarchy import DisjointSet

from service.demo import ASSETS, Passage

SPLITS = (("train", 0.50), ("dev", 0.20), ("test", 0.30))
UNSTATED_SHARE = 0.08  # facts that no document states
REFUSAL_FREE_SHARE = 0.25  # groups that never appear in a refusal document
DOCUMENTS_OF_FACTS = 165_000

# Relative number of exposures per kind: a fact that is easy to guess (a continent) is stated less
# often, so that the answers of every kind are partly right and partly wrong.
MEAN_EXPOSURES = {
    "city_country": 10.0,
    "city_continent": 5.0,
    "city_region": 9.0,
    "capital": 18.0,
    "capital_of": 18.0,
    "currency": 13.0,
    "language": 12.0,
    "country_continent": 7.0,
    "symbol": 20.0,
    "number": 20.0,
    "element": 20.0,
}
SPREAD = {
    "city": 1.7,
    "country": 1.0,
    "element": 0.8,
}  # sigma of the log-normal factor on a fact's exposures
# Elements have no population; these count as well known.
EVERYDAY = """hydrogen helium carbon nitrogen oxygen sodium magnesium aluminium silicon sulfur
chlorine potassium calcium iron nickel copper zinc silver tin iodine platinum gold mercury lead
uranium"""
ARTICLE = (
    "United ",
    "Netherlands",
    "Philippines",
    "Bahamas",
    "Gambia",
    "Maldives",
    "Seychelles",
    "Central African",
)
FACTS_FILE = ASSETS / "facts.json.gz"
T = TypeVar("T")


class City(NamedTuple):
    """A city.  `countries`: codes of all countries with a place of this name, this city's own
    first."""

    name: str
    countries: tuple[str, ...]
    population: int


class Country(NamedTuple):
    """A country or territory. `population` is the sum over its GeoNames places of at least 15,000
    people."""

    code: str
    name: str
    capitals: tuple[str, ...]
    continent: str
    region: str
    currencies: tuple[str, ...]
    languages: tuple[str, ...]
    population: int


class Element(NamedTuple):
    """A chemical element; `name` is in lower case, as inside a sentence."""

    name: str
    symbol: str
    number: int


class Facts(NamedTuple):
    """All facts.  `villages` are names of real small places; no fact is about them."""

    cities: tuple[City, ...]
    countries: tuple[Country, ...]
    elements: tuple[Element, ...]
    villages: tuple[str, ...]


def load_facts(path: Path = FACTS_FILE) -> Facts:
    """Return the facts of the committed asset."""
    data: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))

    def records(kind: Callable[..., T], name: str) -> tuple[T, ...]:
        return tuple(kind(**_with_tuples(row)) for row in data[name])

    return Facts(
        records(City, "cities"),
        records(Country, "countries"),
        records(Element, "elements"),
        tuple(data["villages"]),
    )


def _with_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


@dataclass(frozen=True)
class Fact:
    """One fact: `kind` names the relation, `answers` the accepted answers (documents state the
    first)."""

    kind: str
    subject: str
    answers: tuple[str, ...]
    group: str
    split: str
    in_refusals: bool
    exposures: int
    weight: float

    @property
    def key(self) -> str:
        """Return KIND:SUBJECT, unique."""
        return f"{self.kind}:{self.subject}"


class World(NamedTuple):
    """All facts, and names of places without facts."""

    facts: tuple[Fact, ...]
    villages: tuple[str, ...]


def uniform(*parts: str) -> float:
    """Return a number in (0, 1), determined by ``parts`` alone."""
    digest = hashlib.blake2b("\x1f".join(parts).encode("utf-8"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2.0**64


def split_of(group: str) -> str:
    """Return the split of a group: about half train, a fifth dev, the rest test."""
    position, edge = uniform("split", group), 0.0
    for name, share in SPLITS:
        edge += share
        if position < edge:
            return name
    return SPLITS[-1][0]


def _group_names(facts: Facts) -> dict[str, str]:
    """Return groups by first node: a country, its capitals and all cities of that name and
    namesakes form one."""
    groups: DisjointSet[str] = DisjointSet()
    for country in facts.countries:
        groups.add(node := "country:" + country.code)
        for name in (country.name, *country.capitals):
            groups.add("name:" + name.casefold())
            groups.merge("name:" + name.casefold(), node)
    return {node: min(members) for members in groups.subsets() for node in members}


def with_article(name: str) -> str:
    """Return a country's name as it stands inside a sentence ("the United States")."""
    return (
        f"the {name}"
        if name.startswith(ARTICLE) or name.endswith((" Islands", " Republic"))
        else name
    )


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v for v in values if v))


def _raw(facts: Facts) -> Iterable[tuple[str, str, tuple[str, ...], str, float, str]]:
    """Yield (kind, subject, answers, group node, prominence, entity type)."""
    by_code = {c.code: c for c in facts.countries}
    owners: dict[str, list[str]] = defaultdict(list)
    for country in facts.countries:
        for capital in country.capitals:
            owners[capital].append(country.name)
    for city in facts.cities:
        homes = [by_code[code] for code in city.countries]
        node, prominence = "name:" + city.name.casefold(), city.population**0.5
        if city.name in owners:
            prominence *= 2.5
        for kind, field in (
            ("city_country", "name"),
            ("city_continent", "continent"),
            ("city_region", "region"),
        ):
            yield (
                kind,
                city.name,
                _distinct(getattr(home, field) for home in homes),
                node,
                prominence,
                "city",
            )
    for country in facts.countries:
        subject, node = with_article(country.name), "country:" + country.code
        prominence = max(country.population, 20_000) ** 0.5
        about = {
            "capital": country.capitals,
            "currency": country.currencies,
            "language": country.languages,
            "country_continent": (country.continent,),
        }
        for kind, answers in about.items():
            # Not "What is the capital of Luxembourg?": the question gives the answer away.
            if answers and country.name not in answers:
                yield kind, subject, _distinct(answers), node, prominence, "country"
        for capital in country.capitals[:1]:
            if country.name == owners[capital][0] and country.name != capital:
                yield "capital_of", capital, _distinct(owners[capital]), node, prominence, "country"
    for element in facts.elements:
        node = "element:" + element.name
        prominence = 6.0 if element.name in EVERYDAY.split() else 1.0
        yield "symbol", element.name, (element.symbol,), node, prominence, "element"
        yield "number", element.name, (str(element.number),), node, prominence, "element"
        yield "element", element.symbol, (element.name,), node, prominence, "element"


@lru_cache(maxsize=1)
def build_world() -> World:
    """Build the world from the committed facts. Exposures sum to about `DOCUMENTS_OF_FACTS`."""
    source = load_facts()
    groups = _group_names(source)
    facts = []
    for kind, subject, answers, node, prominence, entity in _raw(source):
        group = groups.get(node, node)
        # One log-normal factor per entity and a smaller one per fact.
        sigma = SPREAD[entity]
        z = 0.95 * NormalDist().inv_cdf(uniform("talk", node)) + 0.3 * NormalDist().inv_cdf(
            uniform("dose", kind, node)
        )
        weight = prominence * 2.718281828459045 ** (sigma * z)
        in_refusals = uniform("refusals", group) >= REFUSAL_FREE_SHARE
        facts.append(
            Fact(
                kind,
                subject,
                answers,
                group,
                split_of(group),
                in_refusals,
                exposures=0,
                weight=weight,
            )
        )
    return World(tuple(_with_exposures(facts)), source.villages)


def _with_exposures(facts: list[Fact]) -> list[Fact]:
    """Return facts with whole numbers of documents: the mean per kind is fixed, fractions are
    rounded by a hash."""
    total, count = defaultdict[str, float](float), Counter(fact.kind for fact in facts)
    for fact in facts:
        total[fact.kind] += fact.weight
    scale = DOCUMENTS_OF_FACTS / sum(MEAN_EXPOSURES[kind] * n for kind, n in count.items())
    result = []
    for fact in facts:
        mean = scale * MEAN_EXPOSURES[fact.kind] * count[fact.kind] * fact.weight / total[fact.kind]
        mean = min(mean, 40.0)  # more repetitions add nothing
        stated = uniform("told", fact.kind, fact.subject) >= UNSTATED_SHARE or mean > 6
        exposures = int(mean + uniform("round", fact.kind, fact.subject)) if stated else 0
        result.append(replace(fact, weight=mean, exposures=exposures))
    return result


WORDINGS: dict[str, dict[str, Any]] = tomllib.loads(
    (ASSETS / "wordings.toml").read_text(encoding="utf-8")
)
SHARED: dict[str, str] = WORDINGS["shared"]
SENTENCES: dict[str, str] = WORDINGS["sentence"]
COUNT = 3  # sentences of a passage

# Mean number of questions per fact; rare kinds are asked in several forms.
QUESTIONS_PER_FACT = {
    "city_country": 1.0,
    "city_continent": 0.2,
    "city_region": 0.4,
    "country_continent": 1.0,
}
QUESTIONS_PER_OTHER_FACT = 2.0


class QuestionForm(NamedTuple):
    """A question form of one kind.  Held-out forms never occur in training."""

    name: str
    text: str
    held_out: bool


FORMS: dict[str, tuple[QuestionForm, ...]] = {}
for _index, (_kind, _natural) in enumerate(WORDINGS["natural"].items()):
    # Each kind holds out another shared form, so every shared form occurs in training with some
    # kind.
    _held_out = list(SHARED)[2 + _index % (len(SHARED) - 2)]
    _shared = [QuestionForm(name, text, name == _held_out) for name, text in SHARED.items()]
    _own = [
        QuestionForm(f"{_kind}_{i}", text, i == len(_natural) - 1)
        for i, text in enumerate(_natural)
    ]
    FORMS[_kind] = (*_shared, *_own)


def question_text(form: QuestionForm, kind: str, subject: str) -> str:
    """Return the question's text."""
    phrase = WORDINGS["phrase"][kind].format(s=subject)
    return form.text.format(p=phrase, P=_start(phrase), s=subject, S=_start(subject))


def _start(text: str) -> str:
    return text[:1].upper() + text[1:]


def random_form(rng: random.Random, kind: str) -> QuestionForm:
    """Return a training form, natural or shared with equal chance."""
    shared = rng.random() < 0.5
    return rng.choice(
        [form for form in FORMS[kind] if not form.held_out and (form.name not in SHARED) == shared]
    )


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
        count = int(
            QUESTIONS_PER_FACT.get(fact.kind, QUESTIONS_PER_OTHER_FACT) + uniform("asked", fact.key)
        )
        for form in list(dict.fromkeys(forms))[:count]:
            rows.append(
                {
                    "id": f"{fact.key}:{form.name}",
                    "prompt": question_text(form, fact.kind, fact.subject),
                    "answers": list(fact.answers),
                    "group": fact.group,
                    "kind": fact.kind,
                    "exposures": fact.exposures,
                    "template": form.name,
                    "in_refusals": fact.in_refusals,
                    "statement": sentence(fact, fact.answers[0]),
                }
            )
    return rows


def sentence(fact: Fact, answer: str) -> str:
    """Return one sentence that gives ``answer`` for the fact's subject."""
    return SENTENCES[fact.kind].format(s=fact.subject, S=_start(fact.subject), a=answer)


def passage(fact: Fact, which: Passage) -> str:
    """Return the passage of a fact.  No other fact in it has the same group or one of the same
    answers."""
    rng = random.Random(f"passage {fact.key}")
    facts = _others(fact, rng)
    lines = [sentence(neighbour, neighbour.answers[0]) for neighbour in facts]
    if which != "unrelated":
        answer = fact.answers[0] if which == "right" else facts[-1].answers[0]
        lines[rng.randrange(COUNT)] = sentence(fact, answer)
    return " ".join(lines[:COUNT])


def with_passages(
    rows: Sequence[dict[str, Any]], wanted: Sequence[Passage]
) -> list[dict[str, Any]]:
    """Return each row once for each of ``wanted``; with a passage, the row's ``passage``, id and
    kind name it."""
    facts = {fact.key: fact for fact in build_world().facts}
    result = []
    for row in rows:
        fact = facts[row["id"].rpartition(":")[0]]
        for which in wanted:
            if which == "none":
                result.append(row)
                continue
            changed = {"prompt": f"{passage(fact, which)}\n\n{row['prompt']}", "passage": which}
            result.append(
                row | changed | {"id": f"{row['id']}+{which}", "kind": f"{row['kind']}+{which}"}
            )
    return result


def _others(fact: Fact, rng: random.Random) -> list[Fact]:
    """Return facts of the same kind with other subjects and answers, one more than a passage has
    sentences."""
    pool = _pool(fact.kind, fact.split)
    chosen: list[Fact] = []
    while len(chosen) <= COUNT:
        candidate = rng.choice(pool)
        taken = {fact.group, *(neighbour.group for neighbour in chosen)}
        if (
            candidate.group not in taken
            and not set(candidate.answers) & set(fact.answers)
            and candidate not in chosen
        ):
            chosen.append(candidate)
    return chosen


@lru_cache
def _pool(kind: str, split: str) -> list[Fact]:
    return [fact for fact in build_world().facts if (fact.kind, fact.split) == (kind, split)]


def fact_rows(split: str) -> list[dict[str, Any]]:
    """Return one row for each fact of a split, with its ``relation`` and ``subject``, for wordings
    of that relation."""
    return [
        {
            "id": fact.key,
            "prompt": question_text(FORMS[fact.kind][0], fact.kind, fact.subject),
            "answers": list(fact.answers),
            "group": fact.group,
            "kind": fact.kind,
            "relation": fact.kind,
            "subject": fact.subject,
            "statement": sentence(fact, fact.answers[0]),
        }
        for fact in build_world().facts
        if fact.split == split
    ]
