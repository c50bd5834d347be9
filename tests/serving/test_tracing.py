"""Bad variables, requests that end badly, and spans that nobody takes; tests/test_traces.py has the rest."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from service.errors import HalluTracerError
from service.policies.guard import Action, Policy, Upstream
from service.serving import tracing
from service.serving.tracing import Tracing
from tests.api.test_reply import guaranteed, known
from tests.otlp import collector
from tests.running import running, until
from tests.serve_process import ROOT

NOWHERE = "http://127.0.0.1:9/v1/traces"
HEADERS = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("OTEL_TRACES_SAMPLER", "allways_on", "allways_on"),
        ("OTEL_TRACES_SAMPLER_ARG", "a tenth", "SAMPLER_ARG"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "s3cret", "eader"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon", "soon"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zip", "zip"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "OTEL_BSP"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1", "positive"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment", "deployment"),
    ],
)
def test_a_variable_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, word: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    monkeypatch.setenv(name, value)
    with pytest.raises(HalluTracerError, match=word) as caught:
        Tracing(NOWHERE)
    assert "s3cret" not in str(caught.value)
    assert logging.getLogger("opentelemetry").propagate
    assert not logging.getLogger("opentelemetry").handlers


def test_the_share_that_is_sampled_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with collector() as sink:
        found = Tracing(sink.endpoint)
        found.request(HEADERS, "GET").end("id", "/score", 200, None)
        found.close()
        assert sink.calls == 0


def test_the_library_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with collector() as sink:
        found = Tracing(sink.endpoint)
        request = found.request({}, "GET")
        request.end("id", "/score", 200, None)
        found.close()
        assert (request.id, sink.calls) == (None, 0)


def test_a_method_that_anybody_may_invent_is_no_name() -> None:
    with collector() as sink:
        found = Tracing(sink.endpoint)
        found.request({}, "SECRET").end("id", None, 405, "method_not_allowed")
        found.close()
        assert [(one.name, one.attributes["http.request.method"]) for one in sink.spans] == [("_OTHER", "_OTHER")]


def test_the_end_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_S", 0.2)
    with collector() as sink:
        sink.free.clear()
        found = Tracing(sink.endpoint)
        found.request({}, "GET").end("id", "/score", 200, None)
        found.close()
        assert any(thread.name == "traces" for thread in threading.enumerate())  # it hangs, and nobody waits for it


def test_a_process_that_ends_at_once_does_not_wait_either() -> None:
    with collector() as sink:
        sink.free.clear()
        code = f"""
