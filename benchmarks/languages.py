"""Held-out questions of fact in German, French, Spanish, Chinese and Japanese, and in English.

    python -m benchmarks.languages --countries countries.json > languages.jsonl
    python -m benchmarks.forms --rows languages.jsonl --record languages-record.jsonl

Which country a city belongs to, or a capital is of: of the held-out half of the question bank, the
same questions in each language.  An answer may name the country in the language of the question or
in English.  ``countries.json``: the table of https://github.com/mledoze/countries, which has the
names of countries in many languages (ODbL 1.0)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from service.data.bank import bank_rows

Row = Mapping[str, Any]

# By language: its code in the table of countries, and the question of each relation.
LANGUAGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "english": (
        "eng",
        {
            "facts/capital_of": "Which country has the capital {}?",
            "facts/city_country": "In which country is the city of {}?",
        },
    ),
    "german": (
        "deu",
        {
            "facts/capital_of": "Welches Land hat die Hauptstadt {}?",
            "facts/city_country": "In welchem Land liegt die Stadt {}?",
        },
    ),
    "french": (
        "fra",
        {
            "facts/capital_of": "Quel pays a pour capitale {} ?",
            "facts/city_country": "Dans quel pays se trouve la ville de {} ?",
        },
    ),
    "spanish": (
        "spa",
        {
            "facts/capital_of": "¿Qué país tiene como capital {}?",
            "facts/city_country": "¿En qué país está la ciudad de {}?",
        },
    ),
    "chinese": (
        "zho",
        {
            "facts/capital_of": "哪个国家的首都是{}？",  # noqa: RUF001
            "facts/city_country": "{}这座城市位于哪个国家？",  # noqa: RUF001
        },
    ),
    "japanese": (
        "jpn",
        {
            "facts/capital_of": "{}はどの国の首都ですか？",  # noqa: RUF001
            "facts/city_country": "{}という都市はどの国にありますか？",  # noqa: RUF001
        },
    ),
}


def names_by_language(countries: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Return each country's common names by the code of a language, by its English name."""
    by_country = {}
    for country in countries:
        common = {code: names["common"] for code, names in country["translations"].items()}
        by_country[country["name"]["common"]] = common
    return by_country


def in_languages(rows: Sequence[Row], names: Mapping[str, Mapping[str, str]]) -> Iterator[Row]:
    """Yield each row that names known countries in every language, as rows for
    ``benchmarks.forms``."""
    for row in rows:
        countries = [answer for answer in row["answers"] if answer in names]
        subject = row["id"].split(":")[1]
        for language, (code, questions) in LANGUAGES.items():
            if not countries or row["kind"] not in questions:
                continue
            named = [names[country][code] for country in countries if code in names[country]]
            yield {
                "id": f"{row['id']}+{language}",
                "group": row["group"],
                "kind": row["kind"],
                "form": language,
                "prompt": questions[row["kind"]].format(subject),
                "answers": list(dict.fromkeys([*row["answers"], *named])),
            }


def main() -> None:
    """Write the rows as JSON lines to the standard output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--countries", type=Path, required=True, help="countries.json")
    parser.add_argument(
        "--each", type=int, default=60, help="questions of each relation and language"
    )
    options = parser.parse_args()
    names = names_by_language(json.loads(options.countries.read_text(encoding="utf-8")))
    held_out, (_, relations) = bank_rows("held-out"), LANGUAGES["english"]
    for relation in relations:
        of_subject = {row["id"].split(":")[1]: row for row in held_out if row["kind"] == relation}
        for row in in_languages([*of_subject.values()][: options.each], names):
            sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
