"""One prompt of vLLM's server: it is judged at its first output, and drives a turn by all of
them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
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
from service.policies.guard import Action, Policy
from service.scoring import RiskReport, Scorer, ended_report
from service.serving import observers
from service.serving.catalogue import untemplated
from service.serving.judgement import AnswerEnd, JudgedPrompt, Judgement, PromptTimings
from service.serving.service import Service
from service.turn import Ended, Event, Phase, Turn
from service.vllm_plugin.answers import AnswerOutputs, AnswerReader
from service.vllm_plugin.note import Note
from service.vllm_plugin.rendering import is_rendering


@dataclass(eq=False)
class TurnDriver:
    """The outputs of one prompt: it drives the prompt's turn by them, and shows what the turn
    shows."""

    service: Service
    engine: VllmEngine
    scorer: Scorer
    policy: Policy
    note: Note
    index: int  # of the prompt in its request
    parameters: Any  # vLLM's
    request_id: str
    same: Callable[[], None]  # raises where the adapter is another one by now
    rendering: tuple[str, ...]  # how it is known to be rendered otherwise than training's
    compared: bool = field(kw_only=True)  # whether its token ids are to tell, too

    def __post_init__(self) -> None:
        parameters = self.parameters
        self._choices = parameters.n
        # As the caller reads it: what is seen here is cumulative where each token has to be seen.
        self._final = parameters.output_kind is RequestOutputKind.FINAL_ONLY
        calls = parameters.n == 1 and self.policy.tools != "gate"
        self._tools = self.note.tools if calls else None
        self._standing = UNKNOWN
        self._lease: ProbeLease | None = None  # None: the prompt is not read
        self._begun: _Begun | None = None

    async def outputs(
        self, start: Callable[[], AsyncGenerator[Any, None]]
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs, as far as the turn shows them.  Raises HalluTracerError."""
        try:
            self._lease = await self._prepare()
            self.note.reads_answers = self._lease.directive.answer is not None
        except HalluTracerError as error:
            self._unread(error)
        reads = self._lease is not None
        try:
            async with aclosing(start()) as outputs:
                async for output in outputs:
                    ended = output.finished
                    if self._begun is None and reads:
                        reads = self._judge(output)
                    if self._begun is None:
                        if ended or not self._final:
                            yield output
                        continue
                    for shown in await self._shown(self._begun, output):
                        yield shown
                    if self._begun.turn.over and not ended:
                        return
        finally:
            if self._lease is not None:
                self._lease.release()
            if self._begun is not None:
                end = AnswerEnd.of(self._begun.report, self._begun.outputs.tokens)
                observers.ended(self.service, self._begun.judgement, [end])

    async def _prepare(self) -> ProbeLease:
        """Hold the probe in its slot and put the directive into the request."""
        await self._check_rendering()
        scorer, parameters = self.scorer, self.parameters
        gate = scorer.gate(self.policy, self._standing)
        # The engine ends an answer by an end token in place of the first. With these options that
        # does not end it, and what may be a call must not be ended so early: both are ended from
        # here.
        ends = not (parameters.ignore_eos or parameters.min_tokens or parameters.structured_outputs)
        in_engine = gate if ends and self._tools is None else None
        lease = await self.engine.lease(
            scorer.probes,
            first_token=scorer.needs_first_token,
            gate=in_engine,
            answer_probes=scorer.answer_probes if self._choices == 1 else None,
        )
        parameters.extra_args = {**(parameters.extra_args or {}), **lease.directive.encode()}
        ends_here = gate is not None and in_engine is None
        if self._final and self._choices == 1 and (ends_here or lease.directive.answer is not None):
            parameters.output_kind = RequestOutputKind.CUMULATIVE  # each token has to be seen here
        return lease

    async def _check_rendering(self) -> None:
        """Note how the prompt departs from training's, where a guarantee or a gate depends on
        it."""
        manifest, note = self.scorer.bundle.manifest, self.note
        matters = manifest.guarantee is not None or self.policy.action.withholds
        # A long chat takes its time, which the other requests of this event loop should not wait
        # for.
        differs, shape = await asyncio.to_thread(self._read_chat, matters=matters)
        if differs:
            self.rendering = (*self.rendering, OTHER_RENDERING)
        if self.rendering:
            self.policy = untemplated(self.scorer, self.policy)
        self._standing = Standing(
            shape, other_rendering=differs and "rendering" not in self.service.settings.callers_may
        )
        shapes = shape_violations(manifest, [shape])
        note.violations = tuple(dict.fromkeys((*note.violations, *self.rendering, *shapes)))

    def _read_chat(self, *, matters: bool) -> tuple[bool, Shape | None]:
        """Return whether the prompt is another than the template makes of its messages, and the
        messages' shape.

        Of messages that are rendered otherwise than training's, or hold more than text, a shape is
        only known where it is one that no training had: nothing of theirs passes as small talk."""
        note = self.note
        index = self.index
        refusals = self.service.catalogue.refusals
        if matters and not note.templated:
            # the caller's text or ids may be a chat as the template writes it
            standing = self.scorer.standing_of_ids(note.prompts[index], refusals)
            return standing.other_rendering, standing.shape
        chat = note.chats[index]
        differs = matters and self.compared and not is_rendering(self.engine, chat)
        if differs:
            note.moved.add(index)
        if (turns := note.conversation(index)) is not None:
            return differs, shape_of(turns, refusals)
        shape = None if chat is None else shape_of(chat.messages, refusals)
        if shape is None or shape_unlike_training(self.scorer.bundle.manifest, shape) is None:
            return differs, None
        return differs, shape

    def _unread(self, error: HalluTracerError) -> None:
        """Under a policy that only observes, the answer goes on without a risk; otherwise the
        request fails."""
        if self.policy.action is not Action.OBSERVE:
            raise error
        self.note.unread = str(error)

    def _judge(self, output: Any) -> bool:
        """Begin the turn with the first output, which has the prefill; return whether its prompt
        could be judged."""
        assert self._lease is not None
        try:
            judgement = self._judgement(self._lease, output)
        except HalluTracerError as error:
            self._unread(error)
            return False
        report = judgement.reports[0]
        reader = AnswerReader(self.scorer, self.policy, self._lease)
        self._begun = _Begun(
            judgement,
            Turn(self.policy, report.verdict, applies=report.context.applies, tools=self._tools),
            reader,
            AnswerOutputs(reader, self.parameters, self.engine.end_token or 0),
        )
        return True

    def _judgement(self, lease: ProbeLease, output: Any) -> Judgement:
        self.same()
        token_ids = output.prompt_token_ids or ()
        result, _ = lease.prefill(output, len(token_ids))
        cached = int(output.num_cached_tokens or 0)
        report = self.scorer.judge(
            result, self.policy, standing=self._standing, cached_tokens=cached
        )
        decoding = Decoding(self.parameters.temperature, self.parameters.top_p)
        report = replace(report, decoding=departure(self.scorer.bundle.manifest, decoding))
        timings = PromptTimings(*times(output))
        prompt = JudgedPrompt(self.index, report, token_ids, timings, shape=self._standing.shape)
        return Judgement(
            scorer=self.scorer,
            policy=self.policy,
            prompts=(prompt,),
            request_id=self.request_id,
            route=canonical(self.note.route),
            who=self.note.who,
            request_violations=self.note.violations,
            monitor=self.service.catalogue.monitors.get(self.scorer.bundle.reference),
        )

    async def _shown(self, begun: _Begun, output: Any) -> Sequence[Any]:
        """Return what the caller may see by now.  Raises AuditUnavailable, where the audit log is
        required."""
        turn, events = begun.turn, list[Event]()
        # 1) The turn decides.
        if turn.phase is Phase.PROMPT:
            events += turn.begin()
        if not turn.over:
            events += turn.feed(begun.outputs.chunk(output))
        if turn.phase is Phase.ANSWER:
            begun.reader.read()  # nothing is kept that needs not be
        # 2) What it says is noted and told before anything is shown.
        if events and isinstance(events[-1], Ended):
            begun.report = ended_report(begun.report, events[-1])
        if events:
            self.note.judgements[self.index] = begun.judgement
        if events and not begun.announced:
            begun.announced = True
            await observers.judged(self.service, begun.judgement)
        # 3) It is shown in vLLM's form.
        return list(begun.outputs.shown(events, output))


@dataclass
class _Begun:
    """A turn that has begun: its prompt was judged."""

    judgement: Judgement
    turn: Turn
    reader: AnswerReader
    outputs: AnswerOutputs
    announced: bool = False  # whether the observers know of it

    @property
    def report(self) -> RiskReport:
        return self.judgement.reports[0]

    @report.setter
    def report(self, report: RiskReport) -> None:
        self.judgement = replace(
            self.judgement, prompts=(replace(self.judgement.prompts[0], report=report),)
        )
