"""From a risk to a decision: policies and verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from service.errors import RequestError
from service.policies.upstreams import Upstream


class Decision(StrEnum):
    """What happens with the request."""

    CONTINUE = "continue"
    ABSTAIN = "abstain"  # show the policy's message instead of an answer
    BLOCK = "block"  # no answer and no message
    RETRIEVE = "retrieve"  # fetch a passage and ask again
    FALLBACK = "fallback"  # another server answers


class Action(StrEnum):
    """What a policy does with a flagged prompt."""

    OBSERVE = "observe"  # nothing
    ANNOTATE = "annotate"  # answers, and says that the answer may be wrong
    ABSTAIN = "abstain"
    BLOCK = "block"
    RETRIEVE = "retrieve"
    FALLBACK = "fallback"

    @property
    def withholds(self) -> bool:
        """Whether the model's own answer is withheld."""
        return DECISIONS[self] is not Decision.CONTINUE

    @property
    def says(self) -> bool:
        """Whether it comes with a message."""
        return self in (Action.ANNOTATE, Action.ABSTAIN, Action.RETRIEVE)

    @property
    def strictness(self) -> int:
        """A higher number lets less through, or less without a warning."""
        return STRICTNESS[self]


DECISIONS = {
    Action.OBSERVE: Decision.CONTINUE,
    Action.ANNOTATE: Decision.CONTINUE,
    Action.ABSTAIN: Decision.ABSTAIN,
    Action.BLOCK: Decision.BLOCK,
    Action.RETRIEVE: Decision.RETRIEVE,
    Action.FALLBACK: Decision.FALLBACK,
}
STRICTNESS = {
    Action.OBSERVE: 0,
    Action.ANNOTATE: 1,
    Action.FALLBACK: 2,  # an answer is given, from elsewhere
    Action.RETRIEVE: 3,
    Action.ABSTAIN: 3,
    Action.BLOCK: 3,
}


@dataclass(frozen=True, slots=True)
class Policy:
    """A named rule.  ``threshold`` None: the bundle's.

    ``message`` is shown instead of the answer, or before an annotated one; ``{risk}`` in it becomes the risk.

    ``withhold_outside``: prompts outside what training saw are treated as flagged ones are, whatever their risk; None,
    which nobody chose: where the policy withholds and the bundle can tell well enough (``Scorer.withholds_outside``).
    ``withhold_no_fact``: a prompt that asks for no fact is judged by its risk as any other; otherwise it continues.
    """

    name: str
    action: Action
    threshold: float | None = None
    message: str | None = None
    withhold_outside: bool | None = None
    withhold_no_fact: bool = False
    upstream: Upstream | None = None  # of a fallback

    def __post_init__(self) -> None:
        """Raises RequestError for a threshold outside [0, 1]."""
        if self.threshold is not None:
            check_threshold(self.threshold)

    def at(self, threshold: float | None) -> Policy:
        """This policy with another threshold; unchanged if ``threshold`` is None."""
        return self if threshold is None else replace(self, threshold=threshold)


OBSERVE = Policy("observe", Action.OBSERVE)
GATE = Policy("gate", Action.ABSTAIN)
BLOCK = Policy("block", Action.BLOCK)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one prompt.  ``flagged``: the risk applies and reached the threshold, whatever the action.

    ``message`` stands in for the answer, or where the decision is to continue before it.
    """

    decision: Decision
    flagged: bool
    threshold: float
    message: str | None


def check_threshold(threshold: float) -> float:
    """A threshold on a probability.  Raises RequestError unless 0 <= threshold <= 1 (a NaN is neither)."""
    if not (math.isfinite(threshold) and 0.0 <= threshold <= 1.0):
        raise RequestError(f"threshold must lie in [0, 1], not {threshold}", param="threshold")
    return threshold


def judge(
    risk: float, policy: Policy, default_threshold: float, *, outside: bool = False, applies: bool = True
) -> Verdict:
    """Flag risks >= threshold: threshold 0 flags every prompt, and a risk of 1 is flagged at every threshold.

    A prompt to which the risk does not apply, since it asks for no fact, is not flagged unless the policy wants it so.

    ``default_threshold``, the bundle's, applies if the policy has none.  ``outside``: the prompt is, or may be, outside
    what training saw, and the policy treats such prompts as flagged ones (``Scorer.withholds_outside``).
    """
    threshold = check_threshold(default_threshold if policy.threshold is None else policy.threshold)
    flagged = risk >= threshold and (applies or policy.withhold_no_fact)
    stopped = flagged or outside
    decision = DECISIONS[policy.action] if stopped else Decision.CONTINUE
    says = policy.message if stopped and policy.action.says else None
    return Verdict(decision, flagged, threshold, None if says is None else says.replace("{risk}", f"{risk:.2f}"))
