"""POST /v1/risk/score and its alias /score: a thin router over ``scoring``."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from service.api.schemas import (
    ERROR_RESPONSES,
    BundleRef,
    CompletionOut,
    RiskOut,
    ScoreRequest,
    ScoreResponse,
    Usage,
)
from service.api.state import ServiceState
from service.engines.base import Sampling
from service.errors import EmptyPrompt, RequestError
from service.risk import running_means
from service.scoring import RiskReport, Scorer

router = APIRouter(tags=["risk"])


def service_state(request: Request) -> ServiceState:
    """The state that the app factory attached."""
    state = request.app.state.service
    assert isinstance(state, ServiceState)
    return state


def _token_ids(scorer: Scorer, body: ScoreRequest, max_prompts: int) -> list[list[int]]:
    if body.messages is not None:
        return [scorer.render(messages=[message.model_dump() for message in body.messages])]
    items: list[str] | list[list[int]]
    if body.prompt is not None:
        items = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        field = "prompt"
    else:
        assert body.input_ids is not None
        nested = bool(body.input_ids) and isinstance(body.input_ids[0], list)
        items = body.input_ids if nested else [body.input_ids]  # type: ignore[assignment]
        field = "input_ids"
    if not items:
        raise EmptyPrompt(f"{field!r} is an empty list: give at least one prompt", param=field)
    if len(items) > max_prompts:
        raise RequestError(f"{len(items)} prompts in one request; at most {max_prompts} are taken", param=field)
    return [scorer.render(prompt=item) if isinstance(item, str) else item for item in items]


def _sampling(body: ScoreRequest, limit: int) -> Sampling | None:
    if body.generate is None:
        return None
    wanted = body.generate
    if wanted.max_tokens > limit:
        raise RequestError(f"generate.max_tokens is at most {limit} here", param="generate.max_tokens")
    return Sampling(wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.seed, tuple(wanted.stop))


def _risk_out(index: int, report: RiskReport, body: ScoreRequest) -> RiskOut:
    completion = None
    if report.completion is not None:
        completion = CompletionOut(
            text=report.completion.text,
            finish_reason=report.completion.finish_reason,
            completion_tokens=len(report.completion.token_ids),
        )
    return RiskOut(
        index=index,
        risk=report.risk,
        depth_mean=report.depth_mean,
        decision=report.decision.value,
        threshold=report.threshold,
        trajectory=report.trajectory.tolist() if "trajectory" in body.include else None,
        running_mean=running_means(report.trajectory).tolist() if "running_mean" in body.include else None,
        completion=completion,
    )


@router.post("/v1/risk/score", response_model_exclude_none=True, responses=ERROR_RESPONSES)
@router.post("/score", response_model_exclude_none=True, responses=ERROR_RESPONSES)
async def score(
    body: ScoreRequest,
    request: Request,
    response: Response,
    state: Annotated[ServiceState, Depends(service_state)],
) -> ScoreResponse:
    """The risk of each prompt's answer, before its first token; with ``generate``, the answer where it may go on."""
    scorer = state.scorer(body.bundle, body.model)
    sampling = _sampling(body, state.settings.max_new_tokens)
    threshold = body.threshold if body.threshold is not None else state.settings.threshold

    def work() -> list[RiskReport]:
        token_ids = _token_ids(scorer, body, state.settings.max_prompts)
        if sampling is None:
            return scorer.score(token_ids, threshold)
        return scorer.score_or_continue(token_ids, sampling, threshold, state.stopping.is_set)

    reports, queue_ms, inference_ms = await state.run(work)
    manifest = scorer.bundle.manifest
    response.headers["x-queue-time"] = f"{queue_ms:.3f}"
    response.headers["x-inference-time"] = f"{inference_ms:.3f}"
    response.headers["x-hallutracer-bundle"] = f"{scorer.bundle.reference}"
    if len(reports) == 1:
        response.headers["x-hallutracer-risk"] = f"{reports[0].risk:.6f}"
        response.headers["x-hallutracer-decision"] = reports[0].decision.value
    prompt_tokens = sum(report.prompt_tokens for report in reports)
    completion_tokens = sum(len(report.completion.token_ids) for report in reports if report.completion)
    return ScoreResponse(
        id=f"risk-{request.state.request_id}",
        created=int(time.time()),
        model=scorer.engine.identity.model,
        bundle=BundleRef(name=manifest.name, version=manifest.version, digest=manifest.digest),
        data=[_risk_out(index, report, body) for index, report in enumerate(reports)],
        usage=Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        ),
    )
