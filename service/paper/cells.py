"""How a fitted set becomes a row of a table: columns named as the paper's, mean and spread over splits, what fails.

A table of one run spans its sets, a row each.  A set that does not carry a computation costs its own row's cells and
a note with the reason, not the table.  Computes nothing of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from service.errors import TrainingError
from service.evaluation.set_run import SetRun
from service.evaluation.tables import Cell, Column, Table
from service.paper.published import PUBLISHED

Row = Mapping[str, Cell]
Maker = Callable[[Sequence[SetRun]], list[Table]]
"""What every ablation and every structure table is: the sets of a run -> the tables it has under one heading."""

SET: Final = Column("set", "Set", "text")
OVER_SPLITS: Final = "mean ± standard deviation over the test sides of all folds and seeds"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation of one number by split, as a cell."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}


def published_columns(label: str, *keys: str) -> list[Column]:
    """The set, then columns of the published table ``label``, so that both tables read alike."""
    known = {column.key: column for column in PUBLISHED[label].columns}
    return [SET, *(known[key] for key in keys)]


def by_set(runs: Sequence[SetRun], make: Callable[[SetRun, list[str]], Row], notes: list[str]) -> list[Row]:
    """``make(run, notes)`` of every set under its name.

    Where it raises TrainingError the row has the name alone, and a note the reason; what it adds to its own list of
    notes is told under the set's name.
    """
    rows: list[Row] = []
    for run in runs:
        own: list[str] = []
        try:
            rows.append({"set": run.title, **make(run, own)})
        except TrainingError as error:
            rows.append({"set": run.title})
            own.append(f"left out: {error}")
        notes += [f"{run.title}: {note}" for note in dict.fromkeys(own)]
    return rows
