"""A request without HTTP: token ids -> engine -> risk report, withheld or continued.

The way of a prompt: ``prompts.render`` -> ``Engine.answer`` (prefill, readout, truth logits) ->
``Scorer.judge`` (``risk.risk``, ``guard.judge``) -> the rest of the answer, where the decision
allows."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.manifest import SIGNALS
from probes_store.records import Context, Decoding, least_reaching
from service.engines import base
from service.engines.base import (
    Completion,
    Engine,
    EngineGate,
    PrefillResult,
    Sampling,
    TokenIds,
    Update,
)
from service.engines.bridge import gather_all, wait_for
from service.engines.chat import Message, ToolDefinition
from service.engines.checks import check_sampling
from service.errors import EngineFailed, HalluTracerError, NonFiniteReadout
from service.judging.conversation import ConversationReader
from service.judging.decoding import departure
from service.judging.guarantee import (
    UNKNOWN,
    Standing,
    shape_of,
    shape_unlike_training,
    unlike_training,
)
from service.judging.uncertainty import Uncertain, uncertain
from service.matching import check_answers, check_golden, check_identity
from service.policies.guard import (
    GATE,
    Decision,
    Policy,
    Verdict,
    judge,
    risk_beside_passage,
    stopped_by,
)
from service.prompts import as_prompt_format, chat_ending, render
from service.readout import Probes, Site
from service.risk import depth_mean, risk, served_risk
from service.tool_calls import Tools
from service.turn import AnswerRisk, Chunk, Ended, Event, Outcome, Text, Turn

_ROUNDING = 1e-9  # of a recalibrated risk, relative


@dataclass(frozen=True)
class ShadowRisk:
    """What a shadow would have said of a prompt, read on the same forward.  ``risk`` None: it gave
    no number."""

    bundle: str  # name:version
    risk: float | None
    flagged: bool  # by the request's policy; a risk that is no number is flagged


@dataclass(frozen=True)
class RiskReport:
    """One prompt's result."""

    risk: float
    depth_mean: float
    trajectory: NDArray[np.float64]  # [m], the truth logits whose mean is ``depth_mean``
    logits: NDArray[np.float64]  # [(1 + A) m], with those of the A context probes
    verdict: Verdict
    prompt_tokens: int
    uncertain: Uncertain
    signals: tuple[float, ...] = ()  # what the classifier read, in the manifest's order
    context: base.PromptContext = base.UNKNOWN
    outcome: Outcome = Outcome.SCORED  # until its turn has ended
    completion: Completion | None = None
    # of ``completion``; None where nothing reads answers, or no token was read
    answer: AnswerRisk | None = None
    cached_tokens: int = 0  # of the prompt, found in the engine's prefix cache
    judge_s: float = 0.0  # from truth logits to the verdict
    shadows: tuple[ShadowRisk, ...] = ()  # they decide nothing
    # decoded although withheld, until it is known whether it is a call of a tool
    held: bool = False
    tool_call: bool = False  # it was held, and is given: it is nothing but calls
    # how its answer is decoded otherwise than those were that the risk is about
    decoding: str | None = None
    # where a passage counted as true in this share only; the risk is so already
    passage_truth: float | None = None
    trained_risk: float | None = None  # the bundle's own, where the risk is another
    # name:version of the second bundle, where its verdict and not this bundle's decides
    decided_by: str | None = None

    @property
    def decision(self) -> Decision:
        """What happens to the request."""
        return self.verdict.decision

    @property
    def bundle_risk(self) -> float:
        """The risk as the bundle has it, whose passages are true, for what compares it with
        training's."""
        return self.risk if self.trained_risk is None else self.trained_risk

    @property
    def shown(self) -> Completion:
        """What was shown of the answer; ask for it where the outcome is one that ``shows``."""
        assert self.completion is not None
        return self.completion

    def before_answer(self) -> RiskReport:
        """Return what is sent before an answer, which may be complete.  What was withheld has none
        to come."""
        if self.decision is not Decision.CONTINUE:
            return self
        return replace(self, outcome=Outcome.SCORED, completion=None, answer=None)


async def _engine_updates(updates: AsyncGenerator[Update, None]) -> AsyncGenerator[Update, None]:
    """Yield an engine's updates.  Raises EngineFailed from an error that is not ours."""
    try:
        async with aclosing(updates):
            async for update in updates:
                yield update
    except HalluTracerError:
        raise
    except Exception as error:
        raise EngineFailed(f"the engine failed: {type(error).__name__}: {error}") from error


