"""True-False (Azaria & Mitchell 2023): 6,330 statements in seven CSV files, label 1 = true = factual.

Group = the subject entity, because each occurs in several statements.  Statements with both labels ("Gibraltar is a
name of a city." is listed as true and as false) are left out and repeats are kept once; both are counted.
"""

from __future__ import annotations

import re
from pathlib import Path

from hallutracer_research.data.files import Row, csv_table
from hallutracer_research.data.statements import Statement, unambiguous_rows

CATEGORIES = ("animals", "cities", "companies", "elements", "facts", "generated", "inventions")
ROWS = 6_330

_SUBJECT = {
    "animals": re.compile(
        r"^(?:The |Human uses for (?:the )?)?(.*?) "
        r"(?:primarily|has|have|uses|use|is|isn't|are|eats|eat|can|lives|live|sleeps|spends|include|exhibits|builds|shares"
        r"|feeds|migrates|lacks)\b",
        re.IGNORECASE,
    ),
    "cities": re.compile(r"^(.*?) is a (?:name of|city in)"),
    "companies": re.compile(r"^(.*?) (?:engages|has|is|operates|provides|produces|acts|manages)\b"),
    "elements": re.compile(r"^(.*?) (?:is|has|appears|was|are|forms|reacts)\b"),
    "inventions": re.compile(r"^(.*?) (?:invented|lived)\b"),
}
_NO_USES = re.compile(r"^There are no specific human uses for (.*?)\.")


def subject(category: str, statement: str) -> str:
    """The entity that a statement is about, or the statement itself if it names none."""
    pattern = _SUBJECT.get(category)
    match = _NO_USES.match(statement) or (pattern.match(statement) if pattern else None)
    return (match.group(1) if match else statement).strip().casefold()


def read_truefalse(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows for the trainer and counts {read, contradictory, repeated}."""
    statements = []
    for category in CATEGORIES:
        name = f"{category}.csv"  # generated.csv starts with a byte-order mark
        for number, row in csv_table(folder, name, ("statement", "label"), problems):
            if row["label"] not in ("0", "1"):
                problems.append(f"{name} line {number}: label must be 0 or 1, not {row['label']!r}")
            text, group = row["statement"], f"{category}/{subject(category, row['statement'])}"
            statements.append(Statement(f"{category}-{number}", text, row["label"] == "1", group, category))
    return unambiguous_rows(statements)
