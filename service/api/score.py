"""POST /v1/risk/score and its alias /score, and the way of every request that reads a prompt.

Admission -> token ids -> dispatcher -> judgement, given up where the client goes away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from probes_store.records import TemplateArgument
from service.access.callers import Caller
from service.access.routes import SCORE_ROUTES, canonical
from service.api import reply as wire
from service.api.auth import TheService, caller_of, who_of
from service.api.json_body import JsonRoute
from service.api.request_schema import EXAMPLES, Kind, ScoreRequest, size_of
from service.engines.base import Sampling, TokenIds
from service.engines.chat import ToolDefinition, texts_in
from service.engines.checks import check_length, check_special_tokens
from service.errors import ClientGone, EmptyPrompt, RequestError
from service.judging import guarantee
from service.judging.decoding import decoding_for
from service.policies.guard import Action, Policy
from service.scoring import RiskReport, Scorer
from service.serving import observers
from service.serving.admission import Deadline
from service.serving.catalogue import untemplated
from service.serving.dispatcher import Piece
from service.serving.judgement import JudgedPrompt, Judgement, StoredPrompt
from service.serving.request_log import record_of
from service.serving.service import Service
from service.settings import ServiceSettings
from service.tool_calls import Tools
from service.turn import Outcome


@dataclass(frozen=True)
class ScoringRequest:
    """What a request asks for, whichever route it came by."""

    scorer: Scorer
    policy: Policy
    caller: Caller
    kind: Kind
    prompts: Sequence[Any]  # texts, conversations or lists of token ids, by ``kind``
    field: str  # that they came in, for messages
    sampling: Sampling | None = None
    stream: bool = False
    running: bool = False  # whether a stream tells the risk of the answer so far
    deadline: Deadline | None = None  # None: the service's own
    retrieval_of: str | None = None  # id of an earlier answer
    tools: Tools | None = None  # that a conversation's model is told of
    # Arguments of the chat template that it asks for, by the field that does.
    of_template: Mapping[str, Mapping[str, TemplateArgument]] | None = None
    of_sample: bool = False  # a question that the bundle carries, and no traffic
    second: Scorer | None = (
        None  # the default bundle, where a canary was drawn: the stricter of both verdicts counts
    )

    @property
    def definitions(self) -> Sequence[ToolDefinition]:
        """Return the tools for the chat template."""
        return () if self.tools is None else self.tools.definitions

    @property
    def texts(self) -> dict[str, list[str]]:
        """Return what the template writes of a conversation, by field: contents, calls of tools,
        and the tools."""
        found = {
            f"messages.{number}.content": [turn["content"]]
            for number, turn in enumerate(self.prompts[0])
        }
        for number, turn in enumerate(self.prompts[0]):
            if "tool_calls" in turn:
                found[f"messages.{number}.tool_calls"] = list(texts_in(turn["tool_calls"]))
        return found | {"tools": list(texts_in(self.definitions))}

    def content(self, kind: Kind, prompt: Any) -> dict[str, Any]:
        """Return one prompt as feedback stores it; with tools it is another than without."""
        return (
            {kind: prompt}
            if self.tools is None
            else {"conversation": prompt, "tools": list(self.definitions)}
        )

    @property
    def violations(self) -> tuple[str, ...]:
        """Return what its rendering violates of what a guarantee assumes."""
        if self.kind == "messages":
            return guarantee.chat_violations(self.prompts[0])
        if self.kind == "text":
            return (guarantee.NO_TEMPLATE,) if self.scorer.prompt_format == "chat" else ()
        return (guarantee.TOKEN_IDS,) if self.kind == "input_ids" else ()

    def check(self, settings: ServiceSettings) -> None:
        """Raise EmptyPrompt for no prompt, RequestError for too many, or more than one with
        ``retrieval_of``."""
        count, most = len(self.prompts), min(settings.max_prompts, settings.max_queue)
        if count == 0:
            raise EmptyPrompt(
                f"{self.field!r} is an empty list: give at least one prompt", param=self.field
            )
        if count > most:
            raise RequestError(
                f"{count} prompts in one request; at most {most} are taken", param=self.field
            )
        if self.running and self.scorer.answer_probes is None:
            what = f"{self.scorer.bundle.reference} reads no answers here"
            raise RequestError(
                f"'answer_risk' cannot be included: {what}; leave it out", param="include"
            )
        if self.retrieval_of is not None and count != 1:
            raise RequestError("'retrieval_of' takes exactly one prompt", param="retrieval_of")

    def token_ids(self, settings: ServiceSettings) -> Sequence[list[int]]:
        """Render and check every prompt, so that nothing a request says can spoil a batch it
        shares; slow.

        Raises RequestError, which names the field of the route that was called, and not the
        engine's argument."""
        try:
            return self._token_ids(settings)
        except RequestError as error:
            error.param = self._named(error.param)
            raise

    def _named(self, param: str | None) -> str | None:
        argument, _, within = (param or "").partition(".")
        if argument not in ("prompt", "messages", "input_ids"):
            return param
        return param if self.field == argument == "messages" and within else self.field

    def _token_ids(self, settings: ServiceSettings) -> Sequence[list[int]]:
        scorer, engine = self.scorer, self.scorer.engine
        ids: Sequence[list[int]] = self.prompts
        if self.kind == "messages":
            ids = [self.rendered(settings)]
        elif self.kind != "input_ids":
            ids = found = list[list[int]]()
            for number, text in enumerate(self.prompts):
                if not text.strip() and len(self.prompts) > 1:
                    raise EmptyPrompt(f"prompt {number} is empty", param=self.field)
                check_length([text], engine)
                found.append(
                    engine.tokenize(text) if self.kind == "text" else scorer.render(prompt=text)
                )
                if len(found[-1]) > engine.identity.max_tokens:
                    break  # refused below: the others are not worth encoding
        engine.check(ids)
        return ids

    def rendered(self, settings: ServiceSettings) -> list[int]:
        """Return a conversation's token ids; they may be more than the context holds."""
        texts, engine = self.texts, self.scorer.engine
        check_length([*chain(*texts.values())], engine)
        if settings.refuse_special_tokens:
            check_special_tokens(texts, engine)
        token_ids = self.scorer.render(messages=self.prompts[0], tools=self.definitions)
        for name, arguments in (self.of_template or {}).items():
            if not engine.renders_alike(self.prompts[0], self.definitions, arguments):
                said = (
                    f"{name!r} would render this chat otherwise than the bundle's training prompts"
                    " were rendered"
                )
                raise RequestError(
                    f"{said}, and no risk is known of such an answer: leave it out", param=name
                )
        return token_ids

    @property
    def size(self) -> int:
        """Return characters or token ids of all that is rendered."""
        return size_of(self.kind, self.prompts) + (
            0 if self.tools is None else self.tools.characters
        )


