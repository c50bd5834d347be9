"""Files of a downloaded set (CSV tables, JSON documents, JSON lines), and what sets of questions
have in common.  Each reader takes the set's folder, a file's path in it and a list ``problems``, to
which it appends one line per error, so that all damaged files are reported at once."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, StringConstraints, ValidationError

Row = dict[str, Any]  # one row for the trainer, see service/data/training_rows.py
Rows = tuple[list[Row], dict[str, int]]  # and the reader's counts
Text = Annotated[
    str, StringConstraints(strict=True, pattern=r"\S")
]  # not blank; as it stands in the file
Label = Annotated[int, Field(strict=True, ge=0, le=1)]
BRIEFLY = " Answer briefly."
Kind = TypeVar("Kind", dict[Any, Any], list[Any])
Model = TypeVar("Model", bound=BaseModel)


def text_of(
    folder: Path, name: str, problems: list[str], encodings: Sequence[str] = ("utf-8-sig",)
) -> str | None:
    """Return a file's text, by the first of ``encodings`` that decodes the whole file; None if it
    cannot be read."""
    try:
        content = (folder / name).read_bytes()
    except FileNotFoundError:
        problems.append(f"{name} is missing")
        return None
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror}")
        return None
    for encoding in encodings:
        try:
            return content.decode(encoding)
        except UnicodeDecodeError as error:
            place = error.start + 1
    problems.append(f"{name}: not UTF-8 at byte {place}: download it again, unchanged")
    return None


def csv_table(
    folder: Path, name: str, columns: Sequence[str], problems: list[str]
) -> list[tuple[int, Row]]:
    """Return line number and row of a table whose header has at least ``columns``."""
    text = text_of(folder, name, problems)
    if text is None:
        return []
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if not set(columns) <= set(reader.fieldnames or ()):
        problems.append(
            f"{name} line 1: expected the columns {','.join(columns)}; found {reader.fieldnames}"
        )
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


def json_document(folder: Path, name: str, kind: type[Kind], problems: list[str]) -> Kind:
    """Return the content of a JSON file that holds a ``kind``; an empty ``kind`` on errors."""
    text = text_of(folder, name, problems)
    if text is not None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            problems.append(f"{name}: invalid JSON: {error}")
        else:
            if isinstance(value, kind):
                return value
            problems.append(
                f"{name}: a JSON {kind.__name__} was expected, found {type(value).__name__}"
            )
    return kind()


def json_lines(folder: Path, name: str, problems: list[str]) -> list[tuple[int, Row]]:
    """Return line number and object of each line that is not blank."""
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


def checked(model: type[Model], value: Any, place: str, problems: list[str]) -> Model | None:
    """Return ``value`` as a ``model``; None, and the first problem, where it is none."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        problems.append(
            f"{place}: {'.'.join(map(str, first['loc']))}: {first['msg']}".replace(": :", ":")
        )
        return None


def question_group(text: str) -> str:
    """Return one name for a question in all sets: its words in lower case, without punctuation."""
    return "question/" + " ".join(words_of(text))


def words_of(text: str) -> list[str]:
    """Return its words in lower case, without punctuation."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
