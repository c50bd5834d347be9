"""vLLM's ``generate``: the same request, judged at its answer onset and ended there if gated.

Every answer of the server comes through here.  On a route whose response cannot carry a risk, an answer passes only
under a policy that observes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import HTTPException
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from service.access.callers import Caller
from service.api.openai_request import Arguments
from service.engines.vllm.client import ProbeLease, times
from service.engines.vllm.engine import VllmEngine
from service.engines.vllm.wire import KEY
from service.errors import AuditUnavailable, HalluTracerError, NotReady
from service.judging.guarantee import NO_TEMPLATE, OTHER_ENDING, shape_departures
from service.policies.guard import Action, Decision, Policy
from service.scoring import RiskReport, Scorer
from service.serving.auditing import decision_line
from service.serving.choice import untemplated
from service.serving.monitor import digest_of
from service.serving.request_handle import Timings
from service.serving.state import ServiceState
from service.settings import env
from service.vllm_plugin.note import CURRENT, NO_PLACE, OURS, Note

Generate = Callable[..., AsyncGenerator[Any, None]]
XARGS = tuple(name for name in Arguments.model_fields if not name.endswith("retrieval_of"))  # our own service's alone


def judging_generate(generate: Generate, state: ServiceState, engine_of: Callable[[], VllmEngine]) -> Generate:
    """``generate`` with risks.  ``state`` may be loading, or have failed to; ``engine_of`` is called once ready."""

    def wrapped(prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        note, parameters, xargs = CURRENT.get() or Note(carries=False), sampling_params, {}
        if isinstance(parameters, SamplingParams):
            parameters = parameters.clone()
            xargs = _take_xargs(note, parameters)
        if not note.carries or parameters is sampling_params:
            if xargs or not observes(state, xargs):
                raise VLLMValidationError(NO_PLACE, parameter="hallutracer_policy")
            return generate(prompt, parameters, request_id, *args, **kwargs)
        place = note.add()
        try:
            scorer, policy = _resolve(state, xargs)
        except NotReady as error:
            if not observes(state, xargs):
                raise HTTPException(error.status, str(error)) from error
            note.unread = str(error)
            return generate(prompt, parameters, request_id, *args, **kwargs)
        if note.forges is not None and policy.action is not Action.OBSERVE:
            said = f"a message spells out the special token {note.forges!r}, which could end its turn; remove it"
            raise VLLMValidationError(said, parameter="messages")
        if note.moves and policy.action is not Action.OBSERVE and "rendering" not in state.settings.callers_may:
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
        note.scorer, note.policy, note.choices = scorer, policy, parameters.n
        note.monitor = state.monitors.get(scorer.bundle.reference)
        shapes = shape_departures(scorer.bundle.manifest, [note.shape(place)])
        note.departures = tuple(dict.fromkeys((*note.departures, *_departures(parameters), *rendering, *shapes)))
        judged = _JudgedPrompt(state, engine_of(), scorer, policy, note, place, parameters, request_id)
        return judged.run(lambda: generate(prompt, parameters, request_id, *args, **kwargs))

    return wrapped


@dataclass
class _JudgedPrompt:
    """One prompt of one request."""

    state: ServiceState
    engine: VllmEngine
    scorer: Scorer
    policy: Policy
    note: Note
    place: int
    parameters: Any
    request_id: str
    report: RiskReport | None = None
    prompt: bytes = b""  # its digest, for the drift monitor
    timings: Timings = field(default_factory=Timings)

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
                    if self.report is None and lease is not None:
                        self._judge(lease, output)
                        await self._audit()
                        if self.report is not None and self.report.decision is not Decision.CONTINUE:
                            yield _withheld(output, self.parameters.n, self.engine.end_token)
                            return
                    new = sum(len(one.token_ids) for one in output.outputs)
                    tokens = tokens + new if self.parameters.output_kind is RequestOutputKind.DELTA else new
                    yield output
        finally:
            if lease is not None:
                lease.release()
            if self.report is not None:
                self._account(self.report, tokens)

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
        try:
            result, _ = lease.prefill(output, len(output.prompt_token_ids or ()))
            self.prompt = digest_of(output.prompt_token_ids or ())
            cached = int(output.num_cached_tokens or 0)
            self.report = self.scorer.judge(result, self.policy, cached_tokens=cached)
        except HalluTracerError as error:
            self._unread(error)
            return
        self.timings = Timings(*times(output))
        self.note.reports[self.place] = self.report

    async def _audit(self) -> None:
        """Before anybody is told.  Raises HTTPException where the log is required and cannot be written."""
        if self.report is None or self.state.audit is None:
            return
        note, indexed = self.note, [(self.place, self.report)]
        line = decision_line(note.who, self.request_id, note.route, self.scorer, self.policy, indexed)
        try:
            await self.state.audit.decided(line)
        except AuditUnavailable as error:
            raise HTTPException(error.status, str(error)) from error

    def _unread(self, error: HalluTracerError) -> None:
        """Under a policy that only observes, the answer goes on without a risk; otherwise the request fails."""
        if self.policy.action is not Action.OBSERVE:
            raise error
        self.note.unread = str(error)

    def _account(self, report: RiskReport, tokens: int) -> None:
        model, reference = self.scorer.engine.identity.model, self.scorer.bundle.reference
        shape = self.note.shape(self.place)
        self.state.metrics.prompt(model, reference, report, self.timings, tokens, route=self.note.route, shape=shape)
        if self.note.monitor is not None:
            self.note.monitor.observe([report], [self.prompt])


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


def _resolve(state: ServiceState, xargs: dict[str, Any]) -> tuple[Scorer, Policy]:
    """The scorer and policy that apply.  Raises NotReady, and VLLMValidationError naming the argument at fault."""
    bundle, policy, threshold = (xargs.get(name) for name in XARGS)
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
        raise VLLMValidationError(f"{XARGS[2]} must be a number in [0, 1]", parameter=f"vllm_xargs.{XARGS[2]}")
    try:
        return state.choose(
            Caller(may=frozenset(state.settings.callers_may)),
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


def observes(state: ServiceState, xargs: dict[str, Any]) -> bool:
    """Whether the policy only observes: while the service is not ready, any other must not let an answer through."""
    own = state.settings.policy
    applied = [own, str(xargs.get(XARGS[1], own))]
    if "policy" in state.settings.callers_may:
        del applied[0]
    return all((policy := state.policies.get(name)) is not None and policy.action is Action.OBSERVE for name in applied)


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


def _departures(parameters: Any) -> tuple[str, ...]:
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
