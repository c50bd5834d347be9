"""Rows of JSON lines with some of their fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Rows = list[Row]
Options = dict[str, Any]  # named arguments
Document = dict[str, Any]  # an object of JSON


def without(rows: Iterable[Mapping[str, Any]], *keys: str) -> Rows:
    """Copies of the rows that lack these fields."""
    bare = [dict(row) for row in rows]
    for row in bare:
        for key in keys:
            row.pop(key, None)
    return bare


def only(rows: Iterable[Mapping[str, Any]], *keys: str) -> Rows:
    """Copies of the rows with these fields alone."""
    picked = []
    for row in rows:
        picked.append({key: row[key] for key in keys})
    return picked


def read_lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def lines_named(problems: Iterable[str]) -> list[str]:
    """Where each problem of a file is: "line 7"."""
    return [problem.partition(":")[0] for problem in problems]
