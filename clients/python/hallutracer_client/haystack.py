"""Haystack: ``RiskGate`` stands before a generator; it has one output for what may be answered,
another for the rest.

Needs ``hallutracer-client[haystack]``.

    pipeline.connect("prompt_builder.prompt", "gate.messages")
    pipeline.connect("gate.messages", "llm.messages") # nothing is sent here where the answer is
    withheld pipeline.connect("gate.replies", "answers.replies")  # then the policy's message is
    here"""

from __future__ import annotations

from typing import Any

from hallutracer_client.client import Client
from hallutracer_client.guard import Guard, details, turn

try:
    from haystack import component, default_from_dict, default_to_dict
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret
except ImportError as error:
    raise ImportError(
        f"{error}; pip install 'hallutracer-client[haystack]'", name=error.name
    ) from error

ROLES = {"system": "system", "user": "user", "assistant": "assistant"}


@component
class RiskGate:
    """Scores messages before a generator sees them.

    ``policy``, ``threshold`` and ``bundle`` are those of a request; None: the service's own.
    ``timeout`` in seconds.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8765",
        api_key: Secret | None = None,
        policy: str | None = None,
        threshold: float | None = None,
        bundle: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        self._given = {
            "url": url,
            "policy": policy,
            "threshold": threshold,
            "bundle": bundle,
            "timeout": timeout,
        }
        self._api_key = api_key
        key = None if api_key is None else api_key.resolve_value()
        self._guard = Guard(Client(url, api_key=key, timeout=timeout), policy, threshold, bundle)

    @component.output_types(messages=list[ChatMessage], replies=list[ChatMessage], risk=float)
    def run(self, messages: list[ChatMessage]) -> dict[str, Any]:
        """Return ``risk`` and ``messages``, or ``replies`` with the policy's message.  Raises
        ValueError."""
        # Nothing but plain text: not one text beside something else.
        texts = [one.text if len(one.texts) == len(one._content) == 1 else None for one in messages]
        turns = [
            turn(one.role.value, text, ROLES) for one, text in zip(messages, texts, strict=True)
        ]
        found = self._guard.risk(messages=turns)
        if not found.gated:
            return {"messages": messages, "risk": found.risk}
        return {
            "replies": [ChatMessage.from_assistant(found.message or "", meta=details(found))],
            "risk": found.risk,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return what Haystack's YAML has; a key is named, never written."""
        return default_to_dict(
            self, api_key=self._api_key.to_dict() if self._api_key else None, **self._given
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RiskGate:
        """Make it from Haystack's YAML."""
        key = data["init_parameters"].get("api_key")
        if isinstance(key, dict):
            data["init_parameters"]["api_key"] = Secret.from_dict(key)
        return default_from_dict(cls, data)
