"""POST /v1/messages/count_tokens, of Anthropic's API: how many tokens a conversation is for the
model that is served.

It is rendered as /v1/messages renders it, and no more: no forward pass, no risk, nothing to gate or
to record."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, Field

from service.access.routes import COUNT_ROUTE
from service.api.auth import TheService, caller_of
from service.api.json_body import JsonRoute
from service.api.messages_routes import FAILURES
from service.api.messages_schema import CountRequest
from service.api.score import ScoringRequest, while_connected
from service.policies.guard import OBSERVE
from service.serving.admission import Deadline

router = APIRouter(tags=["anthropic"], route_class=JsonRoute)


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
    # Whatever policy the caller is held to: nothing is decided.
    asked = ScoringRequest(
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
            asked.caller.name, asked.size, lambda: asked.rendered(service.settings)
        )
    return TokensCount(input_tokens=len(ids))
