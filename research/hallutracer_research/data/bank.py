"""Makes the files of the question bank that the package brings (``service.data.bank``).

    python -m hallutracer_research.data.bank questions.jsonl held.jsonl

The two files are those of the first commands in ``docs/training-data.md``."""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hallutracer_research.data.mixture import read_rows
from service.data.bank import SPLITS, bank_file

FIELDS = ("id", "prompt", "answers", "group", "kind", "statement")


def packed(rows: Iterable[dict[str, Any]]) -> bytes:
    """Return rows as the bank keeps them: fields that training reads, groups in the order of a hash
    of their name."""
    ordered = sorted(
        rows, key=lambda row: (hashlib.sha256(row["group"].encode()).digest(), row["id"])
    )
    lines = [
        json.dumps({field: row[field] for field in FIELDS if field in row}, ensure_ascii=False)
        + "\n"
        for row in ordered
    ]
    return lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)


def main(arguments: Sequence[str]) -> None:
    """Write the halves: the first file is trained on, the second is held out.  Raises ValueError
    where they overlap."""
    halves = [read_rows(Path(name)) for name in arguments]
    train_groups, held_groups = ({row["group"] for row in rows} for rows in halves)
    if shared := train_groups & held_groups:
        raise ValueError(f"{len(shared)} groups are in both files, such as {min(shared)!r}")
    for split, rows in zip(SPLITS, halves, strict=True):
        bank_file(split).write_bytes(packed(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
