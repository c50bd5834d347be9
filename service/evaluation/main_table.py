"""The main table (tab:main-results): every method on the same splits, with the runner-up's distance.  Fits nothing.

AUROC does not ask which class is positive; AUPRC does, the paper does not say, so both are given.  Scores of different
folds have different scales, so where rows of several folds are ranked together (the significance tests) each fold's
scores are first replaced by their ranks' shares within the fold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from service.evaluation.options import OURS
from service.evaluation.significance import delong, paired_bootstrap
from service.evaluation.tables import Column, Table
from service.fitting.fit import Floats, Index
from service.fitting.nested_cv import FoldScores
from service.fitting.scores import auprc, risk_auroc

MEASURES = ("auroc", "auprc_hallucinated", "auprc_factual")
# The runner-up is looked for among these: the paper's baselines that read the model's states before an answer.
BASELINES = ("iti", "fact-probe", "iris")
RESAMPLES = 2_000
Run = FoldScores  # of one method


@dataclass(frozen=True)
class Comparison:
    """Ours against the best of the ``BASELINES``."""

    runner_up: str
    difference: float  # of AUROC, pooled over folds, first seed
    low: float
    high: float
    p_bootstrap: float
    p_delong: float | None  # median over seeds; None where it is not defined


def measured(label: NDArray[np.int64], runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation of each measure over folds and seeds."""
    found: dict[str, list[float]] = {name: [] for name in MEASURES}
    for run in runs:
        side = label[run.test]
        found["auroc"].append(risk_auroc(side, run.score))
        found["auprc_hallucinated"].append(auprc(side, run.score, positive=0))
        found["auprc_factual"].append(auprc(side, run.score, positive=1))
    return {name: {"mean": float(np.mean(values)), "std": float(np.std(values))} for name, values in found.items()}


def pooled_ranks(count: int, runs: Sequence[Run]) -> Floats:
    """One seed's scores of all rows as shares of ranks within their fold, [n]."""
    ranks = np.full(count, np.nan)
    for run in runs:
        ranks[run.test] = rankdata(run.score) / (len(run.score) + 1)
    return ranks


def compare(
    label: NDArray[np.int64], group: Index, runs: Mapping[str, Sequence[Run]], aurocs: Mapping[str, float]
) -> Comparison | None:
    """None where no baseline took part."""
    others = {name: value for name, value in aurocs.items() if name in BASELINES}
    if not others:
        return None
    other = max(others, key=lambda name: others[name])
    seeds = sorted({run.seed for run in runs[OURS]})
    by_seed = {
        name: [pooled_ranks(len(label), [run for run in runs[name] if run.seed == seed]) for seed in seeds]
        for name in (OURS, other)
    }
    pairs = zip(by_seed[OURS], by_seed[other], strict=True)
    p_values = [p for a, b in pairs if (p := delong(label, a, b).p_value) is not None]
    drawn = paired_bootstrap(label, by_seed[OURS][0], by_seed[other][0], group, RESAMPLES, 0)
    return Comparison(
        other, drawn.difference, drawn.low, drawn.high, drawn.p_value, float(np.median(p_values)) if p_values else None
    )


COLUMNS = (
    Column("set", "Set", "text"),
    Column("method", "Method", "text"),
    Column("auroc", "AUROC", "percent", 3, higher=True),
    Column("auprc_hallucinated", "AUPRC, hallucinated positive", "percent", 3, higher=True),
    Column("auprc_factual", "AUPRC, factual positive", "percent", 3, higher=True),
)


def rows_of(
    title: str, titles: Mapping[str, str], measures: Mapping[str, Mapping[str, dict[str, float]]]
) -> list[dict[str, Any]]:
    """The main table's rows of one set, methods in the order of ``measures``."""
    return [{"set": title, "method": titles[name], **found} for name, found in measures.items()]


def main_table(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Table:
    """tab:main-results of this run."""
    return Table(
        name="main",
        label="tab:main-results",
        title="Hallucination detection",
        columns=COLUMNS,
        rows=rows,
        caption="AUROC and AUPRC in percent; mean ± standard deviation over the test sides of all folds and seeds.",
        notes=notes,
        block="set",
    )
