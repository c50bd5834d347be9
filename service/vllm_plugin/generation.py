"""vLLM's ``generate``: the same request, judged at its answer onset and ended there if gated.

Every answer of the server comes through here.  On a route whose response cannot carry a risk, an answer passes only
under a policy that observes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import HTTPException
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from service.access.callers import Caller
from service.access.routes import canonical
from service.api.request_schema import Arguments
from service.engines.vllm.client import ProbeLease, times
from service.engines.vllm.engine import VllmEngine
from service.engines.vllm.wire import KEY
from service.errors import HalluTracerError, NotReady
from service.judging.guarantee import MEDIA, NO_TEMPLATE, OTHER_ENDING, shape_violations
from service.policies.guard import Action, Decision, Policy
from service.scoring import RiskReport, Scorer, called
from service.serving import observers
from service.serving.adapters import Adapters
from service.serving.catalogue import untemplated
from service.serving.judgement import AnswerEnd, JudgedPrompt, Judgement, PromptTimings
from service.serving.service import Service
from service.settings import env
from service.vllm_plugin.answers import Answer
from service.vllm_plugin.calls import MaybeCalls
from service.vllm_plugin.note import CURRENT, IN_BACKGROUND, NO_PLACE, OURS, Note

Generate = Callable[..., AsyncGenerator[Any, None]]
OWN = ("retrieval_of", "include")  # our own service's alone
XARGS = tuple(name for name in Arguments.model_fields if not name.endswith(OWN))


def judging_generate(
    generate: Generate, service: Service, engine_of: Callable[[], VllmEngine], adapters: Adapters
) -> Generate:
    """Return ``generate`` with risks.  ``service`` may be loading, or have failed; ``engine_of`` is for a ready one."""

    def wrapped(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        note = CURRENT.get() or Note(carries=False)
        try:
            return judged(note, prompt, sampling_params, *args, **kwargs)
        except VLLMValidationError as error:
            note.error = (400, str(error))
            raise
        except HTTPException as error:
            note.error = (error.status_code, error.detail)
            raise

    def judged(
        note: Note, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        parameters, xargs = sampling_params, dict[str, Any]()
        if isinstance(parameters, SamplingParams):
            parameters = parameters.clone()
            xargs = _take_xargs(note, parameters)
        adapter = kwargs.get("lora_request")

        def start() -> AsyncGenerator[Any, None]:
            return generate(prompt, parameters, request_id, *args, **kwargs)

        if not note.carries or parameters is sampling_params:
            if xargs or not observes(service, xargs):
                raise VLLMValidationError(NO_PLACE, parameter="hallutracer_policy")
            return start()
        place = note.add()
        try:
            base = service.ready.scorers[0]
            scorer, policy = _resolve(service, xargs, base if adapter is None else adapters.scorer(adapter))
            adapters.check(adapter, scorer)
        except HalluTracerError as error:
            if not observes(service, xargs):
                if isinstance(error, NotReady):
                    raise HTTPException(error.status, str(error)) from error
                raise VLLMValidationError(str(error), parameter="model") from error
            note.unread = str(error)
            return start()
        withholds = policy.action is not Action.OBSERVE
        if withholds and note.forges is not None:
            said = f"a message spells out the special token {note.forges!r}, which could end its turn; remove it"
            raise VLLMValidationError(said, parameter="messages")
        if withholds and note.moves and "rendering" not in service.settings.callers_may:
            said = f"{note.moves[0]!r} has the messages rendered otherwise than in training, where no risk is known; "
            said += f"leave it out, or have the operator allow it with {env('callers-may')}=rendering"
            raise VLLMValidationError(said, parameter=note.moves[0])
        if withholds and note.background:
            raise VLLMValidationError(IN_BACKGROUND, parameter="background")
        if note.beams:
            note.unread = "beam search runs many requests, none of which is the answer: its risk is not measured"
            if withholds:
                raise VLLMValidationError(note.unread, parameter="use_beam_search")
            return start()
        if (field := policy.reads_answers_for) and parameters.n != 1:
            said = f"policy {policy.name!r} has {field}, which reads one answer to a prompt: leave 'n' out"
            raise VLLMValidationError(said, parameter="n")
        if rendering := _rendering(note, scorer, prompt):
            policy = untemplated(scorer, policy)
        note.choices = parameters.n
        shapes = shape_violations(scorer.bundle.manifest, [note.shape(place)])
        note.violations = tuple(dict.fromkeys((*note.violations, *_violations(parameters), *rendering, *shapes)))
        same = partial(adapters.check, adapter, scorer)
        outputs = _judged(start, service, engine_of(), scorer, policy, note, place, parameters, request_id, same)
        return _reported(note, outputs)

    return wrapped


async def _reported(note: Note, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the outputs; an error of ours ends them as vLLM's servers know one."""
    try:
        async with aclosing(outputs):
            async for output in outputs:
                yield output
    except HalluTracerError as error:
        note.error = (error.status, str(error))
        raise HTTPException(error.status, str(error)) from error


