"""POST /v1/risk/score and its alias /score: request -> admission -> token ids -> dispatcher -> reply or stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from service.api.body import JsonRoute
from service.api.dependencies import State, caller_of
from service.api.reply import Reply
from service.api.request_log import record_of
from service.api.request_schema import REQUEST_EXAMPLES, ROUTES, ScoreRequest
from service.api.response_schema import SCORE_RESPONSES
from service.api.stream import EventStream
from service.engines.base import Sampling
from service.engines.checks import check_length, check_special_tokens
from service.errors import ClientGone, EmptyPrompt, RequestError
from service.guarantee import TOKEN_IDS
from service.scoring import Scorer
from service.serving.deadline import Deadline
from service.settings import ServiceSettings

router = APIRouter(tags=["risk"], route_class=JsonRoute)


@router.post(ROUTES[0], responses=SCORE_RESPONSES)
@router.post(ROUTES[1], responses=SCORE_RESPONSES)
async def score(
    body: Annotated[ScoreRequest, Body(openapi_examples=REQUEST_EXAMPLES)],
    request: Request,
    state: State,
) -> Response:
    """The risk of each prompt's answer, before its first token; with ``generate``, the answer where it may go on."""
    settings = state.settings
    caller = caller_of(request, state)
    scorer, policy = state.choose(
        caller, bundle=body.bundle, model=body.model, policy=body.policy, threshold=body.threshold
    )
    sampling = _sampling(body, settings.max_new_tokens)
    deadline = _deadline(body, settings)
    count = _count(body, settings)
    # Before any work is spent on what would be refused.
    handle = state.dispatcher.admit(
        count, scorer, policy, caller=caller.name, sampling=sampling, deadline=deadline, streams=body.stream
    )
    departures = (TOKEN_IDS,) if body.input_ids is not None else ()
    reply = Reply(handle, body.include, record_of(request), state.metrics, departures)
    try:
        async with _while_connected(request):
            async with deadline.enforced():
                token_ids = await state.tokenizing.run(body.size(), lambda: _token_ids(scorer, body, settings))
            handle.start(token_ids)
            reports = await (handle.risks() if body.stream else handle.answers())
    except BaseException:
        handle.cancel()
        reply.account()
        raise
    if body.stream:
        return EventStream(reply, reports)
    reply.account()
    content = reply.body(reports).model_dump_json(exclude_none=True)
    return Response(content, media_type="application/json", headers=reply.headers(reports))


@asynccontextmanager
async def _while_connected(request: Request) -> AsyncIterator[None]:
    """Raise ClientGone inside the block when the client closes its connection, as a timeout would."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone or task.uncancel() > 0:
            raise  # the server's own, at its shutdown
        raise ClientGone("the client closed its connection before its answer was there") from None
    finally:
        watcher.cancel()


def _count(body: ScoreRequest, settings: ServiceSettings) -> int:
    count, field = body.prompt_count(), "input_ids" if body.prompt is None else "prompt"
    if count == 0:
        raise EmptyPrompt(f"{field!r} is an empty list: give at least one prompt", param=field)
    most = min(settings.max_prompts, settings.max_queue)
    if count > most:
        raise RequestError(f"{count} prompts in one request; at most {most} are taken", param=field)
    return count


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
    """Every prompt, rendered and checked, so that nothing a request says can spoil a batch it shares."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    if body.messages is not None:
        contents = [message.content for message in body.messages]
        check_length(contents, scorer.engine)
        if settings.refuse_special_tokens:
            check_special_tokens(contents, scorer.engine)
        prompts = [scorer.render(messages=[message.model_dump() for message in body.messages])]
    elif body.prompt is not None:
        prompts = []
        for text in texts:
            check_length([text], scorer.engine)
            prompts.append(scorer.render(prompt=text))
            if len(prompts[-1]) > scorer.engine.identity.max_tokens:
                break  # refused below: the others are not worth encoding
    else:
        assert body.input_ids is not None
        nested = isinstance(body.input_ids[0], list)
        prompts = body.input_ids if nested else [body.input_ids]  # type: ignore[assignment, list-item]
    scorer.engine.check(prompts)
    return prompts
