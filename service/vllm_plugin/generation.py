"""vLLM's ``generate``: the same request, judged at its answer onset and ended there if gated.

Every answer of the server comes through here.  On a route whose response cannot carry a risk, an answer passes only
under a policy that observes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
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
from service.errors import AuditUnavailable, HalluTracerError, NotReady
from service.judging.guarantee import NO_TEMPLATE, OTHER_ENDING, shape_violations
from service.policies.guard import Action, Decision, Policy
from service.scoring import Scorer
from service.serving import observers
from service.serving.catalogue import untemplated
from service.serving.judgement import AnswerEnd, JudgedPrompt, Judgement, PromptTimings
from service.serving.service import Service
from service.settings import env
from service.vllm_plugin.middleware import CURRENT, NO_PLACE, OURS, Note

Generate = Callable[..., AsyncGenerator[Any, None]]
XARGS = tuple(name for name in Arguments.model_fields if not name.endswith("retrieval_of"))  # our own service's alone


def judging_generate(generate: Generate, service: Service, engine_of: Callable[[], VllmEngine]) -> Generate:
    """Return ``generate`` with risks.  ``service`` may be loading, or have failed; ``engine_of`` is for a ready one."""

    def wrapped(prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        note, parameters, xargs = CURRENT.get() or Note(carries=False), sampling_params, {}
        if isinstance(parameters, SamplingParams):
            parameters = parameters.clone()
            xargs = _take_xargs(note, parameters)
        if not note.carries or parameters is sampling_params:
            if xargs or not observes(service, xargs):
                raise VLLMValidationError(NO_PLACE, parameter="hallutracer_policy")
            return generate(prompt, parameters, request_id, *args, **kwargs)
        place = note.add()
        try:
            scorer, policy = _resolve(service, xargs)
        except NotReady as error:
            if not observes(service, xargs):
                raise HTTPException(error.status, str(error)) from error
            note.unread = str(error)
            return generate(prompt, parameters, request_id, *args, **kwargs)
        if note.forges is not None and policy.action is not Action.OBSERVE:
            said = f"a message spells out the special token {note.forges!r}, which could end its turn; remove it"
            raise VLLMValidationError(said, parameter="messages")
        if note.moves and policy.action is not Action.OBSERVE and "rendering" not in service.settings.callers_may:
            said = f"{note.moves[0]!r} has the messages rendered otherwise than in training, where no risk is known; "
            said += f"leave it out, or have the operator allow it with {env('callers-may')}=rendering"
            raise VLLMValidationError(said, parameter=note.moves[0])
        if note.beams:
            note.unread = "beam search runs many requests, none of which is the answer: its risk is not measured"
            if policy.action is not Action.OBSERVE:
                raise VLLMValidationError(note.unread, parameter="use_beam_search")
            return generate(prompt, parameters, request_id, *args, **kwargs)
        rendering = _rendering(note, scorer, prompt)
        if rendering:
            policy = untemplated(scorer, policy)
        note.choices = parameters.n
        shapes = shape_violations(scorer.bundle.manifest, [note.shape(place)])
        note.violations = tuple(dict.fromkeys((*note.violations, *_violations(parameters), *rendering, *shapes)))
        judged = _VllmPrompt(service, engine_of(), scorer, policy, note, place, parameters, request_id)
        return judged.run(lambda: generate(prompt, parameters, request_id, *args, **kwargs))

    return wrapped


@dataclass
class _VllmPrompt:
    """One prompt of one request."""

    service: Service
    engine: VllmEngine
    scorer: Scorer
    policy: Policy
    note: Note
    place: int
    parameters: Any
    request_id: str
    judgement: Judgement | None = None

    async def run(self, start: Callable[[], AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
        """vLLM's outputs; of a gated answer one, empty and finished."""
        try:
            lease = await self._prepare()
        except HalluTracerError as error:
            self._unread(error)
            lease = None
        tokens = 0
        try:
            async with aclosing(start()) as outputs:
                async for output in outputs:
                    if self.judgement is None and lease is not None:
                        self._judge(lease, output)
                        if self.judgement is not None:
                            await self._tell(self.judgement)
                            if self.judgement.reports[0].decision is not Decision.CONTINUE:
                                yield _withheld(output, self.parameters.n, self.engine.end_token)
                                return
                    new = sum(len(one.token_ids) for one in output.outputs)
                    tokens = tokens + new if self.parameters.output_kind is RequestOutputKind.DELTA else new
                    yield output
        finally:
            if lease is not None:
                lease.release()
            if self.judgement is not None:
                observers.ended(self.service, self.judgement, [AnswerEnd(tokens)])

    async def _prepare(self) -> ProbeLease:
        """Hold the probe in its slot and put the directive into the request."""
        parameters = self.parameters
        gate = self.scorer.gate(self.policy)
        in_engine = gate is not None and _ends_at_an_end_token(parameters)
        lease = await self.engine.lease(
            self.scorer.probes,
            first_token=self.scorer.needs_first_token,
            gate=gate if in_engine else None,
        )
        parameters.extra_args = {**(parameters.extra_args or {}), **lease.directive.encode()}
        final = parameters.output_kind is RequestOutputKind.FINAL_ONLY
        if gate is not None and not in_engine and final and parameters.n == 1:
            parameters.output_kind = RequestOutputKind.CUMULATIVE  # to end it from here, its first token has to be seen
        return lease

    def _judge(self, lease: ProbeLease, output: Any) -> None:
        note, token_ids = self.note, output.prompt_token_ids or ()
        try:
            result, _ = lease.prefill(output, len(token_ids))
            report = self.scorer.judge(result, self.policy, cached_tokens=int(output.num_cached_tokens or 0))
        except HalluTracerError as error:
            self._unread(error)
            return
        monitor = self.service.catalogue.monitors.get(self.scorer.bundle.reference)
        timings, shape = PromptTimings(*times(output)), note.shape(self.place)
        prompt = JudgedPrompt(self.place, report, token_ids, timings, shape=shape)
        note.judgements[self.place] = self.judgement = Judgement(
            scorer=self.scorer,
            policy=self.policy,
            prompts=(prompt,),
            request_id=self.request_id,
            route=canonical(note.route),
            who=note.who,
            request_violations=note.violations,
            monitor=monitor,
            bundle_violations=() if monitor is None else monitor.reasons,
        )

    async def _tell(self, judgement: Judgement) -> None:
        """Raise HTTPException where the audit log is required and cannot be written."""
        try:
            await observers.judged(self.service, judgement)
        except AuditUnavailable as error:
            raise HTTPException(error.status, str(error)) from error

    def _unread(self, error: HalluTracerError) -> None:
        """Under a policy that only observes, the answer goes on without a risk; otherwise the request fails."""
        if self.policy.action is not Action.OBSERVE:
            raise error
        self.note.unread = str(error)


