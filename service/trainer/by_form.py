"""What a bundle's risk is worth in each form of conversation: a table for evaluation.json and the card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.fitting.nested_cv import rounded
from service.fitting.presentation import markdown_table
from service.fitting.scores import debiased_calibration_error, risk_auroc
from service.judging.form_table import kept_forms

Floats = NDArray[np.floating]
FORM = "form"  # the key of a row that names its form


def by_form(
    label: NDArray[np.int64], risk: Floats, strata: Sequence[Mapping[str, str]], threshold: float
) -> dict[str, dict[str, float | int | None]]:
    """label [n], risk [seeds, n]: of each form its rows, share wrong, mean risk, its error, AUROC, and the gate.

    ``calibration_error`` is debiased.  Means over seeds; no AUROC where a form has one class only, nothing of answered
    rows where there are none.  Empty unless every row names its form.
    """
    names = [row.get(FORM) for row in strata]
    if None in names:
        return {}
    form = np.array(names)
    table: dict[str, dict[str, float | int | None]] = {}
    for name in sorted(set(form.tolist())):
        inside = form == name
        own, risks = label[inside], risk[:, inside]
        both, answered = 0 < own.sum() < len(own), risks < threshold
        table[name] = {
            "rows": len(own),
            "wrong": float(1 - own.mean()),
            "mean_risk": float(risks.mean()),
            "calibration_error": float(np.mean([debiased_calibration_error(own, of_seed) for of_seed in risks])),
            "auroc": float(np.mean([risk_auroc(own, of_seed) for of_seed in risks])) if both else None,
            "answered": float(answered.mean()),
            "wrong_among_answered": (1 - own)[np.nonzero(answered)[1]].mean() if answered.any() else None,
            "mean_risk_among_answered": risks[answered].mean() if answered.any() else None,
        }
    return {name: rounded(row) for name, row in table.items()}


def form_section(evaluation: Mapping[str, Any]) -> str | None:
    """The card's section: of held-out rows where there are some, else by folds that never saw the row."""
    if (kept := kept_forms(evaluation)) is None:
        return None
    source, found = kept
    rows = "held-out rows" if source == "held_out" else "by folds that never saw the row"
    header = [
        "form",
        "rows",
        "wrong",
        "mean risk",
        "calibration error",
        "AUROC",
        "answered",
        "wrong among answered",
        "their mean risk",
    ]
    shown = [
        [f"`{name}`", f"{row['rows']}", *(_number(row[column]) for column in list(row)[1:])]
        for name, row in found.items()
    ]
    return (
        "## By form of conversation\n\n"
        f"The same risk in each form in which questions were asked ({rows}), and what a gate at the bundle's threshold "
        "does. Where the mean risk is far from the share of wrong answers, the risk is no probability in that form.\n\n"
        f"{markdown_table(header, shown, range(1, len(header)))}\n"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
