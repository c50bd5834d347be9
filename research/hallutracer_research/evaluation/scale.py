"""Models side by side: this evaluation beside finished ones, on sets of the same name
(``--beside``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hallutracer_research.documents import Row
from hallutracer_research.evaluation.methods import METHODS, OURS
from hallutracer_research.evaluation.page import Column, Rows, Table, described, mean
from hallutracer_research.evaluation.results import SetResult
from service.errors import DataError
from service.fitting.scores import debiased_calibration_error

RESULTS = "results.json"
# among the facts and not in a table: another run of the same has other ones
TIMES = "milliseconds a prefill"
_OURS = METHODS[OURS].title


def sets_table(sets: Sequence[SetResult], weights: int | None) -> Table:
    """Return a row for each set: how hard it is for the model, and how true our risk is."""
    rows: Rows = []
    for result in sets:
        error = debiased_calibration_error(result.label, result.calibrated)
        rows.append(
            {
                "set": result.title,
                "rows": len(result.label),
                "right": float(result.label.mean()),
                "weights": weights,
                "calibration": error,
                "gap": float(result.calibrated.mean() - 1 + result.label.mean()),
            }
        )
    return described("sets", rows)


def beside_tables(
    model: str, tables: Sequence[Table], milliseconds: Mapping[str, float], folders: Sequence[Path]
) -> list[Table]:
    """Return the figures of each model that one line can say, then every method's, model by model.
    Raises DataError where a folder holds no finished evaluation, or none of the same rows."""
    here: Row = {table.name: table.document()["rows"] for table in tables}
    here[TIMES] = milliseconds
    runs = {model: here}
    titles = [row["set"] for row in here["sets"]]
    for folder in folders:
        name, beside = finished(folder)
        shared = {row["set"]: row["rows"] for row in beside.get("sets", ())}
        if not any(shared.get(title) is not None for title in titles):
            raise DataError(str(folder), [f"has no set of {', '.join(titles)}"])
        runs[name if name not in runs else f"{name} ({folder.name})"] = beside
    return [_models(runs, titles), _methods(runs, titles)]


def finished(folder: Path) -> tuple[str, Row]:
    """Return the model's name, and the tables' rows and the times of a finished evaluation.  Raises
    DataError."""
    path = folder / RESULTS
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        tables = {name: table["rows"] for name, table in document["tables"].items()}
        return str(document["facts"]["model"]["name"]), tables | {TIMES: document["facts"][TIMES]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        cure = (
            f"holds no finished evaluation ({RESULTS}: {error}); run hallutracer evaluate --out"
            f" {folder} first"
        )
        raise DataError(str(folder), [cure]) from error


def _models(runs: Mapping[str, Mapping[str, Any]], titles: Sequence[str]) -> Table:
    rows: Rows = []
    for title in titles:
        for model, tables in runs.items():
            about = _row(tables, "sets", set=title)
            main = _row(tables, "main", set=title, method=_OURS)
            decided = _row(tables, "decisions", set=title, method=_OURS)
            left_out = []
            for row in tables.get("transfer", ()):
                _, all_but, source = row["train"].rpartition("all but ")
                if all_but and (row["set"], row["method"]) == (title, _OURS):
                    left_out.append(mean(row[source]))
            known = [value for value in left_out if value is not None]
            rows.append(
                {
                    "set": title,
                    "model": model,
                    **{key: about.get(key) for key in ("weights", "rows", "right")},
                    **{key: main.get(key) for key in ("within", "auroc")},
                    "left_out": float(np.mean(known)) if known else None,
                    **{key: mean(decided.get(key)) for key in ("e_aurc", "caught_at_10")},
                    "calibration": about.get("calibration"),
                    "milliseconds": tables[TIMES].get(title),
                }
            )
    return described("models", rows)


def _methods(runs: Mapping[str, Mapping[str, Any]], titles: Sequence[str]) -> Table:
    rows: Rows = []
    for title in titles:
        named = [row for tables in runs.values() for row in tables["main"] if row["set"] == title]
        for method in dict.fromkeys(row["method"] for row in named):
            by_model = {
                model: _row(tables, "main", set=title, method=method)
                for model, tables in runs.items()
            }
            cells = {
                f"{key} {model}": row.get(key)
                for model, row in by_model.items()
                for key in ("within", "auroc")
            }
            costs = [row["class"] for row in by_model.values() if row]
            rows.append({"set": title, "method": method, "class": costs[0], **cells})
    columns = [
        Column(f"{key} {model}", f"{words}, {model}", "percent", higher=True)
        for model in runs
        for key, words in (("within", "Within kind"), ("auroc", "AUROC"))
    ]
    return described("scale", rows, columns=columns)


def _row(tables: Mapping[str, Any], name: str, **wanted: str) -> Row:
    """Return the first row of a table whose cells are these; {} where there is none."""
    for row in tables.get(name, ()):
        if all(row.get(key) == value for key, value in wanted.items()):
            return dict(row)
    return {}
