"""The numbers the paper prints, as tables that can be shown beside a run's own.

``published.json`` holds them by the paper's label, typed as printed: percentages as percentages, mean and standard
deviation as a pair.  Here a percentage becomes a share of 1, as everywhere in a report.  Models and data sets are
spelt one way throughout, though the paper varies; tab:isotropy-results is transposed, so that a row is a model there
too.  A note under a table says where the printed numbers contradict each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from hallutracer_research.evaluation.tables import Cell, Column, Table

_DIGITS = 10  # a percentage divided by 100 is rounded here, so that 68.71 gives 0.6871 and not 0.6870999


def _read() -> dict[str, Table]:
    text = files("hallutracer_research.paper").joinpath("published.json").read_text(encoding="utf-8")
    return {label: _table(label, entry) for label, entry in json.loads(text).items()}


def _table(label: str, entry: Mapping[str, Any]) -> Table:
    columns = [Column(*column) for column in entry["columns"]]
    rows = [
        {column.key: _cell(column, value) for column, value in zip(columns, row, strict=True)} for row in entry["rows"]
    ]
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


PUBLISHED: Mapping[str, Table] = MappingProxyType(_read())
"""The paper's label ("tab:main-results") -> the table as published; its rows name the data set "True-False",
"HaluEval2", "HELM", "TruthfulQA" or "Agentic" and the model "Qwen2.5-7B" ... "LLaMA-3.1-8B"."""
