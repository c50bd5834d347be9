"""Guardrail routes for products that have a protocol of their own: LiteLLM's proxy, and whatever
calls a classifier.

LiteLLM asks before it calls the model and is told NONE or BLOCKED.  A classifier's caller, such as
vLLM's semantic router (``http_classify``), gets the risk as the probability of a label and decides
itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError
from starlette.exceptions import HTTPException

from service.access.routes import CLASSIFY_ROUTE, LITELLM_ROUTE
from service.api.answering import note, withheld
from service.api.auth import TheService
from service.api.json_body import GuardRoute, JsonRoute
from service.api.openai_schema import ChatMessage
from service.api.reply import FAILURES, Reply
from service.api.request_schema import EXAMPLES, Kind, Reference, RequestModel, Risk, Texts
from service.api.score import ScoringRequest, answer, requested
from service.errors import EmptyPrompt, RequestError
from service.policies.guard import Action, Policy
from service.serving.service import Service


class GuardrailParams(RequestModel):
    """``additional_provider_specific_params``: what ``bundle``, ``policy`` and ``threshold`` are to
    /v1/risk/score."""

    bundle: Reference | None = None
    policy: Reference | None = None
    threshold: Annotated[Risk, Field(strict=True)] | None = None


class GuardrailRequest(BaseModel):
    """What LiteLLM sends before a call."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"example": EXAMPLES["guardrail"]})

    input_type: Literal["request", "response"]
    texts: Texts | None = None
    structured_messages: (
        Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1024)] | None
    ) = None
    images: list[Any] | None = None
    tools: list[Any] | None = None
    tool_calls: list[Any] | None = None
    additional_provider_specific_params: GuardrailParams | None = None


class GuardrailResponse(BaseModel):
    """NONE lets the call go on."""

    action: Literal["NONE", "BLOCKED"]
    blocked_reason: str | None = None
    hallutracer: dict[str, Any] = Field(
        description="the risks, as OpenAI's routes have them, or why there are none"
    )


class ClassifyRequest(RequestModel):
    """As the classifiers of text-embeddings-inference take it."""

    inputs: StrictStr | Texts


class LabelScore(BaseModel):
    """One label's probability; those of one text sum to 1."""

    label: Literal["hallucinated", "factual"]
    score: Risk


router = APIRouter(tags=["guardrail"], route_class=JsonRoute)
guarding = APIRouter(tags=["guardrail"], route_class=GuardRoute)


@guarding.post(
    LITELLM_ROUTE,
    summary="Guardrail of LiteLLM's proxy, before a call",
    response_model=GuardrailResponse,
    responses=FAILURES,
)
async def litellm(
    body: Annotated[GuardrailRequest, Body()], request: Request, service: TheService
) -> Response:
    """LiteLLM's generic guardrail API, mode pre_call: BLOCKED where the policy withholds the
    answer."""
    if body.input_type != "request":
        raise RequestError(
            "a risk is of a prompt: give this guardrail the mode pre_call", param="input_type"
        )
    chosen = (body.additional_provider_specific_params or GuardrailParams()).model_dump()
    texts, messages = body.texts or [], body.structured_messages
    kind: Kind = "messages" if messages else "prompt"
    asked = requested(
        request, service, LITELLM_ROUTE, kind, [messages] if messages else texts, "texts", **chosen
    )
    check_sees_no_answer(asked.policy)
    try:
        with unread(asked.policy, request):
            chat = _conversation(body)
            asked = asked if chat is None else replace(asked, prompts=[chat])
            asked.check(service.settings)
        reply = await read(request, service, asked)
    except CannotRead as error:
        found: dict[str, Any] = {"hallutracer": {"error": str(error)}}
        blocked = {"action": "BLOCKED", "blocked_reason": str(error)}
        return sent((blocked if asked.policy.action.withholds else {"action": "NONE"}) | found)
    reply.end()
    found = {"hallutracer": note(reply.judgement)}
    report = next(filter(withheld, reply.judgement.reports), None)
    if report is None:
        return sent({"action": "NONE"} | found, reply.headers())
    verdict = report.verdict
    why = ", outside training" if report.uncertain.outside and not verdict.flagged else ""
    reason = (
        verdict.message
        or f"withheld: risk {report.risk:.2f}, threshold {verdict.threshold:.2f}{why}"
    )
    return sent({"action": "BLOCKED", "blocked_reason": reason} | found, reply.headers())


