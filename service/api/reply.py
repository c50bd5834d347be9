"""From a judgement to the wire: the body and the headers of one scoring request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.error_handlers import error_body
from service.api.request_schema import Include
from service.api.response_schema import (
    BundleRef,
    CompletionChunk,
    CompletionOut,
    Delta,
    GuaranteeOut,
    RetrievalOut,
    RiskOut,
    ScoreResponse,
    Usage,
)
from service.engines.base import Completion
from service.errors import ClientGone, DeadlineExceeded, HalluTracerError
from service.judging.guarantee import GuaranteeStatus
from service.policies.guard import Decision
from service.risk import running_means
from service.scoring import RiskReport, Scorer
from service.serving import observers
from service.serving.dispatcher import RequestHandle
from service.serving.judgement import Judgement
from service.serving.request_log import RequestRecord
from service.serving.service import Service


@dataclass(frozen=True)
class Reply:
    """A judgement on its way to whoever asked, and the work that goes on behind it."""

    judgement: Judgement
    handle: RequestHandle
    service: Service
    record: RequestRecord
    include: tuple[Include, ...] = ()

    @property
    def id(self) -> str:
        """Return the id, the same in every event of a stream."""
        return f"risk-{self.judgement.request_id}"

    def body(self) -> ScoreResponse:
        """Return the whole answer, or a stream's first event."""
        return score_response(self.judgement, self.include)

    def headers(self) -> dict[str, str]:
        """Return times in ms, of the prompt that took longest, and ``risk_headers``."""
        jobs = [(job.timings, job.decode_s or 0.0) for job in self.handle.jobs]
        return {
            "x-queue-time": f"{max(times.queue for times, _ in jobs) * 1e3:.3f}",
            "x-inference-time": f"{max(times.prefill + times.probe + decode for times, decode in jobs) * 1e3:.3f}",
        } | risk_headers(self.judgement.scorer, self.judgement.reports)

    def end(self) -> None:
        """Tell the observers that nothing more will be sent.  Once."""
        answers = [self.handle.jobs[prompt.index].end() for prompt in self.judgement.prompts]
        observers.ended(self.service, self.judgement, answers, self.record)


def score_response(judgement: Judgement, include: Collection[Include] = ()) -> ScoreResponse:
    """Return the document that answers a scoring request, over HTTP and on the command line."""
    return ScoreResponse(
        id=f"risk-{judgement.request_id}",
        created=judgement.created,
        model=judgement.model,
        policy=judgement.policy.name,
        bundle=bundle_ref(judgement.scorer),
        guarantee=guarantee_out(judgement.guarantee),
        retrieval=retrieval_out(judgement),
        data=[risk_out(prompt.index, prompt.report, include) for prompt in judgement.prompts],
        usage=usage(judgement.reports),
    )


def retrieval_out(judgement: Judgement) -> RetrievalOut | None:
    """Return what the passage changed; None where the request names no earlier one."""
    if judgement.retrieval is None:
        return None
    of, first = judgement.retrieval.of, judgement.retrieval.first
    if first is None or first.digest != judgement.digest:
        return RetrievalOut(of=of, known=False, drop=None)
    return RetrievalOut(of=of, known=True, risk_before=first.risk, drop=first.risk - judgement.reports[0].risk)


def usage(reports: Sequence[RiskReport]) -> Usage:
    """Return the token counts of a request."""
    prompts = sum(report.prompt_tokens for report in reports)
    answers = sum(len(report.completion.token_ids) for report in reports if report.completion)
    cached = sum(report.cached_tokens for report in reports)
    return Usage(prompt_tokens=prompts, cached_tokens=cached, completion_tokens=answers, total_tokens=prompts + answers)


def risk_out(index: int, report: RiskReport, include: Collection[Include] = ()) -> RiskOut:
    """Return one prompt's place in ``data``."""
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
        completion=completion_out(report.completion),
    )


def risk_note(judgement: Judgement, risks: Sequence[RiskOut]) -> dict[str, Any]:
    """Return ``hallutracer`` of the responses of OpenAI's routes: ``risks`` with what applies to them all."""
    guarantee = guarantee_out(judgement.guarantee)
    return {
        "bundle": bundle_ref(judgement.scorer).model_dump(),
        "policy": judgement.policy.name,
        **({} if guarantee is None else {"guarantee": guarantee.model_dump()}),
        "data": [risk.model_dump(exclude_none=True) for risk in risks],
    }


