"""POST /v1/responses, OpenAI's Responses API: the answer, where its risk allows one, written by
``responses_wire``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import Field, create_model

from service.access.routes import RESPONSES_ROUTE
from service.api import reply as wire
from service.api.asking import answered
from service.api.auth import TheService
from service.api.json_body import JsonRoute
from service.api.responses_schema import ResponsesRequest
from service.api.responses_wire import ResponsesWire

# What the document says of an answer.
_PART: Any = create_model(
    "ResponsePart",
    __doc__="A text, or the policy's message.",
    type=Literal["output_text", "refusal"],
    text=(str | None, None),
    refusal=(str | None, None),
)
_ITEM: Any = create_model(
    "ResponseItem",
    __doc__="The answer.",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    status=Literal["completed", "incomplete"],
    content=list[_PART],
)
_CALL: Any = create_model(
    "ResponseFunctionCall",
    __doc__="A call of a tool, with its arguments' JSON.",
    id=str,
    type=Literal["function_call"],
    call_id=str,
    name=str,
    arguments=str,
    status=Literal["completed"],
)
_WHY: Any = create_model(
    "IncompleteDetails",
    __doc__="Why the answer is none, or no whole one.",
    reason=Literal["max_output_tokens", "content_filter"],
)
_USAGE = create_model(
    "ResponseUsage",
    __doc__="Token counts.",
    input_tokens=int,
    output_tokens=int,
    total_tokens=int,
    input_tokens_details=dict[str, int],
    output_tokens_details=dict[str, int],
)
_ANSWER = create_model(
    "OpenAIResponsesResponse",
    __doc__="A whole answer.",
    id=str,
    object=Literal["response"],
    created_at=int,
    status=Literal["completed", "incomplete"],
    incomplete_details=_WHY | None,
    model=str,
    output=list[_ITEM | _CALL],
    usage=_USAGE,
    store=(Literal[False], Field(description="nothing is kept")),
    hallutracer=(dict[str, Any], Field(description=wire.RISKS)),
)
_EVENTS = (
    "response.created, with the risk, to response.completed or response.incomplete, or an error"
)
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": _ANSWER,
        "headers": wire.HEADERS,
        "description": "the answer, or with 'stream' its events; of a withheld answer its refusal",
        "content": {"text/event-stream": {"schema": wire.events_schema(_EVENTS, end="")}},
    },
    **wire.FAILURES_400,
}
router = APIRouter(tags=["openai"], route_class=JsonRoute)


@router.post(
    RESPONSES_ROUTE,
    summary="Responses, as OpenAI's, with the risk beside the answer",
    responses=RESPONSES,
)
async def responses(
    body: Annotated[ResponsesRequest, Body()], request: Request, service: TheService
) -> Response:
    """An answer to the input; its risk is known before its first token.  Nothing is kept."""
    reply = await answered(
        request,
        service,
        body,
        route=RESPONSES_ROUTE,
        prompts=[body.conversation()],
        field="input",
        most=body.max_output_tokens or service.settings.max_new_tokens,
        most_field="max_output_tokens",
        tools=body.offered,
        format=body.format,
    )
    return wire.send(ResponsesWire(reply, body), stream=body.stream)
