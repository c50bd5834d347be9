"""OpenTelemetry traces of requests, sent over OTLP.  Imported only where ``--otlp-traces-endpoint``
asks for them.

The names are those of the GenAI conventions 0.1.0 and of the HTTP conventions; what neither has
begins ``hallutracer.``

    POST /v1/chat/completions     the HTTP request; continues the caller's traceparent
      chat MODEL                  what the model did, by the GenAI conventions
        gate                      a prompt, from the queue to its decision
        decode                    its answer
      chat UPSTREAM_MODEL         the server that a policy falls back on; it gets a traceparent

Spans are queued and sent by a thread of their own: a collector that is slow or gone costs spans,
never a request. No prompt, answer or key becomes an attribute.  The prompts' spans are written when
the request ends, from times that were taken anyway."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service import __version__
from service.access.routes import CHAT_ROUTE, CONVERSATION_ROUTES, SCORE_ROUTES
from service.annexes.traces.evaluation_events import (
    Attributes,
    EvaluationEvents,
    of_answer,
    of_failure,
    of_prompt,
)
from service.errors import ClientGone, HalluTracerError
from service.policies.guard import Decision, Upstream
from service.serving.judgement import AnswerEnd, JudgedPrompt, Judgement

FLUSH_S = 5.0  # how long the end of the service waits for its last spans
METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"}
)
MOST_PROMPTS = 16  # of one request, with spans of their own
PORTS = {"http": 80, "https": 443}
REASONS = frozenset({"stop", "length", "content_filter", "tool_calls", "function_call"})
UNKNOWN = "error"  # the finish reason of what has none: it failed, or nobody waited for its end
# Not the baggage: what callers say of themselves is not for the server that a policy falls back on.
PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """One service's spans, and with ``events`` its risks as events, on their way to a collector."""

    def __init__(self, endpoint: str, events: str | None = None) -> None:
        """The rest is said by OTEL_* variables.  Raises HalluTracerError where OpenTelemetry finds
        fault with one."""
        with _faults_raised():
            resource = Resource.create({SERVICE_VERSION: __version__})
            if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
                resource = resource.merge(Resource({SERVICE_NAME: "hallutracer"}))
            # At exit the library would wait half a minute for a collector that is gone; ``close``
            # is bounded.
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
            self._events = None if events is None else EvaluationEvents(events, resource)
        self._tracer = self._provider.get_tracer("hallutracer", __version__)

    def request(self, headers: Mapping[str, str], method: str) -> RequestTrace:
        """Begin a request's span, as the caller's ``traceparent`` says."""
        known = method if method in METHODS else "_OTHER"
        parent, attributes = PROPAGATOR.extract(headers, Context()), {"http.request.method": known}
        span = self._tracer.start_span(known, parent, SpanKind.SERVER, attributes)
        return RequestTrace(self._tracer, span, known, self._events)

    def close(self) -> None:
        """Send what is left, within ``FLUSH_S``."""
        ends = [self._provider.shutdown] + ([] if self._events is None else [self._events.shutdown])
        last = [threading.Thread(target=end, name="traces", daemon=True) for end in ends]
        until = time.monotonic() + FLUSH_S
        for thread in last:
            thread.start()
        for thread in last:
            thread.join(max(0.0, until - time.monotonic()))


@contextmanager
def _faults_raised() -> Iterator[None]:
    """Raise what OpenTelemetry only warns of: it goes on with a default that nobody chose.

    Warnings of other threads are about exports, such as those of an earlier service, except where
    resources are read."""
    catcher, logger = BufferingHandler(1000), logging.getLogger("opentelemetry")
    catcher.setLevel(logging.WARNING)
    here = threading.get_ident()
    catcher.addFilter(
        lambda record: record.thread == here or record.name == "opentelemetry.sdk.resources"
    )
    logger.addHandler(catcher)
    before, logger.propagate = logger.propagate, False
    try:
        yield  # what cannot be read as a header may be a key
        messages = [
            str(record.msg).replace("%s", "...")
            if record.name == "opentelemetry.util.re"
            else record.getMessage()
            for record in catcher.buffer
        ]
    except (ValueError, OSError, RuntimeError) as error:
        messages = [str(error)]
    finally:
        logger.removeHandler(catcher)
        logger.propagate = before
    if messages:
        raise HalluTracerError(f"OpenTelemetry refuses a variable OTEL_*: {messages[0]}")