def _take_xargs(note: Note, parameters: Any) -> dict[str, Any]:
    """Take our arguments out of ``vllm_xargs``; a directive that a caller wrote is dropped.

    Raises VLLMValidationError for an argument that looks like ours and would have no effect.
    """
    given = dict(note.xargs or parameters.extra_args or {})
    extra = {name: value for name, value in given.items() if name not in XARGS and name != KEY}
    parameters.extra_args = extra or None
    for name in (*extra, *note.misplaced):
        if OURS.match(name):
            raise VLLMValidationError(
                f"{name!r} has no effect here: 'vllm_xargs' takes {', '.join(XARGS)}", parameter=name
            )
    return {name: given[name] for name in XARGS if name in given}


def _resolve(service: Service, xargs: dict[str, Any]) -> tuple[Scorer, Policy]:
    """The scorer and policy that apply.  Raises NotReady, and VLLMValidationError naming the argument at fault."""
    bundle, policy, threshold = (xargs.get(name) for name in XARGS)
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
        raise VLLMValidationError(f"{XARGS[2]} must be a number in [0, 1]", parameter=f"vllm_xargs.{XARGS[2]}")
    try:
        return service.ready.choose(
            Caller(may=frozenset(service.settings.callers_may)),
            "",
            bundle=None if bundle is None else str(bundle),
            model=None,
            policy=None if policy is None else str(policy),
            threshold=threshold,
        )
    except NotReady:
        raise
    except HalluTracerError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


def observes(service: Service, xargs: dict[str, Any]) -> bool:
    """Whether the policy only observes: while the service is not ready, any other must not let an answer through."""
    own = service.settings.policy
    applied = [own, str(xargs.get(XARGS[1], own))]
    if "policy" in service.settings.callers_may:
        del applied[0]
    named = service.catalogue.policies.named
    return all((policy := named.get(name)) is not None and policy.action is Action.OBSERVE for name in applied)


def _rendering(note: Note, scorer: Scorer, prompt: Any) -> tuple[str, ...]:
    """How the prompt departs from what the chat template makes of a question; nothing where training used none."""
    if scorer.prompt_format != "chat":
        return ()
    if not note.templated:
        return (NO_TEMPLATE,)
    if note.moves or note.answered:
        return (*(f"rendering: the request's own {name!r}" for name in note.moves), *note.answered)
    ids, ending = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None, scorer.chat_ending
    return () if ids and tuple(ids[max(0, len(ids) - len(ending)) :]) == ending else (OTHER_ENDING,)


def _violations(parameters: Any) -> tuple[str, ...]:
    """How the answer departs from a greedy one, on which guarantees are calibrated."""
    changed = [f"temperature {parameters.temperature:g}"] if parameters.temperature else []
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
    changed += [name for name, value in neutral.items() if getattr(parameters, name) != value]
    names = ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "structured_outputs")
    changed += [name for name in (*names, "ignore_eos") if getattr(parameters, name)]
    return (f"decoding: not plainly greedy ({', '.join(changed)})",) if changed else ()


def _ends_at_an_end_token(parameters: Any) -> bool:
    """Whether an end token as the first token would end the request; otherwise it is ended from here."""
    return not (parameters.ignore_eos or parameters.min_tokens or parameters.structured_outputs)


def _withheld(output: Any, choices: int, end_token: int | None) -> Any:
    """The same output without any token of the answer, for each of a request's choices.

    It holds an end token without text, because vLLM's streams skip an output that has no token at all.
    """
    from vllm.logprobs import Logprob

    token, first = end_token or 0, output.outputs[0]
    logprobs = None if first.logprobs is None else [{token: Logprob(0.0, 1, "")}]  # nothing of the first token's
    output.outputs = [
        replace(
            first,
            index=index,
            text="",
            token_ids=[token],
            logprobs=logprobs,
            cumulative_logprob=None,
            finish_reason="stop",
            stop_reason=None,
        )
        for index in range(choices)
    ]
    output.finished = True
    return output