def bundle_ref(scorer: Scorer) -> BundleRef:
    """Return the bundle that says so."""
    manifest = scorer.bundle.manifest
    return BundleRef(name=manifest.name, version=manifest.version, digest=manifest.digest)


def guarantee_out(status: GuaranteeStatus | None) -> GuaranteeOut | None:
    """Return the bundle's guarantee as it stands for a request; None where it has none."""
    if status is None:
        return None
    return GuaranteeOut(alpha=status.alpha, delta=status.delta, holds=status.holds, void=list(status.violations))


def risk_headers(scorer: Scorer, reports: Sequence[RiskReport]) -> dict[str, str]:
    """Return the bundle; risk and decision where there is one prompt."""
    headers = {"x-hallutracer-bundle": scorer.bundle.reference}
    if len(reports) == 1:
        headers["x-hallutracer-risk"] = f"{reports[0].risk:.6f}"
        headers["x-hallutracer-decision"] = reports[0].decision.value
    return headers


def completion_out(completion: Completion | None) -> CompletionOut | None:
    """Return an answer, where there is one."""
    if completion is None:
        return None
    reason = completion.finish_reason
    assert reason != "cancelled", "a cancelled answer has no reader"
    return CompletionOut(
        text=completion.text,
        finish_reason="stop" if reason == "stop" else "length",
        completion_tokens=len(completion.token_ids),
    )


DONE = b"data: [DONE]\n\n"
SLOW_READER_S = 5.0  # beyond the deadline, for a reader that is slow rather than gone


class EventStream(StreamingResponse):
    """Starts once the risks are known; whatever ends it also ends the work behind it."""

    def __init__(self, reply: Reply, content: AsyncIterator[bytes]) -> None:
        """``content`` begins with the risks, and ends the stream with DONE."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **reply.headers()}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that goes away stops the decoding."""
        handle, record = self._reply.handle, self._reply.record
        try:
            # A reader that takes nothing blocks a send for ever, which no deadline of ours would see.
            async with asyncio.timeout(max(0.0, handle.deadline.left) + SLOW_READER_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            record.code = DeadlineExceeded.code  # the server closes the connection of an unfinished response
        finally:
            if record.code is None and not handle.finished:
                record.code = ClientGone.code
            handle.cancel()
            self._reply.end()


async def events(reply: Reply) -> AsyncIterator[bytes]:
    """The stream of a scoring request."""
    yield _event(reply.body())
    if reply.judgement.reports[0].decision is Decision.CONTINUE:
        try:
            async for pieces in reply.handle.pieces():
                yield b"".join(_chunk(CompletionChunk(id=reply.id, delta=Delta(text=piece))) for piece in pieces)
                await asyncio.sleep(0)  # neither a full queue nor a free socket suspends: let other requests run
            answers = await reply.handle.answers()
        except Exception as error:
            yield failure(reply, error)
        else:
            completion = completion_out(answers[0].completion)
            assert completion is not None
            yield _chunk(
                CompletionChunk(
                    id=reply.id,
                    delta=Delta(text=""),
                    finish_reason=completion.finish_reason,
                    usage=usage(answers),
                )
            )
    yield DONE


def _event(content: BaseModel) -> bytes:
    return b"data: " + content.model_dump_json(exclude_none=True).encode() + b"\n\n"


def _chunk(content: CompletionChunk) -> bytes:
    """As ``_event``, but with the ``"finish_reason": null`` that readers of OpenAI's streams look for."""
    left_out = {"usage"} if content.usage is None else None
    return b"data: " + content.model_dump_json(exclude=left_out).encode() + b"\n\n"


def failure(reply: Reply, error: Exception) -> bytes:
    """An error after the status line has been sent; one that is not ours keeps its details to itself."""
    known = error if isinstance(error, HalluTracerError) else HalluTracerError("an internal error under way")
    reply.record.code = known.code
    content: dict[str, Any] = error_body(known.status, known.message, known.code, known.param)
    return b"data: " + json.dumps(content).encode() + b"\n\n"
