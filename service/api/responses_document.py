"""A response of OpenAI's Responses API, whole or event by event."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from service.api import reply as wire
from service.api.answering import annotation
from service.api.request_schema import TEMPERATURE
from service.api.responses_schema import ResponsesRequest
from service.scoring import RiskReport

Part = dict[str, Any]
_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


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
            "response.output_item.added", output_index=self.index, item=message_item(self.item, "in_progress")
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


class Told(ItemEvents):
    """What is said of one answer."""

    def __init__(self, body: ResponsesRequest, reply: wire.Reply, message_in_content: bool) -> None:
        super().__init__(f"msg_{reply.judgement.request_id}")
        self.reply, self._body, self._in_content = reply, body, message_in_content

    def parts(self, report: RiskReport) -> list[Part]:
        """Return the answer's content."""
        if report.completion is not None:
            return [text_part(annotation(report) + report.completion.text)]
        return refusal_parts(report.verdict.message, self._in_content)

    def response(self, noted: Mapping[str, Any], report: RiskReport | None = None) -> dict[str, Any]:
        """Return the response; without a report as it is before the answer."""
        body, judgement = self._body, self.reply.judgement
        status, why = ("in_progress", None) if report is None else _status(report)
        parts = [] if report is None else self.parts(report)
        return {
            "id": judgement.answer_id, "object": "response", "created_at": judgement.created,
            "completed_at": int(time.time()) if status == "completed" else None, "status": status, "error": None,
            "incomplete_details": why, "model": judgement.model,
            "output": [message_item(self.item, status, parts)] if parts else [],
            "usage": None if report is None else _counted(report), "store": False, "background": False,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "temperature": TEMPERATURE if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p, "text": {"format": {"type": "text"}}, "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": False, "previous_response_id": None, "metadata": {},
            "reasoning": {"effort": None, "summary": None}, "truncation": "disabled", "top_logprobs": 0, "user": None,
            "hallutracer": noted,
        }  # fmt: skip

    def begun(self, noted: Mapping[str, Any]) -> bytes:
        """Return a stream's first events."""
        response = self.response(noted)
        return self.event("response.created", response=response) + self.event("response.in_progress", response=response)

    def over(self, report: RiskReport, noted: Mapping[str, Any]) -> bytes:
        """Return a stream's last events."""
        response = self.response(noted, report)
        items = [self.event("response.output_item.done", output_index=0, item=item) for item in response["output"]]
        return b"".join(items) + self.event(f"response.{response['status']}", response=response)


def _status(report: RiskReport) -> tuple[str, dict[str, str] | None]:
    ended = "content_filter" if report.completion is None else wire.finish_reason(report.completion)
    return ("completed", None) if ended == "stop" else ("incomplete", {"reason": _REASONS[ended]})


def _counted(report: RiskReport) -> dict[str, Any]:
    counts = wire.usage([report])
    return {
        "input_tokens": counts.prompt_tokens, "output_tokens": counts.completion_tokens,
        "total_tokens": counts.total_tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
    }  # fmt: skip
