"""From reports to the wire: the body, the headers, the log record and the metrics of one scoring request."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.api.request_log import RequestRecord
from service.api.request_schema import Include
from service.api.response_schema import (
    BundleRef,
    CompletionOut,
    GuaranteeOut,
    RetrievalOut,
    RiskOut,
    ScoreResponse,
    Usage,
)
from service.engines.base import Completion
from service.judging.conversation import Shape
from service.judging.guarantee import decoding_departures, shape_departures, standing
from service.policies.guard import Policy
from service.risk import running_means
from service.scoring import RiskReport, Scorer
from service.serving.metrics import Metrics
from service.serving.monitor import Monitor, digest_of
from service.serving.request_handle import RequestHandle
from service.serving.retrievals import Retrieval


@dataclass
class Reply:
    """What is the same for all of one request's events."""

    handle: RequestHandle
    include: list[Include]
    record: RequestRecord
    metrics: Metrics
    departures: tuple[str, ...] = ()  # of the request from what a guarantee was calibrated on
    retrieval: Retrieval | None = None  # where the request names an earlier one
    monitor: Monitor | None = None  # of the bundle
    shapes: Sequence[Shape | None] = ()  # of its prompts, once these are read
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """The same in every event of a stream."""
        return f"risk-{self.record.request_id}"

    def body(self, reports: list[RiskReport]) -> ScoreResponse:
        """The whole answer, or a stream's first event."""
        scorer, policy = self.handle.scorer, self.handle.policy
        return score_response(
            scorer,
            policy,
            reports,
            self.include,
            departures=self.all_departures,
            retrieval=self.retrieved(reports),
            id=self.id,
            created=self.created,
        )

    def retrieved(self, reports: Sequence[RiskReport]) -> RetrievalOut | None:
        """What the passage changed; None where the request names no earlier one."""
        if self.retrieval is None:
            return None
        first = self.retrieval.first
        if first is None or first.digest != self.handle.scorer.bundle.manifest.digest:
            return RetrievalOut(of=self.retrieval.of, known=False, drop=None)
        drop = first.risk - reports[0].risk
        return RetrievalOut(of=self.retrieval.of, known=True, risk_before=first.risk, drop=drop)

    @property
    def own_departures(self) -> tuple[str, ...]:
        """The request's: of its rendering, its decoding, and its conversations once these are read."""
        shapes = shape_departures(self.handle.scorer.bundle.manifest, self.shapes)
        return (*self.departures, *decoding_departures(self.handle.sampling), *shapes)

    @property
    def all_departures(self) -> tuple[str, ...]:
        """The request's own, and what is known of the bundle while it serves."""
        return (*self.own_departures, *(() if self.monitor is None else self.monitor.reasons))

    def headers(self, reports: list[RiskReport]) -> dict[str, str]:
        """Times in ms, of the prompt that took longest, and ``risk_headers``."""
        timings = [job.timings for job in self.handle.jobs]
        return {
            "x-queue-time": f"{max(t.queue for t in timings) * 1e3:.3f}",
            "x-inference-time": f"{max(t.prefill + t.probe + (t.decode or 0.0) for t in timings) * 1e3:.3f}",
        } | risk_headers(self.handle.scorer, reports)

    def account(self) -> None:
        """Tell the log and the metrics of every prompt that was scored.  Once, when nothing more will be sent."""
        # What was decoded before a reader left was decoded all the same.
        scored = [
            (
                job.timings,
                job.report,
                len(job.report.completion.token_ids) if job.report.completion else job.tokens,
                shape,
            )
            for job, shape in zip(self.handle.jobs, self.shapes, strict=False)  # no jobs where it ended before
            if job.report is not None
        ]
        reports = [report for _, report, _, _ in scored]
        model, reference = self.handle.scorer.engine.identity.model, self.handle.scorer.bundle.reference
        for timings, report, tokens, shape in scored:
            self.metrics.prompt(
                model, reference, report, timings, tokens, route=self.record.path, shape=shape, key=self.record.caller
            )
        if self.monitor is not None:
            prompts = [digest_of(job.token_ids) for job in self.handle.jobs if job.report is not None]
            self.monitor.observe(reports, prompts)
        record, manifest = self.record, self.handle.scorer.bundle.manifest
        if record.trace is not None:
            record.trace.handle, record.trace.departures = self.handle, self.all_departures
        record.model, record.bundle, record.digest = model, reference, manifest.digest
        record.policy = self.handle.policy.name
        record.risks = [report.risk for report in reports]
        record.decisions = [report.decision.value for report in reports]
        if scored:
            record.threshold = reports[0].verdict.threshold
            record.prompt_tokens = sum(report.prompt_tokens for report in reports)
            record.completion_tokens = sum(tokens for _, _, tokens, _ in scored)
            record.queue_ms = max(timings.queue for timings, *_ in scored) * 1e3
            record.prefill_ms = max(timings.prefill for timings, *_ in scored) * 1e3
            record.probe_ms = max(timings.probe for timings, *_ in scored) * 1e3
            decodes = [timings.decode for timings, *_ in scored if timings.decode is not None]
            record.decode_ms = max(decodes) * 1e3 if decodes else None


