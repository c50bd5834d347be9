"""A request without HTTP: token ids -> engine -> risk report, gated or continued.

The way of a request: ``prompts.render`` -> ``Engine.score`` (prefill, readout, truth logits) -> ``risk.risk`` ->
``guard.judge`` -> perhaps ``Continuation.decode``; on an OnlineEngine, ``answer`` for the first and the last of these.
Knows neither HTTP nor where bundles are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.golden import check_golden
from probes_store.identity import check_identity
from service.engines.base import Completion, Engine, Onset, Sampling, SteppingEngine, TokenIds, check_sampling
from service.engines.bridge import ask_all
from service.engines.online import Gate, OnlineEngine, Update
from service.errors import NonFiniteReadout
from service.guard import DECISIONS, GATE, Decision, Policy, Verdict, judge
from service.prompts import Message, as_prompt_format, render
from service.readout import Probes, Site
from service.risk import depth_mean, risk
from service.settings import KV_TOKENS


@dataclass(frozen=True)
class RiskReport:
    """One prompt's answer.  ``trajectory`` [m] holds the truth logits whose mean is ``depth_mean``."""

    risk: float
    depth_mean: float
    trajectory: NDArray[np.float64]
    verdict: Verdict
    prompt_tokens: int
    completion: Completion | None = None
    cached_tokens: int = 0  # of the prompt, found in the engine's prefix cache

    @property
    def decision(self) -> Decision:
        """What happens to the request."""
        return self.verdict.decision


def probes_of(bundle: Bundle) -> Probes:
    """What the engine needs of a bundle."""
    tensors = bundle.probes
    return Probes(Site(bundle.manifest.readout.site), tensors.head, tensors.direction, tensors.bias, tensors.scale)


def signal_vector(onset: Onset, trajectory: NDArray[np.float64], signals: Sequence[str]) -> NDArray[np.float64]:
    """The classifier's input [k] in the manifest's order."""
    values = {"depth_mean": float(depth_mean(trajectory))}
    if onset.first_token is not None:
        values |= {"log_max_prob": onset.first_token.log_max_prob, "entropy": onset.first_token.entropy}
    return np.array([values[name] for name in signals], np.float64)


