"""The facts of the demonstration model, read from ``assets/facts.json.gz``.

``assets/ATTRIBUTION.md`` names the three public sources and how the rows were selected from them.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.demo import ASSETS

FACTS_FILE = ASSETS / "facts.json.gz"


@dataclass(frozen=True)
class City:
    """A city.  `countries`: codes of all countries with a place of this name, this city's own first."""

    name: str
    countries: tuple[str, ...]
    population: int


@dataclass(frozen=True)
class Country:
    """A country or territory. `population` is the sum over its GeoNames places of at least 15,000 people."""

    code: str
    name: str
    capitals: tuple[str, ...]
    continent: str
    region: str
    currencies: tuple[str, ...]
    languages: tuple[str, ...]
    population: int


@dataclass(frozen=True)
class Element:
    """A chemical element; `name` is in lower case, as inside a sentence."""

    name: str
    symbol: str
    number: int


@dataclass(frozen=True)
class Facts:
    """All facts.  `villages` are names of real small places; no fact is about them."""

    cities: tuple[City, ...]
    countries: tuple[Country, ...]
    elements: tuple[Element, ...]
    villages: tuple[str, ...]


def load_facts(path: Path = FACTS_FILE) -> Facts:
    """Read the committed asset."""
    data: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))

    def row(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}

    return Facts(
        cities=tuple(City(**row(c)) for c in data["cities"]),
        countries=tuple(Country(**row(c)) for c in data["countries"]),
        elements=tuple(Element(**row(e)) for e in data["elements"]),
        villages=tuple(data["villages"]),
    )
