"""The way of every request: admission -> token ids -> dispatcher -> judgement, given up where the client goes away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from fastapi import Request

from service.access.callers import Caller
from service.access.routes import canonical
from service.api.auth import who_of
from service.api.reply import Reply
from service.api.request_schema import Include
from service.engines.base import Sampling, TokenIds
from service.engines.checks import check_length, check_special_tokens
from service.errors import ClientGone, EmptyPrompt, RequestError
from service.judging.guarantee import Shape, decoding_violations, shape_of, shape_violations
from service.policies.guard import Action, Policy
from service.prompts import Message
from service.scoring import Scorer
from service.serving import observers
from service.serving.admission import Deadline
from service.serving.catalogue import untemplated
from service.serving.feedback import Content, Feedback
from service.serving.judgement import JudgedPrompt, Judgement, StoredPrompt
from service.serving.request_log import record_of
from service.serving.service import Service
from service.settings import ServiceSettings


@dataclass(frozen=True)
class ScoringRequest:
    """What a request asks for, whichever route it came by."""

    scorer: Scorer
    policy: Policy
    caller: Caller
    count: int  # prompts
    field: str  # that they came in, for messages
    size: int  # characters or token ids of them all, templates included
    token_ids: Callable[[], list[list[int]]]  # renders and checks them; slow, and run beside the event loop
    contents: Callable[[], list[Content]]  # each prompt as the caller gave it, for feedback and its shape
    sampling: Sampling | None = None
    stream: bool = False
    deadline: Deadline | None = None  # None: the service's own
    include: Sequence[Include] = ()
    violations: tuple[str, ...] = ()  # by its rendering, of what a guarantee assumes
    retrieval_of: str | None = None  # id of an earlier answer


@dataclass(frozen=True, slots=True)
class _ReadPrompt:
    token_ids: TokenIds
    shape: Shape | None
    stored: StoredPrompt | None


async def answer(request: Request, service: Service, asked: ScoringRequest) -> Reply:
    """Return the reply with the answers; of a stream with the risks, before any answer.

    The caller ends the reply where it returns; where this raises, it has been ended.
    """
    check_count(asked, service.settings)
    asked = _with_retry_policy(asked, service)
    if asked.violations:
        asked = replace(asked, policy=untemplated(asked.scorer, asked.policy))
    # Before any work is spent on what would be refused.
    handle = service.lifecycle.dispatcher.admit(
        asked.count,
        asked.scorer,
        asked.policy,
        caller=asked.caller.name,
        sampling=asked.sampling,
        deadline=asked.deadline or Deadline(service.settings.deadline_s),
        streams=asked.stream,
        shadows=service.catalogue.rollout.watching(asked.scorer),
    )
    created, record, named = int(time.time()), record_of(request), asked.retrieval_of
    retrieval = None if named is None else service.retrievals.recall(asked.caller.name, named)
    monitor = service.catalogue.monitors.get(asked.scorer.bundle.reference)
    prompts: list[_ReadPrompt] = []

    def judgement() -> Judgement:
        """Of the prompts that are scored by now."""
        shapes = shape_violations(asked.scorer.bundle.manifest, [one.shape for one in prompts])
        jobs = list(enumerate(zip(handle.jobs, prompts, strict=False)))  # no jobs where it ended before
        return Judgement(
            scorer=asked.scorer,
            policy=asked.policy,
            prompts=tuple(
                JudgedPrompt(
                    index,
                    replace(job.report, completion=None) if asked.stream else job.report,
                    token_ids=job.token_ids,
                    timings=job.timings,
                    submitted_ns=job.submitted_ns,
                    shape=one.shape,
                    stored=one.stored,
                )
                for index, (job, one) in jobs
                if job.report is not None
            ),
            unscored={index: job.submitted_ns for index, (job, _) in jobs if job.report is None},
            request_id=record.request_id,
            created=created,
            route=canonical(record.path),
            caller=asked.caller,
            who=who_of(request),
            sampling=asked.sampling,
            streams=asked.stream,
            request_violations=(*asked.violations, *decoding_violations(asked.sampling), *shapes),
            monitor=monitor,
            bundle_violations=() if monitor is None else monitor.reasons,
            retrieval=retrieval,
        )

    judged: Judgement | None = None
    try:
        async with while_connected(request):
            async with handle.deadline.enforced():
                prompts = await service.tokenizing.run(asked.size, lambda: _read(asked, service.feedback))
            handle.start([one.token_ids for one in prompts])
            await (handle.risks() if asked.stream else handle.answers())
            judged = judgement()
            await observers.judged(service, judged)
            return Reply(judged, handle, service, record, tuple(asked.include))
    except BaseException:
        handle.cancel()
        Reply(judged or judgement(), handle, service, record).end()
        raise


def _read(asked: ScoringRequest, feedback: Feedback | None) -> list[_ReadPrompt]:
    """Return each prompt's token ids, its shape, and what feedback stores of it."""
    return [
        _ReadPrompt(ids, _shape(content, asked.scorer), None if feedback is None else feedback.stored(content))
        for ids, content in zip(asked.token_ids(), asked.contents(), strict=True)
    ]


