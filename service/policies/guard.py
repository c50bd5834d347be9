"""From a risk to a decision: actions, policies and verdicts, and the server that answers
instead."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, Self
from urllib.parse import urlsplit

from service.errors import HalluTracerError, RequestError

TIMEOUT_S = 60.0
_FETCH = "I cannot tell this from memory. Fetch a passage about it and ask again."
ToolTurns = Literal["let_through", "gate"]


class Decision(StrEnum):
    """What happens with the request."""

    CONTINUE = "continue"
    ABSTAIN = "abstain"  # show the policy's message instead of an answer
    BLOCK = "block"  # no answer and no message
    RETRIEVE = "retrieve"  # fetch a passage and ask again
    FALLBACK = "fallback"  # another server answers


class Action(StrEnum):
    """What a policy does with a flagged prompt.  A new action is one more line: name, decision,
    strictness, message."""

    decision: Decision
    strictness: int  # a higher number lets less through, or less without a warning
    # where the policies file gives none; "": the service's own; None: it comes with none
    message: str | None

    def __new__(
        cls, name: str, decision: Decision, strictness: int, message: str | None = None
    ) -> Self:
        """Make the member that is called ``name``."""
        action = str.__new__(cls, name)
        action._value_ = name
        action.decision = decision
        action.strictness = strictness
        action.message = message
        return action

    OBSERVE = "observe", Decision.CONTINUE, 0
    ANNOTATE = "annotate", Decision.CONTINUE, 1, "Caution: this answer may be wrong (risk {risk})."
    ABSTAIN = "abstain", Decision.ABSTAIN, 3, ""
    BLOCK = "block", Decision.BLOCK, 3
    RETRIEVE = "retrieve", Decision.RETRIEVE, 3, _FETCH
    FALLBACK = "fallback", Decision.FALLBACK, 2  # an answer is given, from elsewhere

    @property
    def withholds(self) -> bool:
        """Return whether the model's own answer is withheld."""
        return self.decision is not Decision.CONTINUE

    @property
    def has_message(self) -> bool:
        """Return whether it comes with a message."""
        return self.message is not None


