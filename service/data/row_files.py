"""Files of rows in the formats that people have: JSON lines, CSV, Parquet, and the first two packed by gzip."""

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

from service.errors import DataError

GZIP, PARQUET = b"\x1f\x8b", b"PAR1"  # what such a file begins with
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
DELIMITERS = ",;\t"
LABEL = re.compile(r"[01](\.0+)?")
Lines = Iterator[tuple[int, bytes | dict[str, Any]]]


def read_lines(path: Path) -> Lines:
    """Yield the number, from 1, of each line or row, and a line's bytes or, of a table, the row's cells that are set.

    ``-`` reads stdin.  Raises DataError: the file cannot be opened, or is no file of lines or rows as a whole."""
    with ExitStack() as stack:
        try:
            file: BinaryIO = sys.stdin.buffer if str(path) == "-" else stack.enter_context(path.open("rb"))
            first = file.readline()
        except OSError as error:
            raise DataError(str(path), [f"cannot be read: {error.strerror}"]) from error
        kinds = [suffix.lower() for suffix in path.suffixes[-2:]]
        if first.startswith(PARQUET):
            yield from enumerate(_parquet(path, first + file.read()), 1)
            return
        rest: Iterator[bytes] = iter(file)
        if first.startswith(GZIP):
            unpacked = _unpacked(path, gzip.GzipFile(fileobj=io.BytesIO(first + file.read())))
            first, rest = next(unpacked, b""), unpacked
        first, second = first.removeprefix(codecs.BOM_UTF8), next(rest, b"")
        lines = chain([first], [second] if second else [], rest)
        if first.startswith(WIDE) or b"\0" in first[:4]:
            raise DataError(str(path), ["is UTF-16 or another text of wide characters: save the file as UTF-8"])
        if ".csv" in kinds or ".tsv" in kinds:
            yield from _csv(path, lines)
            return
        if whole := _one_document(first.strip(), second.strip(), path):
            raise DataError(str(path), [whole])
        yield from enumerate(lines, 1)


def _unpacked(path: Path, packed: gzip.GzipFile) -> Iterator[bytes]:
    try:
        yield from packed
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(str(path), [f"is a damaged gzip file: {error}; download or pack it again"]) from None


def _one_document(first: bytes, second: bytes, path: Path) -> str:
    """Return what is wrong where a file begins as one JSON document over many lines, or an array; else ""."""
    name = "FILE" if str(path) == "-" else path.name
    if first == b"[" or re.match(rb"\[\s*\{", first):
        return f"is one JSON array, and one JSON object per line is expected: jq -c '.[]' {name} > rows.jsonl"
    if first == b"{" and second.startswith(b'"'):
        return f"has JSON objects over several lines, and each is expected in one line: jq -c . {name} > rows.jsonl"
    return ""


def _csv(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a table by the number of their last line; its first line names the columns."""

    def decoded() -> Iterator[str]:
        for number, line in enumerate(lines, 1):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                problem = f"line {number}: not UTF-8 at byte {error.start + 1}: save the file as UTF-8"
                raise DataError(str(path), [problem]) from None

    texts = decoded()
    header = next(texts, "")
    delimiter = max(DELIMITERS, key=header.count)

    def again() -> Iterator[str]:
        yield header
        yield from texts

    reader = csv.reader(again(), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(str(path), [f"line 1: the column {twice[0]!r} appears twice"])
        for cells in reader:
            if len(cells) > len(names):
                problem = f"line {reader.line_num}: {len(cells)} cells, and line 1 names {len(names)} columns"
                raise DataError(str(path), [problem])
            row = {name: _cell(name, text) for name, text in zip(names, cells, strict=False) if text.strip()}
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(str(path), [f"line {reader.line_num}: no CSV: {error}"]) from None


def _cell(name: str, text: str) -> Any:
    """Return the value of a cell, which is a text unless its column has a meaning of ours."""
    value = text.strip()
    if name == "label" and LABEL.fullmatch(value):
        return int(float(value))
    if name == "applies" and value.lower() in ("true", "false"):
        return value.lower() == "true"
    with suppress(ValueError, RecursionError):
        if name == "risk":
            return float(value)
        if name in ("answers", "messages") and value.startswith("["):
            return json.loads(value)
    return text


def _parquet(path: Path, data: bytes) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(str(path), ["is a Parquet file, which needs a package: pip install pyarrow"]) from None
    try:
        rows = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    except Exception as error:  # pyarrow's own kinds
        raise DataError(str(path), [f"is no Parquet file that can be read: {error}"]) from None
    for row in rows:
        kept = {name: value for name, value in row.items() if not _is_missing(value)}
        yield json.loads(json.dumps(kept, default=str))


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
