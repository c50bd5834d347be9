"""The calls of tools in an answer of the chat route, whole or in a stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from service.tool_calls import CallReader, Part, ToolCall, Tools


def call_id() -> str:
    """Return the id of a new call, which nobody can guess."""
    return f"call_{uuid.uuid4().hex}"


def called(call: ToolCall) -> dict[str, Any]:
    """Return a call as OpenAI has it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}


def split(tools: Tools | None, text: str) -> tuple[str, list[ToolCall]]:
    """Return an answer's text and its calls."""
    parts = [text] if tools is None else tools.parts(text)
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts), [part for part in parts if isinstance(part, ToolCall)]


class Deltas:
    """The deltas of a stream: text as it comes, and each call once it is complete."""

    def __init__(self, tools: Tools | None) -> None:
        self._reader = None if tools is None else CallReader(tools)
        self.calls = 0  # sent so far

    def of(self, text: str) -> list[dict[str, Any]]:
        """Return those of one more piece."""
        return (
            [{"content": text}] if self._reader is None else self._deltas(self._reader.feed(text))
        )

    def rest(self) -> list[dict[str, Any]]:
        """Return those of what was held when the answer ended."""
        return [] if self._reader is None else self._deltas(self._reader.end())

    def _deltas(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                found.append({"content": part})
            else:
                found.append({"tool_calls": [{"index": self.calls} | called(part)]})
                self.calls += 1
        return found
