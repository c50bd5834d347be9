"""What to do with a risk: the decision, and nothing about how the risk came to be."""

from __future__ import annotations

import math
from enum import StrEnum

from service.errors import RequestError


class Decision(StrEnum):
    """What the caller should do with the request."""

    CONTINUE = "continue"
    ABSTAIN = "abstain"


def check_threshold(threshold: float) -> float:
    """A threshold on a probability.  Raises RequestError unless 0 <= threshold <= 1 (a NaN is neither)."""
    if not (math.isfinite(threshold) and 0.0 <= threshold <= 1.0):
        raise RequestError(f"threshold must lie in [0, 1], not {threshold}", param="threshold")
    return threshold


def decide(risk: float, threshold: float) -> Decision:
    """Abstain at or above the threshold, so that threshold 0 gates everything and a risk of 1 is never answered."""
    return Decision.ABSTAIN if risk >= check_threshold(threshold) else Decision.CONTINUE
