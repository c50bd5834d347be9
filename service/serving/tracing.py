"""OpenTelemetry traces of requests, sent over OTLP.  Imported only where ``--otlp-traces-endpoint`` asks for them.

    POST /v1/chat/completions     the HTTP request; continues the caller's traceparent
      chat MODEL                  what the model did, by the GenAI conventions
        gate                      a prompt, from the queue to its decision
        decode                    its answer
      chat UPSTREAM_MODEL         the server that a policy falls back on; it gets a traceparent

Spans are queued and sent by a thread of their own: a collector that is slow or gone costs spans, never a request.
No prompt, answer or key becomes an attribute.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind

from service import __version__
from service.errors import HalluTracerError
from service.serving.spans import PROPAGATOR, RequestTrace

FLUSH_S = 5.0  # how long the end of the service waits for its last spans
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})


class Tracing:
    """One service's spans, on their way to a collector."""

    def __init__(self, endpoint: str) -> None:
        """The rest is said by OTEL_* variables.  Raises HalluTracerError where OpenTelemetry finds fault with one."""
        with _faults_raised():
            resource = Resource.create({SERVICE_VERSION: __version__})
            if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
                resource = resource.merge(Resource({SERVICE_NAME: "hallutracer"}))
            # At exit the library would wait half a minute for a collector that is gone; ``close`` is bounded.
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("hallutracer", __version__)

    def request(self, headers: Mapping[str, str], method: str) -> RequestTrace:
        """Begin a request's span, as the caller's ``traceparent`` says."""
        known = method if method in METHODS else "_OTHER"
        span = self._tracer.start_span(
            known, PROPAGATOR.extract(headers, Context()), SpanKind.SERVER, {"http.request.method": known}
        )
        return RequestTrace(self._tracer, span, known)

    def close(self) -> None:
        """Send what is left, within ``FLUSH_S``."""
        last = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        last.start()
        last.join(FLUSH_S)


class _Catcher(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@contextmanager
def _faults_raised() -> Iterator[None]:
    """Raise what OpenTelemetry only warns of: it goes on with a default that nobody chose."""
    catcher, logger = _Catcher(logging.WARNING), logging.getLogger("opentelemetry")
    logger.addHandler(catcher)
    before, logger.propagate = logger.propagate, False
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise HalluTracerError(f"OpenTelemetry refuses a variable OTEL_*: {error}") from None
    finally:
        logger.removeHandler(catcher)
        logger.propagate = before
    if catcher.found:
        first = catcher.found[0]
        # What cannot be read as a header may be a key.
        told = str(first.msg).replace("%s", "...") if first.name == "opentelemetry.util.re" else first.getMessage()
        raise HalluTracerError(f"OpenTelemetry refuses a variable OTEL_*: {told}")
