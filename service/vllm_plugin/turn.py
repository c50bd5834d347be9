"""One prompt of vLLM's server: judged at its first output, held where it may be a call, ended where withheld."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from vllm.sampling_params import RequestOutputKind

from probes_store.records import Decoding
from service.access.routes import canonical
from service.engines.vllm.client import ProbeLease, times
from service.engines.vllm.engine import VllmEngine
from service.errors import HalluTracerError
from service.judging.decoding import departure
from service.judging.guarantee import (
    OTHER_RENDERING,
    UNKNOWN,
    Shape,
    Standing,
    shape_of,
    shape_unlike_training,
    shape_violations,
)
from service.policies.guard import Action, Decision, Policy
from service.scoring import RiskReport, Scorer, called
from service.serving import observers
from service.serving.catalogue import untemplated
from service.serving.judgement import AnswerEnd, JudgedPrompt, Judgement, PromptTimings
from service.serving.service import Service
from service.vllm_plugin.answers import Answer
from service.vllm_plugin.calls import MaybeCalls
from service.vllm_plugin.note import Note
from service.vllm_plugin.rendering import is_rendering


class Turn:
    """The outputs of one prompt, and what becomes of them."""

    def __init__(
        self, service: Service, engine: VllmEngine, scorer: Scorer, policy: Policy, note: Note, place: int,
        parameters: Any, request_id: str, same: Callable[[], None], rendering: tuple[str, ...], *, compared: bool,
    ) -> None:  # fmt: skip
        """``place``: of the prompt in its request.  ``same`` raises where the adapter is another one by now.

        ``rendering``: how the prompt is known to be rendered otherwise than training's; ``compared``: whether its token
        ids are to tell, too."""
        self._service, self._engine, self._scorer, self._policy = service, engine, scorer, policy
        self._note, self._place, self._request_id, self._same = note, place, request_id, same
        self._rendering, self._compared, self._standing = rendering, compared, UNKNOWN
        self._parameters, self._choices = parameters, parameters.n
        # As the caller reads it: what is seen here is cumulative where each token has to be seen.
        self._final = parameters.output_kind is RequestOutputKind.FINAL_ONLY
        self._tools = note.tools if parameters.n == 1 and policy.tools != "gate" else None
        self._lease: ProbeLease | None = None
        self._judgement: Judgement | None = None
        self._answer = Answer(scorer, policy, None, parameters.output_kind)
        self._calls: MaybeCalls | None = None  # while the answer is held because it may be calls of tools
        self._over = False

    async def outputs(self, start: Callable[[], AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs; of a gated answer one, empty and finished.  Raises HalluTracerError."""
        try:
            self._lease = await self._prepare()
            self._note.reads_answers = self._lease.directive.answer is not None
        except HalluTracerError as error:
            self._unread(error)
        try:
            async with aclosing(start()) as outputs:
                async for output in outputs:
                    for shown in await self._shown(output):
                        if shown.finished or not self._final:
                            yield shown
                    if self._over:
                        return
        finally:
            if self._lease is not None:
                self._lease.release()
            if self._judgement is not None:
                risk = self._answer.risk if self._answer.over else None
                tokens = self._answer.tokens if self._calls is None else self._calls.tokens
                end = AnswerEnd(tokens, completion=self._answer.completion, risk=risk)
                observers.ended(self._service, self._judgement, [end])

    async def _prepare(self) -> ProbeLease:
        """Hold the probe in its slot and put the directive into the request."""
        await self._check_rendering()
        scorer, parameters = self._scorer, self._parameters
        gate = scorer.gate(self._policy, self._standing)
        # The engine ends an answer by an end token in place of the first.  With these options that does not end it, and
        # what may be a call must not be ended so early: both are ended from here.
        ends = not (parameters.ignore_eos or parameters.min_tokens or parameters.structured_outputs)
        in_engine = gate if ends and self._tools is None else None
        lease = await self._engine.lease(
            scorer.probes, first_token=scorer.needs_first_token, gate=in_engine,
            answer_probes=scorer.answer_probes if self._choices == 1 else None,
        )  # fmt: skip
        parameters.extra_args = {**(parameters.extra_args or {}), **lease.directive.encode()}
        ends_here = gate is not None and in_engine is None
        if self._final and self._choices == 1 and (ends_here or lease.directive.answer is not None):
            parameters.output_kind = RequestOutputKind.CUMULATIVE  # each token has to be seen here
        return lease

    async def _check_rendering(self) -> None:
        """Note how the prompt departs from training's, where a guarantee or a gate depends on it."""
        manifest, note = self._scorer.bundle.manifest, self._note
        matters = manifest.guarantee is not None or self._policy.action.withholds
        # A long chat takes its time, which the other requests of this event loop should not wait for.
        other, shape = await asyncio.to_thread(self._read_chat, matters=matters)
        if other:
            self._rendering = (*self._rendering, OTHER_RENDERING)
        if self._rendering:
            self._policy = untemplated(self._scorer, self._policy)
        self._standing = Standing(
            shape, other_rendering=other and "rendering" not in self._service.settings.callers_may
        )
        shapes = shape_violations(manifest, [shape])
        note.violations = tuple(dict.fromkeys((*note.violations, *self._rendering, *shapes)))

    def _read_chat(self, *, matters: bool) -> tuple[bool, Shape | None]:
        """Return whether the prompt is another than the template makes of its messages, and the messages' shape.

        Of messages that are rendered otherwise than training's, or hold more than text, a shape is only known where it
        is one that no training had: nothing of theirs passes as small talk."""
        note, place, refusals = self._note, self._place, self._service.catalogue.refusals
        if matters and not note.templated:  # the caller's text or ids may be a chat as the template writes it
            standing = self._scorer.standing_of_ids(note.prompts[place], refusals)
            return standing.other_rendering, standing.shape
        chat = note.chats[place]
        other = matters and self._compared and not is_rendering(self._engine, chat)
        if other:
            note.moved.add(place)
        if (turns := note.conversation(place)) is not None:
            return other, shape_of(turns, refusals)
        shape = None if chat is None else shape_of(chat.messages, refusals)
        if shape is None or shape_unlike_training(self._scorer.bundle.manifest, shape) is None:
            return other, None
        return other, shape

    def _unread(self, error: HalluTracerError) -> None:
        """Under a policy that only observes, the answer goes on without a risk; otherwise the request fails."""
        if self._policy.action is not Action.OBSERVE:
            raise error
        self._note.unread = str(error)

    async def _shown(self, output: Any) -> Sequence[Any]:
        """Return what the caller may see by now."""
        if self._judgement is None and self._lease is not None:
            try:
                self._judgement = self._judge(self._lease, output)
            except HalluTracerError as error:
                self._unread(error)
            else:
                await self._begin()
                if self._withheld and self._calls is None:
                    return [self._withhold(output)]
        if self._judgement is None:
            return [output]
        arrived = [output]
        if self._calls is not None:
            self._calls.add(output)
            if self._calls.undecided:
                return []
            arrived = self._calls.outputs
            await self._decide(self._calls)
            if self._withheld:
                return [self._withhold(output)]
        return arrived if self._over else await self._read(arrived)

    async def _read(self, arrived: Sequence[Any]) -> Sequence[Any]:
        """Read an answer that is no call, and return what may be shown of it."""
        shown = list[Any]()
        for one in arrived:
            shown += self._answer.add(self._report, one)
            self._note.stopped = self._over = self._answer.completion is not None
            if self._answer.over:
                await self._recheck()
                if self._withheld:
                    return [self._withhold(one)]
            if self._over:
                break
        return shown

    def _judge(self, lease: ProbeLease, output: Any) -> Judgement:
        self._same()
        token_ids = output.prompt_token_ids or ()
        result, _ = lease.prefill(output, len(token_ids))
        cached = int(output.num_cached_tokens or 0)
        report = self._scorer.judge(result, self._policy, standing=self._standing, cached_tokens=cached)
        decoding = Decoding(self._parameters.temperature, self._parameters.top_p)
        report = replace(report, decoding=departure(self._scorer.bundle.manifest, decoding))
        timings = PromptTimings(*times(output))
        prompt = JudgedPrompt(self._place, report, token_ids, timings, shape=self._standing.shape)
        return Judgement(
            scorer=self._scorer, policy=self._policy, prompts=(prompt,), request_id=self._request_id,
            route=canonical(self._note.route), who=self._note.who, request_violations=self._note.violations,
            monitor=self._service.catalogue.monitors.get(self._scorer.bundle.reference),
        )  # fmt: skip

    async def _begin(self) -> None:
        """Tell what was decided before the answer, where nothing after it decides."""
        kind = self._parameters.output_kind
        self._answer = Answer(self._scorer, self._policy, self._lease, kind)
        if self._tools is not None and (self._withheld or self._policy.reads_answers_for):
            self._calls = MaybeCalls(self._tools, kind)
        elif not self._policy.recheck or self._withheld:
            await self._tell()

    async def _decide(self, calls: MaybeCalls) -> None:
        """Let an answer through that is nothing but calls; treat any other as one without tools."""
        if calls.are_calls:
            self._replace(called(replace(self._report, held=self._withheld)))
        if calls.are_calls or self._withheld or not self._policy.recheck:
            await self._tell()
        if calls.are_calls:
            self._over = True
        elif not self._withheld:
            self._calls = None

    async def _recheck(self) -> None:
        """Judge an answer that is over by what was read of it."""
        self._replace(self._scorer.rechecked(self._report, self._policy, self._answer.risk))
        self._note.judgements[self._place], self._note.answers[self._place] = self._judged, self._answer.risk
        if self._policy.recheck:
            await self._tell()

    async def _tell(self) -> None:
        """Raises AuditUnavailable, where the audit log is required."""
        self._note.judgements[self._place] = self._judged
        await observers.judged(self._service, self._judged)

    @property
    def _judged(self) -> Judgement:
        assert self._judgement is not None
        return self._judgement

    @property
    def _report(self) -> RiskReport:
        return self._judged.reports[0]

    @property
    def _withheld(self) -> bool:
        return self._report.decision is not Decision.CONTINUE

    def _replace(self, report: RiskReport) -> None:
        self._judgement = replace(self._judged, prompts=(replace(self._judged.prompts[0], report=report),))

    def _withhold(self, output: Any) -> Any:
        """Return the output with an end token as each choice's answer: vLLM's streams skip one without a token."""
        from vllm.logprobs import Logprob

        self._over = True
        token, first = self._engine.end_token or 0, output.outputs[0]
        logprobs = None if first.logprobs is None else [{token: Logprob(0.0, 1, "")}]  # nothing of the first token's
        empty = replace(first, text="", token_ids=[token], logprobs=logprobs, cumulative_logprob=None,
                        finish_reason="stop", stop_reason=None)  # fmt: skip
        output.outputs, output.finished = [replace(empty, index=index) for index in range(self._choices)], True
        return output
