"""The options of the traces: which addresses they take, and which variables stand in the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from service.annexes.traces.options import TraceOptions
from service.cli.options import UsageError
from tests.command_line import one_line_says

ROOT = Path(__file__).parent.parent.parent.parent
GOOD = "http://localhost:4318/v1/traces"


def opened(endpoint: str) -> None:
    if (tracing := TraceOptions(otlp_traces_endpoint=endpoint).opened()) is not None:
        tracing.close()


@pytest.mark.parametrize(
    ("endpoint", "word"),
    [
        ("", "OTLP over HTTP"),
        ("localhost:4318", "OTLP over HTTP"),
        ("grpc://localhost:4317", "OTLP over HTTP"),
        ("http:///v1/traces", "OTLP over HTTP"),
        ("http://localhost:port/v1/traces", "OTLP over HTTP"),
        ("http://localhost:0/v1/traces", "OTLP over HTTP"),
        ("http://local host/v1/traces", "OTLP over HTTP"),
        ("http://localhost:4318/v1/traces?x=1", "OTLP over HTTP"),
        ("http://localhost:4318", "path"),
        ("http://localhost:4318/", "path"),
        ("http://me:s3cret@localhost:4318/v1/traces", "HEADERS"),
        ("http://me@localhost:4318/v1/traces", "HEADERS"),
    ],
)
def test_what_is_no_address_for_traces(endpoint: str, word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        opened(endpoint)
    assert caught.value.param == "--otlp-traces-endpoint"
    assert "s3cret" not in str(caught.value)


def test_events_need_traces_and_an_address_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for traces, events, word in (
        (None, "http://localhost:4318/v1/logs", "needs --otlp-traces-endpoint"),
        (GOOD, "http://localhost:4318", "v1/logs"),
        (GOOD, "http://me@localhost:4318/v1/logs", "OTLP_LOGS_HEADERS"),
    ):
        with pytest.raises(UsageError, match=word) as caught:
            TraceOptions(otlp_traces_endpoint=traces, otlp_logs_endpoint=events).opened()
        assert caught.value.param == "--otlp-logs-endpoint"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "grpc")
    opened(GOOD)
    with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_LOGS_PROTOCOL"):
        TraceOptions(
            otlp_traces_endpoint=GOOD, otlp_logs_endpoint="http://localhost:4318/v1/logs"
        ).opened()


def test_what_keeps_traces_from_being_sent_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        opened(GOOD)
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"
    )  # of the two it counts
    opened(GOOD)
    for name in ("OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(tmp_path / "ca.pem"))
            with pytest.raises(UsageError, match=f"{name} names: .*ca.pem"):
                opened(GOOD)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "service.annexes.traces.tracing", raising=False)
    one_line_says(("serve", "--otlp-traces-endpoint", GOOD), 2, "pip install 'hallutracer[otel]'")


def test_without_the_option_nothing_is_opened_or_imported() -> None:
    assert TraceOptions().opened() is None
    names = "[name for name in sys.modules if name.startswith('opentelemetry')]"
    code = (
        f"import sys, service.cli.serve, service.api.app, service.serving.service; print({names})"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