def score_response(
    scorer: Scorer,
    policy: Policy,
    reports: Sequence[RiskReport],
    include: Collection[Include] = (),
    *,
    departures: tuple[str, ...] = (),
    retrieval: RetrievalOut | None = None,
    id: str,
    created: int,
) -> ScoreResponse:
    """The document that answers a scoring request, over HTTP and on the command line.

    ``departures`` are the request's own from what a guarantee was calibrated on.
    """
    return ScoreResponse(
        id=id,
        created=created,
        model=scorer.engine.identity.model,
        policy=policy.name,
        bundle=bundle_ref(scorer),
        guarantee=guarantee_out(scorer, policy, departures),
        retrieval=retrieval,
        data=[risk_out(index, report, include) for index, report in enumerate(reports)],
        usage=usage(reports),
    )


def usage(reports: Sequence[RiskReport]) -> Usage:
    """Token counts of a request."""
    prompts = sum(report.prompt_tokens for report in reports)
    answers = sum(len(report.completion.token_ids) for report in reports if report.completion)
    cached = sum(report.cached_tokens for report in reports)
    return Usage(prompt_tokens=prompts, cached_tokens=cached, completion_tokens=answers, total_tokens=prompts + answers)


def risk_out(index: int, report: RiskReport, include: Collection[Include] = ()) -> RiskOut:
    """One prompt's place in ``data``."""
    verdict, known = report.verdict, report.uncertain
    return RiskOut(
        index=index,
        risk=report.risk,
        depth_mean=report.depth_mean,
        decision=verdict.decision.value,
        flagged=verdict.flagged,
        threshold=verdict.threshold,
        interval=list(known.interval) if known and known.interval else None,
        outside_training=known.outside if known else None,
        distance=known.distance if known else None,
        applies=report.context.said,
        asks=report.context.asks,
        message=verdict.message,
        trajectory=report.trajectory.tolist() if "trajectory" in include else None,
        running_mean=running_means(report.trajectory).tolist() if "running_mean" in include else None,
        completion=_completion(report.completion),
    )


def risk_note(
    scorer: Scorer, policy: Policy, risks: Sequence[RiskOut], departures: tuple[str, ...] = ()
) -> dict[str, Any]:
    """``hallutracer`` in the responses of OpenAI's routes, ours and vLLM's: ``risks`` with what applies to them all."""
    guarantee = guarantee_out(scorer, policy, departures)
    return {
        "bundle": bundle_ref(scorer).model_dump(),
        "policy": policy.name,
        **({} if guarantee is None else {"guarantee": guarantee.model_dump()}),
        "data": [risk.model_dump(exclude_none=True) for risk in risks],
    }


def bundle_ref(scorer: Scorer) -> BundleRef:
    """The bundle that says so."""
    manifest = scorer.bundle.manifest
    return BundleRef(name=manifest.name, version=manifest.version, digest=manifest.digest)


def guarantee_out(scorer: Scorer, policy: Policy, departures: tuple[str, ...] = ()) -> GuaranteeOut | None:
    """The bundle's guarantee as it stands for a request under ``policy``; None where it has none."""
    stands = standing(scorer.bundle.manifest, policy, scorer.engine.identity.dtype, departures)
    if stands is None:
        return None
    return GuaranteeOut(alpha=stands.alpha, delta=stands.delta, holds=stands.holds, void=list(stands.void))


def risk_headers(scorer: Scorer, reports: Sequence[RiskReport]) -> dict[str, str]:
    """The bundle; risk and decision where there is one prompt."""
    headers = {"x-hallutracer-bundle": scorer.bundle.reference}
    if len(reports) == 1:
        headers["x-hallutracer-risk"] = f"{reports[0].risk:.6f}"
        headers["x-hallutracer-decision"] = reports[0].decision.value
    return headers


def _completion(completion: Completion | None) -> CompletionOut | None:
    if completion is None:
        return None
    reason = completion.finish_reason
    assert reason != "cancelled", "a cancelled answer has no reader"
    return CompletionOut(
        text=completion.text,
        finish_reason="stop" if reason == "stop" else "length",
        completion_tokens=len(completion.token_ids),
    )
