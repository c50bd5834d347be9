"""What answering below a threshold does: one threshold, all of them, and what it is worth.

Labels: 1 factual, 0 hallucinated.  A risk is P(hallucinated); answers are withheld from the highest risk down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from service.fitting.scores import Doubles, Floats, Labels

WITHHELD = (0.05, 0.10, 0.20)
"""Shares of the right answers that a gate may withhold, where ``caught`` looks."""


def at_threshold(label: Labels, risk: Floats, threshold: float) -> dict[str, float]:
    """Return what a gate does: share answered, wrong among the answered (0 where none is), right withheld; label [n],
    risk [n] or [seeds, n], of which every seed's rows count."""
    answered = np.asarray(risk) < threshold
    factual = np.broadcast_to(np.asarray(label) == 1, answered.shape)
    return {
        "answered": float(answered.mean()),
        "wrong_among_answered": float(1 - factual[answered].mean()) if answered.any() else 0.0,
        "right_withheld": float((~answered)[factual].mean()) if factual.any() else 0.0,
    }


def coverage_curve(label: Labels, risk: Floats) -> tuple[Doubles, Doubles]:
    """Return share answered and share wrong among the answered, [n] each, lowest risks answered first; rows of equal
    risks as on average over their orders."""
    wrong = 1.0 - np.asarray(label, np.float64)
    values, place = np.unique(np.asarray(risk, np.float64), return_inverse=True)
    last = np.append(0.0, np.cumsum(np.bincount(place)))  # rows up to each distinct risk
    count = np.arange(1, len(wrong) + 1)
    errors = np.interp(count, last, np.append(0.0, np.cumsum(np.bincount(place, wrong, len(values)))))
    return count / len(wrong), errors / count


def excess_aurc(label: Labels, risk: Floats) -> float:
    """Return E-AURC: the mean share wrong over all coverages, less that of an order that answers every right row first
    (Geifman, Uziel and El-Yaniv 2019, arXiv 1805.08206, Eq. 6).  0 is perfect; label [n], risk [n]."""
    return float(np.mean(coverage_curve(label, risk)[1] - coverage_curve(label, 1.0 - np.asarray(label))[1]))


def caught(label: Labels, risk: Floats, withheld: Sequence[float] = WITHHELD) -> Doubles:
    """Return the shares of the wrong answers that are withheld where these shares of the right ones are, [k]: points of
    the ROC curve, straight between two risks.  label [n], risk [n], both classes."""
    factual = np.asarray(label) == 1
    place = np.unique(-np.asarray(risk, np.float64), return_inverse=True)[1]  # highest risk first
    right, wrong = (
        np.append(0.0, np.cumsum(np.bincount(place[side], minlength=place.max() + 1)) / side.sum())
        for side in (factual, ~factual)
    )
    return np.asarray(np.interp(withheld, right, wrong), np.float64)


def net_benefit(label: Labels, risk: Floats, wrong_costs: float) -> dict[str, float]:
    """Return what the gate at 1 / (1 + wrong_costs) saves for each request, in wrong answers: share of wrong answers
    withheld less share of right ones withheld / ``wrong_costs`` (Vickers and Elkin 2006, Med. Decis. Making 26,
    565-574).  Beside it what withholding every answer saves; answering all saves 0.  label [n], risk [n] or
    [seeds, n]."""
    kept_back = np.asarray(risk) >= 1 / (1 + wrong_costs)
    wrong = np.broadcast_to(np.asarray(label) == 0, kept_back.shape)

    def saved(withheld: NDArray[np.bool_]) -> float:
        return float((withheld & wrong).mean() - (withheld & ~wrong).mean() / wrong_costs)

    return {"net_benefit": saved(kept_back), "withholding_all": saved(np.ones_like(kept_back))}


def decisions(label: Labels, risk: Floats) -> dict[str, float]:
    """Return E-AURC and the shares caught at each of ``WITHHELD``, by name: label [n], risk [n] of both classes."""
    shares = (f"caught_at_{withheld:.0%}".rstrip("%") for withheld in WITHHELD)
    return {"e_aurc": excess_aurc(label, risk)} | dict(zip(shares, caught(label, risk).tolist(), strict=True))
