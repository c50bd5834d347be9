"""The options of the traces."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from service.cli.options import UsageError
from service.settings import option, section

if TYPE_CHECKING:
    from service.annexes.traces.tracing import Tracing
    from service.serving.metrics import Metrics

TRACES, EVENTS = "--otlp-traces-endpoint", "--otlp-logs-endpoint"
HTTP = "http/protobuf"


@section("Traces", 38)
@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Whether requests are traced, and where to; the same of events."""

    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            "Send OpenTelemetry traces there over OTLP/HTTP, such as"
            " http://localhost:4318/v1/traces; service name, headers and sampler are OTEL_*"
            " variables.  Default: no traces."
        ),
    ] = None
    otlp_logs_endpoint: Annotated[
        str | None,
        option(
            "Send the risks of traced requests there, too, as gen_ai.evaluation.result events over"
            " OTLP/HTTP, such as http://localhost:4318/v1/logs.  Default: no events."
        ),
    ] = None

    def hooks(self) -> dict[str, Callable[[Metrics], Tracing | None]]:
        """Return what makes the ``tracing`` of a ``Service``.  Raises UsageError."""
        tracing = self.opened()
        return {"tracing": lambda _: tracing}

    def opened(self) -> Tracing | None:
        """Return the exporter; None: no traces.  Raises UsageError.  Whether a collector listens is
        not asked."""
        if self.otlp_logs_endpoint is not None:
            _check_endpoint(EVENTS, "logs", self.otlp_logs_endpoint)
        if self.otlp_traces_endpoint is None:
            if self.otlp_logs_endpoint is not None:
                raise UsageError(EVENTS, f"needs {TRACES}: an event belongs to a span")
            return None
        _check_endpoint(TRACES, "traces", self.otlp_traces_endpoint)
        try:
            from service.annexes.traces.tracing import Tracing
        except ImportError as error:
            raise UsageError(
                TRACES, f"needs OpenTelemetry: pip install 'hallutracer[otel]' ({error})"
            ) from None
        return Tracing(self.otlp_traces_endpoint, self.otlp_logs_endpoint)


def _check_endpoint(flag: str, signal: str, endpoint: str) -> None:
    """Raise UsageError for what cannot be a collector's address for ``signal``, and for variables
    that do not fit."""
    # of two variables, the first counts
    prefixes = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_", "OTEL_EXPORTER_OTLP_")
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    example = f"such as http://localhost:4318/v1/{signal}"
    if not usable or parts.query or parts.fragment or any(letter.isspace() for letter in endpoint):
        raise UsageError(flag, f"needs an address for OTLP over HTTP, {example}")
    if parts.username is not None or parts.password is not None:
        raise UsageError(flag, f"holds a user or a password; give headers in {prefixes[0]}HEADERS")
    if parts.path in ("", "/"):
        raise UsageError(flag, f"needs the whole address with its path, {example}")
    for name in (
        prefix + file
        for prefix in prefixes
        for file in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
    ):
        if (path := os.environ.get(name)) and not os.access(path, os.R_OK):
            raise UsageError(flag, f"cannot read the file that {name} names: {path}")
    name = next(
        (prefix + "PROTOCOL" for prefix in prefixes if os.environ.get(prefix + "PROTOCOL")), ""
    )
    if name and os.environ[name] != HTTP:
        raise UsageError(
            flag,
            f"sends {HTTP}; {name} asks for {os.environ[name]!r}: unset it, or set it to {HTTP}",
        )
