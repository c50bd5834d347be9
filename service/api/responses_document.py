"""A response of OpenAI's Responses API, whole or event by event."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from service.api import reply as wire
from service.api.answering import annotation
from service.api.responses_items import Output, refusal_parts
from service.api.responses_schema import ResponsesRequest
from service.scoring import RiskReport
from service.tool_calls import CallReader
from service.turn import Outcome

_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Told:
    """What is said of one answer."""

    def __init__(self, body: ResponsesRequest, reply: wire.Reply, message_in_content: bool) -> None:
        self.reply, self._body, self._in_content = reply, body, message_in_content
        self.tools = body.offered
        self._reader = None if self.tools is None else CallReader(self.tools)
        self.output = Output(reply.judgement.request_id)

    def piece(self, text: str, **more: Any) -> bytes:
        """Return the events of one more piece of the answer."""
        return self.output.add([text] if self._reader is None else self._reader.feed(text), **more)

    def begins(self) -> bytes:
        """Return the events before an answer: its message is open at once, unless it may be a call
        of a tool."""
        warning = annotation(self.reply.judgement.reports[0], self._body.format)
        return self.output.text(warning) if warning or self.tools is None else b""

    def ends(self, report: RiskReport) -> bytes:
        """Return the events with which an answer's items end, or those of what is said instead of
        an answer."""
        output, status = self.output, _status(report)[0]
        if report.outcome is Outcome.WITHHELD:
            return output.message(refusal_parts(report.verdict.message, self._in_content), status)
        rest = b"" if self._reader is None else output.add(self._reader.end())
        if output.index < 0:  # nothing was said and nothing called
            rest += output.text("")
        return rest + output.end(status)

    def whole(self, report: RiskReport, noted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response with its answer."""
        if report.outcome.shows:
            self.begins()
            self.piece(report.shown.text)
        self.ends(report)
        return self.response(noted, report)

    def response(
        self, noted: Mapping[str, Any], report: RiskReport | None = None
    ) -> dict[str, Any]:
        """Return the response; without a report as it is before the answer."""
        body, judgement = self._body, self.reply.judgement
        sampling = judgement.sampling
        assert sampling is not None, "every request on this route wants an answer"
        status, why = ("in_progress", None) if report is None else _status(report)
        return {
            "id": judgement.answer_id,
            "object": "response",
            "created_at": judgement.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "model": judgement.model,
            "output": [] if report is None else self.output.items,
            "usage": None if report is None else _counted(report),
            "store": False,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tools": [tool.told() for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": self.tools is not None and self.tools.parallel,
            "previous_response_id": None,
            "metadata": {},
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "top_logprobs": 0,
            "user": None,
            "hallutracer": noted,
        }

    def begun(self, noted: Mapping[str, Any]) -> bytes:
        """Return a stream's first events."""
        response, event = self.response(noted), self.output.event
        return event("response.created", response=response) + event(
            "response.in_progress", response=response
        )

    def over(self, report: RiskReport, noted: Mapping[str, Any]) -> bytes:
        """Return a stream's last events."""
        items = self.ends(report)
        response = self.response(noted, report)
        return items + self.output.event(f"response.{response['status']}", response=response)


def _status(report: RiskReport) -> tuple[str, dict[str, str] | None]:
    ended = (
        "content_filter" if report.outcome is Outcome.WITHHELD else wire.finish_reason(report.shown)
    )
    return ("completed", None) if ended == "stop" else ("incomplete", {"reason": _REASONS[ended]})


def _counted(report: RiskReport) -> dict[str, Any]:
    counts = wire.usage([report])
    return {
        "input_tokens": counts.prompt_tokens,
        "output_tokens": counts.completion_tokens,
        "total_tokens": counts.total_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
    }
