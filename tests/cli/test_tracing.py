"""--otlp-traces-endpoint: what is wrong is said at start, before anything listens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from service.cli.main import main
from service.cli.options import UsageError
from service.cli.tracing import TraceOptions, check
from tests.serve_process import ROOT

GOOD = "http://localhost:4318/v1/traces"


@pytest.mark.parametrize(
    ("endpoint", "word"),
    [
        ("", "OTLP over HTTP"),
        ("localhost:4318", "OTLP over HTTP"),
        ("grpc://localhost:4317", "OTLP over HTTP"),
        ("htp://localhost:4318/v1/traces", "OTLP over HTTP"),
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
        TraceOptions(otlp_traces_endpoint=endpoint).opened()
    assert "--otlp-traces-endpoint" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_another_protocol_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_PROTOCOL asks for 'grpc'"):
        check(GOOD)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")  # of the two it counts
    check(GOOD)


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY"])
def test_a_file_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv(name, str(tmp_path / "ca.pem"))
    with pytest.raises(UsageError, match=f"{name} names: .*ca.pem"):
        check(GOOD)
    (tmp_path / "ca.pem").touch()
    check(GOOD)


def test_without_the_option_nothing_is_opened() -> None:
    assert TraceOptions().opened() is None


def test_without_the_extra_the_cure_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "service.serving.tracing", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--otlp-traces-endpoint", GOOD])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: --otlp-traces-endpoint")
    assert "pip install 'hallutracer[otel]'" in captured.err
    assert captured.err.count("\n") == 1


def test_without_the_option_nothing_is_imported() -> None:
    names = "[name for name in sys.modules if name.startswith('opentelemetry')]"
    code = f"import sys, service.cli.serve, service.api.app, service.serving.service; print({names})"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
