"""POST /v1/messages, Anthropic's Messages API: the answer, where its risk allows one.

The risk is the message's ``hallutracer``.  Of a withheld answer the policy's message is the text,
and the stop reason ``refusal``; an answer that a policy ended under way has that stop reason behind
its text so far."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import Field, create_model

from service.access.routes import MESSAGES_ROUTE
from service.api import reply as wire
from service.api.answering import RISKS, Wanted, annotation, answered, beside, note, whole
from service.api.auth import TheService
from service.api.error_bodies import anthropic_body
from service.api.json_body import JsonRoute
from service.api.messages_schema import MessagesRequest
from service.api.tool_answers import split
from service.engines.formats import Format
from service.errors import HalluTracerError
from service.scoring import RiskReport
from service.serving.dispatcher import Piece
from service.tool_calls import CallReader, Part, ToolCall, Tools
from service.turn import Outcome

REFUSAL = "refusal"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": REFUSAL}

# What the document says of an answer.
_TEXT: Any = create_model(
    "MessageText", __doc__="The answer, or what is said instead.", type=Literal["text"], text=str
)
_CALL: Any = create_model(
    "MessageToolUse",
    __doc__="A call of a tool.",
    type=Literal["tool_use"],
    id=str,
    name=str,
    input=dict[str, Any],
)
_USAGE = create_model(
    "MessagesUsage",
    __doc__="Token counts; ``input_tokens`` without those that were cached.",
    input_tokens=int,
    output_tokens=int,
    cache_creation_input_tokens=int,
    cache_read_input_tokens=int,
)
_ANSWER = create_model(
    "AnthropicMessage",
    __doc__="A whole answer.",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=list[_TEXT | _CALL],
    stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"],
    stop_sequence=str | None,
    usage=_USAGE,
    hallutracer=(dict[str, Any], Field(description=RISKS)),
)
_ERROR = create_model("AnthropicError", __doc__="The cause and the remedy.", type=str, message=str)
_ERROR_RESPONSE: Any = create_model(
    "AnthropicErrorResponse",
    __doc__="The error envelope.",
    type=Literal["error"],
    error=_ERROR,
    request_id=str,
)
_EVENTS = "message_start, with the risk, to message_stop, as Anthropic's API has them, or an error"
FAILURES: dict[int | str, dict[str, Any]] = {
    status: said | {"model": _ERROR_RESPONSE} for status, said in wire.FAILURES_400.items()
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": _ANSWER,
        "headers": wire.HEADERS,
        "description": "the answer, or with 'stream' its events; of a withheld answer the refusal",
        "content": {"text/event-stream": {"schema": wire.events_schema(_EVENTS, end="")}},
    },
    **FAILURES,
}
router = APIRouter(tags=["anthropic"], route_class=JsonRoute)


@router.post(
    MESSAGES_ROUTE,
    summary="Messages, as Anthropic's, with the risk beside the answer",
    responses=RESPONSES,
)
async def messages(
    body: Annotated[MessagesRequest, Body()], request: Request, service: TheService
) -> Response:
    """An answer to a conversation; its risk is known before its first token."""
    tools = body.offered
    # A client has to name a number, so it is its own default as often as a wish: the service's
    # limit comes first.
    most = min(body.max_tokens, service.settings.max_new_tokens)
    wanted = Wanted(
        route=MESSAGES_ROUTE,
        prompts=[body.conversation()],
        field="messages",
        most=most,
        tools=tools,
        format=body.format,
    )
    reply = await answered(request, service, body, wanted)
    if body.stream:
        return wire.EventStream(reply, _events(reply, tools, body.format))
    reply.end()
    report = reply.judgement.reports[0]
    blocks, calls = _blocks(report, tools, body.format)
    content = _head(reply) | {
        "content": blocks,
        **_ended(report, calls),
        "usage": _counted(reply.judgement.reports),
        "hallutracer": note(reply.judgement),
    }
    return whole(reply, content)


def _blocks(
    report: RiskReport, tools: Tools | None, answer_format: Format | None
) -> tuple[list[dict[str, Any]], int]:
    """Return the answer's blocks, or those of what is said instead, and how many of them are calls
    of tools."""
    if report.outcome is Outcome.WITHHELD:
        message = report.verdict.message
        return ([] if message is None else [text_block(message)]), 0
    text, calls = split(tools, report.shown.text)
    text = annotation(report, answer_format) + text
    used = [_tool_use(call) | {"input": json.loads(call.arguments)} for call in calls]
    return [*([text_block(text)] if text or not calls else []), *used], len(calls)


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Return the block of a call as it begins: its input follows."""
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name, "input": {}}


