"""Reads files of rows: JSON lines, CSV, Parquet, or texts with a question a line; all but Parquet
also packed by gzip.  A folder holds requests."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from service.data.requests import requests_in
from service.engines.places import replaced_by
from service.errors import DataError

GZIP, PARQUET = b"\x1f\x8b", b"PAR1"  # the first bytes of such a file
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# first bytes of other kinds of files -> the kind, and how to get rows out of such a file
FOREIGN = {
    b"BZh": "is packed with bzip2: unpack it first: bunzip2 -k {}",
    b"\xfd7zXZ\0": "is packed with xz: unpack it first: unxz -k {}",
    b"\x28\xb5\x2f\xfd": "is packed with Zstandard: unpack it first: zstd -d {}",
    b"\x04\x22\x4d\x18": "is packed with LZ4: unpack it first: lz4 -d {}",
    b"PK\x03\x04": (
        "is a ZIP archive or a spreadsheet: unpack it, or save its table as CSV in UTF-8"
    ),
    b"\xd0\xcf\x11\xe0": "is a spreadsheet: save its table as CSV in UTF-8",
    b"ARROW1": "is an Arrow file: write its table as Parquet or as JSON lines",
    b"\xff\xff\xff\xff": "is an Arrow stream: write its table as Parquet or as JSON lines",
    b"SQLite format 3": "is an SQLite database: write its table as CSV",
    b"\x80\x04": "is a Python pickle: write its rows as JSON lines",
    b"\x80\x05": "is a Python pickle: write its rows as JSON lines",
    b"%PDF": "is a PDF document: write its rows as JSON lines",
}
DELIMITERS = ",;\t|"
SEPARATOR = re.compile(
    r"sep=(.)\s*", re.IGNORECASE
)  # Excel writes it before the line of column names
LIKELY = {  # field -> common names for it elsewhere, in small letters with underscores
    "prompt": (
        "question",
        "query",
        "input",
        "instruction",
        "text",
        "problem",
        "user_input",
        "user_query",
        "user_prompt",
        "question_text",
    ),
    "messages": ("conversation", "conversations", "dialog", "dialogue", "turns"),
    "label": ("labels", "correct", "is_correct", "correctness", "is_factual", "verdict"),
    "answers": (
        "answer",
        "accepted",
        "accepted_answers",
        "ground_truth",
        "ground_truths",
        "reference",
        "references",
        "expected",
        "expected_output",
        "expected_answer",
        "target",
        "output",
        "gold",
        "gold_answer",
        "gold_answers",
        "correct_answer",
        "correct_answers",
        "best_answer",
        "solution",
        "response",
        "completion",
    ),
}
MOST_CHARACTERS = (
    16 * 1024 * 1024
)  # of a cell of a table: Python's own limit is less than a long passage
LABEL = re.compile(r"[01](\.0+)?")
Lines = Iterator[tuple[int, bytes | dict[str, Any]]]


def read_lines(path: Path) -> Lines:
    """Yield the number, from 1, of each line, and its bytes; for a table its non-empty cells
    instead.

    ``-`` reads stdin.  Raises DataError: the file cannot be opened, or is not a file of rows."""
    with ExitStack() as stack:
        try:
            file: BinaryIO = (
                sys.stdin.buffer if str(path) == "-" else stack.enter_context(path.open("rb"))
            )
            first = file.readline()
        except IsADirectoryError:
            yield from enumerate(requests_in(path), 1)
            return
        except OSError as error:
            raise DataError(str(path), [f"cannot be read: {error.strerror}"]) from error
        kinds = [suffix.lower() for suffix in path.suffixes[-2:]]
        if first.startswith(PARQUET):
            yield from enumerate(_parquet(path, first + file.read()), 1)
            return
        following: Iterator[bytes] = iter(file)
        if first.startswith(GZIP):
            unpacked = _unpacked(path, gzip.GzipFile(fileobj=io.BytesIO(first + file.read())))
            first, following = next(unpacked, b""), unpacked
        if not first.endswith(
            b"\n"
        ):  # the only line, or the lines end in \r as in files of old spreadsheets
            first, *more_lines = first.splitlines(keepends=True) or [b""]
            following = chain(more_lines, following)
        first, second = first.removeprefix(codecs.BOM_UTF8), next(following, b"")
        lines = chain([first], [second] if second else [], following)
        if foreign := _foreign(first, path):
            raise DataError(str(path), [foreign])
        if first.startswith(WIDE) or b"\0" in first[:4]:
            raise DataError(
                str(path), ["is UTF-16 or another text of wide characters: save the file as UTF-8"]
            )
        if ".csv" in kinds or ".tsv" in kinds or _names_columns(first):
            yield from _csv(path, lines)
            return
        if whole := _one_document(first.strip(), second.strip(), path):
            raise DataError(str(path), [whole])
        if ".txt" in kinds:
            yield from _questions(path, lines)
            return
        yield from enumerate(lines, 1)


def _questions(path: Path, lines: Iterable[bytes]) -> Lines:
    """Yield each line of a text as a row's prompt, blank ones left out; JSON lines as they are.

    Raises DataError for a line that is not UTF-8."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    are_objects = first[1].lstrip().startswith(b"{")
    for number, line in chain([first], numbered):
        yield number, line if are_objects else {"prompt": _decoded(path, number, line).strip()}


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"line {number}: not UTF-8 at byte {error.start + 1}: save the file as UTF-8"
        raise DataError(str(path), [problem]) from None


def _rows_below(first: bytes, second: bytes) -> str:
    """Return the key whose value is the list of all rows, if the file is a single JSON object; else
    ""."""
    if first == b"{":
        listed = re.match(rb'"(\w+)"\s*:\s*\[$', second)
        key = listed[1].decode() if listed else ""
        return "" if not key or field_of(key, LIKELY) else key
    with suppress(ValueError, RecursionError):
        value = {} if second else json.loads(first)
        if isinstance(value, dict) and not any(
            field_of(key, ("prompt", "messages")) for key in value
        ):
            lists = (key for key, below in value.items() if isinstance(below, list) and below)
            return next((key for key in lists if isinstance(value[key][0], dict)), "")
    return ""


def _unpacked(path: Path, packed: gzip.GzipFile) -> Iterator[bytes]:
    try:
        yield from packed
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            str(path), [f"is a damaged gzip file: {error}; download or pack it again"]
        ) from None


