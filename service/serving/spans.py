"""The spans of one request: what it asked, how each prompt was judged and answered, and who answered instead.

Those of the prompts are written when the request ends, from the times that were taken anyway.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from service.access.routes import CHAT_ROUTE, SCORE_ROUTES
from service.engines.base import Sampling
from service.errors import ClientGone
from service.judging.guarantee import standing
from service.policies.guard import Decision
from service.policies.upstreams import Upstream
from service.serving.request_handle import Job, RequestHandle

MOST_PROMPTS = 16  # of one request, with spans of their own
REASONS = frozenset({"stop", "length", "content_filter", "tool_calls", "function_call"})
Attributes = dict[str, AttributeValue]
# Not the baggage: what callers say of themselves is not for the server that a policy falls back on.
PROPAGATOR = TraceContextTextMapPropagator()


class RequestTrace:
    """One request's spans: ``handle`` and ``departures`` are told by whoever admits it, if it is."""

    def __init__(self, tracer: Tracer, span: Span, method: str) -> None:
        self._tracer, self._span, self._method = tracer, span, method
        self._context = set_span_in_context(span, Context())
        found = span.get_span_context()
        self.id = format_trace_id(found.trace_id) if found.is_valid else None  # None with OTEL_SDK_DISABLED
        self.handle: RequestHandle | None = None
        self.departures: tuple[str, ...] = ()  # from what a guarantee was calibrated on

    def upstream(self, upstream: Upstream, route: str) -> UpstreamCall:
        """Begin the span of a prompt that is sent on."""
        operation = "chat" if route == CHAT_ROUTE else "text_completion"
        parts = urlsplit(upstream.url)
        attributes = _operation(operation, "openai", upstream.model) | {"server.address": parts.hostname or ""}
        if parts.port:
            attributes["server.port"] = parts.port
        name = f"{operation} {upstream.model}"
        return UpstreamCall(self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes))

    def end(self, request_id: str, route: str | None, status: int, code: str | None) -> None:
        """End the request's span with all below it; ``code`` is the error's, ``route`` None where there is none."""
        span = self._span
        if not span.is_recording():
            return
        if self.handle is not None and self.handle.jobs:
            self._operation_ended(self.handle, route, code)
        if route is not None:  # a path that is no route of ours may hold anything
            span.update_name(f"{self._method} {route}")
            span.set_attributes({"http.route": route, "url.path": route})
        span.set_attributes({"http.response.status_code": status, "hallutracer.request_id": request_id})
        _fail(span, code, status)
        span.end()

    def _operation_ended(self, handle: RequestHandle, route: str | None, code: str | None) -> None:
        model, scorer, sampling = handle.scorer.engine.identity.model, handle.scorer, handle.sampling
        operation = "score"
        if sampling is not None:
            chat = route == CHAT_ROUTE or (route in SCORE_ROUTES and scorer.prompt_format == "chat")
            operation = "chat" if chat else "text_completion"
        spans = [_JobSpans(handle, job) for job in handle.jobs]
        bundle = _bundle(handle)
        attributes = _operation(operation, "hallutracer", model) | _decoding(sampling) | _usage(handle.jobs) | bundle
        attributes |= {"gen_ai.response.model": model, "hallutracer.prompts": handle.prompts}
        if sampling is not None:
            attributes["gen_ai.request.stream"] = handle.streams
        reasons = [one.finish_reason for one in spans if one.finish_reason is not None]
        if reasons:
            attributes["gen_ai.response.finish_reasons"] = reasons
        started = min(one.started for one in spans)
        span = self._tracer.start_span(
            f"{operation} {model}", self._context, SpanKind.INTERNAL, attributes, start_time=started
        )
        below = set_span_in_context(span, Context())
        common = bundle | _guarantee(handle, self.departures)
        for index, one in enumerate(spans[:MOST_PROMPTS]):
            one.write(self._tracer, below, common | {"hallutracer.index": index}, code)
        if not all(one.finished for one in spans):  # else what failed came after the model, such as an upstream
            _fail(span, code)
        span.end(max(one.ended for one in spans))


