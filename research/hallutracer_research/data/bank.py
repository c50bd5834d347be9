"""Makes the files of the question bank that the package brings (``service.data.bank``).

    python -m hallutracer_research.data.bank questions.jsonl held.jsonl

The two files are those of the first commands in ``docs/training-data.md``."""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hallutracer_research.data.mixture import read_rows
from service.data.bank import SPLITS, bank_file

FIELDS = ("id", "prompt", "answers", "group", "kind", "statement")
# What models call a thing beside its name in the tables of facts: without these, a right answer is
# labelled a hallucination.  No name that is also a word, or a part of another thing's name.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    # countries
    "Bosnia and Herzegovina": ("Bosnia",),
    "Cape Verde": ("Cabo Verde",),
    "Czechia": ("Czech Republic",),
    "DR Congo": ("Democratic Republic of the Congo", "DRC", "Congo-Kinshasa"),
    "Eswatini": ("Swaziland",),
    "Ivory Coast": ("Côte d'Ivoire",),
    "Myanmar": ("Burma",),
    "Netherlands": ("Holland",),
    "North Korea": ("Democratic People's Republic of Korea", "DPRK"),
    "North Macedonia": ("Macedonia",),
    "Palestine": ("Palestinian Territories", "West Bank", "Gaza Strip"),
    "South Korea": ("Republic of Korea",),
    "Timor-Leste": ("East Timor",),
    "Türkiye": ("Turkey",),
    "United Arab Emirates": ("UAE",),
    "United Kingdom": ("UK", "Great Britain"),
    "United States": ("USA",),
    "Vatican City": ("Holy See",),
    "Vietnam": ("Viet Nam",),
    # capitals
    "Astana": ("Nur-Sultan",),
    "Colombo": ("Sri Jayawardenepura Kotte",),
    "El Aaiún": ("Laayoune",),
    "Kyiv": ("Kiev",),
    "Lobamba": ("Mbabane",),
    "Saint Helier": ("St. Helier",),
    "St. Peter Port": ("Saint Peter Port",),
    "Ulan Bator": ("Ulaanbaatar",),
    "Washington D.C.": ("Washington DC",),
    # continents and regions
    "Africa": ("African continent",),
    "Asia": ("Asian continent",),
    "Europe": ("European continent",),
    "North America": ("North American continent",),
    "South America": ("South American continent",),
    "Eastern Africa": ("East Africa",),
    "Eastern Asia": ("East Asia",),
    "Middle Africa": ("Central Africa",),
    "Northern Africa": ("North Africa",),
    "South-Eastern Asia": ("Southeast Asia", "South East Asia"),
    "Southeast Europe": ("Southeastern Europe", "South-Eastern Europe"),
    "Southern Asia": ("South Asia",),
    "Western Africa": ("West Africa",),
    "Western Asia": ("West Asia",),
    # languages
    "Azerbaijani": ("Azeri",),
    "Belizean Creole": ("Belize Creole", "Kriol"),
    "Berber": ("Tamazight",),
    "Chinese": ("Mandarin",),
    "Greenlandic": ("Kalaallisut",),
    "Maldivian": ("Dhivehi",),
    "Moldavian": ("Moldovan", "Romanian"),
    "Persian (Farsi)": ("Persian", "Farsi"),
    "Sinhala": ("Sinhalese",),
    "Slovene": ("Slovenian",),
    # currencies whose unit has no namesake elsewhere
    "Albanian lek": ("lek",),
    "Bhutanese ngultrum": ("ngultrum",),
    "Botswana pula": ("pula",),
    "British pound": ("pound sterling",),
    "Burmese kyat": ("kyat",),
    "Cambodian riel": ("riel",),
    "Cayman Islands dollar": ("Cayman dollar", "Caymanian dollar"),
    "Chinese yuan": ("yuan", "renminbi"),
    "Costa Rican colón": ("colón",),
    "Ethiopian birr": ("birr",),
    "Ghanaian cedi": ("cedi",),
    "Guatemalan quetzal": ("quetzal",),
    "Haitian gourde": ("gourde",),
    "Honduran lempira": ("lempira",),
    "Hungarian forint": ("forint",),
    "Israeli new shekel": ("shekel",),
    "Japanese yen": ("yen",),
    "Kazakhstani tenge": ("tenge",),
    "Lesotho loti": ("loti",),
    "Macanese pataca": ("pataca",),
    "Malaysian ringgit": ("ringgit",),
    "Maldivian rufiyaa": ("rufiyaa",),
    "Mauritanian ouguiya": ("ouguiya",),
    "Mongolian tögrög": ("tögrög", "tugrik"),
    "Nicaraguan córdoba": ("córdoba",),
    "Panamanian balboa": ("balboa",),
    "Papua New Guinean kina": ("kina",),
    "Polish złoty": ("złoty",),
    "Pound sterling": ("British pound",),
    "Samoan tālā": ("tālā",),
    "Swazi lilangeni": ("lilangeni",),
    "Ukrainian hryvnia": ("hryvnia",),
    "United States dollar": ("US dollar", "U.S. dollar", "American dollar"),
    "Venezuelan bolívar soberano": ("bolívar",),
    "Vietnamese đồng": ("đồng",),
    "Zambian kwacha": ("kwacha",),
}


def with_other_names(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of facts with its answers by their other names, too; any other as it is."""
    if not row["kind"].startswith("facts/"):
        return row
    answers = list(row["answers"])
    for answer in row["answers"]:
        answers += [name for name in OTHER_NAMES.get(answer, ()) if name not in answers]
    return {**row, "answers": answers}


def packed(rows: Iterable[dict[str, Any]]) -> bytes:
    """Return rows as the bank keeps them: fields that training reads, other names
    accepted, groups in the order of a hash of their name."""
    ordered = sorted(
        map(with_other_names, rows),
        key=lambda row: (hashlib.sha256(row["group"].encode()).digest(), row["id"]),
    )
    lines = []
    for row in ordered:
        fields = {field: row[field] for field in FIELDS if field in row}
        lines.append(json.dumps(fields, ensure_ascii=False) + "\n")
    return lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)


def main(arguments: Sequence[str]) -> None:
    """Write the halves: the first file is trained on, the second is held out.  Raises ValueError
    where they overlap."""
    halves = [read_rows(Path(name)) for name in arguments]
    trained, held_out = halves
    if shared := {row["group"] for row in trained} & {row["group"] for row in held_out}:
        raise ValueError(f"{len(shared)} groups are in both files, such as {min(shared)!r}")
    for split, rows in zip(SPLITS, halves, strict=True):
        bank_file(split).write_bytes(packed(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