class RequestTrace:
    """One request's spans."""

    def __init__(
        self, tracer: Tracer, span: Span, method: str, events: EvaluationEvents | None = None
    ) -> None:
        self._tracer = tracer
        self._span = span
        self._method = method
        self._events = events
        self._context = set_span_in_context(span, Context())
        context = span.get_span_context()
        # None with OTEL_SDK_DISABLED
        self.id = format_trace_id(context.trace_id) if context.is_valid else None

    def upstream(self, upstream: Upstream, route: str) -> UpstreamCall:
        """Begin the span of a prompt that is sent on."""
        operation = "chat" if route == CHAT_ROUTE else "text_completion"
        parts = urlsplit(upstream.url)
        attributes = _operation(operation, "openai", upstream.model)
        attributes |= {
            "server.address": parts.hostname or "",
            "server.port": parts.port or PORTS[parts.scheme],
        }
        name = f"{operation} {upstream.model}"
        return UpstreamCall(
            self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes)
        )

    def end(
        self,
        request_id: str,
        route: str | None,
        status: int,
        code: str | None,
        judgement: Judgement | None = None,
        answers: Sequence[AnswerEnd] = (),
    ) -> None:
        """End the request's span with all below it; ``code`` is the error's, ``route`` None where
        there is none."""
        span = self._span
        if not span.is_recording():
            return
        if judgement is not None and (judgement.prompts or judgement.unscored):
            self._write_operation(judgement, answers, route, code)
        if route is not None:  # a path that is no route of ours may hold anything
            span.update_name(f"{self._method} {route}")
            span.set_attributes({"http.route": route, "url.path": route})
        span.set_attributes(
            {"http.response.status_code": status, "hallutracer.request_id": request_id}
        )
        _fail(span, code, status)
        span.end()

    def _write_operation(
        self,
        judgement: Judgement,
        answers: Sequence[AnswerEnd],
        route: str | None,
        code: str | None,
    ) -> None:
        scorer = judgement.scorer
        model = judgement.model
        sampling = judgement.sampling
        manifest = scorer.bundle.manifest
        operation = "score"
        now = time.time_ns()
        rows: list[tuple[int, int, JudgedPrompt | None, AnswerEnd]] = [
            (prompt.index, prompt.submitted_ns, prompt, answer)
            for prompt, answer in zip(judgement.prompts, answers, strict=True)
        ]
        rows += [(index, ns, None, AnswerEnd()) for index, ns in judgement.unscored.items()]
        decoding: Attributes = {}
        if sampling is not None:
            chat = route in CONVERSATION_ROUTES or (
                route in SCORE_ROUTES and scorer.prompt_format == "chat"
            )
            operation = "chat" if chat else "text_completion"
            for name in ("max_tokens", "temperature", "top_p", "seed"):
                if (value := getattr(sampling, name)) is not None:
                    decoding[f"gen_ai.request.{name}"] = value
            decoding |= {"gen_ai.request.stream": True} if judgement.streams else {}
        bundle: Attributes = {
            f"hallutracer.bundle.{name}": getattr(manifest, name)
            for name in ("name", "version", "digest")
        }
        bundle["hallutracer.policy"] = judgement.policy.name
        attributes = (
            _operation(operation, "hallutracer", model)
            | decoding
            | bundle
            | {
                "gen_ai.usage.input_tokens": sum(
                    report.prompt_tokens for report in judgement.reports
                ),
                "gen_ai.usage.cache_read.input_tokens": sum(
                    report.cached_tokens for report in judgement.reports
                ),
                "gen_ai.usage.output_tokens": sum(answer.tokens for answer in answers),
                "gen_ai.response.id": judgement.answer_id,
                "gen_ai.response.model": model,
                "hallutracer.prompts": len(rows),
            }
        )
        started, name = min(ns for _, ns, _, _ in rows), f"{operation} {model}"
        span = self._tracer.start_span(
            name, self._context, SpanKind.INTERNAL, attributes, start_time=started
        )
        below = set_span_in_context(span, Context())
        if (guarantee := judgement.guarantee) is not None:
            bundle["hallutracer.guarantee.holds"] = guarantee.holds
            bundle["hallutracer.guarantee.void"] = guarantee.violations
        reasons = []
        over = started
        finished = True
        for number, (index, ns, prompt, end) in enumerate(sorted(rows, key=lambda row: row[0])):
            decodes = (
                sampling is not None
                and prompt is not None
                and prompt.report.decision is Decision.CONTINUE
            )
            judged = now if prompt is None else ns + _ns(prompt.timings.total)
            ended = (
                judged
                if not decodes
                else now
                if end.decode_s is None
                else judged + _ns(end.decode_s)
            )
            if end.completion is not None:
                reasons.append(end.completion.finish_reason)
            elif sampling is not None:  # as OpenAI's routes say of a withheld answer
                reasons.append(UNKNOWN if prompt is None or decodes else "content_filter")
            finished &= prompt is not None and (end.outcome.shows or not decodes)
            over = max(over, ended)
            if number >= MOST_PROMPTS:
                continue
            own = bundle | {"hallutracer.index": index} | ({} if prompt is None else _told(prompt))
            gate = self._tracer.start_span("gate", below, SpanKind.INTERNAL, own, start_time=ns)
            _fail(gate, code if prompt is None else None)
            gate.end(judged)
            if decodes:
                own = {
                    "gen_ai.usage.output_tokens": end.tokens,
                    "gen_ai.response.finish_reasons": reasons[-1:],
                }
                decode = self._tracer.start_span(
                    "decode", below, SpanKind.INTERNAL, own, start_time=judged
                )
                _fail(decode, None if end.outcome.shows else code)
                decode.end(ended)
            if self._events is not None:
                same: Attributes = {
                    "gen_ai.response.id": judgement.answer_id,
                    "hallutracer.index": index,
                }
                told = (
                    of_failure(code or HalluTracerError.code)
                    if prompt is None
                    else of_prompt(prompt.report)
                )
                self._events.send(below, judged, same | told)
                if end.risk is not None and (record := manifest.answer) is not None:
                    self._events.send(below, ended, same | of_answer(end.risk, record.threshold))
        if reasons:
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
        # else what failed came after the model, such as an upstream
        _fail(span, None if finished else code)
        span.end(over)


