"""Where to stop answering: by what a wrong answer costs, or by a target that out-of-fold risks should meet.

A question is answered where its risk lies below the threshold.  On a calibrated risk a cost is all that is needed: an
answer pays as long as ``risk * K < 1 - risk``, that is below ``1 / (1 + K)``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.errors import TrainingError
from service.fitting.scores import Floats, Labels, at_threshold

COSTS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Values of K that a card shows beside the chosen threshold."""
LEAST_ANSWERED = 20
"""Rows, in the mean over seeds: a share of wrong among fewer answered ones says little."""
_OPEN = 1e-9  # a threshold without a guarantee lies strictly between 0 and 1
_TARGET = re.compile(r"\s*(?:(wrong)\s*<=|(answered)\s*>=)\s*(\d+(?:\.\d*)?|\.\d+)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class WrongCosts:
    """A wrong answer costs as much as ``k`` withheld right ones.  Raises TrainingError where that is no such number.

    1 is the default: answer what is more likely right than wrong.
    """

    k: float = 1.0

    def __post_init__(self) -> None:
        """Check values, not types."""
        if not 0 < self.k < math.inf:
            raise TrainingError(
                f"wrong_costs must be a positive number, what a wrong answer costs in withheld right answers, not "
                f"{self.k!r}: 1 answers what is more likely right than wrong",
                param="wrong_costs",
            )

    @property
    def threshold(self) -> float:
        """A risk, between 0 and 1: from here on an answer costs more than it gains."""
        return _inside(1 / (1 + self.k))


@dataclass(frozen=True, slots=True)
class Target:
    """``wrong`` at most, or ``answered`` at least, a share of rows."""

    measure: Literal["wrong", "answered"]
    share: float  # wrong: of the answered rows; answered: of all rows

    @classmethod
    def parse(cls, text: str) -> Target:
        """``wrong<=0.2`` or ``answered>=0.5``.  Raises TrainingError where it is neither."""
        if found := _TARGET.fullmatch(text):
            share = float(found[3])
            if found[1] and 0 <= share < 1:
                return cls("wrong", share)
            if found[2] and 0 < share <= 1:
                return cls("answered", share)
        raise TrainingError(
            'target must be "wrong<=SHARE" (from 0, below 1) or "answered>=SHARE" (above 0, up to 1), not '
            f'{text!r}: write for example --target "wrong<=0.2", with the quotes',
            param="target",
        )

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        return f"{self.measure}{'<=' if self.measure == 'wrong' else '>='}{self.share:g}"


Rule = WrongCosts | Target


@dataclass(frozen=True, slots=True)
class Chosen:
    """A threshold, the rule that it follows, and what it does to the rows that it was chosen on."""

    threshold: float  # strictly between 0 and 1
    rule: Rule
    reached: bool  # the target; a cost always is
    gate: dict[str, float]  # ``scores.at_threshold`` of the out-of-fold risks

    def document(self) -> dict[str, Any]:
        """The rule and its threshold, for evaluation.json."""
        rule: dict[str, Any] = (
            {"rule": "wrong_costs", "wrong_costs": self.rule.k}
            if isinstance(self.rule, WrongCosts)
            else {"rule": "target", "target": str(self.rule), "reached": self.reached}
        )
        return rule | {"threshold": self.threshold}


def choose_threshold(rule: Rule, label: Labels, risk: Floats) -> Chosen:
    """The threshold that ``rule`` asks for: label [n], 1 factual; out-of-fold risk [seeds, n], read as seeds n rows.

    A target on wrong answers has the largest threshold that meets it with ``LEAST_ANSWERED`` rows answered; where none
    does, the one with the lowest share of wrong among as many, of equals the largest.  A target on answers has the
    smallest threshold that meets it.  Thresholds that answer the same rows count as one, half-way between two risks.

    Raises TrainingError: a target on wrong answers, and no threshold answers ``LEAST_ANSWERED`` rows.
    """
    if isinstance(rule, WrongCosts):
        threshold, reached = rule.threshold, True
    else:
        threshold, reached = _for_target(rule, label, risk)
    return Chosen(threshold, rule, reached, at_threshold(label, risk, threshold))


def by_wrong_costs(label: Labels, risk: Floats) -> list[dict[str, float]]:
    """What thresholds for each of ``COSTS`` do: label [n], risk [seeds, n]."""
    return [
        {"wrong_costs": k, "threshold": WrongCosts(k).threshold} | at_threshold(label, risk, WrongCosts(k).threshold)
        for k in COSTS
    ]


def _for_target(target: Target, label: Labels, risk: Floats) -> tuple[float, bool]:
    """Threshold, and whether it meets the target."""
    cuts, answered, wrong = _cuts(label, risk)
    if target.measure == "answered":
        fine = np.flatnonzero(answered / risk.size >= target.share)
        return float(cuts[fine[0] if len(fine) else -1]), len(fine) > 0
    enough = answered >= LEAST_ANSWERED * len(risk)
    if not enough.any():
        raise TrainingError(
            f"the target {target} needs {LEAST_ANSWERED} answered rows, and there are {len(label)} labelled ones: "
            "add rows, or choose the threshold with --wrong-costs",
            param="target",
        )
    cuts, share = cuts[enough], wrong[enough] / answered[enough]
    reached = bool(share.min() <= target.share)
    return float(cuts[np.flatnonzero(share <= (target.share if reached else share.min()))[-1]]), reached


def _cuts(label: Labels, risk: Floats) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Rising thresholds [c], one behind each distinct risk; rows that lie below, and wrong ones among them."""
    values = np.asarray(risk, np.float64).ravel()
    order = np.argsort(values, kind="stable")
    wrong = np.r_[0, np.cumsum(np.broadcast_to(np.asarray(label) == 0, risk.shape).ravel()[order])]
    levels = np.unique(values)
    cuts = np.clip((levels + np.r_[levels[1:], 1.0]) / 2, _OPEN, 1 - _OPEN)
    answered = np.searchsorted(values[order], cuts, side="left")
    return cuts, answered, wrong[answered]


def _inside(threshold: float) -> float:
    return min(max(threshold, _OPEN), 1 - _OPEN)
