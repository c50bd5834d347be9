"""The main table (tab:main-results): every method on the same splits, and our difference to the runner-up.

AUROC does not depend on which class is positive.  AUPRC does, and the paper does not say which it takes, so both are
given.  Scores of different folds have different scales: where rows of several folds are ranked together (the
significance tests), each fold's scores are first replaced by their relative ranks within the fold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from hallutracer_research.evaluation.cost import CLASSES, Cost
from hallutracer_research.evaluation.options import OURS
from hallutracer_research.evaluation.significance import delong
from hallutracer_research.evaluation.tables import Column, Table
from service.fitting.nested_cv import FoldScores, test_sides
from service.fitting.probes import Floats, Index
from service.fitting.scores import auprc, gain, risk_auroc

MEASURES = ("auroc", "auprc_hallucinated", "auprc_factual")
# Candidates for the runner-up: the paper's baselines that read the model's states before an answer.
BASELINES = ("iti", "fact-probe", "iris")


@dataclass(frozen=True)
class Comparison:
    """Ours against the best of the ``BASELINES``."""

    runner_up: str
    difference: float  # of the mean AUROC over all test sides
    low: float
    high: float
    p_value: float  # over groups
    p_delong: float | None  # median over seeds; None where it is not defined


def measured(label: NDArray[np.int64], splits: Sequence[FoldScores]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation of each measure over folds and seeds."""
    by_measure: dict[str, list[float]] = {name: [] for name in MEASURES}
    for split in splits:
        test_label = label[split.test]
        by_measure["auroc"].append(risk_auroc(test_label, split.score))
        by_measure["auprc_hallucinated"].append(auprc(test_label, split.score, positive=0))
        by_measure["auprc_factual"].append(auprc(test_label, split.score, positive=1))
    return {name: spread(values) for name, values in by_measure.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation of one number by split, as a table's cell."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}


def pooled_ranks(count: int, splits: Sequence[FoldScores], seed: int = 0) -> Floats:
    """One seed's scores of all rows as relative ranks within their fold, [n]."""
    ranks = np.full(count, np.nan)
    for split in splits:
        if split.seed == seed:
            ranks[split.test] = rankdata(split.score) / (len(split.score) + 1)
    return ranks


def compare(
    label: NDArray[np.int64], group: Index, scores: Mapping[str, Sequence[FoldScores]], aurocs: Mapping[str, float]
) -> Comparison | None:
    """None where no baseline was evaluated."""
    others = {name: value for name, value in aurocs.items() if name in BASELINES}
    if not others:
        return None
    other = max(others, key=lambda name: others[name])
    seeds = sorted({split.seed for split in scores[OURS]})
    pairs = [[pooled_ranks(len(label), scores[name], seed) for name in (OURS, other)] for seed in seeds]
    p_values = [p for ours, theirs in pairs if (p := delong(label, ours, theirs).p_value) is not None]
    found = gain(label, group, test_sides(scores[OURS]), test_sides(scores[other]))
    return Comparison(other, *found, float(np.median(p_values)) if p_values else None)


COLUMNS = (
    Column("set", "Set", "text"),
    Column("method", "Method", "text"),
    Column("class", "Class", "text"),
    Column("cost", "Cost, prefills", "number", 3),
    Column("auroc", "AUROC", "percent", 3, higher=True),
    Column("auprc_hallucinated", "AUPRC, hallucinated positive", "percent", 3, higher=True),
    Column("auprc_factual", "AUPRC, factual positive", "percent", 3, higher=True),
)


def rows_of(
    title: str,
    titles: Mapping[str, str],
    measures: Mapping[str, Mapping[str, dict[str, float]]],
    costs: Mapping[str, Cost],
) -> list[dict[str, Any]]:
    """The main table's rows of one set: by cost class, within it in the order of ``measures``; first our class, A."""
    order = ("A", *(name for name in CLASSES if name not in ("A", "none")), "none")
    return [
        {"set": title, "method": titles[name], "class": costs[name].cls, "cost": costs[name].prefills, **measures[name]}
        for name in sorted(measures, key=lambda name: order.index(costs[name].cls))
    ]


def main_table(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Table:
    """tab:main-results of this run."""
    return Table(
        name="main",
        label="tab:main-results",
        title="Hallucination detection",
        columns=COLUMNS,
        rows=rows,
        caption="AUROC and AUPRC in percent, means over the test sides of all folds and seeds: AUROC with its 95 % "
        "interval over groups, for other training and test rows of this kind; AUPRC ± standard deviation over sides. "
        f"Class: what a score takes ({', '.join(f'{name}: {text}' for name, text in CLASSES.items())}); its cost is in "
        "prefills of the same prompt.",
        notes=notes,
        block="set",
    )
