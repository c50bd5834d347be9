"""POST /v1/messages, Anthropic's Messages API: the answer, where its risk allows one, written by
``messages_wire``; and POST /v1/messages/count_tokens, how many tokens a conversation is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, Field, create_model

from service.access.routes import COUNT_ROUTE, MESSAGES_ROUTE
from service.api import reply as wire
from service.api.asking import ScoringRequest, answered, while_connected
from service.api.auth import TheService, caller_of
from service.api.json_body import JsonRoute
from service.api.messages_schema import CountRequest, MessagesRequest
from service.api.messages_wire import MessagesWire
from service.policies.guard import OBSERVE
from service.serving.admission import Deadline

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
    hallutracer=(dict[str, Any], Field(description=wire.RISKS)),
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
    status: response | {"model": _ERROR_RESPONSE} for status, response in wire.FAILURES_400.items()
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
    reply = await answered(
        request,
        service,
        body,
        route=MESSAGES_ROUTE,
        prompts=[body.conversation()],
        field="messages",
        # A client has to name a number, so it is its own default as often as a wish: the service's
        # limit comes first.
        most=min(body.max_tokens, service.settings.max_new_tokens),
        tools=body.offered,
        format=body.format,
    )
    return wire.send(MessagesWire(reply, body), stream=body.stream)


class TokensCount(BaseModel):
    """Of the tools, too, and of what the chat template writes around them."""

    input_tokens: int = Field(description="may be more than the model's context holds")


@router.post(
    COUNT_ROUTE, summary="How many tokens a conversation is, as Anthropic's", responses=FAILURES
)
async def count_tokens(
    body: Annotated[CountRequest, Body()], request: Request, service: TheService
) -> TokensCount:
    """The tokens that /v1/messages would read of the same conversation; nothing is asked of the
    model."""
    # No forward pass, no risk, nothing to gate or to record, whatever policy the caller is held to.
    spec = ScoringRequest(
        service.ready.scorer(None, body.model),
        OBSERVE,
        caller_of(request, service),
        "messages",
        [body.conversation()],
        "messages",
        tools=body.offered,
        of_template=body.of_template(),
    )
    async with while_connected(request), Deadline(service.settings.deadline_s).enforced():
        ids = await service.tokenizing.run(
            spec.caller.name, spec.size, lambda: spec.rendered(service.settings)
        )
    return TokensCount(input_tokens=len(ids))