def requested(
    request: Request,
    service: Service,
    route: str,
    kind: Kind,
    prompts: Sequence[Any],
    field: str = "",
    **chosen: Any,
) -> ScoringRequest:
    """Return the request with the bundle and the policy that judge it.  Raises NotReady and what
    ``choose`` raises.

    ``chosen``: its bundle, model, policy and threshold, where it names them.  The header
    ``x-session-id`` names its session; without it, what the first prompt begins with."""
    caller = caller_of(request, service)

    def session() -> str:
        named = request.headers.get("x-session-id")
        return named or (_beginning(kind, prompts[0]) if prompts else "")

    every = dict.fromkeys(("bundle", "model", "policy", "threshold")) | chosen
    scorer, policy = service.ready.choose(caller, route, session=session, **every)
    second = service.catalogue.second(scorer, policy) if every["bundle"] is None else None
    return ScoringRequest(scorer, policy, caller, kind, prompts, field or kind, second=second)


def beyond_limit(limit: int, asked: int) -> str:
    """Return what is said of an answer of more tokens than the service's limit."""
    return (
        f"at most {limit} answer tokens here, not {asked}; the operator raises it with"
        " --max-completion-tokens"
    )


def _beginning(kind: Kind, prompt: Any) -> str:
    """Return a conversation up to its first user message; any other prompt whole."""
    if kind != "messages":
        return json.dumps({kind: prompt})
    first = next(
        (place for place, one in enumerate(prompt) if one.get("role") == "user"), len(prompt)
    )
    return json.dumps(prompt[: first + 1])


@dataclass(frozen=True, slots=True)
class _ReadPrompt:
    token_ids: TokenIds
    standing: (
        guarantee.Standing
    )  # its shape is None where it is not known: a plain text may hold a conversation
    stored: StoredPrompt | None


