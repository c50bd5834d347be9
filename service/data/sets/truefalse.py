"""True-False (Azaria & Mitchell 2023): 6,330 statements in seven CSV files, label 1 = true = factual.

Groups are subject entities, because each returns in several statements.  Statements that carry both labels
("Gibraltar is a name of a city." is listed as true and as false) are left out, repeats are kept once; both are counted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

from service.data.sets.files import Row, csv_table
from service.data.sets.statements import statement_row
from service.errors import DataError

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
    """The entity a statement is about; the statement itself where it names none."""
    pattern = _SUBJECT.get(category)
    found = _NO_USES.match(statement) or (pattern.match(statement) if pattern else None)
    return (found.group(1) if found else statement).strip().casefold()


def read_truefalse(folder: Path) -> tuple[list[Row], dict[str, int]]:
    """Rows for the trainer and counts {read, contradictory, repeated}.

    Raises:
        DataError: a file is missing, a column or a label is not what the set has.
    """
    problems: list[str] = []
    rows, counts = [], Counter[str]()
    for category in CATEGORIES:
        name = f"{category}.csv"
        table = csv_table(folder, name, ("statement", "label"), problems)  # generated.csv starts with a byte-order mark
        labels: dict[str, set[str]] = defaultdict(set)
        for number, row in table:
            if row["label"] not in ("0", "1"):
                problems.append(f"{name} line {number}: label must be 0 or 1, not {row['label']!r}")
            labels[row["statement"]].add(row["label"])
        seen: set[str] = set()
        for number, row in table:
            statement = row["statement"]
            counts["read"] += 1
            if len(labels[statement]) > 1:
                counts["contradictory"] += 1
            elif statement in seen:
                counts["repeated"] += 1
            else:
                seen.add(statement)
                group = f"{category}/{subject(category, statement)}"
                rows.append(statement_row(f"{category}-{number}", statement, row["label"] == "1", group, category))
    if problems:
        raise DataError(str(folder), problems)
    return rows, {name: counts[name] for name in ("read", "contradictory", "repeated")}
