"""Files of a downloaded set: CSV tables, JSON documents, JSON lines.  Every fault is one line that names the file.

Knows no set.  A reader hands in its folder, the file's place in it and the list that collects the problems, so that a
user hears of all damaged files at once.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # one row for the trainer, see service/data/training_rows.py


def text_of(folder: Path, name: str, problems: list[str]) -> str | None:
    """A file's text, without a byte-order mark; None after noting why it cannot be had."""
    try:
        return (folder / name).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        problems.append(f"{name} is missing")
    except UnicodeDecodeError as error:
        problems.append(f"{name}: not UTF-8 at byte {error.start + 1}: download it again, unchanged")
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror}")
    return None


def csv_table(folder: Path, name: str, columns: tuple[str, ...], problems: list[str]) -> list[tuple[int, Row]]:
    """Line number and row of a table whose header has at least ``columns``; damaged rows go to ``problems``."""
    text = text_of(folder, name, problems)
    if text is None:
        return []
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if not set(columns) <= set(reader.fieldnames or ()):
        problems.append(f"{name} line 1: expected the columns {','.join(columns)}; found {reader.fieldnames}")
        return []
    table = []
    try:
        for row in reader:
            if all(isinstance(row[column], str) for column in columns):
                table.append((reader.line_num, dict(row)))
            else:
                problems.append(f"{name} line {reader.line_num}: fewer columns than the header")
    except csv.Error as error:
        problems.append(f"{name} line {reader.line_num}: {error}")
    return table


def json_document(folder: Path, name: str, kind: type[dict[Any, Any]] | type[list[Any]], problems: list[str]) -> Any:
    """A whole JSON file that holds a ``kind``; an empty one after noting what is wrong."""
    text = text_of(folder, name, problems)
    if text is not None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            problems.append(f"{name}: invalid JSON: {error}")
        else:
            if isinstance(value, kind):
                return value
            expected = "an object" if kind is dict else "a list"
            problems.append(f"{name}: {expected} was expected, found {type(value).__name__}")
    return kind()


def json_lines(folder: Path, name: str, problems: list[str]) -> list[tuple[int, Row]]:
    """Line number and object of each line that is not blank."""
    objects = []
    for number, line in enumerate((text_of(folder, name, problems) or "").split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{name} line {number}: invalid JSON: {error}")
            continue
        if isinstance(value, dict):
            objects.append((number, value))
        else:
            problems.append(f"{name} line {number}: a JSON object is expected")
    return objects
