"""POST /v1/chat/completions and /v1/completions, for clients of OpenAI's API: the answer, where its
risk allows one, written by ``chat_wire``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import Field, create_model

from service.access.routes import CHAT_ROUTE, TEXT_ROUTE
from service.api import reply as wire
from service.api.asking import answered, while_connected
from service.api.auth import TheService
from service.api.chat_wire import ChatWire
from service.api.forwarding import Forwarder
from service.api.json_body import JsonRoute
from service.api.openai_schema import TEXT_MAX_TOKENS, ChatRequest, TextRequest
from service.api.request_schema import Kind
from service.policies.guard import Decision
from service.serving.service import Service

# What the document says of an answer, which ``ChatWire`` writes.
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
    hallutracer=(dict[str, Any], Field(description=wire.RISKS)),
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
    most = body.length or service.settings.max_new_tokens
    return await _served(CHAT_ROUTE, body, request, service, "messages", [conversation], most)


@router.post(TEXT_ROUTE, summary="Text completion, as OpenAI's, with the risk", responses=RESPONSES)
async def text(
    body: Annotated[TextRequest, Body()], request: Request, service: TheService
) -> Response:
    """A continuation of each prompt, which goes through no chat template."""
    prompts = body.prompts()
    kind: Kind = "text" if not prompts or isinstance(prompts[0], str) else "input_ids"
    most = body.length or min(TEXT_MAX_TOKENS, service.settings.max_new_tokens)
    return await _served(TEXT_ROUTE, body, request, service, kind, prompts, most)


async def _served(
    route: str,
    body: ChatRequest | TextRequest,
    request: Request,
    service: Service,
    kind: Kind,
    prompts: Sequence[Any],
    most: int,
) -> Response:
    """Return the answer, or that of the server which the policy falls back on."""
    reply = await answered(
        request,
        service,
        body,
        route=route,
        kind=kind,
        prompts=prompts,
        field="messages" if route == CHAT_ROUTE else "prompt",
        most=most,
        most_field=body.length_field,
        forwards=True,
        tools=body.offered,
        format=body.format,
    )
    judgement = reply.judgement
    # The policy that judged: with a passage, a fetching policy has become one that abstains.
    upstream = judgement.policy.upstream
    if upstream is None or judgement.reports[0].decision is not Decision.FALLBACK:
        return wire.send(ChatWire(reply, body), stream=body.stream)
    # What is about this model, or about a cache of OpenAI's own of which only the name is kept.
    left_out = {"vllm_xargs", "chat_template_kwargs", "reasoning_effort", "prompt_cache_options"}
    content = body.model_dump(mode="json", exclude_none=True, exclude=left_out)
    forwarder: Forwarder = request.app.state.forwarder
    answer, call = ChatWire(reply, body, forwarded=True), (upstream, route, content)
    if body.stream:
        chunks = forwarder.stream(*call, reply.record.trace)
        return wire.EventStream(answer, _forwarded(answer, chunks))
    try:
        async with while_connected(request), reply.handle.deadline.enforced():
            document = answer.whole(await forwarder.whole(*call, reply.record.trace))
    finally:
        reply.end()
    return wire.json_response(document, reply.headers())


async def _forwarded(
    answer: ChatWire, chunks: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[bytes, None]:
    """Yield another server's chunks, each before the request's deadline, and the service's end.
    Raises DeadlineExceeded, NotReady and UpstreamFailed."""
    reply = answer.reply
    async with aclosing(chunks):
        while True:
            try:
                async with reply.service.lifecycle.until_cut(), reply.handle.deadline.enforced():
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            yield answer.chunk(chunk)
