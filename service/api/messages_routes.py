"""POST /v1/messages, Anthropic's Messages API: the answer, where its risk allows one.

The risk is the message's ``hallutracer``.  Of a withheld answer the policy's message is the text, and the stop reason
``refusal``; an answer that a policy ended under way has that stop reason behind its text so far."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import Field, create_model

from service.access.routes import MESSAGES_ROUTE
from service.api import reply as wire
from service.api.answering import RISKS, Wanted, annotation, answered, beside, note, whole, withheld
from service.api.auth import TheService
from service.api.error_bodies import anthropic_body
from service.api.messages_schema import MessagesRequest
from service.api.middleware import JsonRoute
from service.errors import HalluTracerError
from service.scoring import RiskReport
from service.serving.dispatcher import Piece

REFUSAL = "refusal"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": REFUSAL}

# What the document says of an answer.
_TEXT: Any = create_model("MessageText", __doc__="The answer, or what is said instead.", type=Literal["text"], text=str)
_USAGE = create_model(
    "MessagesUsage", __doc__="Token counts; ``input_tokens`` without those that were cached.",
    input_tokens=int, output_tokens=int, cache_creation_input_tokens=int, cache_read_input_tokens=int,
)  # fmt: skip
_ANSWER = create_model(
    "AnthropicMessage", __doc__="A whole answer.", id=str, type=Literal["message"], role=Literal["assistant"],
    model=str, content=list[_TEXT], stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "refusal"],
    stop_sequence=str | None, usage=_USAGE, hallutracer=(dict[str, Any], Field(description=RISKS)),
)  # fmt: skip
_ERROR = create_model("AnthropicError", __doc__="The cause and the remedy.", type=str, message=str)
_ERROR_RESPONSE: Any = create_model(
    "AnthropicErrorResponse", __doc__="The error envelope.", type=Literal["error"], error=_ERROR, request_id=str
)
_EVENTS = "message_start, with the risk, to message_stop, as Anthropic's API has them, or an error"
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": _ANSWER, "headers": wire.HEADERS,
        "description": "the answer, or with 'stream' its events; of a withheld answer the refusal",
        "content": {"text/event-stream": {"schema": wire.events_schema(_EVENTS, end="")}},
    },
    **{status: said | {"model": _ERROR_RESPONSE} for status, said in wire.FAILURES_400.items()},
}  # fmt: skip
router = APIRouter(tags=["anthropic"], route_class=JsonRoute)


@router.post(MESSAGES_ROUTE, summary="Messages, as Anthropic's, with the risk beside the answer", responses=RESPONSES)
async def messages(body: Annotated[MessagesRequest, Body()], request: Request, service: TheService) -> Response:
    """An answer to a conversation; its risk is known before its first token."""
    wanted = Wanted(route=MESSAGES_ROUTE, prompts=[body.conversation()], field="messages", most=body.max_tokens)
    reply = await answered(request, service, body, wanted)
    if body.stream:
        return wire.EventStream(reply, _events(reply))
    reply.end()
    report = reply.judgement.reports[0]
    said = _said(report)
    content = _head(reply) | {
        "content": [] if said is None else [text_block(said)], **_ended(report),
        "usage": _counted(reply.judgement.reports), "hallutracer": note(reply.judgement),
    }  # fmt: skip
    return whole(reply, content)


def _said(report: RiskReport) -> str | None:
    """Return the answer, or what is said instead; None where nothing is."""
    if report.completion is None:
        return report.verdict.message
    return annotation(report) + report.completion.text


def _ended(report: RiskReport) -> dict[str, Any]:
    completion = report.completion
    if completion is None:
        return {"stop_reason": REFUSAL, "stop_sequence": None}
    if completion.finish_reason == "stop" and completion.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop}
    return {"stop_reason": _STOP_REASONS[wire.finish_reason(completion)], "stop_sequence": None}


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
        "input_tokens": counts.prompt_tokens - counts.cached_tokens, "output_tokens": counts.completion_tokens,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": counts.cached_tokens,
    }  # fmt: skip


def event(kind: str, **content: Any) -> bytes:
    """Return an event of a stream."""
    return wire.event(json.dumps({"type": kind} | content, ensure_ascii=False), kind)


def text_delta(text: str, index: int = 0, **more: Any) -> bytes:
    """Return a piece of a block's text."""
    return event("content_block_delta", index=index, delta={"type": "text_delta", "text": text}, **more)


async def _events(reply: wire.Reply) -> AsyncIterator[bytes]:
    judgement, report = reply.judgement, reply.judgement.reports[0]
    begun = event("content_block_start", index=0, content_block=text_block(""))

    def over(reports: list[RiskReport], block: bool = True) -> bytes:
        stop = event("content_block_stop", index=0) if block else b""
        more = beside(wire.answer_note(reports[0].answer))
        told = event("message_delta", delta=_ended(reports[0]), usage=_counted(reports), **more)
        return stop + told + event("message_stop")

    def piece(one: Piece) -> bytes:
        return text_delta(one.text, **beside(wire.running_note(one.answer)))

    def failed(error: HalluTracerError) -> bytes:
        body = anthropic_body(error.status, error.message, judgement.request_id)
        return wire.event(json.dumps(body), "error")

    first: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _counted([report])}
    yield event("message_start", message=_head(reply) | first | {"hallutracer": note(judgement)})
    if withheld(report):
        said = _said(report)
        yield over([report], block=False) if said is None else begun + text_delta(said) + over([report])
        return
    warning = annotation(report)
    yield begun + (text_delta(warning) if warning else b"")
    async for part in wire.answer_events(reply, piece, over, failed):
        yield part