def _read(asked: ScoringRequest, service: Service) -> list[_ReadPrompt]:
    """Return each prompt's token ids, its shape, and what feedback stores of it."""
    kind, chat = asked.kind, asked.scorer.prompt_format == "chat"
    if kind == "text" and not chat:
        kind = "prompt"  # the bundle's own rows went through no template either
    found = []
    for ids, prompt in zip(asked.token_ids(service.settings), asked.prompts, strict=True):
        refusals, standing = service.catalogue.refusals, guarantee.UNKNOWN
        if kind == "messages":
            standing = asked.scorer.standing(messages=prompt, refusals=refusals)
        elif kind == "prompt":
            standing = asked.scorer.standing(prompt, refusals=refusals)
        else:
            standing = asked.scorer.standing_of_ids(ids, refusals)
        stored = (
            None
            if service.feedback is None
            else service.feedback.stored(asked.content(kind, prompt))
        )
        found.append(_ReadPrompt(ids, standing, stored))
    return found


async def answer(request: Request, service: Service, asked: ScoringRequest) -> wire.Reply:
    """Return the reply with the answers; of a stream with the risks, before any answer.

    The caller ends the reply where it returns; where this raises, it has been ended."""
    asked.check(service.settings)
    policy = asked.policy
    if asked.retrieval_of is not None and policy.action is Action.RETRIEVE:
        # With a passage that did not help, nobody is sent to fetch one for ever.
        policy = replace(policy, action=Action.ABSTAIN, message=service.catalogue.abstain_message)
    if asked.violations:
        policy = untemplated(asked.scorer, policy)
    deadline, sampling = asked.deadline or Deadline(service.settings.deadline_s), asked.sampling
    if (
        sampling is not None and not asked.of_sample
    ):  # an answer of the bundle's own is judged, so it has to be whole
        sampling = replace(sampling, until=deadline.nearly)
    # Before any work is spent on what would be refused.
    handle = service.lifecycle.dispatcher.admit(
        len(asked.prompts),
        asked.scorer,
        policy,
        caller=asked.caller.name,
        sampling=sampling,
        deadline=deadline,
        streams=asked.stream,
        running=asked.running,
        shadows=() if asked.of_sample else service.catalogue.rollout.watching(asked.scorer),
        tools=asked.tools,
        second=asked.second,
    )
    created, record, named = int(time.time()), record_of(request), asked.retrieval_of
    retrieval = None if named is None else service.retrievals.recall(asked.caller.name, named)
    monitor = service.catalogue.monitors.get(asked.scorer.bundle.reference)
    prompts: list[_ReadPrompt] = []

    def judgement() -> Judgement:
        """Return that of the prompts that are scored by now."""
        manifest = asked.scorer.bundle.manifest
        tools = (
            guarantee.tool_violations(asked.prompts[0], asked.tools)
            if asked.kind == "messages"
            else ()
        )
        shapes = guarantee.shape_violations(manifest, [one.standing.shape for one in prompts])
        jobs = list(
            enumerate(zip(handle.jobs, prompts, strict=False))
        )  # no jobs where it ended before
        return Judgement(
            scorer=asked.scorer,
            policy=policy,
            request_id=record.request_id,
            created=created,
            prompts=tuple(
                JudgedPrompt(
                    index,
                    job.report.before_answer() if asked.stream else job.report,
                    token_ids=job.token_ids,
                    timings=job.timings,
                    submitted_ns=job.submitted_ns,
                    shape=one.standing.shape,
                    stored=one.stored,
                )
                for index, (job, one) in jobs
                if job.report is not None
            ),
            unscored={index: job.submitted_ns for index, (job, _) in jobs if job.report is None},
            route=canonical(record.path),
            caller=asked.caller,
            who=who_of(request),
            sampling=asked.sampling,
            streams=asked.stream,
            of_sample=asked.of_sample,
            monitor=monitor,
            request_violations=(
                *asked.violations,
                *guarantee.decoding_violations(manifest, asked.sampling),
                *shapes,
                *tools,
                *(() if asked.second is None else (guarantee.SECOND_VERDICT,)),
            ),
            retrieval=retrieval,
        )

    judged: Judgement | None = None
    try:
        async with while_connected(request):
            async with handle.deadline.enforced():
                prompts = await service.tokenizing.run(
                    asked.caller.name, asked.size, lambda: _read(asked, service)
                )
                if (sampling := handle.sampling) is not None and (
                    found := sampling.format
                ) is not None:
                    prepared, caller, deadline = (
                        asked.scorer.engine.prepared,
                        asked.caller.name,
                        handle.deadline,
                    )
                    compiled = await service.tokenizing.compile(
                        caller, lambda: prepared(found, caller, deadline.left)
                    )
                    handle.sampling = replace(sampling, format=compiled)
            handle.start([one.token_ids for one in prompts], [one.standing for one in prompts])
            # What is read again is held to its end, so that the first event of a stream has the
            # decision.
            await (handle.risks() if asked.stream and not policy.recheck else handle.answers())
            if any(
                job.result().held for job in handle.jobs
            ):  # of a stream, too: is it a call of a tool?
                await handle.answers()
            judged = judgement()
            await observers.judged(service, judged)
            return wire.Reply(judged, handle, service, record)
    except BaseException:
        handle.cancel()
        wire.Reply(judged or judgement(), handle, service, record).end()
        raise


