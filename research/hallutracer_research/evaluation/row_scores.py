"""Every row's scores as CSV, for plots and questions of one's own."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from hallutracer_research.evaluation.main_table import pooled_ranks
from hallutracer_research.evaluation.set_result import SetResult
from probes_store.local import atomic_write


def write_row_scores(result: SetResult, path: Path) -> None:
    """A line for each labelled row: id, group, label (1 factual), and each method's rank of risk.

    A rank is relative, in (0, 1), among the rows of the first seed's fold that tested the row: no fit saw it.
    """
    ranks = [pooled_ranks(len(result.label), scores) for scores in result.scores.values()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", "group", "label", *result.scores])
    dataset = result.prepared.rows.dataset
    for place, row in enumerate(result.prepared.index.tolist()):
        values = [f"{rank[place]:.6f}" for rank in ranks]
        writer.writerow([dataset.rows[row].id, int(result.group[place]), int(result.label[place]), *values])
    atomic_write(path, text.getvalue().encode("utf-8", "backslashreplace"))