@dataclass(frozen=True, slots=True)
class Upstream:
    """Another OpenAI-compatible server, to which a withheld prompt is sent instead, and as what."""

    url: str  # up to and with /v1
    model: str
    key_env: str | None = None  # the environment variable that holds its bearer key
    timeout_s: float = TIMEOUT_S  # until it begins to answer, and between two pieces of a stream

    @property
    def host(self) -> str:
        """Return host and port, for messages: the address may hold a password."""
        parts = urlsplit(self.url)
        return (
            parts.hostname + (f":{parts.port}" if parts.port else "")
            if parts.hostname
            else self.url
        )

    def headers(self) -> dict[str, str]:
        """Return the headers that it needs.  Raises HalluTracerError where the key's variable is
        empty."""
        if self.key_env is None:
            return {}
        if not (key := os.environ.get(self.key_env, "")):
            raise HalluTracerError(
                f"the environment variable {self.key_env} holds no key for {self.host}"
            )
        return {"authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class Policy:
    """A named rule.  ``threshold`` None: the bundle's.

    ``message`` is shown instead of the answer, or before an annotated one; ``{risk}`` in it becomes
    the risk.

    ``withhold_outside``: prompts outside training are treated as flagged ones are,
    whatever their risk; None, which nobody chose: where the policy withholds and the bundle can
    tell well enough (``Scorer.withholds_outside``).
    ``withhold_no_fact``: a prompt that asks for no fact is judged by its risk as any other;
        otherwise it continues.
    ``recheck``: an answer that may begin is held until its own tokens were read, and treated as a
    flagged prompt is where they flag it, or where none could be read.
    ``stop_at``: an answer ends where the running risk of its own tokens reaches this, or a token
    was not read; what was said before stays.
    ``tools``: of a request that offers tools, a turn of nothing but calls is no answer and is let
    through, whatever the risk; or it is judged as an answer is.
    ``passage_truth``: the share of passages that say the truth, above 0 and at most 1, as in
    training.  The risk of a prompt with a passage beside it rises by that, before any threshold
    (``risk_beside_passage``)."""

    name: str
    action: Action
    threshold: float | None = None
    message: str | None = None
    withhold_outside: bool | None = None
    withhold_no_fact: bool = False
    recheck: bool = False
    stop_at: float | None = None
    upstream: Upstream | None = None  # of a fallback
    tools: ToolTurns = "let_through"
    passage_truth: float = 1.0

    def __post_init__(self) -> None:
        """Raises RequestError for a threshold outside [0, 1], or a share of true passages outside
        (0, 1]."""
        if not 0.0 < self.passage_truth <= 1.0:
            raise RequestError(
                f"passage_truth must lie above 0 and be at most 1, not {self.passage_truth}",
                param="passage_truth",
            )
        if self.threshold is not None:
            check_threshold(self.threshold)

    @property
    def reads_answers_for(self) -> str | None:
        """Return the field by which it decides by an answer's own tokens; None where it does
        not."""
        return "recheck" if self.recheck else "stop_at" if self.stop_at is not None else None

    def at(self, threshold: float | None) -> Policy:
        """Return this policy with another threshold; unchanged if ``threshold`` is None."""
        return self if threshold is None else replace(self, threshold=threshold)


OBSERVE = Policy("observe", Action.OBSERVE)
GATE = Policy("gate", Action.ABSTAIN)
BLOCK = Policy("block", Action.BLOCK)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one prompt.  ``flagged``: the risk applies and reached the threshold,
    whatever the action.

    ``message`` stands in for the answer, or where the decision is to continue before it."""

    decision: Decision
    flagged: bool
    threshold: float
    message: str | None

    @property
    def acts(self) -> bool:
        """Return whether the policy does anything: it withholds the answer, or puts a message
        before it."""
        return self.decision is not Decision.CONTINUE or self.message is not None


def check_threshold(threshold: float) -> float:
    """Return a threshold on a probability.  Raises RequestError unless 0 <= threshold <= 1 (a NaN
    is neither)."""
    if not 0.0 <= threshold <= 1.0:
        raise RequestError(f"threshold must lie in [0, 1], not {threshold}", param="threshold")
    return threshold


def risk_beside_passage(risk: float, truth: float) -> float:
    """Return the risk of an answer from a passage that says the truth with probability ``truth``.

    ``risk`` is that of an answer from a true passage; what repeats a false one is wrong."""
    return risk if truth == 1.0 else 1.0 - truth * (1.0 - risk)


def judge(
    risk: float,
    policy: Policy,
    default_threshold: float,
    *,
    outside: bool = False,
    applies: bool = True,
) -> Verdict:
    """Flag risks >= threshold: 0 flags every prompt, and a risk of 1 is flagged at every threshold.

    ``applies``: false of a prompt that asks for no fact, which is not flagged unless the policy
    wants it so. ``default_threshold``, the bundle's, applies if the policy has none.  ``outside``:
    the prompt is, or may be, outside training, and the policy treats such prompts as
    flagged ones (``Scorer.withholds_outside``)."""
    threshold = check_threshold(default_threshold if policy.threshold is None else policy.threshold)
    flagged = risk >= threshold and (applies or policy.withhold_no_fact)
    verdict = Verdict(Decision.CONTINUE, flagged, threshold, None)
    return stopped_by(policy, verdict, risk) if flagged or outside else verdict


def stopped_by(policy: Policy, verdict: Verdict, risk: float | None) -> Verdict:
    """Return the verdict with the policy's action: its decision and its words, with this risk where
    there is one."""
    message = policy.message if policy.action.has_message else None
    shown = "unknown" if risk is None else f"{risk:.2f}"
    return replace(
        verdict,
        decision=policy.action.decision,
        message=message and message.replace("{risk}", shown),
    )
