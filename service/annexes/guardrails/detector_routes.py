"""The detector API of FMS Guardrails, whose orchestrator is in TrustyAI and OpenShift AI; LiteLLM
calls it, too.

A prompt whose answer the policy withholds has one detection, any other none.  Its score is the
risk; where something else withholds (the prompt is unlike training's, or cannot be read), 1: a
caller's own threshold must not let it pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Request, Response
from pydantic import BaseModel, Field

from service.annexes.guardrails import CONTENTS_DETECTOR, MESSAGES_DETECTOR
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
from service.api import reply as wire
from service.api.asking import ScoringRequest, answer, requested
from service.api.auth import TheService
from service.api.request_schema import Kind, Reference, RequestModel, Risk, StrictRisk, Texts
from service.errors import RequestError
from service.scoring import RiskReport
from service.serving.service import Service

TYPE = "hallucination_risk"
OWN = "hallutracer"  # the detector-id that leaves the bundle to the service


class DetectorParams(RequestModel):
    """What ``policy`` and ``threshold`` are to /v1/risk/score."""

    policy: Reference | None = None
    threshold: StrictRisk | None = None


class ContentsRequest(RequestModel):
    """Texts, each a prompt of its own."""

    contents: Texts
    detector_params: DetectorParams = DetectorParams()


class ChatDetectorRequest(RequestModel):
    """A conversation, as OpenAI's chats have it."""

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1024)]
    tools: list[Any] | None = None
    detector_params: DetectorParams = DetectorParams()


class Detection(BaseModel):
    """Why a prompt's answer is withheld."""

    detection: str = Field(description="the policy's decision, or unreadable")
    detection_type: str = TYPE
    score: Risk
    metadata: dict[str, Any] = Field(
        description="the risk, as OpenAI's routes have it, or why there is none"
    )


class ContentDetection(Detection):
    """The same of a text, which it covers whole."""

    start: int = 0
    end: int = Field(description="characters of the text")
    text: str


class DetectorError(BaseModel):
    """As the orchestrator reads it."""

    code: int = Field(description="the HTTP status")
    message: str


def error_body(status: int, message: str) -> dict[str, object]:
    """Return the body of an error, as ``DetectorError`` has it."""
    return {"code": status, "message": message}


DetectorId = Annotated[
    str,
    Header(
        description=(
            f"{OWN}: the service's own bundle; else that of this name, as 'bundle' of"
            " /v1/risk/score"
        )
    ),
]
FAILURES: dict[int | str, dict[str, Any]] = {
    status: response | {"model": DetectorError}
    for status, response in wire.FAILURES.items()
    if status != 502
}
router = APIRouter(tags=["guardrail"], route_class=GuardRoute, responses=FAILURES)


@router.post(
    CONTENTS_DETECTOR,
    summary="Detector of texts, for FMS Guardrails",
    response_model=list[list[ContentDetection]],
)
async def contents(
    body: Annotated[ContentsRequest, Body()],
    request: Request,
    service: TheService,
    detector_id: DetectorId = OWN,
) -> Response:
    """A list of detections for each text: of a detector of type text_contents, before a call."""
    spec = _spec(
        request, service, CONTENTS_DETECTOR, "prompt", body.contents, "contents", detector_id, body
    )
    try:
        with unread(spec.policy, request):
            reply = await answer(request, service, spec)
    except CannotRead as error:
        if not spec.policy.action.withholds:
            return sent([[] for _ in body.contents])
        raise RequestError(str(error), param="contents") from None
    of_texts = list[list[dict[str, Any]]]()
    for text, detections in zip(body.contents, _detected(reply), strict=True):
        span = {"start": 0, "end": len(text), "text": text}
        of_texts.append([span | detection for detection in detections])
    return sent(of_texts, reply.headers())


@router.post(
    MESSAGES_DETECTOR,
    summary="Detector of chats, for FMS Guardrails",
    response_model=list[Detection],
)
async def chat(
    body: Annotated[ChatDetectorRequest, Body()],
    request: Request,
    service: TheService,
    detector_id: DetectorId = OWN,
) -> Response:
    """The detections of a conversation: of a detector of type text_chat, before a call."""
    spec = _spec(
        request,
        service,
        MESSAGES_DETECTOR,
        "messages",
        [body.messages],
        "messages",
        detector_id,
        body,
    )
    try:
        with unread(spec.policy, request):
            check_readable(tools=body.tools)
            spec = replace(spec, prompts=[conversation(body.messages, "messages")])
        with unread_prompts():
            reply = await answer(request, service, spec)
    except CannotRead as error:
        detection = _detection("unreadable", 1.0, error=str(error))
        return sent([detection] if spec.policy.action.withholds else [])
    return sent(_detected(reply)[0], reply.headers())


def _spec(
    request: Request,
    service: Service,
    route: str,
    kind: Kind,
    prompts: Sequence[Any],
    field: str,
    detector_id: str,
    body: ContentsRequest | ChatDetectorRequest,
) -> ScoringRequest:
    bundle, chosen = None if detector_id == OWN else detector_id, body.detector_params.model_dump()
    spec = requested(request, service, route, kind, prompts, field, bundle=bundle, **chosen)
    require_policy_without_answers(spec.policy)
    return spec


def _detected(reply: wire.Reply) -> list[list[dict[str, Any]]]:
    """End the reply and return each prompt's detections."""
    reply.end()
    risk, of_prompts = wire.risk_note(reply.judgement), list[list[dict[str, Any]]]()
    for report, row in zip(reply.judgement.reports, risk["data"], strict=True):
        detection = _detection(row["decision"], _score(report), bundle=risk["bundle"], **row)
        of_prompts.append([detection] if withheld(report) else [])
    return of_prompts


def _score(report: RiskReport) -> float:
    return report.risk if report.verdict.flagged and not report.uncertain.outside else 1.0


def _detection(name: str, score: float, **metadata: Any) -> dict[str, Any]:
    return {"detection": name, "detection_type": TYPE, "score": score, "metadata": metadata}