class Scorer:
    """One engine and one bundle that belong together."""

    def __init__(self, engine: Engine, bundle: Bundle) -> None:
        """Refuse a bundle that is not this model's, then replay its golden prompts.

        Raises:
            probes_store.errors.BundleRefused: another model, revision, tokenizer, chat template or geometry, or golden
                prompts whose risks differ from the recorded ones.
        """
        check_identity(bundle.manifest, engine.identity)
        self.engine: Engine = engine
        self.bundle = bundle
        self.prompt_format = as_prompt_format(bundle.manifest.prompt_format)
        self.probes = probes_of(bundle)
        self._signals = bundle.manifest.signals
        self._weight = np.array(bundle.manifest.classifier.weight, np.float64)
        self.needs_first_token = len(self._signals) > 1
        onsets = engine.score(bundle.golden.prompts(), [self.probes], first_token=self.needs_first_token)
        trajectories = np.stack([onset.trajectories[0] for onset in onsets])
        risks = np.array([self._risk(onset, onset.trajectories[0]) for onset in onsets])
        check_golden(bundle, trajectories, risks, dtype=engine.identity.dtype)

    def render(self, prompt: str | None = None, messages: Sequence[Message] | None = None) -> list[int]:
        """Token ids, rendered the way this bundle's training prompts were."""
        return render(self.engine, prompt, messages, self.prompt_format)

    def score(self, prompts: Sequence[TokenIds], policy: Policy = GATE) -> list[RiskReport]:
        """Prefill and report; nothing is decoded."""
        onsets = self.engine.score(prompts, [self.probes], first_token=self.needs_first_token)
        return [self.report(onset, onset.trajectories[0], policy) for onset in onsets]

    def score_or_continue(
        self, prompts: Sequence[TokenIds], sampling: Sampling, policy: Policy = GATE
    ) -> list[RiskReport]:
        """Prefill once; prompts that may continue decode on from the same KV cache, the others emit no token.

        A SteppingEngine gets groups of at most ``KV_TOKENS``, because every open continuation holds its prompt's
        cache; an OnlineEngine makes its own out of all of them.
        """
        check_sampling(sampling)
        if isinstance(self.engine, OnlineEngine):
            return self._ask(self.engine, prompts, sampling, policy)
        reports: list[RiskReport] = []
        start = held = 0
        for end, prompt in enumerate(prompts):
            if end > start and held + len(prompt) > KV_TOKENS:
                reports += self._group(prompts[start:end], sampling, policy)
                start, held = end, 0
            held += len(prompt)
        return reports + self._group(prompts[start:], sampling, policy)

    def gate(self, policy: Policy) -> Gate | None:
        """When an engine that goes on by itself must not; None where ``policy`` ends no answer.

        It only spares work: what ``report`` decides is what happens.  At threshold 1 there is nothing to spare, since
        only a risk that was rounded to 1 reaches it.
        """
        threshold = self.bundle.manifest.threshold if policy.threshold is None else policy.threshold
        if DECISIONS[policy.action] is Decision.CONTINUE or threshold >= 1.0:
            return None
        weight = dict(zip(self._signals, self._weight.tolist(), strict=True))
        depth, probability, entropy = (weight.get(name, 0.0) for name in ("depth_mean", "log_max_prob", "entropy"))
        return Gate((depth, probability, entropy), self.bundle.manifest.classifier.intercept, threshold)

    def report(
        self, onset: Onset, trajectory: NDArray[np.float64], policy: Policy, *, cached_tokens: int = 0
    ) -> RiskReport:
        """What one prompt's onset says.  ``trajectory`` [m] is this bundle's among the onset's.

        Raises NonFiniteReadout rather than report a NaN.
        """
        value = self._risk(onset, trajectory)
        return RiskReport(
            risk=value,
            depth_mean=float(depth_mean(trajectory)),
            trajectory=trajectory,
            verdict=judge(value, policy, self.bundle.manifest.threshold),
            prompt_tokens=onset.prompt_tokens,
            cached_tokens=cached_tokens,
        )

    def _group(self, prompts: Sequence[TokenIds], sampling: Sampling, policy: Policy) -> list[RiskReport]:
        continuations = cast(SteppingEngine, self.engine).begin(prompts, [self.probes])
        try:
            reports = [self.report(c.onset, c.onset.trajectories[0], policy) for c in continuations]
            for continuation, report in zip(continuations, reports, strict=True):
                if report.decision is not Decision.CONTINUE:
                    continuation.close()
            for place, continuation in enumerate(continuations):
                if reports[place].decision is Decision.CONTINUE:
                    for _ in continuation.decode(sampling):
                        pass
                    reports[place] = replace(reports[place], completion=continuation.completion)
                    continuation.close()
        finally:
            for continuation in continuations:
                continuation.close()
        return reports

    def _ask(
        self, engine: OnlineEngine, prompts: Sequence[TokenIds], sampling: Sampling, policy: Policy
    ) -> list[RiskReport]:
        reports: dict[int, RiskReport] = {}

        def goes_on(place: int, onset: Onset, update: Update) -> bool:
            report = self.report(onset, onset.trajectories[0], policy, cached_tokens=update.cached_tokens)
            reports[place] = report
            return report.decision is Decision.CONTINUE

        completions = ask_all(
            engine,
            prompts,
            [self.probes],
            sampling,
            first_token=self.needs_first_token,
            gate=self.gate(policy),
            goes_on=goes_on,
        )
        return [replace(reports[place], completion=one) for place, one in enumerate(completions)]

    def _risk(self, onset: Onset, trajectory: NDArray[np.float64]) -> float:
        vector = signal_vector(onset, trajectory, self._signals)
        value = float(risk(vector, self._weight, self.bundle.manifest.classifier.intercept))
        if not np.isfinite(value):
            raise NonFiniteReadout("the forward pass gave a NaN or an infinity at the answer onset; no risk is served")
        return value
