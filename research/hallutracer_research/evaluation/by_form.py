"""How well the risk ranks within each form of conversation, for sets whose rows name their form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hallutracer_research.evaluation.main_table import pooled_ranks
from hallutracer_research.evaluation.options import OURS
from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.evaluation.tables import Cell, Column, Table
from service.data.training_rows import FORM
from service.fitting.scores import risk_auroc

RIVALS = ("iti", "text-ngrams")  # the best single head, and what the words alone tell


def form_table(sets: Sequence[SetResult], titles: Mapping[str, str]) -> Table | None:
    """A row for each form of each set with two forms or more; None where there is no such set."""
    rows: list[Mapping[str, Cell]] = []
    methods: list[str] = []
    for result in sets:
        dataset = result.prepared.rows.dataset
        form = np.array([dataset.rows[row].strata.get(FORM, "") for row in result.prepared.index.tolist()], np.str_)
        names = sorted(set(form.tolist()) - {""})
        if len(names) < 2:
            continue
        rivals = [method for method in RIVALS if method in result.scores]
        methods += [method for method in (OURS, *rivals) if method not in methods]
        ranks = {method: pooled_ranks(len(form), result.scores[method]) for method in (OURS, *rivals)}
        for name in names:
            inside = form == name
            label = result.label[inside]
            cells: dict[str, Cell] = {}
            if 0 < label.sum() < len(label):
                cells = {method: risk_auroc(label, rank[inside]) for method, rank in ranks.items()}
            rows.append(
                {"set": result.title, FORM: name, "rows": len(label), "wrong": float(1 - label.mean()), **cells}
            )
    if not rows:
        return None
    return Table(
        name="forms",
        title="By form of conversation",
        columns=(
            Column("set", "Set", "text"),
            Column(FORM, "Form", "text"),
            Column("rows", "Rows", "integer"),
            Column("wrong", "Hallucinated", "percent", 3),
            *(Column(method, f"AUROC, {titles[method]}", "percent", 3, higher=True) for method in methods),
        ),
        rows=rows,
        caption="AUROC in percent within the rows of one form, by out-of-fold ranks of the first seed. What a form "
        "does to the level of the risk does not show here: `hallutracer train` puts that into the model card.",
        block="set",
    )
