"""An OTLP receiver: a collector's HTTP side, which keeps the spans and events that it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.kit.local_server import answer, listening
from tests.running import until

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class Span:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]
    raw: str  # everything of it, as text


@dataclass(frozen=True)
class Event:
    name: str
    trace_id: str
    span_id: str
    at_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    raw: str


@dataclass
class Collector:
    """``status`` is its answer to what comes; while ``free`` is not set it gives none."""

    address: str = ""
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    calls: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    free: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}/v1/traces"

    @property
    def events_endpoint(self) -> str:
        return f"http://{self.address}/v1/logs"

    def receive(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.calls += 1
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.free.wait()
        if self.status == 200 and request.path in ("/v1/traces", "/v1/logs"):
            assert request.headers["Content-Type"] == "application/x-protobuf"
            if request.path == "/v1/traces":
                self.spans += spans_of(body)
            else:
                self.events += events_of(body)
        answer(request, self.status, b"", "application/x-protobuf")

    def trace(self, trace_id: str) -> dict[str, Span]:
        """A trace's spans by name, once the one that ends last, the request's, is there."""
        until(lambda: any(one.kind == "server" for one in self.of(trace_id)))
        result = self.of(trace_id)
        assert len({one.name for one in result}) == len(result)
        return {one.name: one for one in result}

    def of(self, trace_id: str) -> list[Span]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]


@contextmanager
def collector() -> Iterator[Collector]:
    found = Collector()
    found.free.set()
    with listening(found.receive) as address:
        found.address = address
        try:
            yield found
        finally:
            found.free.set()


def spans_of(body: bytes) -> Iterator[Span]:
    for part in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in part.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    KINDS[span.kind],
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == 2,
                    _attributes(span.attributes),
                    _attributes(part.resource.attributes),
                    f"{span}{part.resource}{scope.scope}",
                )


def events_of(body: bytes) -> Iterator[Event]:
    for part in ExportLogsServiceRequest.FromString(body).resource_logs:
        for scope in part.scope_logs:
            for log_record in scope.log_records:
                yield Event(
                    log_record.event_name,
                    log_record.trace_id.hex(),
                    log_record.span_id.hex(),
                    log_record.time_unix_nano,
                    _attributes(log_record.attributes),
                    _attributes(part.resource.attributes),
                    f"{log_record}{part.resource}{scope.scope}",
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [_value(one) for one in value.array_value.values]
        if kind == "array_value"
        else getattr(value, kind)
    )
