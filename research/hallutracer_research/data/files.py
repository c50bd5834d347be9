"""Files of a downloaded set (CSV tables, JSON documents, JSON lines), and what sets of questions
have in common."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from hallutracer_research.documents import Row

# Rows for the trainer (see service/data/training_rows.py), and the reader's counts.
Rows = tuple[list[Row], dict[str, int]]
# not blank; as it stands in the file
Text = Annotated[str, StringConstraints(strict=True, pattern=r"\S")]
Label = Annotated[int, Field(strict=True, ge=0, le=1)]
BRIEFLY = " Answer briefly."
Kind = TypeVar("Kind", dict[Any, Any], list[Any])
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class SetFiles:
    """The files of a downloaded set.  Each error adds a line to ``problems`` and raises nothing, so
    that all damaged files are reported at once."""

    folder: Path
    problems: list[str] = field(default_factory=list)

    def text(self, name: str, encodings: Sequence[str] = ("utf-8-sig",)) -> str | None:
        """Return a file's text, by the first of ``encodings`` that decodes the whole file; None if
        it cannot be read."""
        try:
            content = (self.folder / name).read_bytes()
        except FileNotFoundError:
            self.problems.append(f"{name} is missing")
            return None
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror}")
            return None
        for encoding in encodings:
            try:
                return content.decode(encoding)
            except UnicodeDecodeError as error:
                byte = error.start + 1
        self.problems.append(f"{name}: not UTF-8 at byte {byte}: download it again, unchanged")
        return None

    def csv_table(self, name: str, columns: Sequence[str]) -> list[tuple[int, Row]]:
        """Return line number and row of a table whose header has at least ``columns``."""
        text = self.text(name)
        if text is None:
            return []
        reader = csv.DictReader(io.StringIO(text, newline=""))
        if not set(columns) <= set(reader.fieldnames or ()):
            expected = f"expected the columns {','.join(columns)}"
            self.problems.append(f"{name} line 1: {expected}; found {reader.fieldnames}")
            return []
        table = []
        try:
            for row in reader:
                if all(isinstance(row[column], str) for column in columns):
                    table.append((reader.line_num, dict(row)))
                else:
                    self.problems.append(
                        f"{name} line {reader.line_num}: fewer columns than the header"
                    )
        except csv.Error as error:
            self.problems.append(f"{name} line {reader.line_num}: {error}")
        return table

    def json_document(self, name: str, kind: type[Kind]) -> Kind:
        """Return the content of a JSON file that holds a ``kind``; an empty ``kind`` on errors."""
        text = self.text(name)
        for value in [] if text is None else self._json(text, name):
            if isinstance(value, kind):
                return value
            self.problems.append(
                f"{name}: a JSON {kind.__name__} was expected, found {type(value).__name__}"
            )
        return kind()

    def json_lines(self, name: str) -> list[tuple[int, Row]]:
        """Return line number and object of each line that is not blank."""
        objects = []
        for number, line in enumerate((self.text(name) or "").split("\n"), 1):
            where = f"{name} line {number}"
            for value in self._json(line, where) if line.strip() else []:
                if isinstance(value, dict):
                    objects.append((number, value))
                else:
                    self.problems.append(f"{where}: a JSON object is expected")
        return objects

    def _json(self, text: str, where: str) -> list[Any]:
        """Return [value] of a JSON text; [], and a problem, where it is none."""
        try:
            return [json.loads(text)]
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{where}: invalid JSON: {error}")
            return []

    def checked(self, model: type[Model], value: Any, where: str) -> Model | None:
        """Return ``value`` as a ``model``; None, and the first problem, where it is none."""
        try:
            return model.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            self.problems.append(
                f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}".replace(": :", ":")
            )
            return None


def question_group(text: str) -> str:
    """Return one name for a question in all sets: its words in lower case, without punctuation."""
    return "question/" + " ".join(words_of(text))


def words_of(text: str) -> list[str]:
    """Return its words in lower case, without punctuation."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
