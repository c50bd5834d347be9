"""The way of every request that reads a prompt.

Admission -> token ids -> dispatcher -> judgement, given up where the client goes away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from fastapi import Request

from probes_store.records import TemplateArgument
from service.access.callers import Caller
from service.access.routes import canonical
from service.api.auth import caller_of, who_of
from service.api.reply import Reply
from service.api.request_schema import AnswerRequest, Arguments, Kind, size_of
from service.engines.base import Sampling, TokenIds
from service.engines.chat import ToolDefinition, texts_in
from service.engines.checks import check_length, check_special_tokens
from service.engines.formats import Format
from service.errors import ClientGone, EmptyPrompt, RequestError
from service.judging import guarantee
from service.judging.decoding import decoding_for
from service.policies.guard import Action, Policy
from service.scoring import Scorer
from service.serving import observers
from service.serving.admission import Deadline
from service.serving.catalogue import untemplated
from service.serving.dispatcher import RequestHandle
from service.serving.judgement import JudgedPrompt, Judgement, StoredPrompt
from service.serving.request_log import record_of
from service.serving.service import Service
from service.settings import ServiceSettings
from service.tool_calls import Tools


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
    # The default bundle, where a canary was drawn: the stricter of both verdicts counts.
    second: Scorer | None = None

    @property
    def definitions(self) -> Sequence[ToolDefinition]:
        """Return the tools for the chat template."""
        return () if self.tools is None else self.tools.definitions

    @property
    def texts(self) -> dict[str, list[str]]:
        """Return what the template writes of a conversation, by field: contents, calls of tools,
        and the tools."""
        turns = dict(enumerate(self.prompts[0]))
        contents = {
            f"messages.{number}.content": [turn["content"]] for number, turn in turns.items()
        }
        calls = {
            f"messages.{number}.tool_calls": list(texts_in(turn["tool_calls"]))
            for number, turn in turns.items()
            if "tool_calls" in turn
        }
        return contents | calls | {"tools": list(texts_in(self.definitions))}

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
            raise RequestError(
                f"'answer_risk' cannot be included: {self.scorer.bundle.reference} reads no"
                " answers here; leave it out",
                param="include",
            )
        if self.retrieval_of is not None and count != 1:
            raise RequestError("'retrieval_of' takes exactly one prompt", param="retrieval_of")

    def token_ids(self, settings: ServiceSettings) -> Sequence[list[int]]:
        """Render and check every prompt, so that nothing a request says can spoil a batch it
        shares; slow.

        Raises RequestError, which names the field of the route that was called, and not the
        engine's argument."""
        try:
            ids: Sequence[list[int]] = self.prompts
            if self.kind == "messages":
                ids = [self.rendered(settings)]
            elif self.kind != "input_ids":
                ids = self._encoded()
            self.scorer.engine.check(ids)
            return ids
        except RequestError as error:
            argument, _, within = (error.param or "").partition(".")
            in_messages = self.field == argument == "messages" and within
            if argument in ("prompt", "messages", "input_ids") and not in_messages:
                error.param = self.field
            raise

    def _encoded(self) -> list[list[int]]:
        engine, encoded = self.scorer.engine, list[list[int]]()
        for number, text in enumerate(self.prompts):
            if not text.strip() and len(self.prompts) > 1:
                raise EmptyPrompt(f"prompt {number} is empty", param=self.field)
            check_length([text], engine)
            ids = engine.tokenize(text) if self.kind == "text" else self.scorer.render(prompt=text)
            encoded.append(ids)
            if len(ids) > engine.identity.max_tokens:
                break  # refused by the engine's check: the others are not worth encoding
        return encoded

    def rendered(self, settings: ServiceSettings) -> list[int]:
        """Return a conversation's token ids; they may be more than the context holds."""
        texts, engine = self.texts, self.scorer.engine
        check_length([*chain(*texts.values())], engine)
        if settings.refuse_special_tokens:
            check_special_tokens(texts, engine)
        token_ids = self.scorer.render(messages=self.prompts[0], tools=self.definitions)
        for name, arguments in (self.of_template or {}).items():
            if not engine.renders_alike(self.prompts[0], self.definitions, arguments):
                raise RequestError(
                    f"{name!r} would render this chat otherwise than the bundle's training prompts"
                    " were rendered, and no risk is known of such an answer: leave it out",
                    param=name,
                )
        return token_ids

    @property
    def size(self) -> int:
        """Return characters or token ids of all that is rendered."""
        tools = 0 if self.tools is None else self.tools.characters
        return size_of(self.kind, self.prompts) + tools


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

    scorer, policy = service.ready.choose(caller, route, session=session, **chosen)
    second = service.catalogue.second(scorer, policy) if chosen.get("bundle") is None else None
    return ScoringRequest(scorer, policy, caller, kind, prompts, field or kind, second=second)


