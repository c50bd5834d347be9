"""What the adapters share: one question to the service before a model may answer.

A risk is that of the service's model.  Before another model it only tells how hard the question is
for the first. An adapter never lets through what it cannot have scored: every error of the client
is raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hallutracer_client.client import Client
from hallutracer_client.results import Risk, Withheld

WITHHELD = "content_filter"  # the finish reason of a withheld answer, as OpenAI's clients know it


@dataclass(frozen=True)
class Guard:
    """Asks ``client`` under a policy, threshold and bundle; None: the service's own."""

    client: Client
    policy: str | None = None
    threshold: float | None = None
    bundle: str | None = None

    def risk(
        self,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        prompt: str | None = None,
        raises: bool = False,
    ) -> Risk:
        """Return the risk of the answer to a conversation, or to one question; with ``raises``
        raise Withheld."""
        risk = self.client.score(
            messages=messages,
            prompt=prompt,
            policy=self.policy,
            threshold=self.threshold,
            bundle=self.bundle,
        ).only
        if raises and risk.gated:
            raise Withheld(risk)
        return risk


def turn(role: str, content: object, roles: Mapping[str, str]) -> dict[str, str]:
    """Return a message as the service reads it; ``roles``: theirs -> ours.  Raises ValueError: it
    may not pass."""
    if role not in roles:
        raise ValueError(
            f"a message of the role {role!r} cannot be scored; only {', '.join(sorted(roles))} can"
        )
    if not isinstance(content, str):
        raise ValueError(
            f"a {role} message without plain text cannot be scored: images, files and tool calls"
            " cannot"
        )
    return {"role": roles[role], "content": content}


def details(risk: Risk) -> dict[str, Any]:
    """Return what goes with a withheld answer, as plain JSON."""
    told = {"risk": risk.risk, "decision": risk.decision, "threshold": risk.threshold}
    return {"refusal": risk.message, "finish_reason": WITHHELD, "hallutracer": told}
