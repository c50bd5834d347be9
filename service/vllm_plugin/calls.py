"""A turn that may call tools: which a request offers, and what is held until it is known whether it is a call.

A call is what ``service.tool_calls`` takes for one, the form of Qwen2.5 and Hermes.  vLLM's own parser words it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.sampling_params import RequestOutputKind

from service.judging.guarantee import tool_violations
from service.tool_calls import Tools, may_be_calls


def offered(content: dict[str, Any]) -> Tools | None:
    """Return the functions that an answer to this body may call; None where there is none."""
    choice, given = content.get("tool_choice"), content.get("tools")
    if choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none") or not isinstance(given, list):
        return None
    described = [one.get("function", one) for one in given if isinstance(one, dict)]  # flat but in chats
    names = [one["name"] for one in described if isinstance(one, dict) and isinstance(one.get("name"), str)]
    return Tools(tuple({"function": {"name": name}} for name in names)) if names else None


_OF_TOOLS = frozenset(("function_call", "function_call_output", "tool_use", "tool_result"))  # items and blocks


def used(content: dict[str, Any], turns: Iterable[Any]) -> bool:
    """Return whether a body offers tools, or one of its turns is a call or a result."""
    messages = [one for one in turns if isinstance(one, dict)]
    blocks = [block for one in messages if isinstance(one.get("content"), list) for block in one["content"]]
    kinds = [one.get("type") for one in (*messages, *blocks) if isinstance(one, dict)]
    of_tools = any(isinstance(kind, str) and kind in _OF_TOOLS for kind in kinds)
    return bool(content.get("tools")) or of_tools or bool(tool_violations(messages, None))


class MaybeCalls:
    """The outputs of an answer for as long as it may be nothing but calls."""

    def __init__(self, tools: Tools, kind: RequestOutputKind) -> None:
        """``kind``: of the outputs."""
        self.outputs = list[Any]()
        self.are_calls = False  # it has ended, and is nothing else
        self.undecided = True
        self.tokens = 0
        self._tools, self._text, self._delta = tools, "", kind is RequestOutputKind.DELTA

    def add(self, output: Any) -> None:
        """Take one more output; of one answer, as ``n`` is 1."""
        one = output.outputs[0]
        self._text = self._text + one.text if self._delta else one.text
        self.tokens = self.tokens + len(one.token_ids) if self._delta else len(one.token_ids)
        self.outputs.append(output)
        if output.finished:
            self.are_calls = one.finish_reason == "stop" and self._tools.only_calls(self._text)
        self.undecided = not output.finished and may_be_calls(self._text)
