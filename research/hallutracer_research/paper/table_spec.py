"""The paper's tables as rows of one list: a name, columns, a caption, and how one evaluated set becomes a row.

A table of one run has a row for each of its data sets.  A set that does not support a computation has an empty row and
a note with the reason; the other rows are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.evaluation.tables import Cell, Column, Table
from hallutracer_research.paper.published import PUBLISHED
from service.errors import TrainingError

Row = Mapping[str, Cell]
RowMaker = Callable[[SetResult, list[str]], Row]
"""(set, notes to add to) -> cells by key; keys that no column has are left out.  May raise TrainingError."""
Columns = Sequence[str | Column]

SET: Final = Column("set", "Set", "text")
OVER_SPLITS: Final = "mean ± standard deviation over the test sides of all folds and seeds"


@dataclass(frozen=True)
class TableSpec:
    """One table.

    label: the paper's, "" for a table of our own.
    columns: after the set's; a string is a key of the published table with that label.  A function of the sets where
        the columns depend on the number of layers.
    notes: those of every run; each set adds its own.
    """

    name: str
    title: str
    label: str
    columns: Columns | Callable[[Sequence[SetResult]], Columns]
    caption: str
    row: RowMaker
    notes: tuple[str, ...] = ()

    def table(self, results: Sequence[SetResult]) -> Table:
        """The table of these sets."""
        return make_tables([self], results)[0]

    def resolved_columns(self, results: Sequence[SetResult]) -> list[Column]:
        """All columns, the set's first."""
        columns = self.columns(results) if callable(self.columns) else self.columns
        published = {column.key: column for column in PUBLISHED[self.label].columns} if self.label else {}
        return [SET, *(published[column] if isinstance(column, str) else column for column in columns)]


def make_tables(specs: Sequence[TableSpec], results: Sequence[SetResult]) -> list[Table]:
    """One table for each spec.  A row function that several specs share runs once, its notes go under the first."""
    cells: dict[RowMaker, list[Row]] = {}
    tables = []
    for spec in specs:
        notes = list(spec.notes)
        if spec.row not in cells:
            cells[spec.row] = [_row(spec.row, result, notes) for result in results]
        columns = spec.resolved_columns(results)
        rows = [{column.key: row[column.key] for column in columns if column.key in row} for row in cells[spec.row]]
        tables.append(Table(spec.name, spec.title, columns, rows, spec.label, spec.caption, notes))
    return tables


def attributes(diagnostic: Any, notes: list[str]) -> dict[str, Any]:
    """The cells of a diagnostic's result, by its field names; its notes are added to ``notes``."""
    notes += diagnostic.notes
    return dict(vars(diagnostic))


def _row(make: RowMaker, result: SetResult, notes: list[str]) -> Row:
    own: list[str] = []
    row: dict[str, Cell] = {SET.key: result.title}
    try:
        row |= make(result, own)
    except TrainingError as error:
        own.append(f"left out: {error}")
    notes += [f"{result.title}: {note}" for note in dict.fromkeys(own)]
    return row
