"""Where ``hallutracer serve`` sends its traces."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from service.cli.options import UsageError
from service.settings import option, section

if TYPE_CHECKING:
    from service.serving.tracing import Tracing

FLAG = "--otlp-traces-endpoint"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # the first that is set counts
HTTP = "http/protobuf"
FILES = tuple(
    f"OTEL_EXPORTER_OTLP_{signal}{file}"
    for signal in ("TRACES_", "")
    for file in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
)


@section("Traces", 38)
@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Whether requests are traced, and where to."""

    otlp_traces_endpoint: Annotated[
        str | None,
        option("Send OpenTelemetry traces there over OTLP/HTTP, such as http://localhost:4318/v1/traces; service name, "
               "headers and sampler are OTEL_* variables.  Default: no traces."),
    ] = None  # fmt: skip

    def opened(self) -> Tracing | None:
        """None: no traces.  Raises UsageError and HalluTracerError; whether a collector listens is not asked."""
        if self.otlp_traces_endpoint is None:
            return None
        check(self.otlp_traces_endpoint)
        try:
            from service.serving.tracing import Tracing
        except ImportError as error:
            raise UsageError(FLAG, f"needs OpenTelemetry: pip install 'hallutracer[otel]' ({error})") from None
        return Tracing(self.otlp_traces_endpoint)


def check(endpoint: str) -> None:
    """Raise UsageError for what cannot be a collector's address for traces."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    example = "such as http://localhost:4318/v1/traces"
    if not usable or parts.query or parts.fragment or any(letter.isspace() for letter in endpoint):
        raise UsageError(FLAG, f"needs an address for OTLP over HTTP, {example}")
    if parts.username is not None or parts.password is not None:
        raise UsageError(FLAG, "holds a user or a password; give headers in OTEL_EXPORTER_OTLP_TRACES_HEADERS")
    if parts.path in ("", "/"):
        raise UsageError(FLAG, f"needs the whole address with its path, {example}")
    for name in filter(os.environ.get, FILES):
        if not os.access(os.environ[name], os.R_OK):
            raise UsageError(FLAG, f"cannot read the file that {name} names: {os.environ[name]}")
    for name in list(filter(os.environ.get, PROTOCOLS))[:1]:
        if os.environ[name] != HTTP:
            raise UsageError(FLAG, f"sends {HTTP}; {name} asks for {os.environ[name]!r}: unset it, or set it to {HTTP}")
