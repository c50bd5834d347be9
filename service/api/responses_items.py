"""The items of a response's output: messages and calls of tools, whole or event by event."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from service.api import reply as wire
from service.api.tool_answers import call_id
from service.tool_calls import Part as Written
from service.tool_calls import ToolCall

Part = dict[str, Any]


def text_part(said: str) -> Part:
    """Return a part of an answer."""
    return {"type": "output_text", "text": said, "annotations": [], "logprobs": []}


def _refusal_part(said: str) -> Part:
    return {"type": "refusal", "refusal": said}


def refusal_parts(message: str | None, in_content: bool) -> list[Part]:
    """Return what is said instead of an answer; many clients show its text and drop its refusal."""
    if message is None:
        return []
    return [*([text_part(message)] if in_content else []), _refusal_part(message)]


def message_item(item: str, status: str, parts: Sequence[Part] = ()) -> dict[str, Any]:
    """Return the item of an output that is the answer."""
    same = {"type": "message", "role": "assistant", "status": status, "content": parts}
    return {"id": item} | same


class ItemEvents:
    """The events of a stream, which it numbers, and those of one item."""

    def __init__(self, item: str, index: int = 0) -> None:
        """``index``: of the item in the output."""
        self.item, self.index = item, index
        self._events = 0

    def event(self, kind: str, **content: Any) -> bytes:
        """Return one event."""
        document = {"type": kind, "sequence_number": self._events} | content
        self._events += 1
        return wire.event(json.dumps(document, ensure_ascii=False), kind)

    def item_begins(self) -> bytes:
        """Return the event before all parts."""
        return self.event(
            "response.output_item.added",
            output_index=self.index,
            item=message_item(self.item, "in_progress"),
        )

    def part_begins(self, empty: Part, index: int = 0) -> bytes:
        """Return the event before a part's text."""
        return self._of_part("content_part.added", index, part=empty)

    def delta(self, text: str, kind: str = "output_text", index: int = 0, **more: Any) -> bytes:
        """Return a piece of a part's text."""
        own: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return self._of_part(f"{kind}.delta", index, delta=text, **own, **more)

    def part_ends(self, part: Part, index: int = 0) -> bytes:
        """Return the events behind a part's text."""
        own = {name: part[name] for name in ("text", "refusal", "logprobs") if name in part}
        done = self._of_part(f"{part['type']}.done", index, **own)
        return done + self._of_part("content_part.done", index, part=part)

    def whole_part(self, part: Part, index: int) -> bytes:
        """Return the events of a part that is known before it is sent."""
        name = "refusal" if part["type"] == "refusal" else "text"
        begins = self.part_begins(part | {name: ""}, index)
        return begins + self.delta(part[name], part["type"], index) + self.part_ends(part, index)

    def _of_part(self, kind: str, index: int, **content: Any) -> bytes:
        same = {"item_id": self.item, "output_index": self.index, "content_index": index}
        return self.event(f"response.{kind}", **same, **content)


class Output(ItemEvents):
    """The items of one answer in the order in which it is written: a message is open until a call
    or the end.

    A whole answer's items are those that a stream of it would have told of."""

    def __init__(self, request_id: str) -> None:
        super().__init__("", -1)
        self.items: list[dict[str, Any]] = []  # that are complete
        self.calls = 0
        self._request_id, self._messages = request_id, 0
        self._said: list[str] | None = None  # of the message that is open

    def add(self, parts: Sequence[Written], **more: Any) -> bytes:
        """Return the events of more texts and calls."""
        return b"".join(
            self.text(one, **more) if isinstance(one, str) else self.call(one) for one in parts
        )

    def text(self, said: str, **more: Any) -> bytes:
        """Return the events of one more piece of text."""
        begun = b""
        if self._said is None:
            self._said = []
            begun = self._message_begins() + self.part_begins(text_part(""))
        self._said.append(said)
        return begun + (self.delta(said, **more) if said or more else b"")

    def call(self, call: ToolCall) -> bytes:
        """Return the events of a call, which is complete before it is sent."""
        ended = self.end()
        self.calls += 1
        self._next(f"fc_{uuid.uuid4().hex}")
        known = {"id": self.item, "type": "function_call", "call_id": call_id(), "name": call.name}
        begun = self._item("added", known | {"arguments": "", "status": "in_progress"})
        same = {"item_id": self.item, "output_index": self.index}
        kind = "response.function_call_arguments"
        begun += self.event(f"{kind}.delta", **same, delta=call.arguments)
        begun += self.event(f"{kind}.done", **same, arguments=call.arguments)
        return (
            ended + begun + self._done(known | {"arguments": call.arguments, "status": "completed"})
        )

    def end(self, status: str = "completed") -> bytes:
        """Return the events that close the open message, if one is."""
        if self._said is None:
            return b""
        part, self._said = text_part("".join(self._said)), None
        return self.part_ends(part) + self._done(message_item(self.item, status, [part]))

    def message(self, parts: Sequence[Part], status: str) -> bytes:
        """Return the events of a message that is known before it is sent; of one without parts
        there are none."""
        if not parts:
            return b""
        begun = self._message_begins() + b"".join(
            self.whole_part(part, place) for place, part in enumerate(parts)
        )
        return begun + self._done(message_item(self.item, status, parts))

    def _message_begins(self) -> bytes:
        number = f"_{self._messages}" if self._messages else ""
        self._messages += 1
        self._next(f"msg_{self._request_id}{number}")
        return self.item_begins()

    def _next(self, item: str) -> None:
        self.item, self.index = item, self.index + 1

    def _done(self, item: dict[str, Any]) -> bytes:
        self.items.append(item)
        return self._item("done", item)

    def _item(self, what: str, item: dict[str, Any]) -> bytes:
        return self.event(f"response.output_item.{what}", output_index=self.index, item=item)