def check_limit(most: int, param: str, settings: ServiceSettings) -> None:
    """Raise RequestError for an answer of more tokens than the service's limit."""
    if most > settings.max_new_tokens:
        raise RequestError(
            f"at most {settings.max_new_tokens} answer tokens here, not {most}; the operator raises"
            " it with --max-completion-tokens",
            param=param,
        )


def _beginning(kind: Kind, prompt: Any) -> str:
    """Return a conversation up to its first user message; any other prompt whole."""
    if kind != "messages":
        return json.dumps({kind: prompt})
    roles = [turn.get("role") for turn in prompt]
    first = roles.index("user") if "user" in roles else len(prompt)
    return json.dumps(prompt[: first + 1])


async def answered(
    request: Request,
    service: Service,
    body: AnswerRequest,
    *,
    route: str,
    prompts: Sequence[Any],
    field: str,
    most: int,
    kind: Kind = "messages",
    most_field: str = "max_tokens",
    forwards: bool = False,
    tools: Tools | None = None,
    format: Format | None = None,
) -> Reply:
    """Return the reply, as ``answer`` does, under the bundle, policy and threshold that the body
    chooses.

    ``field``: that the prompts came in.  ``most``: tokens of an answer, from ``most_field``.
    ``forwards``: another server may answer on this route.  ``tools``: those that the model is told
    of."""
    deadline = Deadline(service.settings.deadline_s)
    chosen = body.vllm_xargs or Arguments()
    spec = requested(
        request,
        service,
        route,
        kind,
        prompts,
        field,
        model=body.model,
        bundle=chosen.hallutracer_bundle,
        policy=chosen.hallutracer_policy,
        threshold=chosen.hallutracer_threshold,
    )
    policy = spec.policy
    if body.stream and len(prompts) != 1:
        raise RequestError(
            "'stream' takes exactly one prompt; send one request per prompt", param="prompt"
        )
    if policy.action is Action.FALLBACK and not forwards:
        raise RequestError(
            f"policy {policy.name!r} may send a prompt on, in OpenAI's older protocol, which this"
            " route does not speak: ask /v1/chat/completions, or under another policy",
            param="policy",
        )
    if policy.action is Action.FALLBACK and (len(prompts) != 1 or kind == "input_ids"):
        raise RequestError(
            f"policy {policy.name!r} may send a prompt on: give exactly one, as text",
            param="prompt",
        )
    check_limit(most, most_field, service.settings)
    decoding = decoding_for(
        spec.scorer.bundle.manifest, service.settings.decoding, body.temperature, body.top_p
    )
    sampling = Sampling(
        most, decoding.temperature, decoding.top_p, body.seed, body.stops(), format=format
    )
    spec = replace(
        spec,
        sampling=sampling,
        deadline=deadline,
        stream=bool(body.stream),
        retrieval_of=chosen.hallutracer_retrieval_of,
        running=bool(chosen.hallutracer_include),
        tools=tools,
        of_template=body.of_template(),
    )
    return await answer(request, service, spec)


@dataclass(frozen=True, slots=True)
class _ReadPrompt:
    token_ids: TokenIds
    # Its shape is None where it is not known: a plain text may hold a conversation.
    standing: guarantee.Standing
    stored: StoredPrompt | None


def _read(spec: ScoringRequest, service: Service) -> list[_ReadPrompt]:
    """Return each prompt's token ids, its shape, and what feedback stores of it."""
    scorer = spec.scorer
    kind = spec.kind
    feedback = service.feedback
    if kind == "text" and scorer.prompt_format != "chat":
        kind = "prompt"  # the bundle's own rows went through no template either
    refusals, read = service.catalogue.refusals, list[_ReadPrompt]()
    for ids, prompt in zip(spec.token_ids(service.settings), spec.prompts, strict=True):
        if kind == "messages":
            standing = scorer.standing(messages=prompt, refusals=refusals)
        elif kind == "prompt":
            standing = scorer.standing(prompt, refusals=refusals)
        else:
            standing = scorer.standing_of_ids(ids, refusals)
        stored = None if feedback is None else feedback.stored(spec.content(kind, prompt))
        read.append(_ReadPrompt(ids, standing, stored))
    return read