async def _judged(
    start: Callable[[], AsyncGenerator[Any, None]], service: Service, engine: VllmEngine, scorer: Scorer,
    policy: Policy, note: Note, place: int, parameters: Any, request_id: str, same: Callable[[], None],
) -> AsyncGenerator[Any, None]:  # fmt: skip
    """Yield vLLM's outputs of one prompt; of a gated answer one, empty and finished.  Raises HalluTracerError."""
    lease: ProbeLease | None = None
    judgement: Judgement | None = None
    answer = Answer(scorer, policy, None, parameters.output_kind)
    tools = note.tools if parameters.n == 1 and policy.tools != "gate" else None
    calls: MaybeCalls | None = None  # while the answer is held because it may be calls of tools
    final = parameters.output_kind is RequestOutputKind.FINAL_ONLY  # as the caller reads it, whatever is seen here

    def unread(error: HalluTracerError) -> None:
        """Under a policy that only observes, the answer goes on without a risk; otherwise the request fails."""
        if policy.action is not Action.OBSERVE:
            raise error
        note.unread = str(error)

    def judge(lease: ProbeLease, output: Any) -> Judgement:
        same()
        token_ids = output.prompt_token_ids or ()
        result, _ = lease.prefill(output, len(token_ids))
        report = scorer.judge(result, policy, cached_tokens=int(output.num_cached_tokens or 0))
        monitor = service.catalogue.monitors.get(scorer.bundle.reference)
        prompt = JudgedPrompt(place, report, token_ids, PromptTimings(*times(output)), shape=note.shape(place))
        return Judgement(
            scorer=scorer, policy=policy, prompts=(prompt,), request_id=request_id, route=canonical(note.route),
            who=note.who, request_violations=note.violations, monitor=monitor,
        )  # fmt: skip

    async def told(judgement: Judgement) -> None:
        note.judgements[place] = judgement
        await observers.judged(service, judgement)  # AuditUnavailable, where the audit log is required

    def withheld(judgement: Judgement) -> bool:
        return judgement.reports[0].decision is not Decision.CONTINUE

    def with_report(judgement: Judgement, report: RiskReport) -> Judgement:
        return replace(judgement, prompts=(replace(judgement.prompts[0], report=report),))

    try:
        lease = await _prepare(engine, scorer, policy, parameters, may_call=tools is not None)
        note.reads_answers = lease.directive.answer is not None
    except HalluTracerError as error:
        unread(error)
    try:
        async with aclosing(start()) as outputs:
            async for output in outputs:
                if judgement is None and lease is not None:
                    try:
                        judgement = judge(lease, output)
                    except HalluTracerError as error:
                        unread(error)
                    else:
                        answer = Answer(scorer, policy, lease, parameters.output_kind)
                        if tools is not None and (withheld(judgement) or policy.reads_answers_for):
                            calls = MaybeCalls(tools, parameters.output_kind)
                        elif not policy.recheck or withheld(judgement):
                            await told(judgement)
                        if withheld(judgement) and calls is None:
                            yield _withheld(output, parameters.n, engine.end_token)
                            return
                if judgement is None:
                    if output.finished or not final:
                        yield output
                    continue
                arrived = [output]
                if calls is not None:
                    calls.add(output)
                    if calls.undecided:
                        continue
                    if calls.are_calls:
                        held = replace(judgement.reports[0], held=withheld(judgement))
                        judgement = with_report(judgement, called(held))
                    if calls.are_calls or withheld(judgement) or not policy.recheck:
                        await told(judgement)
                    if withheld(judgement):
                        yield _withheld(output, parameters.n, engine.end_token)
                        return
                    arrived = calls.outputs
                    if calls.are_calls:
                        for one in arrived:
                            if one.finished or not final:
                                yield one
                        return
                    calls = None
                for one in arrived:
                    shown = answer.add(judgement.reports[0], one)
                    note.stopped = answer.completion is not None
                    if answer.over:
                        report = scorer.rechecked(judgement.reports[0], policy, answer.risk)
                        judgement = with_report(judgement, report)
                        note.judgements[place], note.answers[place] = judgement, answer.risk
                        if policy.recheck:
                            await told(judgement)
                        if withheld(judgement):
                            yield _withheld(one, parameters.n, engine.end_token)
                            return
                    for each in shown:
                        if each.finished or not final:
                            yield each
                    if answer.completion is not None:
                        return
    finally:
        if lease is not None:
            lease.release()
        if judgement is not None:
            risk = answer.risk if answer.over else None
            tokens = answer.tokens if calls is None else calls.tokens
            observers.ended(service, judgement, [AnswerEnd(tokens, completion=answer.completion, risk=risk)])


