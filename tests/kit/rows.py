"""Rows of JSON lines with some of their fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def without(rows: Iterable[Mapping[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Copies of the rows that lack these fields."""
    bare = [dict(row) for row in rows]
    for row in bare:
        for key in keys:
            row.pop(key, None)
    return bare


def only(rows: Iterable[Mapping[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Copies of the rows with these fields alone."""
    picked = []
    for row in rows:
        picked.append({key: row[key] for key in keys})
    return picked


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