@router.post(
    CLASSIFY_ROUTE,
    summary="Risk as a classifier's label, for routers",
    responses=FAILURES,
    response_model=list[LabelScore] | list[list[LabelScore]],
)
async def classify(
    body: Annotated[ClassifyRequest, Body()], request: Request, service: TheService
) -> Response:
    """The risk of each text as the probability of a label, after text-embeddings-inference; the
    caller decides."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    reply = await answer(
        request, service, requested(request, service, CLASSIFY_ROUTE, "prompt", texts, "inputs")
    )
    reply.end()
    # What is withheld for no risk must not pass a router's own threshold.
    risks = [
        report.risk if report.verdict.flagged or not report.verdict.acts else 1.0
        for report in reply.judgement.reports
    ]
    found = [
        [{"label": "hallucinated", "score": risk}, {"label": "factual", "score": 1.0 - risk}]
        for risk in risks
    ]
    return sent(found[0] if isinstance(body.inputs, str) else found, reply.headers())


class CannotRead(Exception):
    """The call holds what no risk can be read from."""


@contextmanager
def unread(policy: Policy, request: Request) -> Iterator[None]:
    """Check a call in the block: where the policy observes, what is wrong with it raises
    CannotRead, for it passes."""
    refusal: HTTPException | None = request.state.unreadable
    if refusal is not None and policy.action.withholds:
        raise refusal
    if refusal is not None:
        raise CannotRead("the call cannot be read: a text of it is not well-formed Unicode")
    try:
        yield
    except RequestError as error:
        if policy.action.withholds:
            raise
        raise CannotRead(f"the call cannot be read: {error.message}") from None


async def read(request: Request, service: Service, asked: ScoringRequest) -> Reply:
    """Return the reply.  Raises CannotRead where a prompt is too long or empty, or the chat
    template refuses it."""
    try:
        return await answer(request, service, asked)
    except RequestError as error:
        raise CannotRead(f"a prompt cannot be read: {error.message}") from None


def check_sees_no_answer(policy: Policy) -> None:
    """Raise RequestError for a policy that changes answers, or decides by them."""
    does = (
        "annotates"
        if policy.action is Action.ANNOTATE
        else "reads"
        if policy.reads_answers_for
        else None
    )
    if does is not None:
        raise RequestError(
            f"policy {policy.name!r} {does} answers, and this route sees none", param="policy"
        )


def check_readable(**beside: Any) -> None:
    """Raise CannotRead for anything that stands beside a chat's messages, by name."""
    for name, given in beside.items():
        if given:
            raise CannotRead(f"the call has {name}, from which no risk can be read")


def conversation(messages: Sequence[Mapping[str, Any]], field: str) -> list[dict[str, str]]:
    """Return a chat's messages.  Raises CannotRead, and EmptyPrompt for none."""
    try:
        found = [ChatMessage.model_validate(message) for message in messages]
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CannotRead(f"a message cannot be read, at {where or 'its role or content'}") from None
    if any(message.tool_calls or message.role == "tool" for message in found):
        raise CannotRead(
            "a message is a call of a tool or its result: without the tools it cannot be read"
        )
    if not found:
        raise EmptyPrompt(f"{field!r} is empty", param=field)
    return [message.rendered() for message in found]


def _conversation(body: GuardrailRequest) -> list[dict[str, str]] | None:
    """Return a chat's messages; None where there are only texts.  Raises CannotRead, and
    EmptyPrompt for nothing."""
    check_readable(images=body.images, tools=body.tools, tool_calls=body.tool_calls)
    if body.structured_messages is not None:
        return conversation(body.structured_messages, "structured_messages")
    if not body.texts:
        raise EmptyPrompt("give 'texts' or 'structured_messages'", param="texts")
    return None


def sent(content: Any, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(
        json.dumps(content, ensure_ascii=False), media_type="application/json", headers=headers
    )