@asynccontextmanager
async def while_connected(request: Request) -> AsyncIterator[None]:
    """Raise ClientGone inside the block when the client closes its connection, as a timeout
    would."""
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


router = APIRouter(tags=["risk"], route_class=JsonRoute)

_EVENTS = wire.events_schema("first one risk.list, then completion.chunk objects or an error")
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": wire.ScoreResponse,
        "headers": wire.HEADERS,
        "description": "the risks, or with 'stream' the events: the risk first, then the answer",
        "content": {
            "application/json": {"example": EXAMPLES["risk"]},
            "text/event-stream": {"schema": _EVENTS, "example": EXAMPLES["stream"]},
        },
    },
    **wire.FAILURES,
}
SUMMARY = "Risk of each prompt before it is answered, and the answer if the policy lets it"


@router.post(SCORE_ROUTES[0], summary=SUMMARY, responses=RESPONSES)
@router.post(SCORE_ROUTES[1], summary=SUMMARY, responses=RESPONSES)
async def score(
    body: Annotated[ScoreRequest, Body(openapi_examples=EXAMPLES["score"])],
    request: Request,
    service: TheService,
) -> Response:
    """The risk of each prompt's answer, before its first token; with ``generate``, the answer where
    it may go on."""
    kind, prompts = body.given()
    names = {name: getattr(body, name) for name in ("bundle", "model", "policy", "threshold")}
    asked = requested(request, service, SCORE_ROUTES[0], kind, prompts, kind, **names)
    deadline_ms, most = body.deadline_ms, service.settings.deadline_s * 1e3
    sampling, wanted, limit = None, body.generate, service.settings.max_new_tokens
    if wanted is not None:
        if wanted.max_tokens > limit:
            raise RequestError(beyond_limit(limit, wanted.max_tokens), param="generate.max_tokens")
        decoding = decoding_for(
            asked.scorer.bundle.manifest, "bundle", wanted.temperature, wanted.top_p
        )
        sampling = Sampling(
            wanted.max_tokens, decoding.temperature, decoding.top_p, wanted.seed, tuple(wanted.stop)
        )
    if deadline_ms is not None and deadline_ms > most:
        raise RequestError(f"deadline_ms is at most {most:g} here", param="deadline_ms")
    deadline = None if deadline_ms is None else Deadline(deadline_ms / 1e3)
    asked = replace(
        asked,
        sampling=sampling,
        stream=body.stream,
        deadline=deadline,
        retrieval_of=body.retrieval_of,
        running="answer_risk" in body.include,
    )
    reply = await answer(request, service, asked)
    first = wire.score_response(reply.judgement, body.include).model_dump_json(exclude_none=True)
    if body.stream:
        return wire.EventStream(reply, _events(reply, first))
    reply.end()
    return Response(first, media_type="application/json", headers=reply.headers())


async def _events(reply: wire.Reply, first: str) -> AsyncIterator[bytes]:
    def chunk(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
        same = {"id": reply.judgement.answer_id, "object": "completion.chunk", "index": 0}
        content = same | {"delta": {"text": text}, "finish_reason": finish_reason} | more
        return wire.event(json.dumps(content, ensure_ascii=False, separators=(",", ":")))

    def piece(one: Piece) -> bytes:
        return chunk(one.text, **wire.running_note(one.answer))

    def last(reports: list[RiskReport]) -> bytes:
        completion = wire.completion_out(reports[0].shown)
        known = wire.answer_note(reports[0].answer, reports[0].decoding)
        return chunk("", completion.finish_reason, usage=wire.usage(reports).model_dump(), **known)

    yield wire.event(first)
    if reply.judgement.reports[0].outcome is not Outcome.WITHHELD:
        async for part in wire.answer_events(reply, piece, last):
            yield part
    yield wire.DONE