class _JobSpans:
    """One prompt's times, in ns since 1970: gate from ``started`` to ``judged``, decode from there to ``ended``."""

    def __init__(self, handle: RequestHandle, job: Job) -> None:
        self.job, now, times = job, time.time_ns(), job.timings
        self.started = job.submitted_ns
        self.judged = self.started + _ns(times.queue + times.prefill + times.probe) if job.report else now
        report = job.report
        self.decodes = report is not None and handle.sampling is not None and report.decision is Decision.CONTINUE
        completion = None if report is None else report.completion
        self.finished = report is not None and (completion is not None or not self.decodes)
        self.ended = self.judged
        if self.decodes:
            self.ended = now if times.decode is None else self.judged + _ns(times.decode)
        self.finish_reason: str | None = None
        if completion is not None:
            self.finish_reason = completion.finish_reason
        elif report is not None and handle.sampling is not None and not self.decodes:
            self.finish_reason = "content_filter"  # as OpenAI's routes say of a withheld answer

    def write(self, tracer: Tracer, context: Context, attributes: Attributes, code: str | None) -> None:
        """Both spans; ``attributes`` are the gate's beside the prompt's own."""
        report, times = self.job.report, self.job.timings
        gate = tracer.start_span("gate", context, SpanKind.INTERNAL, attributes, start_time=self.started)
        if report is None:
            _fail(gate, code)
        else:
            gate.set_attributes(
                {
                    "hallutracer.risk": report.risk,
                    "hallutracer.decision": report.decision.value,
                    "hallutracer.threshold": report.verdict.threshold,
                    "hallutracer.flagged": report.verdict.flagged,
                    "hallutracer.queue_s": times.queue,
                    "hallutracer.prefill_s": times.prefill,
                    "hallutracer.probe_s": times.probe,
                    "gen_ai.usage.input_tokens": report.prompt_tokens,
                }
            )
            if report.uncertain is not None:
                gate.set_attribute("hallutracer.outside_training", report.uncertain.outside)
            if report.context.said is not None:
                gate.set_attribute("hallutracer.applies", report.context.applies)
        gate.end(self.judged)
        if self.decodes:
            decode = tracer.start_span("decode", context, SpanKind.INTERNAL, start_time=self.judged)
            decode.set_attribute("gen_ai.usage.output_tokens", _output_tokens(self.job))
            if self.finish_reason is not None:
                decode.set_attribute("gen_ai.response.finish_reasons", [self.finish_reason])
            else:
                _fail(decode, code)
            decode.end(self.ended)


class UpstreamCall:
    """The span of one prompt that is sent on; ``headers`` continue the trace there."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.headers: dict[str, str] = {}
        PROPAGATOR.inject(self.headers, set_span_in_context(span, Context()))
        self._reasons: list[str] = []

    def note(self, document: Mapping[str, Any]) -> None:
        """Take usage and finish reasons from an answer or a chunk, where they are what they should be."""
        for choice in document["choices"]:
            reason = choice.get("finish_reason") if isinstance(choice, dict) else None
            if isinstance(reason, str) and reason in REASONS:
                self._reasons.append(reason)
        usage = document.get("usage")
        for name, key in (("input", "prompt_tokens"), ("output", "completion_tokens")):
            tokens = usage.get(key) if isinstance(usage, dict) else None
            if isinstance(tokens, int) and abs(tokens) < 2**63:
                self._span.set_attribute(f"gen_ai.usage.{name}_tokens", tokens)

    def end(self, code: str | None) -> None:
        """The call is over; ``code``: why without an answer."""
        if self._reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        _fail(self._span, code)
        self._span.end()


def _operation(operation: str, provider: str, model: str) -> Attributes:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model,
    }


def _decoding(sampling: Sampling | None) -> Attributes:
    if sampling is None:
        return {}
    found: Attributes = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }
    return found if sampling.seed is None else found | {"gen_ai.request.seed": sampling.seed}


def _usage(jobs: Sequence[Job]) -> Attributes:
    reports = [job.report for job in jobs if job.report is not None]
    return {
        "gen_ai.usage.input_tokens": sum(report.prompt_tokens for report in reports),
        "gen_ai.usage.cache_read.input_tokens": sum(report.cached_tokens for report in reports),
        "gen_ai.usage.output_tokens": sum(map(_output_tokens, jobs)),
    }


def _output_tokens(job: Job) -> int:
    completion = None if job.report is None else job.report.completion
    return job.tokens if completion is None else len(completion.token_ids)


def _bundle(handle: RequestHandle) -> Attributes:
    manifest = handle.scorer.bundle.manifest
    return {
        "hallutracer.bundle.name": manifest.name,
        "hallutracer.bundle.version": manifest.version,
        "hallutracer.bundle.digest": manifest.digest,
        "hallutracer.policy": handle.policy.name,
    }


def _guarantee(handle: RequestHandle, departures: tuple[str, ...]) -> Attributes:
    scorer = handle.scorer
    stands = standing(scorer.bundle.manifest, handle.policy, scorer.engine.identity.dtype, departures)
    if stands is None:
        return {}
    return {"hallutracer.guarantee.holds": stands.holds, "hallutracer.guarantee.void": stands.void}


def _fail(span: Span, code: str | None, status: int | None = None) -> None:
    """By the HTTP conventions a caller's own fault is no error of the server; nor is one who left."""
    if code is None:
        return
    span.set_attribute("error.type", code)
    if code != ClientGone.code and (status is None or not 400 <= status < 500):
        span.set_status(StatusCode.ERROR)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