async def answer(request: Request, service: Service, spec: ScoringRequest) -> Reply:
    """Return the reply with the answers; of a stream with the risks, before any answer.

    The caller ends the reply where it returns; where this raises, it has been ended."""
    # 1) Refuse what cannot be served, before any work is spent on it.
    spec.check(service.settings)
    spec = replace(spec, policy=_applied_policy(spec, service))
    deadline, sampling = spec.deadline or Deadline(service.settings.deadline_s), spec.sampling
    if sampling is not None and not spec.of_sample:
        # An answer of the bundle's own is judged, so it has to be whole.
        sampling = replace(sampling, until=deadline.nearly)
    handle = service.lifecycle.dispatcher.admit(
        len(spec.prompts),
        spec.scorer,
        spec.policy,
        caller=spec.caller.name,
        sampling=sampling,
        deadline=deadline,
        streams=spec.stream,
        running=spec.running,
        shadows=() if spec.of_sample else service.catalogue.rollout.watching(spec.scorer),
        tools=spec.tools,
        second=spec.second,
    )
    record, begun = record_of(request), _begun_judgement(request, service, spec)
    prompts: list[_ReadPrompt] = []
    judgement: Judgement | None = None
    try:
        async with while_connected(request):
            # 2) Render the prompts, and compile the format of an answer.
            async with handle.deadline.enforced():
                prompts = await service.tokenizing.run(
                    spec.caller.name, spec.size, lambda: _read(spec, service)
                )
                await _compile_format(service, spec, handle)
            # 3) Read the prompts, and decode what is wanted before the response begins.
            handle.start(
                [prompt.token_ids for prompt in prompts], [prompt.standing for prompt in prompts]
            )
            # What is read again is held to its end, so that the first event of a stream has the
            # decision.
            risks_first = spec.stream and not spec.policy.recheck
            await (handle.risks() if risks_first else handle.answers())
            # Of a stream, too: is it a call of a tool?
            if any(job.result().held for job in handle.jobs):
                await handle.answers()
            # 4) Tell the observers before anything is sent.
            judgement = _judgement(begun, spec, handle, prompts)
            await observers.judged(service, judgement)
            return Reply(judgement, handle, service, record)
    except BaseException:
        handle.cancel()
        judgement = judgement or _judgement(begun, spec, handle, prompts)
        Reply(judgement, handle, service, record).end()
        raise


def _applied_policy(spec: ScoringRequest, service: Service) -> Policy:
    """Return the policy that judges: it may be stricter than the one that was chosen."""
    policy = spec.policy
    if spec.retrieval_of is not None and policy.action is Action.RETRIEVE:
        # A request that brings a passage must not be told to retrieve again.
        policy = replace(policy, action=Action.ABSTAIN, message=service.catalogue.abstain_message)
    return untemplated(spec.scorer, policy) if spec.violations else policy


async def _compile_format(service: Service, spec: ScoringRequest, handle: RequestHandle) -> None:
    sampling = handle.sampling
    engine = spec.scorer.engine
    caller = spec.caller.name
    if sampling is not None and (format := sampling.format) is not None:
        compiled = await service.tokenizing.compile(
            caller, lambda: engine.prepared(format, caller, handle.deadline.left)
        )
        handle.sampling = replace(sampling, format=compiled)


def _begun_judgement(
    request: Request, service: Service, spec: ScoringRequest
) -> Callable[..., Judgement]:
    """Return what makes the request's judgement, but for its prompts and violations."""
    record = record_of(request)
    named = spec.retrieval_of
    retrieval = None
    if named is not None:
        retrieval = service.retrievals.recall(spec.caller.name, named)
    return partial(
        Judgement,
        scorer=spec.scorer,
        policy=spec.policy,
        request_id=record.request_id,
        created=int(time.time()),
        route=canonical(record.path),
        caller=spec.caller,
        who=who_of(request),
        sampling=spec.sampling,
        streams=spec.stream,
        of_sample=spec.of_sample,
        monitor=service.catalogue.monitors.get(spec.scorer.bundle.reference),
        retrieval=retrieval,
    )


def _judgement(
    begun: Callable[..., Judgement],
    spec: ScoringRequest,
    handle: RequestHandle,
    prompts: Sequence[_ReadPrompt],
) -> Judgement:
    """Build the judgement of the prompts that are scored so far."""
    # 1) The prompts.  There are no jobs where the request ended before it was started.
    scored, unscored = list[JudgedPrompt](), dict[int, int]()
    for index, (job, prompt) in enumerate(zip(handle.jobs, prompts, strict=False)):
        if (report := job.report) is None:
            unscored[index] = job.submitted_ns
            continue
        judged = JudgedPrompt(
            index,
            report.before_answer() if spec.stream else report,
            token_ids=job.token_ids,
            timings=job.timings,
            submitted_ns=job.submitted_ns,
            shape=prompt.standing.shape,
            stored=prompt.stored,
        )
        scored.append(judged)
    # 2) What the request violates of what a guarantee assumes.
    manifest, shapes = spec.scorer.bundle.manifest, [prompt.standing.shape for prompt in prompts]
    violations = [*spec.violations, *guarantee.decoding_violations(manifest, spec.sampling)]
    violations += guarantee.shape_violations(manifest, shapes)
    if spec.kind == "messages":
        violations += guarantee.tool_violations(spec.prompts[0], spec.tools)
    if spec.second is not None:
        violations.append(guarantee.SECOND_VERDICT)
    return begun(prompts=tuple(scored), unscored=unscored, request_violations=tuple(violations))


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
