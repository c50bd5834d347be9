"""Guardrail routes for products that have a protocol of their own: LiteLLM's proxy, and whatever
calls a classifier.

LiteLLM asks before it calls the model and is told NONE or BLOCKED.  A classifier's caller, such as
vLLM's semantic router (``http_classify``), gets the risk as the probability of a label and decides
itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictStr

from service.annexes.guardrails import CLASSIFY_ROUTE, LITELLM_ROUTE
from service.annexes.guardrails.guarding import (
    CannotRead,
    GuardRoute,
    check_readable,
    conversation,
    require_policy_without_answers,
    sent,
    unread,
    unread_prompts,
    withheld,
)
from service.api.asking import answer, requested
from service.api.auth import TheService
from service.api.json_body import JsonRoute
from service.api.reply import FAILURES, risk_note
from service.api.request_schema import Kind, Reference, RequestModel, Risk, StrictRisk, Texts
from service.errors import EmptyPrompt, RequestError
from service.scoring import RiskReport

EXAMPLE: dict[str, Any] = {
    "input_type": "request",
    "texts": ["What is the capital of France?"],
    "request_data": {},
}


class GuardrailParams(RequestModel):
    """``additional_provider_specific_params``: what ``bundle``, ``policy`` and ``threshold`` are to
    /v1/risk/score."""

    bundle: Reference | None = None
    policy: Reference | None = None
    threshold: StrictRisk | None = None


class GuardrailRequest(BaseModel):
    """What LiteLLM sends before a call."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"example": EXAMPLE})

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
    spec = requested(
        request, service, LITELLM_ROUTE, kind, [messages] if messages else texts, "texts", **chosen
    )
    require_policy_without_answers(spec.policy)
    try:
        with unread(spec.policy, request):
            chat = _conversation(body)
            spec = spec if chat is None else replace(spec, prompts=[chat])
            spec.check(service.settings)
        with unread_prompts():
            reply = await answer(request, service, spec)
    except CannotRead as error:
        reason = str(error) if spec.policy.action.withholds else None
        return sent(_verdict(reason, {"error": str(error)}))
    reply.end()
    reasons = [_reason(report) for report in reply.judgement.reports if withheld(report)]
    reason = reasons[0] if reasons else None
    return sent(_verdict(reason, risk_note(reply.judgement)), reply.headers())


def _verdict(reason: str | None, risk: dict[str, Any]) -> dict[str, Any]:
    """Return what LiteLLM is told; without a reason the call goes on."""
    if reason is None:
        return {"action": "NONE", "hallutracer": risk}
    return {"action": "BLOCKED", "blocked_reason": reason, "hallutracer": risk}


def _reason(report: RiskReport) -> str:
    verdict = report.verdict
    why = ", outside training" if report.uncertain.outside and not verdict.flagged else ""
    return (
        verdict.message
        or f"withheld: risk {report.risk:.2f}, threshold {verdict.threshold:.2f}{why}"
    )


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
    labels = [
        [{"label": "hallucinated", "score": risk}, {"label": "factual", "score": 1.0 - risk}]
        for risk in risks
    ]
    return sent(labels[0] if isinstance(body.inputs, str) else labels, reply.headers())


def _conversation(body: GuardrailRequest) -> list[dict[str, str]] | None:
    """Return a chat's messages; None where there are only texts.  Raises CannotRead, and
    EmptyPrompt for nothing."""
    check_readable(images=body.images, tools=body.tools, tool_calls=body.tool_calls)
    if body.structured_messages is not None:
        return conversation(body.structured_messages, "structured_messages")
    if not body.texts:
        raise EmptyPrompt("give 'texts' or 'structured_messages'", param="texts")
    return None