def _name(path: Path) -> str:
    return "FILE" if str(path) == "-" else path.name


def _foreign(first: bytes, path: Path) -> str:
    """Return the kind of a file that holds no rows, and what to do with it; else ""."""
    kind = next((kind for signature, kind in FOREIGN.items() if first.startswith(signature)), "")
    return kind.format(_name(path)) or replaced_by(first)


def field_of(name: str, fields: Iterable[str]) -> str | None:
    """Return which of these fields a column of this name is likely to hold, or None."""
    plain = re.sub(r"[\s_-]+", "_", name.strip().lower())
    return next((field for field in fields if plain == field or plain in LIKELY[field]), None)


def _names_columns(first: bytes) -> bool:
    """Return whether a file's first line looks like the column names of a table."""
    text = first.decode("utf-8", "replace").strip()
    if SEPARATOR.fullmatch(text):
        return True
    with suppress(csv.Error, StopIteration):
        names = next(csv.reader([text], delimiter=_delimiter(text)))
        return len(names) > 1 and any(field_of(name, ("prompt", "messages")) for name in names)
    return False


def _delimiter(header: str) -> str:
    return max(DELIMITERS, key=header.count)


def _one_document(first: bytes, second: bytes, path: Path) -> str:
    """Return the problem of a file that is a JSON array, or JSON over several lines; else ""."""
    name = _name(path)
    if field := _rows_below(first, second):
        return (
            f"has its rows in one JSON object, below {field!r}: jq -c '.{field}[]' {name} >"
            " rows.jsonl"
        )
    if first == b"[" or re.match(rb"\[\s*\{", first):
        return (
            f"is one JSON array, and one JSON object per line is expected: jq -c '.[]' {name} >"
            " rows.jsonl"
        )
    if first == b"{" and second.startswith(b'"'):
        return (
            f"has JSON objects over several lines, and each is expected in one line: jq -c . {name}"
            " > rows.jsonl"
        )
    return ""


