"""POST /v1/chat/completions and /v1/completions, for clients of OpenAI's API: the answer, where its
risk allows one.

The risk is the response's ``hallutracer``.  A withheld answer has no text and the finish reason
``content_filter``, in a chat the policy's message as ``refusal``: OpenAI's clients know both."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import Field, create_model

from service.access.routes import CHAT_ROUTE, TEXT_ROUTE
from service.api import reply as wire
from service.api.answering import RISKS, Wanted, annotation, answered, beside, note, whole
from service.api.auth import TheService
from service.api.forwarding import Forwarder
from service.api.json_body import JsonRoute
from service.api.openai_schema import TEXT_MAX_TOKENS, ChatRequest, TextRequest
from service.api.request_schema import Kind
from service.api.score import while_connected
from service.api.tool_answers import Deltas, called, split
from service.policies.guard import Decision
from service.scoring import RiskReport
from service.serving.dispatcher import Piece
from service.serving.judgement import Judgement
from service.serving.service import Service
from service.tool_calls import ToolCall
from service.turn import Outcome

Route = Literal["chat", "text"]
Chunks = AsyncGenerator[dict[str, Any], None]
WITHHELD = "content_filter"


# What the document says of an answer, which is made by ``_served``.
_DETAILS = create_model("TokenDetails", __doc__="Of the prompt's tokens.", cached_tokens=int)
_USAGE = create_model(
    "OpenAIUsage",
    __doc__="Token counts.",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    prompt_tokens_details=_DETAILS,
)
_ROLE: Any = (Literal["assistant"], "assistant")
_CALLED: Any = create_model(
    "CalledByAnswer", __doc__="A call's tool, and its arguments' JSON.", name=str, arguments=str
)
_CALL: Any = create_model(
    "AnswerToolCall",
    __doc__="A call of a tool.",
    id=str,
    type=Literal["function"],
    function=_CALLED,
)
_MESSAGE: Any = create_model(
    "AnswerMessage",
    __doc__="A chat's answer.",
    role=_ROLE,
    content=(str | None, None),
    refusal=(
        str | None,
        Field(None, description="the policy's message, where the answer is withheld"),
    ),
    tool_calls=(list[_CALL] | None, Field(None, description="of the request's tools")),
)
_CHOICE: Any = create_model(
    "Choice",
    __doc__="The answer to one prompt: ``message`` of a chat, ``text`` of a text completion.",
    index=int,
    message=(_MESSAGE | None, None),
    text=(str | None, None),
    finish_reason=Literal["stop", "length", "content_filter", "tool_calls"],
    logprobs=(None, None),
)
_ANSWER = create_model(
    "OpenAIResponse",
    __doc__="A whole answer.",
    id=str,
    object=Literal["chat.completion", "text_completion"],
    created=int,
    model=str,
    choices=list[_CHOICE],
    usage=_USAGE,
    hallutracer=(dict[str, Any], Field(description=RISKS)),
)

router = APIRouter(tags=["openai"], route_class=JsonRoute)
_EVENTS = "chat.completion.chunk or text_completion objects, the first with the risk, or an error"
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": _ANSWER,
        "headers": wire.HEADERS,
        "description": "the answer, or with 'stream' its chunks; of a withheld answer its refusal",
        "content": {"text/event-stream": {"schema": wire.events_schema(_EVENTS)}},
    },
    **wire.FAILURES,
}


@router.post(
    CHAT_ROUTE, summary="Chat, as OpenAI's, with the risk beside the answer", responses=RESPONSES
)
async def chat(
    body: Annotated[ChatRequest, Body()], request: Request, service: TheService
) -> Response:
    """An answer to a conversation; its risk is known before its first token."""
    conversation = [message.rendered() for message in body.messages]
    return await _served("chat", CHAT_ROUTE, body, request, service, "messages", [conversation])


@router.post(TEXT_ROUTE, summary="Text completion, as OpenAI's, with the risk", responses=RESPONSES)
async def text(
    body: Annotated[TextRequest, Body()], request: Request, service: TheService
) -> Response:
    """A continuation of each prompt, which goes through no chat template."""
    prompts = body.prompts()
    kind: Kind = "text" if not prompts or isinstance(prompts[0], str) else "input_ids"
    return await _served("text", TEXT_ROUTE, body, request, service, kind, prompts)


async def _served(
    to: Route,
    route: str,
    body: ChatRequest | TextRequest,
    request: Request,
    service: Service,
    kind: Kind,
    prompts: list[Any],
) -> Response:
    settings, most = service.settings, service.settings.max_new_tokens
    limit = body.length or (most if to == "chat" else min(TEXT_MAX_TOKENS, most))
    field = "messages" if to == "chat" else "prompt"
    tools, found = (body.offered, body.format) if isinstance(body, ChatRequest) else (None, None)
    wanted = Wanted(
        route=route,
        kind=kind,
        prompts=prompts,
        field=field,
        most=limit,
        most_field=body.length_field,
        forwards=True,
        tools=tools,
        format=found,
    )
    reply = await answered(request, service, body, wanted)
    forwarder: Forwarder = request.app.state.forwarder
    # The policy that judged: with a passage, a fetching policy has become one that abstains.
    upstream = (
        reply.judgement.policy.upstream
        if reply.judgement.reports[0].decision is Decision.FALLBACK
        else None
    )
    # What is about this model, or about a cache of OpenAI's own of which only the name is kept.
    left_out = {"vllm_xargs", "chat_template_kwargs", "reasoning_effort", "prompt_cache_options"}
    sent_on = body.model_dump(mode="json", exclude_none=True, exclude=left_out)
    in_content, trace = settings.message_in_content, reply.record.trace
    if body.stream:
        foreign = None if upstream is None else forwarder.stream(upstream, route, sent_on, trace)
        return wire.EventStream(
            reply, _chunks(to, reply, wanted, body.with_usage, in_content, foreign)
        )
    try:
        reports = reply.judgement.reports
        content = _head(to, reply.judgement) | {
            "choices": [
                _choice(to, index, report, wanted, in_content)
                for index, report in enumerate(reports)
            ],
            "usage": _counted(reports),
            "hallutracer": note(reply.judgement),
        }
        if upstream is not None:
            async with while_connected(request), reply.handle.deadline.enforced():
                content |= await forwarder.whole(upstream, route, sent_on, trace)
    finally:
        reply.end()
    return whole(reply, content)


def _head(to: Route, judgement: Judgement, chunk: bool = False) -> dict[str, Any]:
    """Return what each event of a stream begins with, too."""
    kind = "chat.completion" if to == "chat" else "text_completion"
    return {
        "id": judgement.answer_id,
        "object": f"{kind}.chunk" if to == "chat" and chunk else kind,
        "created": judgement.created,
        "model": judgement.model,
    }


def _counted(reports: list[RiskReport]) -> dict[str, Any]:
    counts = wire.usage(reports)
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = {"prompt_tokens_details": {"cached_tokens": counts.cached_tokens}}
    return {name: getattr(counts, name) for name in names} | cached


def _finish_reason(report: RiskReport, calls: int) -> str:
    if report.outcome is Outcome.WITHHELD:
        return WITHHELD
    ended = wire.finish_reason(report.shown)
    return "tool_calls" if calls and ended == "stop" else ended


def _choice(
    to: Route, index: int, report: RiskReport, wanted: Wanted, in_content: bool
) -> dict[str, Any]:
    said, calls = _refusal(report, in_content), list[ToolCall]()
    if report.outcome.shows:
        text, calls = split(wanted.tools, report.shown.text)
        said = {"content": annotation(report, wanted.format) + text, "refusal": None}
    if calls:
        said |= {"content": said["content"] or None, "tool_calls": [called(call) for call in calls]}
    own = (
        {"text": said["content"] or ""}
        if to == "text"
        else {"message": {"role": "assistant", **said}}
    )
    return {
        "index": index,
        **own,
        "finish_reason": _finish_reason(report, len(calls)),
        "logprobs": None,
    }


def _refusal(report: RiskReport, in_content: bool) -> dict[str, Any]:
    """Return what a withheld answer's message holds; many clients show its ``content`` and drop its
    ``refusal``."""
    message = report.verdict.message
    return {"content": message if in_content else None, "refusal": message}


async def _chunks(
    to: Route,
    reply: wire.Reply,
    wanted: Wanted,
    with_usage: bool,
    in_content: bool,
    foreign: Chunks | None,
) -> AsyncIterator[bytes]:
    """Yield the stream of one prompt; ``foreign`` are the chunks of the server that answers
    instead."""
    same = _head(to, reply.judgement, chunk=True) | ({"usage": None} if with_usage else {})
    report, deltas = reply.judgement.reports[0], Deltas(wanted.tools)

    def sent(content: dict[str, Any]) -> bytes:
        return wire.event(json.dumps(same | content, ensure_ascii=False))

    def chunk(
        delta: dict[str, Any], end: str | None = None, hallutracer: dict[str, Any] | None = None
    ) -> bytes:
        own = {"delta": delta} if to == "chat" else {"text": delta.get("content") or ""}
        return sent(
            {"choices": [{"index": 0, "finish_reason": end, "logprobs": None} | own]}
            | beside(hallutracer or {})
        )

    def used(reports: list[RiskReport]) -> bytes:
        return sent({"choices": [], "usage": _counted(reports)}) if with_usage else b""

    def piece(one: Piece) -> bytes:
        noted, found = wire.running_note(one.answer), deltas.of(one.text)
        if noted and not found:
            found = [{}]
        return b"".join(chunk(delta, hallutracer=noted) for delta in found)

    def last(reports: list[RiskReport]) -> bytes:
        rest = b"".join(map(chunk, deltas.rest()))
        ended = _finish_reason(reports[0], deltas.calls)
        return (
            rest
            + chunk({}, ended, wire.answer_note(reports[0].answer, reports[0].decoding))
            + used(reports)
        )

    if foreign is None and report.outcome is Outcome.WITHHELD:
        said = {"role": "assistant", **_refusal(report, in_content)}
        yield chunk(said, WITHHELD, hallutracer=note(reply.judgement)) + used([report])
    else:
        yield chunk(
            {"role": "assistant", "content": annotation(report, wanted.format)},
            hallutracer=note(reply.judgement),
        )
        if foreign is None:
            async for part in wire.answer_events(reply, piece, last):
                yield part
        else:
            try:
                async with aclosing(foreign), aclosing(_in_time(reply, foreign)) as timely:
                    async for found in timely:
                        yield sent(found)
            except Exception as error:
                yield wire.failure(reply, error)
    yield wire.DONE


async def _in_time(reply: wire.Reply, foreign: Chunks) -> Chunks:
    """Yield each chunk before the request's deadline, and the service's end.  Raises
    DeadlineExceeded, NotReady."""
    while True:
        try:
            async with reply.service.lifecycle.until_cut(), reply.handle.deadline.enforced():
                chunk = await anext(foreign)
        except StopAsyncIteration:
            return
        yield chunk
