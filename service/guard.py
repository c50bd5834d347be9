"""What to do with a risk: policies and their verdicts, and nothing about how the risk came to be."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from service.errors import RequestError


class Decision(StrEnum):
    """What happens to the request, and what its caller should do."""

    CONTINUE = "continue"
    ABSTAIN = "abstain"  # say the policy's message instead of an answer
    BLOCK = "block"  # no answer and no message


class Action(StrEnum):
    """What a policy does with a flagged prompt."""

    OBSERVE = "observe"
    ABSTAIN = "abstain"
    BLOCK = "block"


DECISIONS = {Action.OBSERVE: Decision.CONTINUE, Action.ABSTAIN: Decision.ABSTAIN, Action.BLOCK: Decision.BLOCK}


@dataclass(frozen=True, slots=True)
class Policy:
    """A named rule.  ``threshold`` None leaves it to the bundle; ``message`` is what an abstaining service says."""

    name: str
    action: Action
    threshold: float | None = None
    message: str | None = None

    def __post_init__(self) -> None:
        """Raises RequestError for a threshold outside [0, 1]."""
        if self.threshold is not None:
            check_threshold(self.threshold)

    def at(self, threshold: float | None) -> Policy:
        """This policy with another threshold; with its own where ``threshold`` is None."""
        return self if threshold is None else replace(self, threshold=threshold)


OBSERVE = Policy("observe", Action.OBSERVE)
GATE = Policy("gate", Action.ABSTAIN)
BLOCK = Policy("block", Action.BLOCK)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One prompt's outcome.  ``flagged``: the risk reached the threshold, also where a policy only observes."""

    decision: Decision
    flagged: bool
    threshold: float
    message: str | None


def check_threshold(threshold: float) -> float:
    """A threshold on a probability.  Raises RequestError unless 0 <= threshold <= 1 (a NaN is neither)."""
    if not (math.isfinite(threshold) and 0.0 <= threshold <= 1.0):
        raise RequestError(f"threshold must lie in [0, 1], not {threshold}", param="threshold")
    return threshold


def judge(risk: float, policy: Policy, default_threshold: float) -> Verdict:
    """Flag at or above the threshold, so that threshold 0 flags everything and a risk of 1 is never answered.

    ``default_threshold`` is the bundle's own; it counts where the policy names none.
    """
    threshold = check_threshold(default_threshold if policy.threshold is None else policy.threshold)
    flagged = risk >= threshold
    decision = DECISIONS[policy.action] if flagged else Decision.CONTINUE
    return Verdict(decision, flagged, threshold, policy.message if decision is Decision.ABSTAIN else None)
