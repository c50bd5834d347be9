"""POST /v1/risk/score and its alias /score: what a request asks for, and its answer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from service.access.routes import SCORE_ROUTES
from service.api.answering import ScoringRequest, answer, encoded, rendered_chat, session_of
from service.api.auth import TheService, caller_of
from service.api.body import JsonRoute
from service.api.reply import EventStream, events
from service.api.request_schema import REQUEST_EXAMPLES, ScoreRequest
from service.api.response_schema import SCORE_RESPONSES
from service.engines.base import Sampling
from service.errors import RequestError
from service.judging.guarantee import TOKEN_IDS, chat_violations
from service.scoring import Scorer
from service.serving.admission import Deadline
from service.settings import ServiceSettings

router = APIRouter(tags=["risk"], route_class=JsonRoute)


SUMMARY = "Risk of each prompt before it is answered, and the answer if the policy lets it"


@router.post(SCORE_ROUTES[0], summary=SUMMARY, responses=SCORE_RESPONSES)
@router.post(SCORE_ROUTES[1], summary=SUMMARY, responses=SCORE_RESPONSES)
async def score(
    body: Annotated[ScoreRequest, Body(openapi_examples=REQUEST_EXAMPLES)],
    request: Request,
    service: TheService,
) -> Response:
    """The risk of each prompt's answer, before its first token; with ``generate``, the answer where it may go on."""
    settings = service.settings
    caller = caller_of(request, service)
    scorer, policy = service.ready.choose(
        caller,
        SCORE_ROUTES[0],
        bundle=body.bundle,
        model=body.model,
        policy=body.policy,
        threshold=body.threshold,
        session=session_of(request, body.contents),
    )
    last = [message.model_dump() for message in (body.messages or [])[-1:]]
    violations = chat_violations(last) if body.input_ids is None else (TOKEN_IDS,)
    asked = ScoringRequest(
        scorer,
        policy,
        caller,
        count=body.prompt_count(),
        field="input_ids" if body.prompt is None else "prompt",
        size=body.size(),
        token_ids=lambda: _token_ids(scorer, body, settings),
        sampling=_sampling(body, settings.max_new_tokens),
        stream=body.stream,
        deadline=_deadline(body, settings),
        include=body.include,
        violations=violations,
        retrieval_of=body.retrieval_of,
        contents=body.contents,
    )
    reply = await answer(request, service, asked)
    if body.stream:
        return EventStream(reply, events(reply))
    reply.end()
    content = reply.body().model_dump_json(exclude_none=True)
    return Response(content, media_type="application/json", headers=reply.headers())


def _deadline(body: ScoreRequest, settings: ServiceSettings) -> Deadline:
    if body.deadline_ms is None:
        return Deadline(settings.deadline_s)
    if body.deadline_ms > settings.deadline_s * 1e3:
        raise RequestError(f"deadline_ms is at most {settings.deadline_s * 1e3:g} here", param="deadline_ms")
    return Deadline(body.deadline_ms / 1e3)


def _sampling(body: ScoreRequest, limit: int) -> Sampling | None:
    wanted = body.generate
    if wanted is None:
        return None
    if wanted.max_tokens > limit:
        raise RequestError(f"generate.max_tokens is at most {limit} here", param="generate.max_tokens")
    return Sampling(wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.seed, tuple(wanted.stop))


def _token_ids(scorer: Scorer, body: ScoreRequest, settings: ServiceSettings) -> list[list[int]]:
    """Every prompt, rendered and checked."""
    if body.messages is not None:
        return rendered_chat(scorer, [message.model_dump() for message in body.messages], settings)
    if body.prompt is not None:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        return encoded(scorer, texts, lambda text: scorer.render(prompt=text))
    assert body.input_ids is not None
    nested = isinstance(body.input_ids[0], list)
    prompts: list[list[int]] = body.input_ids if nested else [body.input_ids]  # type: ignore[assignment, list-item]
    scorer.engine.check(prompts)
    return prompts
