"""OpenAI's chats and text completions: an answer as one document, or as a stream's chunks.

The risk is ``hallutracer``.  A withheld answer has no text and the finish reason
``content_filter``, in a chat the policy's message as ``refusal``: OpenAI's clients know both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from service.api import reply as wire
from service.api.openai_schema import ChatRequest, TextRequest
from service.scoring import RiskReport
from service.serving.dispatcher import Piece
from service.tool_calls import ToolCall
from service.turn import Outcome

WITHHELD = "content_filter"


class ChatWire(wire.Wire):
    """The answer to one chat, or to each prompt of a request for text completions."""

    done = wire.DONE

    def __init__(
        self, reply: wire.Reply, body: ChatRequest | TextRequest, *, forwarded: bool = False
    ) -> None:
        """``forwarded``: another server answers."""
        super().__init__(reply, body.offered, body.format)
        self._is_chat = isinstance(body, ChatRequest)
        self._with_usage, self._forwarded = body.with_usage, forwarded
        self._calls = 0  # that a stream has sent

    def head(self) -> bytes:
        """Return the first chunk; of a withheld answer it has the refusal, too."""
        risk, report = wire.risk_note(self.judgement), self.report
        if self.withheld and not self._forwarded:
            return self._chunk({"role": "assistant", **self._refusal(report)}, WITHHELD, risk)
        return self._chunk({"role": "assistant", "content": self.warning(report)}, risk=risk)

    def text(self, piece: Piece) -> bytes:
        """Return a chunk for each text and each call; the risk so far has one of its own where
        there is neither."""
        risk = wire.running_note(piece.answer)
        deltas = [self._delta(part) for part in self.parts(piece.text)]
        if risk and not deltas:
            deltas = [{}]
        return b"".join(self._chunk(delta, risk=risk) for delta in deltas)

    def end(self, reports: list[RiskReport]) -> bytes:
        """Return the last chunks: the finish reason, and the usage where it is wanted."""
        chunks = b""
        if not self.withheld:
            deltas = [self._delta(part) for part in self.last_parts()]
            risk = wire.answer_note(reports[0].answer, reports[0].decoding)
            chunks = b"".join(map(self._chunk, deltas))
            chunks += self._chunk({}, _finish_reason(reports[0], self._calls), risk)
        if self._with_usage:
            chunks += self.chunk({"choices": [], "usage": _usage(reports)})
        return chunks

    def whole(self, instead: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Return the answer; ``instead``: the fields that another server gives."""
        reports = self.judgement.reports
        document = self._same("chat.completion") | {
            "choices": [self._choice(index, report) for index, report in enumerate(reports)],
            "usage": _usage(reports),
            "hallutracer": wire.risk_note(self.judgement),
        }
        return json.dumps({**document, **instead}, ensure_ascii=False)

    def chunk(self, content: Mapping[str, Any]) -> bytes:
        """Return one chunk of a stream."""
        usage = {"usage": None} if self._with_usage else {}
        document = {**self._same("chat.completion.chunk"), **usage, **content}
        return wire.event(json.dumps(document, ensure_ascii=False))

    def _same(self, chat_object: str) -> dict[str, Any]:
        judgement = self.judgement
        return {
            "id": judgement.answer_id,
            "object": chat_object if self._is_chat else "text_completion",
            "created": judgement.created,
            "model": judgement.model,
        }

    def _delta(self, part: str | ToolCall) -> dict[str, Any]:
        if isinstance(part, str):
            return {"content": part}
        self._calls += 1
        return {"tool_calls": [{"index": self._calls - 1} | _call(part)]}

    def _chunk(
        self,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        risk: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        answer = {"delta": delta} if self._is_chat else {"text": delta.get("content") or ""}
        choice = {"index": 0, "finish_reason": finish_reason, "logprobs": None} | answer
        return self.chunk({"choices": [choice]} | wire.risk_field(risk))

    def _choice(self, index: int, report: RiskReport) -> dict[str, Any]:
        message, calls = self._refusal(report), list[ToolCall]()
        if report.outcome.shows:
            text, calls = self.split(report.shown.text)
            message = {"content": self.warning(report) + text, "refusal": None}
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": [*map(_call, calls)]}
        answer: dict[str, Any] = {"text": message["content"] or ""}
        if self._is_chat:
            answer = {"message": {"role": "assistant", **message}}
        ended = {"finish_reason": _finish_reason(report, len(calls)), "logprobs": None}
        return {"index": index, **answer, **ended}

    def _refusal(self, report: RiskReport) -> dict[str, Any]:
        """Return what a withheld answer's message holds; many clients show its ``content`` and drop
        its ``refusal``."""
        message = report.verdict.message
        return {"content": message if self.refusal_in_content else None, "refusal": message}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": wire.call_id(), "type": "function", "function": function}


def _finish_reason(report: RiskReport, calls: int) -> str:
    if report.outcome is Outcome.WITHHELD:
        return WITHHELD
    reason = wire.finish_reason(report.shown)
    return "tool_calls" if calls and reason == "stop" else reason


def _usage(reports: Sequence[RiskReport]) -> dict[str, Any]:
    counts = wire.usage(reports).model_dump()
    cached = counts.pop("cached_tokens")
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}
