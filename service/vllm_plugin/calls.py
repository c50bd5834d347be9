"""The tools of a request to vLLM's server: which functions it offers, and whether its conversation
has used any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from service.judging.guarantee import tool_violations
from service.tool_calls import Tools


def offered(content: dict[str, Any]) -> Tools | None:
    """Return the functions that an answer to this body may call; None where there is none."""
    choice, given = content.get("tool_choice"), content.get("tools")
    if (
        choice == "none"
        or (isinstance(choice, dict) and choice.get("type") == "none")
        or not isinstance(given, list)
    ):
        return None
    described = [
        one.get("function", one) for one in given if isinstance(one, dict)
    ]  # flat but in chats
    names = [
        one["name"]
        for one in described
        if isinstance(one, dict) and isinstance(one.get("name"), str)
    ]
    return Tools(tuple({"function": {"name": name}} for name in names)) if names else None


_OF_TOOLS = frozenset(
    ("function_call", "function_call_output", "tool_use", "tool_result")
)  # items and blocks


def used(content: dict[str, Any], turns: Iterable[Any]) -> bool:
    """Return whether a body offers tools, or one of its turns is a call or a result."""
    messages = [one for one in turns if isinstance(one, dict)]
    blocks = [
        block
        for one in messages
        if isinstance(one.get("content"), list)
        for block in one["content"]
    ]
    kinds = [one.get("type") for one in (*messages, *blocks) if isinstance(one, dict)]
    of_tools = any(isinstance(kind, str) and kind in _OF_TOOLS for kind in kinds)
    return bool(content.get("tools")) or of_tools or bool(tool_violations(messages, None))