async def _prepare(
    engine: VllmEngine, scorer: Scorer, policy: Policy, parameters: Any, *, may_call: bool
) -> ProbeLease:
    """Hold the probe in its slot and put the directive into the request.

    ``may_call``: whether a withheld answer is decoded for as long as it may be a call of a tool."""
    gate = scorer.gate(policy)
    # Elsewhere an end token as the first token would not end the request, and it is ended from here.
    ends = not (may_call or parameters.ignore_eos or parameters.min_tokens or parameters.structured_outputs)
    in_engine = gate if ends else None
    lease = await engine.lease(
        scorer.probes, first_token=scorer.needs_first_token, gate=in_engine,
        answer_probes=scorer.answer_probes if parameters.n == 1 else None,
    )  # fmt: skip
    parameters.extra_args = {**(parameters.extra_args or {}), **lease.directive.encode()}
    final, ends_here = parameters.output_kind is RequestOutputKind.FINAL_ONLY, gate is not None and in_engine is None
    if final and parameters.n == 1 and (ends_here or lease.directive.answer is not None):
        parameters.output_kind = RequestOutputKind.CUMULATIVE  # each token has to be seen here
    return lease


def _take_xargs(note: Note, parameters: Any) -> dict[str, Any]:
    """Take our arguments out of ``vllm_xargs``, and a directive that a caller wrote.

    Raises VLLMValidationError for an argument that looks like ours and would have no effect."""
    given = dict(note.xargs or parameters.extra_args or {})
    extra = {name: value for name, value in given.items() if name not in XARGS and name != KEY}
    parameters.extra_args = extra or None
    for name in (*extra, *note.misplaced):
        if OURS.match(name):
            said = f"{name!r} has no effect here: 'vllm_xargs' takes {', '.join(XARGS)}"
            raise VLLMValidationError(said, parameter=name)
    return {name: given[name] for name in XARGS if name in given}


def _resolve(service: Service, xargs: dict[str, Any], own: Scorer) -> tuple[Scorer, Policy]:
    """Return the scorer and policy that apply.  Raises NotReady, and VLLMValidationError naming the argument."""
    bundle, policy, threshold = (xargs.get(name) for name in XARGS)
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
        raise VLLMValidationError(f"{XARGS[2]} must be a number in [0, 1]", parameter=f"vllm_xargs.{XARGS[2]}")
    try:
        return service.ready.choose(
            Caller(may=frozenset(service.settings.callers_may)), "", model=own.engine.identity.model,
            bundle=None if bundle is None else str(bundle), policy=None if policy is None else str(policy),
            threshold=threshold,
        )  # fmt: skip
    except NotReady:
        raise
    except HalluTracerError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


def observes(service: Service, xargs: dict[str, Any]) -> bool:
    """Return whether the policy only observes; any other must let nothing through while the service is not ready."""
    own = service.settings.policy
    applied = [own, str(xargs.get(XARGS[1], own))]
    if "policy" in service.settings.callers_may:
        del applied[0]
    named = service.catalogue.policies.named
    return all((policy := named.get(name)) is not None and policy.action is Action.OBSERVE for name in applied)


def _rendering(note: Note, scorer: Scorer, prompt: Any) -> tuple[str, ...]:
    """Return how the prompt departs from what the chat template makes of a question; nothing without a template."""
    if isinstance(prompt, Mapping) and prompt.get("mm_placeholders"):
        return (MEDIA,)
    if scorer.prompt_format != "chat":
        return ()
    if not note.templated:
        return (NO_TEMPLATE,)
    if note.moves or note.answered:
        return (*(f"rendering: the request's own {name!r}" for name in note.moves), *note.answered)
    ids, ending = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None, scorer.chat_ending
    return () if ids and tuple(ids[max(0, len(ids) - len(ending)) :]) == ending else (OTHER_ENDING,)


def _violations(parameters: Any) -> tuple[str, ...]:
    """Return how the answer departs from a greedy one, on which guarantees are calibrated."""
    changed = [f"temperature {parameters.temperature:g}"] if parameters.temperature else []
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
    changed += [name for name, value in neutral.items() if getattr(parameters, name) != value]
    names = ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "structured_outputs")
    changed += [name for name in (*names, "ignore_eos") if getattr(parameters, name)]
    return (f"decoding: not plainly greedy ({', '.join(changed)})",) if changed else ()


def _withheld(output: Any, choices: int, end_token: int | None) -> Any:
    """Return the output with an end token instead of each choice's answer: vLLM's streams skip one without a token."""
    from vllm.logprobs import Logprob

    token, first = end_token or 0, output.outputs[0]
    logprobs = None if first.logprobs is None else [{token: Logprob(0.0, 1, "")}]  # nothing of the first token's
    empty = replace(first, text="", token_ids=[token], logprobs=logprobs, cumulative_logprob=None,
                    finish_reason="stop", stop_reason=None)  # fmt: skip
    output.outputs, output.finished = [replace(empty, index=index) for index in range(choices)], True
    return output