def _shape(content: Content, scorer: Scorer) -> Shape | None:
    """Return None for token ids and for text that goes through no template: it may hold a whole conversation."""
    if "messages" in content:
        return shape_of(content["messages"])
    if "prompt" in content and scorer.prompt_format == "chat":  # rendered as one user turn
        return shape_of([{"role": "user", "content": content["prompt"]}])
    return None


def check_count(asked: ScoringRequest, settings: ServiceSettings) -> None:
    """Raise EmptyPrompt for no prompt, RequestError for too many."""
    if asked.count == 0:
        raise EmptyPrompt(f"{asked.field!r} is an empty list: give at least one prompt", param=asked.field)
    most = min(settings.max_prompts, settings.max_queue)
    if asked.count > most:
        raise RequestError(f"{asked.count} prompts in one request; at most {most} are taken", param=asked.field)


def _with_retry_policy(asked: ScoringRequest, service: Service) -> ScoringRequest:
    """With a passage that did not help, the policy abstains: nobody is sent to fetch one for ever."""
    if asked.retrieval_of is None:
        return asked
    if asked.count != 1:
        raise RequestError("'retrieval_of' takes exactly one prompt", param="retrieval_of")
    if asked.policy.action is not Action.RETRIEVE:
        return asked
    policy = replace(asked.policy, action=Action.ABSTAIN, message=service.catalogue.abstain_message)
    return replace(asked, policy=policy)


def rendered_chat(scorer: Scorer, messages: Sequence[Message], settings: ServiceSettings) -> list[list[int]]:
    """A conversation's token ids, checked, so that nothing a request says can spoil a batch it shares."""
    contents = [message["content"] for message in messages]
    check_length(contents, scorer.engine)
    if settings.refuse_special_tokens:
        check_special_tokens(contents, scorer.engine)
    prompts = [scorer.render(messages=messages)]
    scorer.engine.check(prompts)
    return prompts


def encoded(scorer: Scorer, texts: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Each text's token ids, checked; ``encode`` renders one."""
    prompts: list[list[int]] = []
    for text in texts:
        check_length([text], scorer.engine)
        prompts.append(encode(text))
        if len(prompts[-1]) > scorer.engine.identity.max_tokens:
            break  # refused below: the others are not worth encoding
    scorer.engine.check(prompts)
    return prompts


@asynccontextmanager
async def while_connected(request: Request) -> AsyncIterator[None]:
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


HEADER = "x-session-id"


def session_of(request: Request, contents: Callable[[], Sequence[Content]]) -> Callable[[], str]:
    """The header ``x-session-id``; without it, what the first prompt begins with, up to its first user message."""

    def session() -> str:
        named = request.headers.get(HEADER)
        if named:
            return named
        found = contents()
        return _beginning(found[0]) if found else ""

    return session


def _beginning(content: Content) -> str:
    messages: list[dict[str, Any]] | None = content.get("messages")
    if messages is None:
        return json.dumps(dict(content))
    before = list(takewhile(lambda message: message.get("role") != "user", messages))
    return json.dumps([*before, *messages[len(before) : len(before) + 1]])
