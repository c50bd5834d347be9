"""Rows whose label is a share: right ones among sampled answers.

The logistic loss of a row with share p is p times that of a factual row plus 1 - p times that of a hallucinated one, so
a row becomes two weighted copies.  A copy without weight is left out: rows with a share of 0 or 1 stay one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.errors import TrainingError
from service.fitting.scores import auroc

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Copies:
    """r weighted copies of n rows, ordinary rows in their own order first."""

    row: NDArray[np.int64]  # [r] which row
    label: NDArray[np.int64]  # [r] 1 factual, 0 hallucinated
    weight: Floats  # [r] those of a row sum to 1


def copies_of(label: NDArray[np.integer], share: Floats | None) -> Copies:
    """label [n] where ``share`` [n] is None, else shares: -> copies."""
    rows = np.arange(len(label))
    if share is None:
        return Copies(rows, np.asarray(label, np.int64), np.ones(len(label)))
    first = (share >= 0.5).astype(np.int64)  # the class with more weight; the other one where it has any
    mixed = np.flatnonzero((share > 0) & (share < 1))
    both = np.r_[first, 1 - first[mixed]]
    row = np.r_[rows, mixed]
    return Copies(row, both, np.where(both == 1, share[row], 1 - share[row]))


def check_shares(share: Floats) -> None:
    """Raise TrainingError where the sampled answers of rows that are fitted on are all right, or all wrong."""
    if not 0 < share.sum() < len(share):
        raise TrainingError(
            f"all sampled answers of {len(share)} training rows are {'right' if share.all() else 'wrong'}: add rows of "
            "the other class, more samples or a higher temperature",
            param="samples",
        )


def soft_auroc(label: NDArray[np.integer], share: Floats | None, score: NDArray[np.floating]) -> float:
    """AUROC of a truth score [n] against ``label`` [n], or where there are shares [n] against these.

    Of shares: P(score of a right answer > score of a wrong one), ties half, answers drawn from random rows.
    ``check_shares`` holds for the rows.
    """
    if share is None:
        return auroc(label, score)
    made = copies_of(label, share)
    good = made.label == 1
    score = np.asarray(score)[made.row]
    others = np.argsort(score[~good])
    upto = np.append(0.0, np.cumsum(made.weight[~good][others]))  # weight of the wrong answers ranked below
    below, with_ties = (upto[np.searchsorted(score[~good][others], score[good], side)] for side in ("left", "right"))
    return float(np.average((below + with_ties) / 2, weights=made.weight[good]) / upto[-1])
