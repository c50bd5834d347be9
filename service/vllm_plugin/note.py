"""The risks of one OpenAI request's prompts: written by ``generation``, read by ``middleware``.

A context variable connects the two across vLLM's own serving code.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from service.api.reply import risk_headers, risk_note, risk_out
from service.audit.events import Who
from service.judging.conversation import Shape
from service.policies.guard import Decision, Policy
from service.scoring import RiskReport, Scorer
from service.serving.monitor import Monitor

NO_PLACE = (
    "a policy that withholds answers applies to this request, and the response of this route cannot carry a verdict; "
    "use /v1/completions or /v1/chat/completions, or have the operator choose a policy that observes"
)
OURS = re.compile(r"hallu[_-]*tracer", re.IGNORECASE)  # how an argument of ours begins, well written or not


@dataclass
class Note:
    """One request's reports, in the order of its prompts; None where there is none yet."""

    scorer: Scorer | None = None
    policy: Policy | None = None
    reports: list[RiskReport | None] = field(default_factory=list)
    unread: str | None = None  # why there is no risk
    choices: int = 1  # answers to each prompt (n)
    departures: tuple[str, ...] = ()  # of the request from what a guarantee was calibrated on
    monitor: Monitor | None = None  # of the bundle
    route: str = ""  # that the request came by
    carries: bool = True  # whether the response has a place for it
    templated: bool = True  # whether its prompts go through the chat template
    moves: tuple[str, ...] = ()  # its fields that render its messages otherwise than training's were
    answered: tuple[str, ...] = ()  # ``chat_departures`` of its messages
    shapes: tuple[Shape, ...] = ()  # of its chats, in the order of its prompts; empty where they are not known
    beams: bool = False  # whether it asks for a beam search
    forges: str | None = None  # a special token that a message spells out: vLLM's renderer would take it for one
    misplaced: tuple[str, ...] = ()  # arguments of ours outside vllm_xargs
    xargs: dict[str, Any] = field(default_factory=dict)  # vllm_xargs of a beam search, which vLLM drops
    who: Who = Who()  # for the audit log; without a key's name, as vLLM's own keys have none

    def add(self) -> int:
        """Add a prompt and return its index."""
        self.reports.append(None)
        return len(self.reports) - 1

    def shape(self, place: int) -> Shape | None:
        """Of this prompt's chat; None where it is not known."""
        return self.shapes[place] if place < len(self.shapes) else None

    def gated(self, place: int) -> bool:
        """Whether this prompt's answer was withheld."""
        report = self.reports[place] if place < len(self.reports) else None
        return report is not None and report.decision is not Decision.CONTINUE

    def message(self, place: int) -> str | None:
        """What the policy says instead of this prompt's answer."""
        report = self.reports[place]
        return None if report is None else report.verdict.message

    def body(self) -> dict[str, Any] | None:
        """For the response: as ``data`` of ``/v1/risk/score``, with what applies to all of it.  None: nothing yet."""
        if self.unread is not None:
            return {"error": self.unread}
        if self.scorer is None or self.policy is None or not any(self.reports):
            return None
        risks = [risk_out(index, report) for index, report in enumerate(self.reports) if report is not None]
        found = () if self.monitor is None else self.monitor.reasons
        return risk_note(self.scorer, self.policy, risks, (*self.departures, *found))

    def headers(self) -> dict[str, str]:
        """As those of ``/v1/risk/score``: where there is one prompt."""
        if self.scorer is None or len(self.reports) != 1 or self.reports[0] is None:
            return {}
        return risk_headers(self.scorer, [self.reports[0]])


CURRENT: ContextVar[Note | None] = ContextVar("hallutracer_note", default=None)
