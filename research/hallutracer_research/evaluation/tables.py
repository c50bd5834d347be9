"""Tables as data, and as GitHub Markdown; the HTML page and the JSON file are written from the same data.

Text is escaped, so that a method called ``a|b`` or ``<c>`` is shown under its name; in captions and notes a span
between backticks stays code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from service.trainer.presentation import markdown_table

Kind = Literal["text", "integer", "number", "percent", "p_value"]
Cell = str | int | float | None | Mapping[str, float]  # a mapping: mean, and std or low and high


@dataclass(frozen=True)
class Column:
    """One column: the key in each row, its heading, and how its cells are written.

    number: ``digits`` decimals; percent: a share of 1 written as 12.3; p_value: two digits, "< 0.001" below.
    higher: whether a larger value is better (the best is set in bold), None where neither is.
    """

    key: str
    title: str
    kind: Kind = "number"
    digits: int = 3
    higher: bool | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells by column key; a missing cell is shown as a dash.

    name: short and unique in a run ("main"); label: the paper's ("tab:main-results"), "" where the paper has none.
    block: a column key by whose values rows are grouped (and within which the best is sought), "" for none.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    label: str = ""
    caption: str = ""
    notes: Sequence[str] = field(default=())
    block: str = ""

    def document(self) -> dict[str, Any]:
        """Return, for the JSON file, the rows as they are, and what the columns mean."""
        return {
            "title": self.title, "label": self.label, "caption": self.caption, "notes": list(self.notes),
            "columns": {column.key: column.title for column in self.columns},
            "rows": [dict(row) for row in self.rows],
        }  # fmt: skip


DASH, MINUS = "–", "−"
SMALLEST_P = 0.001
Rows = Sequence[Mapping[str, Cell]]


def to_markdown(tables: Sequence[Table], intro: str) -> str:
    """Return ``intro`` (Markdown, as it is), then every table under its title; the best cell of a block is in bold."""
    parts = [intro.strip()] if intro.strip() else []
    parts += [table_markdown(table) for table in tables]
    return "\n\n".join(parts) + "\n"


def table_markdown(table: Table) -> str:
    """Return heading, caption, rows and notes.  Raises ValueError for what ``cell_text`` cannot write."""
    lines = []
    for rows in blocks(table):
        best = {column.key: best_rows(column, rows) for column in table.columns}
        for index, row in enumerate(rows):
            texts = {column.key: _escape(cell_text(column, row.get(column.key))) for column in table.columns}
            lines.append([f"**{text}**" if index in best[key] else text for key, text in texts.items()])
    header = [_escape(header_text(column)) for column in table.columns]
    numbers = [place for place, column in enumerate(table.columns) if column.kind != "text"]
    heading = f"## {_escape(table.title)}" + (f" (paper: `{table.label}`)" if table.label else "")
    parts = [
        heading,
        _prose(table.caption),
        markdown_table(header, lines, numbers),
        "\n".join(f"- {_prose(note)}" for note in table.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def blocks(table: Table) -> list[Rows]:
    """Return rows grouped by the table's block column, in order of first appearance; one group without one."""
    if not table.block:
        return [list(table.rows)]
    groups: dict[str, list[Mapping[str, Cell]]] = {}
    for row in table.rows:
        groups.setdefault(str(row.get(table.block)), []).append(row)
    return list(groups.values())


def best_rows(column: Column, rows: Rows) -> set[int]:
    """Return which of ``rows`` hold the best value as it is written (values that are written alike are a tie).

    Empty where the column has no better direction, or where fewer than two rows have a number to compare.
    """
    if column.higher is None:
        return set()
    shown = {
        index: _shown(column, value)
        for index, row in enumerate(rows)
        if (value := mean(row.get(column.key))) is not None
    }
    if len(shown) < 2:
        return set()
    best = max(shown.values()) if column.higher else min(shown.values())
    return {index for index, value in shown.items() if value == best}


def mean(cell: Cell) -> float | None:
    """Return the number of a cell: itself, or the mean that comes with a spread; None for text and missing cells."""
    if isinstance(cell, Mapping):
        return cell.get("mean")
    return cell if isinstance(cell, int | float) else None


def header_text(column: Column) -> str:
    """Return a column's heading; a column of percentages names the unit unless its title does."""
    named = "%" in column.title or column.title.endswith("points")
    return f"{column.title}, %" if column.kind == "percent" and not named else column.title


def cell_text(column: Column, cell: Cell) -> str:
    """Return a cell as it is written: "0.687", "68.7 ± 0.3", "68.7 [67.9, 69.4]", "< 0.001", "3,793", "–" for none.

    A percentage has two decimals fewer than the share it stands for: ``digits`` 3 writes 0.6871 as 68.7.
    ValueError names the column where a number is not finite or a text stands in a column of numbers.
    """
    if cell is None:
        return DASH
    if isinstance(cell, str):
        if column.kind != "text":
            raise ValueError(f"column {column.key!r} holds {column.kind}s, but a cell is the text {cell!r}")
        return cell
    if column.kind == "text" and not isinstance(cell, Mapping):
        return str(cell)
    value = mean(cell)
    if value is None:
        return DASH
    text, more = _number(column, value), cell if isinstance(cell, Mapping) else {}
    if "low" in more:
        return f"{text} [{_number(column, more['low'])}, {_number(column, more['high'])}]"
    return f"{text} ± {_number(column, more['std'])}" if "std" in more else text


def _number(column: Column, value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(
            f"column {column.key!r}: {value} is not a number to show; give None, and a note with the reason"
        )
    if column.kind == "p_value":
        return f"< {SMALLEST_P}" if value < SMALLEST_P else f"{value:#.2g}"
    return f"{_shown(column, value):,.{_decimals(column)}f}".replace("-", MINUS)


def _decimals(column: Column) -> int:
    return {"integer": 0, "percent": max(column.digits - 2, 0)}.get(column.kind, column.digits)


def _shown(column: Column, value: float) -> float:
    """Return it as far as its digits go; never a negative zero.  A p-value is compared as it is."""
    if column.kind == "p_value":
        return value
    return round(100 * value if column.kind == "percent" else value, _decimals(column)) + 0.0


def _escape(text: str) -> str:
    """Return plain text that Markdown, HTML inside it and GitHub's formulas leave alone, on one line."""
    text = re.sub(r"([\\`*\[\]|$~])", r"\\\1", " ".join(text.split()))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # an underscore inside a word means nothing


def _prose(text: str) -> str:
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    for index, text in enumerate(parts[::2]):
        inner = _escape(text)
        parts[2 * index] = " " * text.startswith(" ") + inner + " " * bool(inner and text.endswith(" "))
    return "".join(parts)