def _csv(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a table, each with the number of its last line.  The table's first line
    names the columns."""
    texts = (_decoded(path, number, line) for number, line in enumerate(lines, 1))
    header = next(texts, "")
    named = SEPARATOR.fullmatch(header)
    skipped = 0 if named is None else 1
    header = header if named is None else next(texts, "")
    delimiter = _delimiter(header) if named is None else named[1]

    def again() -> Iterator[str]:
        yield header
        yield from texts

    csv.field_size_limit(max(MOST_CHARACTERS, csv.field_size_limit()))
    reader = csv.reader(again(), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        if twice := sorted({name for name in names if name and names.count(name) > 1}):
            raise DataError(
                str(path), [f"line {1 + skipped}: the column {twice[0]!r} appears twice"]
            )
        for cells in reader:
            line = reader.line_num + skipped
            if len(cells) > len(names):
                problem = (
                    f"line {line}: {len(cells)} cells, and line {1 + skipped} names {len(names)}"
                    " columns"
                )
                raise DataError(str(path), [problem])
            try:
                named_cells = (
                    (name, text)
                    for name, text in zip(names, cells, strict=False)
                    if name and text.strip()
                )
                row = {name: _cell(name, text) for name, text in named_cells}
            except ValueError as error:
                raise DataError(str(path), [f"line {line}: {error}"]) from None
            if row:
                yield line, row
    except csv.Error as error:
        raise DataError(str(path), [f"line {reader.line_num + skipped}: no CSV: {error}"]) from None


def _cell(name: str, text: str) -> Any:
    """Return the value of a cell: a text, unless the column is one of our fields with another type.

    Raises ValueError for a list that is not JSON, which would otherwise be read as a single
    text."""
    value = text.strip()
    if name == "label" and LABEL.fullmatch(value):
        return int(float(value))
    if name == "answer_tokens" and value.isdecimal():
        return int(value)
    if name == "applies" and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if name in ("answers", "messages") and value.startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            problem = f"{name!r} begins with a bracket and is no list as JSON has it"
            raise ValueError(f'{problem}: write ["a", "b"], in CSV as "[""a"", ""b""]"') from None
    with suppress(ValueError):
        if name == "risk":
            return float(value)
    return text


def _parquet(path: Path, data: bytes) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            str(path), ["is a Parquet file, which needs a package: pip install pyarrow"]
        ) from None
    try:
        rows = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    except Exception as error:  # pyarrow has many exception classes
        raise DataError(str(path), [f"is no Parquet file that can be read: {error}"]) from None
    for number, row in enumerate(rows, 1):
        kept: dict[str, Any] = {}
        for name, value in row.items():
            try:
                if not _is_missing(value):
                    kept[name] = _set(value)
            except UnicodeDecodeError:
                problem = f"row {number}: {name!r} holds bytes that are no UTF-8: write texts"
                raise DataError(str(path), [problem]) from None
        yield json.loads(json.dumps(kept, default=str))


def _set(value: Any) -> Any:
    """Return a cell's value without the fields that are null: a column's objects all have those
    that one has.

    Texts that were written as bytes are decoded.  Raises UnicodeDecodeError."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {name: _set(inner) for name, inner in value.items() if inner is not None}
    return [_set(inner) for inner in value] if isinstance(value, list) else value


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
