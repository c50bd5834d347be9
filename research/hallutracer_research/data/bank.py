"""Makes the files of the question bank that the package brings (``service.data.bank``).

    python -m hallutracer_research.data.bank questions.jsonl held.jsonl

The two files are those of the first commands in ``docs/training-data.md``."""

from __future__ import annotations

import hashlib
import lzma
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hallutracer_research.data.mixture import read_rows
from hallutracer_research.documents import Row, json_lines, table_beside
from service.data.bank import SPLITS, bank_file

FACTS = "facts/"  # the kind of a fact is this and its relation
FIELDS = ("id", "prompt", "answers", "group", "kind", "statement", "relation", "subject")
OTHER_NAMES: Mapping[str, list[str]] = table_beside(__file__, "other_names.toml")
"""What models call a thing beside its name in the tables of facts."""


def with_other_names(row: Row) -> Row:
    """Return a row of facts with its answers by their other names, too; any other as it is."""
    if not row["kind"].startswith(FACTS):
        return row
    answers = list(row["answers"])
    for answer in row["answers"]:
        answers += [name for name in OTHER_NAMES.get(answer, ()) if name not in answers]
    return {**row, "answers": answers}


def with_relation(row: Row) -> Row:
    """Return a row of facts with its relation and subject, which its kind and id hold; any other
    as it is."""
    if not row["kind"].startswith(FACTS):
        return row
    _, subject, _ = row["id"].split(":")
    return {**row, "relation": row["kind"].removeprefix(FACTS), "subject": subject}


def trimmed_row(row: Row) -> Row:
    """Return a row's fields that the bank keeps."""
    return {field: row[field] for field in FIELDS if field in row}


def packed(rows: Iterable[Row]) -> bytes:
    """Return rows as the bank keeps them: fields that training reads, other names
    accepted, groups in the order of a hash of their name."""
    ordered = sorted(
        (with_relation(with_other_names(row)) for row in rows),
        key=lambda row: (hashlib.sha256(row["group"].encode()).digest(), row["id"]),
    )
    trimmed = map(trimmed_row, ordered)
    return lzma.compress(json_lines(trimmed).encode(), preset=9 | lzma.PRESET_EXTREME)


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
