"""Measures what a gate does that answers below a threshold: at one threshold, at all of them, and
its benefit.

Labels: 1 factual, 0 hallucinated.  A risk is P(hallucinated); answers are withheld from the highest
    risk down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from service.fitting.scores import Doubles, Floats, Labels

WITHHELD = (0.05, 0.10, 0.20)
"""Shares of the right answers that a gate may withhold, at which ``caught`` measures."""


def at_threshold(label: Labels, risk: Floats, threshold: float) -> dict[str, float]:
    """Return a gate's share answered, wrong among the answered (0 if none is) and right withheld.

    label [n], risk [n] or [seeds, n]; the rows of every seed count."""
    answered = np.asarray(risk) < threshold
    factual = np.broadcast_to(np.asarray(label) == 1, answered.shape)
    return {
        "answered": float(answered.mean()),
        "wrong_among_answered": float(1 - factual[answered].mean()) if answered.any() else 0.0,
        "right_withheld": float((~answered)[factual].mean()) if factual.any() else 0.0,
    }


def coverage_curve(label: Labels, risk: Floats) -> tuple[Doubles, Doubles]:
    """Return share answered and share wrong among the answered, [n] each, lowest risks answered
    first.

    Rows of equal risk count as the average over their orders."""
    wrong = 1.0 - np.asarray(label, np.float64)
    values, level = np.unique(np.asarray(risk, np.float64), return_inverse=True)
    last = np.append(0.0, np.cumsum(np.bincount(level)))  # rows up to each distinct risk
    count = np.arange(1, len(wrong) + 1)
    errors = np.interp(
        count, last, np.append(0.0, np.cumsum(np.bincount(level, wrong, len(values))))
    )
    return count / len(wrong), errors / count


def excess_aurc(label: Labels, risk: Floats) -> float:
    """Return E-AURC: the mean share wrong over all coverages, less that of a perfect order; label
    [n], risk [n].

    Geifman, Uziel and El-Yaniv 2019, arXiv 1805.08206, Eq. 6.  0 is perfect."""
    return float(
        np.mean(coverage_curve(label, risk)[1] - coverage_curve(label, 1.0 - np.asarray(label))[1])
    )


def caught(label: Labels, risk: Floats, withheld: Sequence[float] = WITHHELD) -> Doubles:
    """Return the shares of wrong answers withheld at the thresholds that withhold these shares of
    right ones, [k].

    They are points of the ROC curve, linear between two risks.  label [n], risk [n] of both
    classes."""
    factual = np.asarray(label) == 1
    rank = np.unique(-np.asarray(risk, np.float64), return_inverse=True)[1]  # highest risk first
    right, wrong = (
        np.append(0.0, np.cumsum(np.bincount(rank[side], minlength=rank.max() + 1)) / side.sum())
        for side in (factual, ~factual)
    )
    return np.asarray(np.interp(withheld, right, wrong), np.float64)


def net_benefit(label: Labels, risk: Floats, wrong_costs: float) -> dict[str, float]:
    """Return the net benefit of the gate at 1 / (1 + wrong_costs), and of withholding every answer,
    per request.

    It is the share of requests with a wrong answer withheld, less that with a right one withheld /
    ``wrong_costs`` (Vickers and Elkin 2006, Med. Decis. Making 26, 565-574).  Answering everything
    has 0.  label [n], risk [n] or [seeds, n]."""
    kept_back = np.asarray(risk) >= 1 / (1 + wrong_costs)
    wrong = np.broadcast_to(np.asarray(label) == 0, kept_back.shape)

    def saved(withheld: NDArray[np.bool_]) -> float:
        return float((withheld & wrong).mean() - (withheld & ~wrong).mean() / wrong_costs)

    return {"net_benefit": saved(kept_back), "withholding_all": saved(np.ones_like(kept_back))}


def decisions(label: Labels, risk: Floats) -> dict[str, float]:
    """Return E-AURC and the shares caught at each of ``WITHHELD``, by name: label [n], risk [n] of
    both classes."""
    shares = (f"caught_at_{withheld:.0%}".rstrip("%") for withheld in WITHHELD)
    return {"e_aurc": excess_aurc(label, risk)} | dict(
        zip(shares, caught(label, risk).tolist(), strict=True)
    )
