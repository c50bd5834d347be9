"""OpenAI's responses: an answer as one response, or as the events of its items.

The risk is the response's ``hallutracer``.  A withheld answer is a refusal, the policy's message;
it is incomplete for the reason ``content_filter``, and so is one that a policy ended under way."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from service.api import reply as wire
from service.api.error_bodies import error_body
from service.api.responses_schema import ResponsesRequest
from service.errors import HalluTracerError
from service.scoring import RiskReport
from service.serving.dispatcher import Piece
from service.tool_calls import Part, ToolCall
from service.turn import Outcome

_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesWire(wire.Wire):
    """The answer to one conversation."""

    def __init__(self, reply: wire.Reply, body: ResponsesRequest) -> None:
        super().__init__(reply, body.offered, body.format)
        self._body, self._items = body, Items(reply.judgement.request_id)

    def head(self) -> bytes:
        """Return the events of the response without its answer."""
        response = self._response(wire.risk_note(self.judgement))
        kinds = ("response.created", "response.in_progress")
        events = b"".join(self._items.event(kind, response=response) for kind in kinds)
        return events if self.withheld else events + self._begin()

    def text(self, piece: Piece) -> bytes:
        """Return the events of one more piece of the answer."""
        risk = wire.risk_field(wire.running_note(piece.answer))
        return self._items.add(self.parts(piece.text), **risk)

    def end(self, reports: list[RiskReport]) -> bytes:
        """Return the events that close the last item, and the response with its answer."""
        events = self._end(reports[0])
        response = self._response(wire.risk_note(self.judgement, reports), reports[0])
        return events + self._items.event(f"response.{response['status']}", response=response)

    def failed(self, error: HalluTracerError) -> bytes:
        """Return the event of an error after the status line.

        It stands under ``error``, too, where OpenAI's client looks for what it raises: half an
        answer must not pass for one."""
        body = error_body(error.status, error.message, error.code, error.param)
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._items.event("error", **fields, **body)

    def whole(self) -> str:
        """Return the response; its items are those that a stream of it would have told of."""
        if self.report.outcome.shows:
            self._begin()
            self._items.add(self.parts(self.report.shown.text))
        self._end(self.report)
        response = self._response(wire.risk_note(self.judgement), self.report)
        return json.dumps(response, ensure_ascii=False)

    def _begin(self) -> bytes:
        """Return the events before an answer: its message is open at once, unless it may be a call
        of a tool."""
        warning = self.warning(self.report)
        return self._items.text(warning) if warning or self.tools is None else b""

    def _end(self, report: RiskReport) -> bytes:
        status, items = _status(report)[0], self._items
        if report.outcome is Outcome.WITHHELD:
            parts = refusal_parts(report.verdict.message, self.refusal_in_content)
            return items.message(parts, status)
        events = items.add(self.last_parts())
        if items.index < 0:  # there is neither a text nor a call
            events += items.text("")
        return events + items.end(status)

    def _response(
        self, risk: Mapping[str, Any], report: RiskReport | None = None
    ) -> dict[str, Any]:
        """Return the response; without a report as it is before the answer."""
        body = self._body
        judgement = self.judgement
        sampling = self.judgement.sampling
        assert sampling is not None, "every request on this route wants an answer"
        status, details = ("in_progress", None) if report is None else _status(report)
        return {
            "id": judgement.answer_id,
            "object": "response",
            "created_at": judgement.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "model": judgement.model,
            "output": [] if report is None else self._items.complete,
            "usage": None if report is None else _usage(report),
            "store": False,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tools": [tool.repeated() for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": self.tools is not None and self.tools.parallel,
            "previous_response_id": None,
            "metadata": {},
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "top_logprobs": 0,
            "user": None,
            "hallutracer": risk,
        }


class Items:
    """The items of a response's output, in the order in which the answer is written, and the events
    of a stream that tell of them: a message is open until a call or the end."""

    def __init__(self, request_id: str) -> None:
        self.complete: list[dict[str, Any]] = []
        self.request_id, self.index = request_id, -1  # of the newest item in the output
        self._id = ""
        self._messages = self._events = 0
        self._texts: list[str] | None = None  # of the message that is open

    def event(self, kind: str, **content: Any) -> bytes:
        """Return one event, with its number."""
        document = {"type": kind, "sequence_number": self._events} | content
        self._events += 1
        return wire.event(json.dumps(document, ensure_ascii=False), kind)

    def add(self, parts: Sequence[Part], **more: Any) -> bytes:
        """Return the events of more texts and calls."""
        return b"".join(
            self.text(part, **more) if isinstance(part, str) else self.call(part) for part in parts
        )

    def text(self, text: str, **more: Any) -> bytes:
        """Return the events of one more piece of text."""
        events = b""
        if self._texts is None:
            self._texts = []
            events = self._begin_message() + self._of_part("content_part.added", part=_text(""))
        self._texts.append(text)
        if text or more:
            events += self._of_part("output_text.delta", delta=text, logprobs=[], **more)
        return events

    def call(self, call: ToolCall) -> bytes:
        """Return the events of a call, which is complete before it is sent."""
        events = self.end()
        self._next(f"fc_{uuid.uuid4().hex}")
        item = {"id": self._id, "type": "function_call", "call_id": wire.call_id()}
        item |= {"name": call.name, "arguments": "", "status": "in_progress"}
        events += self._item("added", item)
        same = {"item_id": self._id, "output_index": self.index}
        kind = "response.function_call_arguments"
        events += self.event(f"{kind}.delta", **same, delta=call.arguments)
        events += self.event(f"{kind}.done", **same, arguments=call.arguments)
        return events + self._done(item | {"arguments": call.arguments, "status": "completed"})

    def end(self, status: str = "completed") -> bytes:
        """Return the events that close the open message, if one is."""
        if self._texts is None:
            return b""
        part, self._texts = _text("".join(self._texts)), None
        return self._end_part(part) + self._done(_message(self._id, status, [part]))

    def message(self, parts: Sequence[Mapping[str, Any]], status: str) -> bytes:
        """Return the events of a message that is known before it is sent; of one without parts
        there are none."""
        if not parts:
            return b""
        events = self._begin_message()
        for index, part in enumerate(parts):
            kind = part["type"]
            name = "refusal" if kind == "refusal" else "text"
            logprobs: dict[str, Any] = {} if kind == "refusal" else {"logprobs": []}
            events += self._of_part("content_part.added", index, part={**part, name: ""})
            events += self._of_part(f"{kind}.delta", index, delta=part[name], **logprobs)
            events += self._end_part(part, index)
        return events + self._done(_message(self._id, status, parts))

    def _begin_message(self) -> bytes:
        number = f"_{self._messages}" if self._messages else ""
        self._messages += 1
        self._next(f"msg_{self.request_id}{number}")
        return self._item("added", _message(self._id, "in_progress"))

    def _next(self, item: str) -> None:
        self._id, self.index = item, self.index + 1

    def _done(self, item: dict[str, Any]) -> bytes:
        self.complete.append(item)
        return self._item("done", item)

    def _item(self, kind: str, item: dict[str, Any]) -> bytes:
        return self.event(f"response.output_item.{kind}", output_index=self.index, item=item)

    def _end_part(self, part: Mapping[str, Any], index: int = 0) -> bytes:
        content = {name: part[name] for name in ("text", "refusal", "logprobs") if name in part}
        done = self._of_part(f"{part['type']}.done", index, **content)
        return done + self._of_part("content_part.done", index, part=part)

    def _of_part(self, kind: str, index: int = 0, **content: Any) -> bytes:
        same = {"item_id": self._id, "output_index": self.index, "content_index": index}
        return self.event(f"response.{kind}", **same, **content)


def refusal_parts(message: str | None, in_content: bool) -> list[dict[str, Any]]:
    """Return what is said instead of an answer; many clients show its text and drop its refusal."""
    if message is None:
        return []
    refusal = {"type": "refusal", "refusal": message}
    return [_text(message), refusal] if in_content else [refusal]


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(item: str, status: str, parts: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    same = {"type": "message", "role": "assistant", "status": status, "content": parts}
    return {"id": item} | same


def _status(report: RiskReport) -> tuple[str, dict[str, str] | None]:
    reason: str = "content_filter"
    if report.outcome is not Outcome.WITHHELD:
        reason = wire.finish_reason(report.shown)
    return ("completed", None) if reason == "stop" else ("incomplete", {"reason": _REASONS[reason]})


def _usage(report: RiskReport) -> dict[str, Any]:
    counts = wire.usage([report])
    return {
        "input_tokens": counts.prompt_tokens,
        "output_tokens": counts.completion_tokens,
        "total_tokens": counts.total_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
    }
