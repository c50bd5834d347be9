"""The risks of one OpenAI request's prompts: written by ``generation``, read by ``middleware``.

A context variable connects the two across vLLM's own serving code.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from service.api.reply import risk_headers, risk_note, risk_out
from service.audit.events import Who
from service.judging.conversation import Shape
from service.policies.guard import Decision
from service.scoring import RiskReport
from service.serving.judgement import Judgement

NO_PLACE = (
    "a policy that withholds answers applies to this request, and the response of this route cannot carry a verdict; "
    "use /v1/completions or /v1/chat/completions, or have the operator choose a policy that observes"
)
OURS = re.compile(r"hallu[_-]*tracer", re.IGNORECASE)  # how an argument of ours begins, well written or not


@dataclass
class Note:
    """One request's judgements, in the order of its prompts; None where there is none yet."""

    judgements: list[Judgement | None] = field(default_factory=list)
    unread: str | None = None  # why there is no risk
    choices: int = 1  # answers to each prompt (n)
    violations: tuple[str, ...] = ()  # of what a guarantee assumes, by the request
    route: str = ""  # that the request came by
    carries: bool = True  # whether the response has a place for it
    templated: bool = True  # whether its prompts go through the chat template
    moves: tuple[str, ...] = ()  # its fields that render its messages otherwise than training's were
    answered: tuple[str, ...] = ()  # ``chat_violations`` of its messages
    shapes: tuple[Shape, ...] = ()  # of its chats, in the order of its prompts; empty where they are not known
    beams: bool = False  # whether it asks for a beam search
    forges: str | None = None  # a special token that a message spells out: vLLM's renderer would take it for one
    misplaced: tuple[str, ...] = ()  # arguments of ours outside vllm_xargs
    xargs: dict[str, Any] = field(default_factory=dict)  # vllm_xargs of a beam search, which vLLM drops
    who: Who = Who()  # for the audit log; without a key's name, as vLLM's own keys have none

    def add(self) -> int:
        """Add a prompt and return its index."""
        self.judgements.append(None)
        return len(self.judgements) - 1

    def shape(self, place: int) -> Shape | None:
        """Of this prompt's chat; None where it is not known."""
        return self.shapes[place] if place < len(self.shapes) else None

    def report(self, place: int) -> RiskReport | None:
        """Return this prompt's report; None where there is none yet."""
        judgement = self.judgements[place] if place < len(self.judgements) else None
        return None if judgement is None else judgement.reports[0]

    def gated(self, place: int) -> bool:
        """Return whether this prompt's answer was withheld."""
        report = self.report(place)
        return report is not None and report.decision is not Decision.CONTINUE

    def message(self, place: int) -> str | None:
        """Return what the policy says instead of this prompt's answer."""
        report = self.report(place)
        return None if report is None else report.verdict.message

    def body(self) -> dict[str, Any] | None:
        """Return what the response says, as ``data`` of ``/v1/risk/score`` with what applies to all; None: nothing yet.

        The request's violations are those of all its prompts.
        """
        if self.unread is not None:
            return {"error": self.unread}
        judged = [judgement for judgement in self.judgements if judgement is not None]
        if not judged:
            return None
        risks = [risk_out(one.index, one.report) for judgement in judged for one in judgement.prompts]
        return risk_note(replace(judged[-1], request_violations=self.violations), risks)

    def headers(self) -> dict[str, str]:
        """Return those of ``/v1/risk/score``: where there is one prompt."""
        if len(self.judgements) != 1 or (judgement := self.judgements[0]) is None:
            return {}
        return risk_headers(judgement.scorer, judgement.reports)


CURRENT: ContextVar[Note | None] = ContextVar("hallutracer_note", default=None)
