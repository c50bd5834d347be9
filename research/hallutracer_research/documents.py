"""Reads the TOML tables that lie beside a module, and writes its results as JSON."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A JSON object."""


def table_beside(module: str, name: str) -> Row:
    """Return the tables of a TOML file in the folder of a module, which gives its ``__file__``."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as JSONL, a line for each."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_json(path: Path, document: Any, indent: int = 2) -> None:
    """Write a document as JSON; numbers that are not finite are refused with a ValueError."""
    text = json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")