from service.serving.tracing import Tracing
found = Tracing({sink.endpoint!r})
found.request({{}}, "GET").end("id", "/score", 200, None)
print("over")
"""
        limits = {"OTEL_BSP_SCHEDULE_DELAY": "600000", "OTEL_EXPORTER_OTLP_TIMEOUT": "300"}
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | limits, capture_output=True,
                               text=True, timeout=25)  # fmt: skip
        assert found.stdout == "over\n", found.stderr
        assert sink.calls == 0


def test_spans_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The newest stay: requests go on while a collector hangs, and memory does not grow."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "6")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    with collector() as sink:
        sink.free.clear()
        with running(tmp_path, tracing=Tracing(sink.endpoint)) as service:
            for _ in range(20):  # three spans each
                assert service.post(prompt="Why?").status_code == 200
            assert sink.calls == 1
            sink.free.set()
        assert len(sink.spans) == 7


def test_a_collector_that_is_gone_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setattr(tracing, "FLUSH_S", 0.2)
    with collector() as sink:
        endpoint = Tracing(sink.endpoint)
        gone = sink.address
        service = running(tmp_path, tracing=endpoint)
        serving = service.__enter__()
        assert serving.post(prompt="Why?").status_code == 200
        until(lambda: bool(sink.spans))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{gone}")
    for _ in range(3):
        assert serving.post(prompt="Why?").status_code == 200
    until(lambda: any("opentelemetry" in record.name for record in caplog.records))  # and the log tells
    service.__exit__(None, None, None)


def test_a_prompt_that_is_never_judged_has_a_gate_that_failed(tmp_path: Path) -> None:
    with collector() as sink:
        with running(tmp_path, tracing=Tracing(sink.endpoint), deadline_s=0.2) as service:
            service.engine.sleep_s = 1.0
            assert service.post(prompt="Why?").status_code == 504
        spans = {one.name: one for one in sink.spans}
        assert {one.attributes.get("error.type") for one in spans.values()} == {"deadline_exceeded"}
        assert all(one.failed for one in spans.values())
        assert set(spans) == {"POST /score", "score scripted", "gate"}
        assert "hallutracer.risk" not in spans["gate"].attributes


def test_a_stream_whose_reader_leaves_ends_its_spans(tmp_path: Path) -> None:
    with collector() as sink:
        with running(tmp_path, tracing=Tracing(sink.endpoint)) as service:
            service.engine.answer, service.engine.sleep_s = "x" * 400, 0.02
            body = {"prompt": "Why?", "generate": {"max_tokens": 400}, "policy": "observe", "stream": True}
            with httpx.stream("POST", f"{service.url}/score", json=body, headers=HEADERS, timeout=60) as found:
                lines = found.iter_lines()
                assert all(next(lines) is not None for _ in range(8))
            until(lambda: service.metric("hallutracer_requests_in_flight") == 0)
        spans = {one.name: one for one in sink.spans}
        assert set(spans) == {"POST /score", "chat scripted", "gate", "decode"}
        root, chat, decode = spans["POST /score"], spans["chat scripted"], spans["decode"]
        assert decode.start_ns < decode.end_ns == chat.end_ns <= root.end_ns
        assert {one.attributes.get("error.type") for one in (root, chat, decode)} == {"client_closed_request"}
        assert "error.type" not in spans["gate"].attributes
        assert not any(one.failed for one in spans.values())  # nobody's fault
        assert 0 < decode.attributes["gen_ai.usage.output_tokens"] < 400
        assert decode.attributes["gen_ai.usage.output_tokens"] == chat.attributes["gen_ai.usage.output_tokens"]
        assert not any("gen_ai.response.finish_reasons" in one.attributes for one in spans.values())


def test_a_prompt_unlike_training_is_told(tmp_path: Path) -> None:
    with collector() as sink:
        with running(tmp_path, names=(), add=[known], tracing=Tracing(sink.endpoint)) as service:
            found = service.post(prompt="Why?").json()["data"][0]["outside_training"]
        [gate] = [one for one in sink.spans if one.name == "gate"]
        assert gate.attributes["hallutracer.outside_training"] is found


def test_a_guarantee_is_told_as_the_answer_tells_it(tmp_path: Path) -> None:
    with collector() as sink:
        with running(tmp_path, names=(), add=[guaranteed], tracing=Tracing(sink.endpoint)) as service:
            sampled = {"generate": {"max_tokens": 2, "temperature": 1.0}}
            told = [service.post(prompt="Why?", **more).json()["guarantee"] for more in ({}, sampled)]
        gates = [one.attributes for one in sink.spans if one.name == "gate"]
        assert [told[0]["holds"], told[1]["holds"]] == [True, False]
        for gate, guarantee in zip(gates, told, strict=True):
            assert gate["hallutracer.guarantee.holds"] is guarantee["holds"]
            assert gate["hallutracer.guarantee.void"] == guarantee["void"]


def test_a_caller_who_leaves_an_upstream_ends_its_span(tmp_path: Path) -> None:
    with collector() as sink, collector() as other:  # the other server never answers
        other.free.clear()
        sends = Policy("send", Action.FALLBACK, 0.0, upstream=Upstream(f"http://{other.address}/v1", "theirs"))
        with running(tmp_path, policies={"send": sends}, tracing=Tracing(sink.endpoint)) as service:
            body = {"model": "scripted", "messages": [{"role": "user", "content": "Why?"}],
                    "vllm_xargs": {"hallutracer_policy": "send"}}  # fmt: skip
            left = threading.Thread(target=_leave, args=(f"{service.url}/v1/chat/completions", body, other))
            left.start()
            left.join()
            until(lambda: service.metric("hallutracer_upstream_requests_total") == 1)
        [theirs] = [one for one in sink.spans if one.name == "chat theirs"]
        assert theirs.attributes["error.type"] == "given_up"


def _leave(url: str, body: object, other: object) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=1.0)
