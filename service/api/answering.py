"""The way of every request: admission -> token ids -> dispatcher -> reports, given up where the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from fastapi import Request

from service.access.callers import Caller
from service.access.routes import canonical
from service.api.dependencies import who_of
from service.api.reply import Reply
from service.api.request_log import record_of
from service.api.request_schema import Include
from service.engines.base import Sampling
from service.engines.checks import check_length, check_special_tokens
from service.errors import ClientGone, EmptyPrompt, RequestError
from service.judging.conversation import Shape, shape_of
from service.policies.guard import Action, Decision, Policy
from service.prompts import Message
from service.scoring import RiskReport, Scorer
from service.serving.auditing import decision_line
from service.serving.choice import untemplated
from service.serving.deadline import Deadline
from service.serving.feedback import Content, Feedback, Kept
from service.serving.state import ServiceState
from service.settings import ServiceSettings


@dataclass(frozen=True)
class Asked:
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
    departures: tuple[str, ...] = ()  # of its rendering, from what a guarantee was calibrated on
    retrieval_of: str | None = None  # id of an earlier answer


async def answer(request: Request, state: ServiceState, asked: Asked) -> tuple[Reply, list[RiskReport]]:
    """The reports with their answers; of a stream the risks, before any answer.

    The caller accounts for the reply where it returns; where this raises, it is accounted for.
    """
    check_count(asked, state.settings)
    asked = _asked_again(asked, state)
    if asked.departures:
        asked = replace(asked, policy=untemplated(asked.scorer, asked.policy))
    # Before any work is spent on what would be refused.
    handle = state.dispatcher.admit(
        asked.count,
        asked.scorer,
        asked.policy,
        caller=asked.caller.name,
        sampling=asked.sampling,
        deadline=asked.deadline or Deadline(state.settings.deadline_s),
        streams=asked.stream,
        shadows=state.rollout.watching(asked.scorer),
    )
    named = asked.retrieval_of
    retrieval = None if named is None else state.retrievals.recall(asked.caller.name, named)
    monitor = state.monitors.get(asked.scorer.bundle.reference)
    reply = Reply(handle, list(asked.include), record_of(request), state.metrics, asked.departures, retrieval, monitor)
    try:
        async with while_connected(request):
            async with handle.deadline.enforced():
                token_ids, kept, shapes = await state.tokenizing.run(asked.size, lambda: _read(asked, state.feedback))
            reply.shapes = shapes
            handle.start(token_ids)
            reports = await (handle.risks() if asked.stream else handle.answers())
            route = canonical(reply.record.path)
            if state.audit is not None:  # before anybody is told
                line = decision_line(
                    who_of(request), reply.record.request_id, route, asked.scorer, asked.policy, enumerate(reports)
                )
                await state.audit.decided(line)
            if state.feedback is not None:  # before anybody can know the id
                state.feedback.remember(
                    asked.caller,
                    reply.record.request_id,
                    route,
                    asked.scorer,
                    asked.policy,
                    reports,
                    kept,
                    reply.own_departures,
                )
            if asked.count == 1 and reports[0].decision is Decision.RETRIEVE:
                digest = asked.scorer.bundle.manifest.digest
                state.retrievals.remember(asked.caller.name, reply.record.request_id, reports[0].risk, digest)
            return reply, reports
    except BaseException:
        handle.cancel()
        reply.account()
        raise


def _read(asked: Asked, feedback: Feedback | None) -> tuple[list[list[int]], list[Kept], list[Shape | None]]:
    """Token ids, and of the prompts that have some what feedback keeps, and their shapes."""
    token_ids, contents = asked.token_ids(), asked.contents()
    kept = [] if feedback is None else feedback.kept(contents)
    return token_ids, kept, [_shape(one, asked.scorer) for one in contents]


def _shape(content: Content, scorer: Scorer) -> Shape | None:
    """None for token ids and for text that goes through no template: it may hold a whole conversation."""
    if "messages" in content:
        return shape_of(content["messages"])
    if "prompt" in content and scorer.prompt_format == "chat":  # rendered as one user turn
        return shape_of([{"role": "user", "content": content["prompt"]}])
    return None


def check_count(asked: Asked, settings: ServiceSettings) -> None:
    """Raise EmptyPrompt for no prompt, RequestError for too many."""
    if asked.count == 0:
        raise EmptyPrompt(f"{asked.field!r} is an empty list: give at least one prompt", param=asked.field)
    most = min(settings.max_prompts, settings.max_queue)
    if asked.count > most:
        raise RequestError(f"{asked.count} prompts in one request; at most {most} are taken", param=asked.field)


def _asked_again(asked: Asked, state: ServiceState) -> Asked:
    """With a passage that did not help, the policy abstains: nobody is sent to fetch one for ever."""
    if asked.retrieval_of is None:
        return asked
    if asked.count != 1:
        raise RequestError("'retrieval_of' takes exactly one prompt", param="retrieval_of")
    if asked.policy.action is not Action.RETRIEVE:
        return asked
    policy = replace(asked.policy, action=Action.ABSTAIN, message=state.abstain_message)
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
