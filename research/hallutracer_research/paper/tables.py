"""The paper's tables: its printed numbers, and how one evaluated set becomes a row of a run's own
(``tables.toml``).

``published.json`` holds the printed numbers by the paper's label; a percentage becomes a share of
1.  Models and sets are spelt one way, though the paper varies; tab:isotropy-results is transposed.
Notes say where printed numbers disagree. A set that does not support a computation has an empty row
and a note with the reason; the others are unaffected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hallutracer_research.documents import table_beside
from hallutracer_research.evaluation.page import SET, Cell, Column, Table
from hallutracer_research.evaluation.results import SetResult
from service.errors import TrainingError

# A percentage divided by 100 is rounded here, so that 68.71 gives 0.6871 and not 0.6870999.
_DIGITS = 10


def _table(label: str, entry: Mapping[str, Any]) -> Table:
    columns = [Column(*column) for column in entry["columns"]]
    rows = []
    for values in entry["rows"]:
        named = zip(columns, values, strict=True)
        rows.append({column.key: _cell(column, value) for column, value in named})
    return Table(
        name="paper-" + label.removeprefix("tab:"),
        title=entry["title"],
        columns=columns,
        rows=rows,
        label=label,
        caption=entry["caption"],
        notes=entry.get("notes", ()),
        block=entry.get("block", ""),
    )


def _cell(column: Column, value: Any) -> Cell:
    if isinstance(value, list):
        mean, std = value
        return {"mean": _share(column, mean), "std": _share(column, std)}
    return _share(column, value) if isinstance(value, int | float) else value


def _share(column: Column, value: float) -> float:
    return round(value / 100, _DIGITS) if column.kind == "percent" else value


_TEXTS = table_beside(__file__, "tables.toml")
_PRINTED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
PUBLISHED: Mapping[str, Table] = {label: _table(label, entry) for label, entry in _PRINTED.items()}
"""The paper's label ("tab:main-results") -> the table as published; its rows name the data set
"True-False", "HaluEval2", "HELM", "TruthfulQA" or "Agentic" and the model "Qwen2.5-7B" ...
"LLaMA-3.1-8B"."""


Row = Mapping[str, Cell]
RowMaker = Callable[[SetResult, list[str]], Row]
"""(set, notes to add to) -> cells by key; keys that no column has are left out.  May raise
TrainingError."""
Columns = Sequence[str | Column]

SHARED = _TEXTS.pop("shared")


@dataclass(frozen=True)
class TableSpec:
    """One table."""

    name: str
    title: str
    label: str  # the paper's, "" for a table of our own
    # after the set's; a string: a published key
    columns: Columns | Callable[[Sequence[SetResult]], Columns]
    caption: str
    row: RowMaker
    notes: tuple[str, ...] = ()  # of every run; each set adds its own

    def resolved_columns(self, results: Sequence[SetResult]) -> list[Column]:
        """Return all columns, the set's first."""
        columns = self.columns(results) if callable(self.columns) else self.columns
        published = (
            {column.key: column for column in PUBLISHED[self.label].columns} if self.label else {}
        )
        return [
            SET,
            *(published[column] if isinstance(column, str) else column for column in columns),
        ]


def specs(
    rows: Mapping[str, RowMaker],
    columns: Mapping[str, Callable[[Sequence[SetResult]], Columns]] = {},
    **numbers: float,
) -> dict[str, TableSpec]:
    """Return the tables of ``tables.toml`` by name, with their row functions; ``numbers`` are those
    in their texts."""
    described, words = {}, {**SHARED, **numbers}
    for name, row in rows.items():
        entry = _TEXTS[name]
        listed = [
            Column(*column) if isinstance(column, list) else column
            for column in entry.get("columns", ())
        ]
        described[name] = TableSpec(
            name,
            entry["title"],
            entry.get("label", ""),
            columns.get(name, listed),
            entry["caption"].format_map(words),
            row,
            tuple(note.format_map(words) for note in entry.get("notes", ())),
        )
    return described


def make_tables(specs: Iterable[TableSpec], results: Sequence[SetResult]) -> list[Table]:
    """Return one table for each spec.  A row function of several specs runs once, its notes go
    under the first."""
    cells: dict[RowMaker, list[Row]] = {}
    tables = []
    for spec in specs:
        notes = list(spec.notes)
        if spec.row not in cells:
            cells[spec.row] = [_set_row(spec.row, result, notes) for result in results]
        columns = spec.resolved_columns(results)
        keys = [column.key for column in columns]
        rows = []
        for row in cells[spec.row]:
            rows.append({key: row[key] for key in keys if key in row})
        tables.append(Table(spec.name, spec.title, columns, rows, spec.label, spec.caption, notes))
    return tables


def attributes(diagnostic: Any, notes: list[str]) -> dict[str, Any]:
    """Return the cells of a diagnostic's result, by its field names; its notes are added to
    ``notes``."""
    notes += diagnostic.notes
    return dict(vars(diagnostic))


def _set_row(make: RowMaker, result: SetResult, notes: list[str]) -> Row:
    of_set: list[str] = []
    row: dict[str, Cell] = {SET.key: result.title}
    try:
        row |= make(result, of_set)
    except TrainingError as error:
        of_set.append(f"left out: {error}")
    notes += [f"{result.title}: {note}" for note in dict.fromkeys(of_set)]
    return row
