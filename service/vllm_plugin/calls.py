"""The tools of a request to vLLM's server: which functions it offers, and whether its conversation
has used any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from service.judging.guarantee import tool_violations
from service.tool_calls import Tools


def offered(content: dict[str, Any]) -> Tools | None:
    """Return the functions that an answer to this body may call; None where there is none."""
    choice, tools = content.get("tool_choice"), content.get("tools")
    if isinstance(choice, dict):
        choice = choice.get("type")
    if choice == "none" or not isinstance(tools, list):
        return None
    # Flat but in chats.
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    definitions = [{"function": {"name": name}} for name in names if isinstance(name, str)]
    return Tools(tuple(definitions)) if definitions else None


# items and blocks
_OF_TOOLS = frozenset(("function_call", "function_call_output", "tool_use", "tool_result"))


def used(content: dict[str, Any], turns: Iterable[Any]) -> bool:
    """Return whether a body offers tools, or one of its turns is a call or a result."""
    messages = [turn for turn in turns if isinstance(turn, dict)]
    parts = list[Any](messages)
    for message in messages:
        blocks = message.get("content")
        parts += blocks if isinstance(blocks, list) else ()
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    of_tools = any(isinstance(kind, str) and kind in _OF_TOOLS for kind in kinds)
    return bool(content.get("tools")) or of_tools or bool(tool_violations(messages, None))
