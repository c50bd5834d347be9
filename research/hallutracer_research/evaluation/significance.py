"""Is one risk's AUROC larger than another's on the same rows?

``delong`` assumes independent rows; where rows come in groups (several statements of one entity) its p-values are too
small, and ``fitting.scores.gain`` over groups is the one to report.  Risks rise with hallucination; label 1 is
factual.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata

from service.errors import TrainingError

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]


class DeLong(NamedTuple):
    """Two correlated AUROCs.  ``z`` and ``p_value`` are None where the variance is undefined: see ``delong``."""

    auc_a: float
    auc_b: float
    z: float | None
    p_value: float | None  # two-sided


def delong(label: Labels, risk_a: Floats, risk_b: Floats) -> DeLong:
    """DeLong's test for two AUROCs on the same rows, by midranks in O(n log n) (Sun and Xu 2014).

    label [n], risks [n].  Equal rankings give z = 0 and p = 1.  None stands for z and p where a class has a single row,
    or where the AUROCs differ but neither varies (both rank every pair of rows alike, one of them for the worse).
    Raises TrainingError: a class is missing, lengths differ or a risk is not finite.
    """
    hallucinated = _checked(label, risk_a, risk_b)
    bad_a, good_a = _components(hallucinated, np.asarray(risk_a))
    bad_b, good_b = _components(hallucinated, np.asarray(risk_b))
    auc_a, auc_b = float(bad_a.mean()), float(bad_b.mean())
    if min(len(bad_a), len(good_a)) < 2:
        return DeLong(auc_a, auc_b, None, None)
    # The variance of the difference from the differences themselves: exactly zero where the rankings agree.
    variance = np.var(bad_a - bad_b, ddof=1) / len(bad_a) + np.var(good_a - good_b, ddof=1) / len(good_a)
    if variance < 1e-28:  # what rounding leaves of zero; the smallest real one, a single pair swapped, is far above
        return DeLong(auc_a, auc_b, 0.0, 1.0) if abs(auc_a - auc_b) < 1e-12 else DeLong(auc_a, auc_b, None, None)
    z = (auc_a - auc_b) / float(np.sqrt(variance))
    return DeLong(auc_a, auc_b, z, float(2.0 * norm.sf(abs(z))))


def _components(hallucinated: NDArray[np.bool_], risk: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Structural components: for each hallucinated row the share of factual ones below it, for each factual row the
    share of hallucinated ones above it; ties count half.  The mean of either is the AUROC."""
    bad, good = risk[hallucinated], risk[~hallucinated]
    together = rankdata(np.concatenate([bad, good]))
    of_bad = (together[: len(bad)] - rankdata(bad)) / len(good)
    of_good = 1.0 - (together[len(bad) :] - rankdata(good)) / len(bad)
    return of_bad, of_good


def _checked(label: Labels, risk_a: Floats, risk_b: Floats) -> NDArray[np.bool_]:
    """Which rows are hallucinated."""
    values = np.asarray(label)
    for name, risk in (("risk_a", risk_a), ("risk_b", risk_b)):
        if np.shape(risk) != values.shape or values.ndim != 1:
            raise TrainingError(f"{name} has shape {np.shape(risk)}, label {values.shape}; both must be [n]")
        if not np.all(np.isfinite(risk)):
            row = int(np.flatnonzero(~np.isfinite(risk))[0])
            raise TrainingError(f"{name} is not finite at row {row}; every row needs a risk")
    hallucinated: NDArray[np.bool_] = values == 0
    if not np.all(hallucinated | (values == 1)) or hallucinated.all() or not hallucinated.any():
        raise TrainingError("label must hold 1 (factual) and 0 (hallucinated), both of them and nothing else")
    return hallucinated
