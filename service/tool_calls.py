"""The calls of tools in an answer, as the chat templates of Qwen2.5 and Hermes have a model write
them.

A call is a block, ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``.  What is not exactly
that is text: the name has to be an offered tool's, the arguments a JSON object, and nothing else
may stand in the block."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
MOST_CHARACTERS = 65_536  # of one block
MOST_DEPTH = 32  # of lists and objects within arguments, and within a tool's parameters
# A string, to its end or the text's, or the end of the block: the end's characters may stand in a
# string.
_STRING_OR_END = re.compile(rf'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|{END}', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote; ``arguments`` is the JSON of an object."""

    name: str
    arguments: str


Part = str | ToolCall


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that a request offers; ``definitions`` as the chat template takes them."""

    definitions: tuple[Mapping[str, Any], ...]
    parallel: bool = True  # False: an answer's first call is its only one
    characters: int = 0  # that their JSON has, about

    @property
    def names(self) -> frozenset[str]:
        """Return what may be called."""
        return frozenset(tool["function"]["name"] for tool in self.definitions)

    def only_calls(self, answer: str) -> bool:
        """Return whether an answer is one or more calls, and white space around them, and nothing
        else."""
        parts = self.parts(answer)
        return bool(parts) and all(isinstance(part, ToolCall) for part in parts)

    def parts(self, answer: str) -> list[Part]:
        """Return the texts and the calls of a whole answer."""
        reader = CallReader(self)
        return [*reader.feed(answer), *reader.end()]


def may_be_calls(beginning: str) -> bool:
    """Return whether an answer that begins so may still be nothing but calls."""
    beginning = beginning.lstrip()
    return beginning.startswith(BEGIN) or BEGIN.startswith(beginning)


class CallReader:
    """Tells the calls in an answer from its text as the pieces come; what may belong to a call is
    held."""

    def __init__(self, tools: Tools) -> None:
        self._names, self._parallel = tools.names, tools.parallel
        self._held, self._called = "", False

    def feed(self, text: str) -> list[Part]:
        """Return what is known with one more piece."""
        self._held += text
        parts: list[Part] = []
        while (at := self._held.find(BEGIN)) >= 0:
            before, block = self._held[:at], self._held[at:]
            end = _end_of(block)
            if end is None and len(block) <= MOST_CHARACTERS:
                shown = before.rstrip()
                parts += [shown] if shown else []
                self._held = before[len(shown) :] + block
                return parts
            end = len(block) if end is None else end
            call = call_in(block[:end], self._names)
            if call is None:
                parts.append(before + block[:end])
            else:
                parts += [before.rstrip()] if before.strip() else []
                parts += [call] if self._parallel or not self._called else []
                self._called = True
            self._held = block[end:]
        ready = len(self._held) - _undecided(self._held)
        parts += [self._held[:ready]] if ready else []
        self._held = self._held[ready:]
        return parts

    def end(self) -> list[Part]:
        """Return what was held of an answer that has ended: a call that is not complete is text."""
        held, self._held = self._held, ""
        return [held] if held.strip() or (held and not self._called) else []


def call_in(block: str, names: Collection[str]) -> ToolCall | None:
    """Return the call that a block from ``BEGIN`` to ``END`` is; None where it is none."""
    if len(block) > MOST_CHARACTERS or not block.endswith(END):
        return None
    try:
        call = json.loads(
            block[len(BEGIN) : -len(END)], parse_constant=_refuse, object_pairs_hook=_each_once
        )
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            return None
        name, arguments = call["name"], call["arguments"]
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
            return None
        if deeper_than(arguments, MOST_DEPTH):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # a lone surrogate cannot be sent
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, written)


def deeper_than(value: Any, most: int) -> bool:
    """Return whether lists and objects are nested more than ``most`` deep."""
    level = [value]
    for _ in range(most + 1):
        inner = [container for container in level if isinstance(container, dict | list)]
        level = [
            below
            for container in inner
            for below in (container.values() if isinstance(container, dict) else container)
        ]
        if not inner:
            return False
    return True


def _end_of(block: str) -> int | None:
    ends = (match.end() for match in _STRING_OR_END.finditer(block) if match[0] == END)
    return next(ends, None)


def _undecided(text: str) -> int:
    """Return how many last characters may be the white space before a call and the beginning of its
    mark."""
    length = next(
        length for length in range(len(BEGIN) - 1, -1, -1) if text.endswith(BEGIN[:length])
    )
    return len(text) - len(text[: len(text) - length].rstrip())


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return document