def _told(prompt: JudgedPrompt) -> Attributes:
    """Return what a prompt's gate says of it."""
    report, timings = prompt.report, prompt.timings
    attributes: Attributes = {
        "hallutracer.risk": report.risk,
        "hallutracer.decision": report.decision.value,
        "hallutracer.threshold": report.verdict.threshold,
        "hallutracer.flagged": report.verdict.flagged,
        "hallutracer.queue_s": timings.queue,
        "hallutracer.prefill_s": timings.prefill,
        "hallutracer.probe_s": timings.probe,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "hallutracer.outside_training": report.uncertain.outside,
    }
    return (
        attributes
        if report.context.said is None
        else attributes | {"hallutracer.applies": report.context.applies}
    )


class UpstreamCall:
    """The span of one prompt that is sent on; ``headers`` continue the trace there."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.headers: dict[str, str] = {}
        PROPAGATOR.inject(self.headers, set_span_in_context(span, Context()))
        self._reasons: list[str] = []

    def note(self, document: Mapping[str, Any]) -> None:
        """Take usage and finish reasons from an answer or a chunk, where they are what they should
        be."""
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
        """End the span; ``code``: why without an answer."""
        if reasons := self._reasons or ([] if code is None else [UNKNOWN]):
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        _fail(self._span, code)
        self._span.end()


def _operation(operation: str, provider: str, model: str) -> Attributes:
    names = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
    return dict(zip(names, (operation, provider, model), strict=True))


def _fail(span: Span, code: str | None, status: int | None = None) -> None:
    """By the HTTP conventions a caller's own fault is no error of the server; nor is one who
    left."""
    if code is None:
        return
    span.set_attribute("error.type", code)
    if code != ClientGone.code and (status is None or not 400 <= status < 500):
        span.set_status(StatusCode.ERROR)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
