"""Anthropic's messages: an answer as one message, or as the events of its blocks.

The risk is the message's ``hallutracer``.  Of a withheld answer the policy's message is the text,
and the stop reason ``refusal``; an answer that a policy ended under way has that stop reason behind
its text so far."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from service.api import reply as wire
from service.api.error_bodies import anthropic_body
from service.api.messages_schema import MessagesRequest
from service.errors import HalluTracerError
from service.scoring import RiskReport
from service.serving.dispatcher import Piece
from service.tool_calls import Part, ToolCall
from service.turn import Outcome

REFUSED = {"stop_reason": "refusal", "stop_sequence": None}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}


class MessagesWire(wire.Wire):
    """The answer to one conversation."""

    def __init__(self, reply: wire.Reply, body: MessagesRequest) -> None:
        super().__init__(reply, body.offered, body.format)
        self._blocks = Blocks()

    def head(self) -> bytes:
        """Return the message without its answer; a text is open at once, unless it may be a
        call."""
        message = self._same() | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self.report),
            "hallutracer": wire.risk_note(self.judgement),
        }
        events, warning = event("message_start", message=message), self.warning(self.report)
        if warning or (self.tools is None and not self.withheld):
            events += self._blocks.text(warning)
        return events

    def text(self, piece: Piece) -> bytes:
        """Return the events of one more piece of the answer."""
        risk = wire.risk_field(wire.running_note(piece.answer))
        return self._blocks.add(self.parts(piece.text), **risk)

    def end(self, reports: list[RiskReport]) -> bytes:
        """Return the events that close the last block, with the stop reason, and the message."""
        report = reports[0]
        blocks = self._blocks
        events = b""
        if report.outcome.shows:
            events = blocks.add(self.last_parts())
        elif report.verdict.message is not None:
            events = blocks.text(report.verdict.message)
        events += blocks.end()
        risk = wire.risk_field(wire.answer_note(report.answer, report.decoding))
        delta = _stop(report, blocks.calls)
        events += event("message_delta", delta=delta, usage=_usage(report), **risk)
        return events + event("message_stop")

    def failed(self, error: HalluTracerError) -> bytes:
        """Return the event of an error after the status line."""
        body = anthropic_body(error.status, error.message, self.judgement.request_id)
        return wire.event(json.dumps(body), "error")

    def whole(self) -> str:
        """Return the message with its answer."""
        report, calls = self.report, list[ToolCall]()
        content = refusal(report.verdict.message)
        if report.outcome.shows:
            text, calls = self.split(report.shown.text)
            text = self.warning(report) + text
            content = [text_block(text)] if text or not calls else []
        content += [_tool_use(call) | {"input": json.loads(call.arguments)} for call in calls]
        message = self._same() | {
            "content": content,
            **_stop(report, len(calls)),
            "usage": _usage(report),
            "hallutracer": wire.risk_note(self.judgement),
        }
        return json.dumps(message, ensure_ascii=False)

    def _same(self) -> dict[str, Any]:
        kind = {"type": "message", "role": "assistant", "model": self.judgement.model}
        return {"id": self.judgement.answer_id} | kind


class Blocks:
    """The events of a stream's blocks: a text is open until a call or the end; each call is a block
    of its own."""

    def __init__(self, before: int = 0) -> None:
        """``before``: the blocks that the stream has had."""
        self.calls = 0
        self._index = before - 1
        self._open = False

    def add(self, parts: Sequence[Part], **more: Any) -> bytes:
        """Return the events of more texts and calls."""
        return b"".join(
            self.text(part, **more) if isinstance(part, str) else self.call(part) for part in parts
        )

    def text(self, text: str, **more: Any) -> bytes:
        """Return the events of one more piece of text."""
        events = b"" if self._open else self._begin(text_block(""))
        if text or more:
            events += self._delta({"type": "text_delta", "text": text}, **more)
        return events

    def call(self, call: ToolCall) -> bytes:
        """Return the events of a call."""
        self.calls += 1
        events = self.end() + self._begin(_tool_use(call))
        events += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return events + self.end()

    def end(self) -> bytes:
        """Return the event that closes the open block, if one is."""
        was_open, self._open = self._open, False
        return event("content_block_stop", index=self._index) if was_open else b""

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._open = True
        self._index += 1
        return event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any], **more: Any) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta, **more)


def event(kind: str, **content: Any) -> bytes:
    """Return an event of a stream."""
    return wire.event(json.dumps({"type": kind} | content, ensure_ascii=False), kind)


def refusal(message: str | None) -> list[dict[str, Any]]:
    """Return the blocks that stand in for a withheld answer."""
    return [] if message is None else [text_block(message)]


def text_block(text: str) -> dict[str, Any]:
    """Return a block of an answer."""
    return {"type": "text", "text": text}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Return the block of a call as it begins: its input follows."""
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name, "input": {}}


def _stop(report: RiskReport, calls: int) -> dict[str, Any]:
    if report.outcome is Outcome.WITHHELD:
        return REFUSED
    completion = report.shown
    if completion.finish_reason == "stop" and completion.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop}
    reason = wire.finish_reason(completion)
    stop_reason = "tool_use" if calls and reason == "stop" else _STOP_REASONS[reason]
    return {"stop_reason": stop_reason, "stop_sequence": None}


def _usage(report: RiskReport) -> dict[str, int]:
    counts = wire.usage([report])
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
    }
