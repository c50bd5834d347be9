"""Scores of a risk: ranking, calibration, what a threshold does.

Labels: 1 factual, 0 hallucinated.  A risk is P(hallucinated).  AUPRC is given with either class as the positive one,
because the paper does not say which it uses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, brier_score_loss

Labels = NDArray[np.integer]
Floats = NDArray[np.floating]

ECE_BINS = 15
ROWS_A_BIN = 20  # at least, where bins are shown: a share of fewer rows says little
SUMMARY = ("auroc", "auprc_hallucinated", "auprc_factual", "brier", "ece")


def auroc(label: Labels, score: Floats) -> float:
    """P(score of a factual row > score of a hallucinated row), ties count half: label [N], score [N].

    ``score`` rises with factuality (a truth logit).  ValueError where a class is missing.
    """
    values = _two_classes(label)
    hallucinated, factual = np.sort(np.asarray(score)[values == 0]), np.sort(np.asarray(score)[values == 1])
    # Counting pairs gives the same number as scikit-learn's curve, faster: head selection needs it many thousand times.
    below = np.searchsorted(hallucinated, factual, "left").sum() + np.searchsorted(hallucinated, factual, "right").sum()
    return float(below) / (2.0 * len(hallucinated) * len(factual))


def risk_auroc(label: Labels, risk: Floats) -> float:
    """AUROC of a risk, which rises with hallucination; hallucinated is the positive class."""
    return auroc(label, -np.asarray(risk))


def auprc(label: Labels, risk: Floats, *, positive: int) -> float:
    """Average precision with ``positive`` 0 (hallucinated, ranked by risk) or 1 (factual, ranked by 1 - risk)."""
    if positive not in (0, 1):
        raise ValueError(f"positive must be 0 (hallucinated) or 1 (factual), not {positive}")
    _two_classes(label)
    score = np.asarray(risk) if positive == 0 else -np.asarray(risk)
    return float(average_precision_score(label == positive, score))


def brier(label: Labels, risk: Floats) -> float:
    """Mean squared difference between the risk and the truth (1 hallucinated)."""
    return float(brier_score_loss(1 - np.asarray(label), risk, pos_label=1))


def equal_mass_bins(risk: Floats, bins: int = ECE_BINS) -> NDArray[np.int64]:
    """The bin of each row, 0 and up without gaps: risk [n] -> [n].

    Rows are sorted by risk and cut into ``bins`` runs of (nearly) equal length; equal risks share the bin of the first
    of them, so the order of rows does not matter.
    """
    values = np.asarray(risk, np.float64)
    first = np.searchsorted(np.sort(values), values, side="left")
    return np.unique(first * bins // len(values), return_inverse=True)[1].astype(np.int64)


def reliability(
    label: Labels, risk: Floats, bins: int = ECE_BINS
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Mean risk, share hallucinated and size of each of ``equal_mass_bins``, [b <= bins]."""
    order = np.argsort(risk, kind="stable")
    ranked = np.asarray(risk, np.float64)[order]
    index = equal_mass_bins(ranked, bins)
    size = np.bincount(index)
    truth = 1.0 - np.asarray(label, np.float64)[order]
    return np.bincount(index, ranked) / size, np.bincount(index, truth) / size, size


def shown_bins(count: int) -> int:
    """How many bins a plot of ``count`` rows has: as ECE where each has ``ROWS_A_BIN``, else fewer, at least one."""
    return max(1, min(ECE_BINS, count // ROWS_A_BIN))


def ece(label: Labels, risk: Floats, bins: int = ECE_BINS) -> float:
    """Expected calibration error over equal-mass bins: sum_b n_b / N |mean risk - share hallucinated|."""
    predicted, observed, size = reliability(label, risk, bins)
    return float(np.sum(size * np.abs(predicted - observed)) / np.sum(size))


def debiased_calibration_error(label: Labels, risk: Floats, bins: int = ECE_BINS) -> float:
    """Root of the squared calibration error over equal-mass bins without what chance adds (Kumar et al. 2019).

    Of each bin the squared difference minus the variance of its observed share, y (1 - y) / (n - 1); 0 where the sum is
    negative.  Bins of a single row tell nothing and are left out.
    """
    predicted, observed, size = reliability(label, risk, bins)
    kept = size > 1
    if not kept.any():
        return 0.0
    predicted, observed, size = predicted[kept], observed[kept], size[kept]
    squared = (predicted - observed) ** 2 - observed * (1 - observed) / (size - 1)
    return float(np.sqrt(max(0.0, float(np.sum(size * squared) / np.sum(size)))))


def at_threshold(label: Labels, risk: Floats, threshold: float) -> dict[str, float]:
    """What a gate at ``threshold`` does: share answered, wrong among the answered (0 where none is), right withheld.

    label [n], risk [n]; or risk [seeds, n], of which every seed's rows count.
    """
    answered = np.asarray(risk) < threshold
    factual = np.broadcast_to(np.asarray(label) == 1, answered.shape)
    return {
        "answered": float(answered.mean()),
        "wrong_among_answered": float(1 - factual[answered].mean()) if answered.any() else 0.0,
        "right_withheld": float((~answered)[factual].mean()) if factual.any() else 0.0,
    }


def coverage_curve(label: Labels, risk: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share answered and share wrong among the answered, [n] each, where the lowest risks are answered first."""
    wrong = 1.0 - np.asarray(label, np.float64)[np.argsort(risk, kind="stable")]
    count = np.arange(1, len(wrong) + 1)
    return count / len(wrong), np.cumsum(wrong) / count


def within_stratum_auroc(label: Labels, risk: Floats, strata: Sequence[Hashable]) -> float | None:
    """AUROC among rows of the same stratum: mean over strata weighted by their (hallucinated, factual) pairs.

    It measures what remains once the stratum, such as the kind of question, is known.  None if no stratum has both
    classes.
    """
    codes: dict[Hashable, int] = {}
    index = np.array([codes.setdefault(stratum, len(codes)) for stratum in strata])
    total = pairs = 0.0
    for code in range(len(codes)):
        inside = index == code
        weight = float(np.sum(label[inside] == 0)) * float(np.sum(label[inside] == 1))
        if weight:
            total += weight * risk_auroc(label[inside], risk[inside])
            pairs += weight
    return total / pairs if pairs else None


def summary(label: Labels, risk: Floats) -> dict[str, float]:
    """Every score of one set of risks, by the names in ``SUMMARY``.

    Accuracy is none of them: where most answers are wrong, to call all of them wrong has a higher one than any gate.
    """
    return {
        "auroc": risk_auroc(label, risk),
        "auprc_hallucinated": auprc(label, risk, positive=0),
        "auprc_factual": auprc(label, risk, positive=1),
        "brier": brier(label, risk),
        "ece": ece(label, risk),
    }


def _two_classes(label: Labels) -> NDArray[np.int64]:
    values = np.asarray(label, np.int64)
    ones, zeros = int(np.sum(values == 1)), int(np.sum(values == 0))
    if not ones or not zeros or ones + zeros != len(values):
        raise ValueError(f"both classes (1 factual, 0 hallucinated) are needed, found {sorted(set(values.tolist()))}")
    return values