class Scorer:
    """One engine and one bundle that belong together."""

    def __init__(self, engine: Engine, bundle: Bundle) -> None:
        """Check the bundle against the model and replay its golden prompts.  Raises a subclass of
        BundleRefused."""
        check_identity(bundle.manifest, engine.identity)
        self.engine, self.bundle = engine, bundle
        self.prompt_format = as_prompt_format(bundle.manifest.prompt_format)
        # the risk's, then the context's
        self.probes = Probes.all_of(Site(bundle.manifest.readout.site), bundle.probes)
        self.needs_first_token = bundle.manifest.needs_first_token
        self.answer_probes: Probes | None = None
        if (answer := bundle.answer) is not None and engine.reads_answers:
            self.answer_probes = Probes.of(self.probes[0].site, answer)
        self.replayed(self.score(bundle.golden.prompts()))
        self._replay_answers()

    def again(self, bundle: Bundle) -> Scorer:
        """Return one for the same bundle, loaded again: its golden prompts need not be replayed."""
        scorer = copy(self)
        scorer.bundle = bundle
        return scorer

    def replayed(self, reports: Sequence[RiskReport]) -> None:
        """Keep in ``golden`` how far the golden prompts' reports are from the record.  Raises
        GoldenMismatch."""
        logits = np.stack([report.logits for report in reports])
        risks = np.array([report.risk for report in reports])
        self.golden = check_golden(self.bundle, logits, risks, dtype=self.engine.identity.dtype)

    def _replay_answers(self) -> None:
        """Read the golden answers as written text.  Raises GoldenMismatch."""
        stored = self.bundle.answer
        if stored is None or self.answer_probes is None:
            return
        read = self.engine.score(
            stored.rows(), [self.answer_probes], last=stored.answer_tokens.tolist()
        )
        trajectories = np.stack([answer.trajectories[0] for answer in read])
        risks = np.array([self._answer_risk(trajectory) for trajectory in trajectories])
        check_answers(self.bundle, trajectories, risks, dtype=self.engine.identity.dtype)

    def _answer_risk(self, trajectory: NDArray[np.float64]) -> float:
        record = self.bundle.manifest.answer
        assert record is not None
        return float(
            risk(depth_mean(trajectory)[None], np.array([record.weight]), record.intercept)
        )

    def judge_answer(self, reading: base.AnswerReading | None) -> AnswerRisk | None:
        """Return the risk of an answer whose tokens were read; None where none was.  Raises
        NonFiniteReadout."""
        record = self.bundle.manifest.answer
        if reading is None or record is None:
            return None
        value = self._answer_risk(reading.trajectory)
        if not np.isfinite(value):
            raise NonFiniteReadout(
                "a decode step gave a NaN or an infinity; no risk of the answer is served"
            )
        return AnswerRisk(value, value >= record.threshold, reading.tokens)

    def render(
        self,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[ToolDefinition] = (),
    ) -> list[int]:
        """Return token ids, rendered the way this bundle's training prompts were; ``tools`` go
        beside messages."""
        return render(self.engine, prompt, messages, self.prompt_format, tools)

    def standing(
        self,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        refusals: Collection[str] = (),
    ) -> Standing:
        """Return what is known of what ``render`` renders; ``refusals``: what stands in for
        withheld answers here."""
        if messages is None and (prompt is None or self.prompt_format != "chat"):
            return UNKNOWN
        turns = [{"role": "user", "content": prompt}] if messages is None else messages
        return Standing(shape_of(turns, refusals))

    def standing_of_ids(self, token_ids: TokenIds, refusals: Collection[str] = ()) -> Standing:
        """Return what is known of token ids that somebody else rendered, read back; ``refusals`` as
        ``standing`` has.

        It takes as long as rendering them: not for an event loop's thread.  Nothing of theirs
        passes as small talk."""
        ending = self.chat_ending if self.prompt_format == "chat" else ()
        if not ending or tuple(token_ids[-len(ending) :]) != ending:
            return UNKNOWN
        messages = self.conversations.read(token_ids)
        if messages is None:
            return Standing(other_rendering=True)
        shape = shape_of(messages, refusals)
        return (
            UNKNOWN
            if shape_unlike_training(self.bundle.manifest, shape) is None
            else Standing(shape)
        )

    @cached_property
    def conversations(self) -> ConversationReader:
        """Return what reads the messages of a rendered chat back."""
        return ConversationReader.of(self.engine.render_chat, self.engine.spell)

    @cached_property
    def chat_ending(self) -> tuple[int, ...]:
        """Return how every question ends that the chat template renders."""
        return chat_ending(self.engine)

    def score(
        self, prompts: Sequence[TokenIds], policy: Policy = GATE, standings: Sequence[Standing] = ()
    ) -> list[RiskReport]:
        """Prefill and report; nothing is decoded.  ``standings``: one for each prompt, or none are
        known."""
        results = self.engine.score(prompts, self.probes, first_token=self.needs_first_token)
        known = standings or [UNKNOWN] * len(results)
        return [
            self.judge(result, policy, standing=standing)
            for result, standing in zip(results, known, strict=True)
        ]

    def score_or_continue(
        self,
        prompts: Sequence[TokenIds],
        sampling: Sampling,
        policy: Policy = GATE,
        standings: Sequence[Standing] = (),
    ) -> list[RiskReport]:
        """Prefill once; prompts that may continue decode from the same KV cache, the others emit no
        token.

        ``standings``: as ``score`` takes them.  The first failure ends them all and is raised."""
        check_sampling(sampling)
        pairs = list(zip(prompts, standings or [UNKNOWN] * len(prompts), strict=True))

        async def reports() -> list[RiskReport]:
            return await gather_all(
                [self.last_report(prompt, policy, sampling, known) for prompt, known in pairs]
            )

        return wait_for(reports())

    async def last_report(
        self,
        prompt: TokenIds,
        policy: Policy,
        sampling: Sampling | None = None,
        standing: Standing = UNKNOWN,
    ) -> RiskReport:
        """Return the last report of ``run``, with the completion where there is one.  Raises what
        ``run`` raises."""
        async with aclosing(self.run(prompt, policy, sampling, standing=standing)) as steps:
            async for report, _ in steps:
                last = report
        return last

    async def run(
        self,
        prompt: TokenIds,
        policy: Policy,
        sampling: Sampling | None = None,
        *,
        turn: base.Turn = base.FIRST_COME,
        shadows: Sequence[Scorer] = (),
        second: Scorer | None = None,
        running: bool = False,
        tools: Tools | None = None,
        standing: Standing = UNKNOWN,
    ) -> AsyncGenerator[tuple[RiskReport, Update], None]:
        """Yield one prompt's report with each of the engine's updates; the last report has the
        completion, if any.

        ``turn``: as ``Engine.answer`` takes it; ``shadows`` read the same forward; so does
        ``second``, and the stricter of both verdicts counts; ``running``: reports have the risk of
        the answer so far; ``standing``: what is known of the prompt beside its ids.  Where the
        decision is not to continue, one update without text is all; with ``tools``, unless the
        policy gates their calls, the answer is decoded and held for as long as it may be a call:
        the last report then has it, or says that it is withheld.  Closing the generator ends the
        request in the engine. Raises what ``judge`` raises, and of the engine's errors those that
        are ours; EngineFailed from any other."""
        readers = [self, *shadows, *(() if second is None else (second,))]
        holds_calls = tools is not None and policy.tools != "gate"
        updates = self.engine.answer(
            prompt,
            [probes for scorer in readers for probes in scorer.probes],
            first_token=any(scorer.needs_first_token for scorer in readers),
            sampling=sampling,
            turn=turn,
            gate=None if sampling is None or holds_calls else self.gate(policy, standing),
            answer_probes=self.answer_probes,
        )
        machine: Turn | None = None
        async with aclosing(_engine_updates(updates)) as own_updates:
            async for update in own_updates:
                # 1) The first update has the prefill: judge the prompt.
                events = list[Event]()
                if machine is None:
                    report = self._first_report(update, policy, sampling, standing, shadows, second)
                    applies, answers = report.context.applies, sampling is not None
                    machine = Turn(
                        policy, report.verdict, applies=applies, answers=answers, tools=tools
                    )
                    events += machine.begin()
                # 2) What was decoded is shown, is held, or ends the answer.
                begun = not machine.over
                if begun:
                    risk_so_far = partial(self.judge_answer, update.answer)
                    events += machine.feed(
                        Chunk(update.piece, update.tokens, risk_so_far, update.completion)
                    )
                text = "".join(event.text for event in events if isinstance(event, Text))
                # 3) The last report says how the turn has ended.
                if machine.over:
                    ended = events[-1]
                    assert isinstance(ended, Ended)
                    tokens = update.tokens if begun and ended.outcome is not Outcome.STOPPED else 0
                    last = replace(update, piece=text, tokens=tokens, completion=ended.completion)
                    yield ended_report(report, ended), last
                    return
                report = replace(report, held=machine.undecided)
                if running and not report.held:
                    report = replace(report, answer=self.judge_answer(update.answer))
                yield report, replace(update, piece=text)
        raise base.unfinished()

    def _first_report(
        self,
        update: Update,
        policy: Policy,
        sampling: Sampling | None,
        standing: Standing,
        shadows: Sequence[Scorer],
        second: Scorer | None,
    ) -> RiskReport:
        """Return the report of a prompt from the engine's first update, with what the other readers
        make of it."""
        prefill, first_trajectory = base.prefill_of(update), len(self.probes)
        report = self.judge(prefill, policy, standing=standing, cached_tokens=update.cached_tokens)
        risks = list[ShadowRisk]()
        for shadow in shadows:
            risks.append(shadow.shadowed(prefill, policy, first_trajectory, standing))
            first_trajectory += len(shadow.probes)
        report = replace(report, shadows=tuple(risks))
        if second is not None:
            report = second.stricter(report, prefill, policy, first_trajectory, standing)
        if sampling is None:
            return report
        return replace(
            report,
            decoding=departure(
                self.bundle.manifest, Decoding(sampling.temperature, sampling.top_p)
            ),
        )

    def in_words(self, policy: Policy) -> str:
        """Return, for the log, which bundle judges by which policy and threshold, and where it
        reads which model."""
        manifest, identity = self.bundle.manifest, self.engine.identity
        return (
            f"bundle {manifest.reference} ({manifest.digest[:19]}) judges by policy {policy.name}"
            f" ({policy.action}) from threshold {self.threshold(policy):.3g} on; it reads"
            f" {identity.model} ({identity.dtype}) at the site {manifest.readout.site} of"
            f" {manifest.model.num_layers} layers"
        )

    def threshold(self, policy: Policy, standing: Standing = UNKNOWN) -> float:
        """Return the risk from which on ``policy`` flags a prompt of this bundle; the strictest if
        little is known."""
        bundle_threshold = self.bundle.manifest.threshold_for(standing.passage)
        return bundle_threshold if policy.threshold is None else policy.threshold

    def withholds_outside(self, policy: Policy) -> bool:
        """Return whether ``policy`` treats prompts outside training as flagged ones.

        Where it does not say, it does if it withholds and the bundle ``tells_outside``."""
        if policy.withhold_outside is not None:
            return policy.withhold_outside
        return policy.action.withholds and self.bundle.manifest.tells_outside

    def withholds(self, known: Uncertain, policy: Policy) -> bool:
        """Return whether ``policy`` treats this prompt as a flagged one because training had none
        like it.

        One of a form that no training had is, unless the operator opened that (``withhold_outside =
        false``)."""
        untrained = (
            known.untrained and policy.action.withholds and policy.withhold_outside is not False
        )
        return untrained or (known.outside and self.withholds_outside(policy))

    def _context(self, standing: Standing) -> Context | None:
        """Return the bundle's context record with the P(asks) below which this prompt asks for no
        fact, if any is."""
        context = self.bundle.manifest.context
        if context is None or (limit := context.applicability) is None:
            return context
        below = standing.no_fact_below(self.bundle.manifest)
        return replace(context, applicability=replace(limit, threshold=below) if below else None)

    def gate(self, policy: Policy, standing: Standing = UNKNOWN) -> EngineGate | None:
        """Return when an engine that decodes by itself must not begin; None where ``policy`` ends
        no answer.

        It only saves work: the decision is ``judge``'s.  At threshold 1 there is nothing to save,
        since only a risk that was rounded to 1 reaches it."""
        manifest, threshold = self.bundle.manifest, self.threshold(policy, standing)
        if policy.passage_truth < 1.0 and standing.passage is True:
            # else the probes tell, too late for the engine
            threshold = max(0.0, 1.0 - (1.0 - threshold) / policy.passage_truth * (1.0 - _ROUNDING))
        if manifest.recalibration is not None:
            # the engine compares the classifier's own risk; rather too late
            threshold = least_reaching(manifest.recalibration, threshold) * (1 + _ROUNDING)
        if not policy.action.withholds or threshold >= 1.0:
            return None
        weight_of: dict[str, float] = dict(
            zip(manifest.signals, manifest.classifier.weight, strict=True)
        )
        weight = tuple(weight_of.get(name, 0.0) for name in SIGNALS)
        context = self._context(UNKNOWN if policy.withhold_no_fact else standing)
        return EngineGate(weight, manifest.classifier.intercept, threshold, context)

    def shadowed(
        self, result: PrefillResult, policy: Policy, first_trajectory: int, standing: Standing
    ) -> ShadowRisk:
        """Return what this bundle would have said; nothing that is wrong with it is the request's
        fault."""
        try:
            report = self.judge(
                result, policy, standing=standing, first_trajectory=first_trajectory
            )
        except NonFiniteReadout:
            return ShadowRisk(self.bundle.reference, None, flagged=True)
        return ShadowRisk(self.bundle.reference, report.risk, report.verdict.flagged)

    def stricter(
        self,
        report: RiskReport,
        result: PrefillResult,
        policy: Policy,
        first_trajectory: int,
        standing: Standing,
    ) -> RiskReport:
        """Return another bundle's report, with this bundle's verdict where that one lets the answer
        pass and this not.

        Closed where this bundle gives no number; ``first_trajectory`` and ``standing`` as ``judge``
        takes them."""
        if report.verdict.acts:
            return report
        try:
            verdict_here = self.judge(
                result, policy, standing=standing, first_trajectory=first_trajectory
            ).verdict
        except NonFiniteReadout:
            verdict_here = stopped_by(policy, report.verdict, None)
        if not verdict_here.acts:
            return report
        verdict = replace(
            report.verdict, decision=verdict_here.decision, message=verdict_here.message
        )
        return replace(report, verdict=verdict, decided_by=self.bundle.reference)

    def judge(
        self,
        result: PrefillResult,
        policy: Policy,
        *,
        standing: Standing = UNKNOWN,
        cached_tokens: int = 0,
        first_trajectory: int = 0,
    ) -> RiskReport:
        """Return the report: the one place where a risk becomes a decision.

        ``standing``: what is known of the prompt beside its ids; ``first_trajectory``: the position
        of this bundle's first one in the result.  Raises NonFiniteReadout rather than report a NaN.
        """
        started, manifest = time.perf_counter(), self.bundle.manifest
        trajectory, *context_trajectories = result.trajectories[
            first_trajectory : first_trajectory + len(self.probes)
        ]
        mean = float(depth_mean(trajectory))
        means = [float(depth_mean(probe_logits)) for probe_logits in context_trajectories]
        context = base.prompt_context(self._context(standing), means, result.prompt_tokens)
        signals = {name: getattr(context, name) for name in ("passage", "stated", "stated_length")}
        signals["depth_mean"] = mean
        if (first := result.first_token) is not None:
            signals |= {"log_max_prob": first.log_max_prob, "entropy": first.entropy}
        vector = np.array([signals[name] for name in manifest.signals], np.float64)
        value = float(served_risk(vector, manifest))
        logits = np.concatenate([trajectory, *context_trajectories])
        if not np.isfinite(value) or not np.isfinite(logits).all():
            raise NonFiniteReadout(
                "the forward pass gave a NaN or an infinity at the answer onset; no risk is served"
            )
        known = uncertain(self.bundle, logits, vector, unlike=unlike_training(manifest, standing))
        outside = self.withholds(known, policy)
        truth = policy.passage_truth if beside_passage(standing, context) else 1.0
        served_value = risk_beside_passage(value, truth)
        if truth < 1.0 and (interval := known.interval) is not None:
            low, high = (risk_beside_passage(bound, truth) for bound in interval)
            known = replace(known, interval=(low, high))
        verdict = judge(
            served_value,
            policy,
            self.threshold(policy, standing),
            outside=outside,
            applies=context.applies,
        )
        return RiskReport(
            passage_truth=truth if truth < 1.0 else None,
            trained_risk=value if truth < 1.0 else None,
            risk=served_value,
            depth_mean=mean,
            trajectory=trajectory,
            logits=logits,
            verdict=verdict,
            signals=tuple(vector.tolist()),
            uncertain=known,
            context=context,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=cached_tokens,
            judge_s=time.perf_counter() - started,
        )


def beside_passage(standing: Standing, context: base.PromptContext) -> bool:
    """Return whether text to answer from stands beside the question, by its form or by what the
    bundle reads.

    A prompt of which neither tells counts as one with such text: its risk may only be too high."""
    reads = None if context.passage is None else context.passage >= 0.5
    return True in (standing.passage, reads) or (standing.passage is None and reads is None)


def ended_report(report: RiskReport, ended: Ended) -> RiskReport:
    """Return a prompt's last report: how its turn has ended, and what was shown of the answer."""
    called = ended.outcome is Outcome.CALLED
    return replace(
        report,
        outcome=ended.outcome,
        verdict=ended.verdict,
        completion=ended.completion,
        answer=ended.answer,
        held=False,
        tool_call=called and report.decision is not Decision.CONTINUE,
        decided_by=None if called else report.decided_by,
    )
