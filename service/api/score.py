"""POST /v1/risk/score and its alias /score: what a request asks for, its answer and its stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from service.access.routes import SCORE_ROUTES
from service.api.answering import answer, requested
from service.api.auth import TheService
from service.api.body import JsonRoute
from service.api.reply import (
    DONE,
    FAILURES,
    HEADERS,
    EventStream,
    Reply,
    ScoreResponse,
    answer_events,
    completion_out,
    event,
    events_schema,
    score_response,
    usage,
)
from service.api.request_schema import REQUEST_EXAMPLES, ScoreRequest
from service.engines.base import Sampling
from service.errors import RequestError
from service.policies.guard import Decision
from service.scoring import RiskReport
from service.serving.admission import Deadline

router = APIRouter(tags=["risk"], route_class=JsonRoute)

RISK_EXAMPLE: dict[str, Any] = {
    "id": "risk-c67afd5b1cb64cdeadfda66467e28928",
    "object": "risk.list",
    "created": 1795186131,
    "model": "hallutracer-demo",
    "policy": "gate",
    "bundle": {"name": "demo", "version": 1, "digest": "sha256:" + "b" * 64},
    "data": [
        {
            "index": 0, "risk": 0.0321, "depth_mean": 1.986, "decision": "continue", "flagged": False,
            "threshold": 0.3098,
            "completion": {"text": " It is Rome.", "finish_reason": "stop", "completion_tokens": 5},
        },
        {
            "index": 1, "risk": 0.8138, "depth_mean": -1.422, "decision": "abstain", "flagged": True,
            "threshold": 0.3098, "message": "I am not sure.",
        },
    ],
    "usage": {"prompt_tokens": 22, "cached_tokens": 0, "completion_tokens": 5, "total_tokens": 27},
}  # fmt: skip
STREAM_EXAMPLE = (
    'data: {"id": "risk-1f", "object": "risk.list", "data": [{"index": 0, "risk": 0.0321, "decision": "continue", '
    "...}], ...}\n\n"
    'data: {"id": "risk-1f", "object": "completion.chunk", "index": 0, "delta": {"text": " It"}}\n\n'
    'data: {"id": "risk-1f", "object": "completion.chunk", "index": 0, "delta": {"text": ""}, '
    '"finish_reason": "stop", "usage": {...}}\n\n'
    "data: [DONE]\n\n"
)
SCORED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ScoreResponse,
        "description": "the risks, or with 'stream' the events: the risk first, then the answer",
        "headers": HEADERS,
        "content": {
            "application/json": {"example": RISK_EXAMPLE},
            "text/event-stream": {
                "schema": events_schema("first one risk.list, then completion.chunk objects or an error"),
                "example": STREAM_EXAMPLE,
            },
        },
    }
}
SUMMARY = "Risk of each prompt before it is answered, and the answer if the policy lets it"


@router.post(SCORE_ROUTES[0], summary=SUMMARY, responses=SCORED | FAILURES)
@router.post(SCORE_ROUTES[1], summary=SUMMARY, responses=SCORED | FAILURES)
async def score(
    body: Annotated[ScoreRequest, Body(openapi_examples=REQUEST_EXAMPLES)], request: Request, service: TheService
) -> Response:
    """The risk of each prompt's answer, before its first token; with ``generate``, the answer where it may go on."""
    kind, prompts = body.given()
    field = "input_ids" if body.prompt is None else "prompt"
    names = {name: getattr(body, name) for name in ("bundle", "model", "policy", "threshold")}
    asked = requested(request, service, SCORE_ROUTES[0], kind, prompts, field, **names)
    deadline_ms, most = body.deadline_ms, service.settings.deadline_s * 1e3
    sampling, wanted, limit = None, body.generate, service.settings.max_new_tokens
    if wanted is not None:
        if wanted.max_tokens > limit:
            raise RequestError(f"generate.max_tokens is at most {limit} here", param="generate.max_tokens")
        sampling = Sampling(wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.seed, tuple(wanted.stop))
    if deadline_ms is not None and deadline_ms > most:
        raise RequestError(f"deadline_ms is at most {most:g} here", param="deadline_ms")
    asked = replace(
        asked,
        sampling=sampling,
        stream=body.stream,
        deadline=None if deadline_ms is None else Deadline(deadline_ms / 1e3),
        retrieval_of=body.retrieval_of,
    )
    reply = await answer(request, service, asked)
    first = score_response(reply.judgement, body.include).model_dump_json(exclude_none=True)
    if body.stream:
        return EventStream(reply, _events(reply, first))
    reply.end()
    return Response(first, media_type="application/json", headers=reply.headers())


async def _events(reply: Reply, first: str) -> AsyncIterator[bytes]:
    def chunk(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
        same = {"id": f"risk-{reply.judgement.request_id}", "object": "completion.chunk", "index": 0}
        content = same | {"delta": {"text": text}, "finish_reason": finish_reason} | more
        return event(json.dumps(content, ensure_ascii=False, separators=(",", ":")))

    def last(reports: list[RiskReport]) -> bytes:
        completion = completion_out(reports[0].completion)
        assert completion is not None
        return chunk("", completion.finish_reason, usage=usage(reports).model_dump())

    yield event(first)
    if reply.judgement.reports[0].decision is Decision.CONTINUE:
        async for part in answer_events(reply, chunk, last):
            yield part
    yield DONE