def _ended(report: RiskReport, calls: int = 0) -> dict[str, Any]:
    if report.outcome is Outcome.WITHHELD:
        return {"stop_reason": REFUSAL, "stop_sequence": None}
    completion = report.shown
    if completion.finish_reason == "stop" and completion.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop}
    ended = wire.finish_reason(completion)
    return {
        "stop_reason": "tool_use" if calls and ended == "stop" else _STOP_REASONS[ended],
        "stop_sequence": None,
    }


def _head(reply: wire.Reply) -> dict[str, Any]:
    judgement = reply.judgement
    same = {"type": "message", "role": "assistant", "model": judgement.model}
    return {"id": judgement.answer_id} | same


def text_block(said: str) -> dict[str, Any]:
    """Return a block of an answer."""
    return {"type": "text", "text": said}


def _counted(reports: Sequence[RiskReport]) -> dict[str, int]:
    counts = wire.usage(reports)
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
    }


def event(kind: str, **content: Any) -> bytes:
    """Return an event of a stream."""
    return wire.event(json.dumps({"type": kind} | content, ensure_ascii=False), kind)


class Blocks:
    """The events of a stream's blocks: a text is open until a call or the end; each call is a block
    of its own."""

    def __init__(self, before: int = 0) -> None:
        """``before``: the blocks that the stream has had."""
        self.calls, self._index, self._open = 0, before - 1, False

    def text(self, said: str, **more: Any) -> bytes:
        """Return the events of one more piece of text."""
        begun = b"" if self._open else self.begin(text_block(""))
        self._open = True
        return begun + (
            self._delta({"type": "text_delta", "text": said}, **more) if said or more else b""
        )

    def call(self, call: ToolCall) -> bytes:
        """Return the events of a call."""
        self.calls += 1
        ended, begun = self.end(), self.begin(_tool_use(call))
        self._open = True
        return (
            ended
            + begun
            + self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            + self.end()
        )

    def begin(self, block: dict[str, Any]) -> bytes:
        """Return the event that opens the next block."""
        self._index += 1
        return event("content_block_start", index=self._index, content_block=block)

    def end(self) -> bytes:
        """Return the event that closes the open block, if one is."""
        was, self._open = self._open, False
        return event("content_block_stop", index=self._index) if was else b""

    def _delta(self, delta: dict[str, Any], **more: Any) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta, **more)


async def _events(
    reply: wire.Reply, tools: Tools | None, answer_format: Format | None
) -> AsyncIterator[bytes]:
    judgement, report, blocks = reply.judgement, reply.judgement.reports[0], Blocks()
    reader = None if tools is None else CallReader(tools)

    def told(parts: Sequence[Part], **more: Any) -> bytes:
        return b"".join(
            blocks.text(one, **more) if isinstance(one, str) else blocks.call(one) for one in parts
        )

    def over(reports: list[RiskReport]) -> bytes:
        stop = (
            told(reader.end()) if reader is not None and reports[0].outcome.shows else b""
        ) + blocks.end()
        more = beside(wire.answer_note(reports[0].answer, reports[0].decoding))
        ended = event(
            "message_delta", delta=_ended(reports[0], blocks.calls), usage=_counted(reports), **more
        )
        return stop + ended + event("message_stop")

    def piece(one: Piece) -> bytes:
        parts: Sequence[Part] = [one.text] if reader is None else reader.feed(one.text)
        return told(parts, **beside(wire.running_note(one.answer)))

    def failed(error: HalluTracerError) -> bytes:
        body = anthropic_body(error.status, error.message, judgement.request_id)
        return wire.event(json.dumps(body), "error")

    first: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _counted([report]),
    }
    yield event("message_start", message=_head(reply) | first | {"hallutracer": note(judgement)})
    if report.outcome is Outcome.WITHHELD:
        said = report.verdict.message
        yield (b"" if said is None else blocks.text(said)) + over([report])
        return
    warning = annotation(report, answer_format)
    yield blocks.text(warning) if warning or tools is None else b""
    async for part in wire.answer_events(reply, piece, over, failed):
        yield part
