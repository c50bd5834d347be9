"""Traces as a real OTLP receiver gets them: what each request tells, and requests that end
badly."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from service.annexes.traces import tracing
from service.annexes.traces.tracing import Tracing
from service.errors import HalluTracerError
from service.policies.guard import Action, Policy, Upstream
from tests.api.test_reply import guaranteed, known
from tests.kit.local_server import answer, listening
from tests.otlp import Collector, Span, collector
from tests.running import Running, running, until

ASKED = "What is the capital of the Solomon Islands?"
CHATS = "/v1/chat/completions"
CHAT = {
    "messages": [{"role": "user", "content": ASKED}],
    "model": "m",
    "temperature": 0,
    "max_tokens": 8,
}
CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{CALLER}-00f067aa0ba902b7-01"}
KEY = "a-key-of-the-upstream"


class Lines(logging.Handler):
    """The fields of the request log's lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.record.fields())  # type: ignore[attr-defined]


@dataclass
class Traced:
    """The service, its collector, and the server that a policy falls back on."""

    collector: Collector
    service: Running = field(init=False)
    log: Lines = field(default_factory=Lines)
    calls: int = 0
    status: int = 200  # of the other server
    headers: dict[str, str] = field(default_factory=dict)  # that it got

    def say(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        choice = {"index": 0, "finish_reason": "length"}
        usage = {"prompt_tokens": 12, "completion_tokens": 3}
        if json.loads(body).get("stream"):
            chunk = {"choices": [choice | {"delta": {"content": "A secret."}}], "usage": usage}
            answer(
                request,
                200,
                f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(),
                "text/event-stream",
            )
            return
        whole = {
            "choices": [choice | {"message": {"role": "assistant", "content": "A secret."}}],
            "usage": usage,
        }
        answer(request, self.status, json.dumps(whole).encode())

    def post(self, path: str = CHATS, policy: str | None = None, **body: Any) -> httpx.Response:
        xargs = {} if policy is None else {"vllm_xargs": {"hallutracer_policy": policy}}
        return httpx.post(
            f"{self.service.url}{path}", json=CHAT | xargs | body, headers=self.header(), timeout=60
        )

    def header(self, flags: str = "01") -> dict[str, str]:
        self.calls += 1
        return {
            "traceparent": f"00-{self.trace_id}-00f067aa0ba902b7-{flags}",
            "baggage": "user=alice",
        }

    @property
    def trace_id(self) -> str:
        """Of the newest call."""
        return f"{CALLER[:-4]}{self.calls:04x}"

    def trace(self) -> dict[str, Span]:
        return self.collector.trace(self.trace_id)

    def lines(self, **fields: str) -> list[dict[str, Any]]:
        return [line for line in self.log.lines if line.items() >= fields.items()]


@pytest.fixture(scope="module")
def _traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    requests = logging.getLogger("hallutracer.request")
    with (
        collector() as sink,
        listening((made := Traced(sink)).say) as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        with patch.context() as otel:
            for name, value in (
                ("EXPORTER_OTLP_HEADERS", "x-tenant=acme"),
                ("RESOURCE_ATTRIBUTES", "deployment=test"),
                ("BSP_SCHEDULE_DELAY", "20"),
            ):
                otel.setenv(f"OTEL_{name}", value)
            opened = Tracing(sink.endpoint)
        patch.setenv("UPSTREAM_KEY", KEY)
        patch.setattr(requests, "level", logging.INFO)
        patch.setattr(requests, "handlers", [made.log])
        sends = Policy(
            "send",
            Action.FALLBACK,
            0.0,
            upstream=Upstream(f"http://{address}/v1", "theirs", "UPSTREAM_KEY"),
        )
        folder = tmp_path_factory.mktemp("traces")
        with running(
            folder, policies={"send": sends}, tracing=opened, model_names=("m",)
        ) as made.service:
            made.service.engine.answer = "Honiara, I believe."
            yield made


@pytest.fixture
def traced(_traced: Traced) -> Traced:
    _traced.collector.status = _traced.status = 200
    _traced.collector.free.set()
    return _traced


def test_an_answer(traced: Traced) -> None:
    found = traced.post(policy="observe")
    request_id = found.headers["x-request-id"]
    document = found.json()
    spans = traced.trace()
    names = ("POST /v1/chat/completions", "chat scripted", "gate", "decode")
    root, chat, gate, decode = (spans[name] for name in names)
    assert set(spans) == set(names)
    assert root.parent_id == "00f067aa0ba902b7"
    assert [one.kind for one in (root, chat, gate, decode)] == [
        "server",
        "internal",
        "internal",
        "internal",
    ]
    assert (chat.parent_id, gate.parent_id, decode.parent_id) == (
        root.span_id,
        chat.span_id,
        chat.span_id,
    )
    assert not any(one.failed for one in spans.values())
    assert (
        root.start_ns
        <= gate.start_ns
        == chat.start_ns
        < gate.end_ns
        == decode.start_ns
        < decode.end_ns
    )
    assert decode.end_ns == chat.end_ns <= root.end_ns
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": CHATS,
        "url.path": CHATS,
        "http.response.status_code": 200,
        "hallutracer.request_id": request_id,
    }
    judged, bundle = document["hallutracer"]["data"][0], document["hallutracer"]["bundle"]
    ours = {f"hallutracer.bundle.{name}": bundle[name] for name in ("name", "version", "digest")}
    ours["hallutracer.policy"] = "observe"
    usage, reasons = document["usage"], [document["choices"][0]["finish_reason"]]
    assert chat.attributes == ours | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "hallutracer",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.id": document["id"],
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "hallutracer.prompts": 1,
    }
    times = {
        name: gate.attributes[f"hallutracer.{name}_s"] for name in ("queue", "prefill", "probe")
    }
    assert times["prefill"] > 0
    assert gate.end_ns - gate.start_ns == pytest.approx(sum(times.values()) * 1e9, rel=1e-6)
    assert gate.attributes == ours | {
        f"hallutracer.{name}_s": value for name, value in times.items()
    } | {
        "hallutracer.index": 0,
        "hallutracer.risk": pytest.approx(judged["risk"], abs=1e-12),
        "hallutracer.decision": "continue",
        "hallutracer.threshold": judged["threshold"],
        "hallutracer.flagged": judged["flagged"],
        "hallutracer.outside_training": judged["outside_training"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
    }
    told = {
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": reasons,
    }
    assert decode.attributes == told
    assert (root.resource["service.name"], root.resource["deployment"]) == ("hallutracer", "test")
    assert traced.collector.headers[-1]["x-tenant"] == "acme"
    (line,) = traced.lines(request_id=request_id)
    assert line["trace_id"] == traced.trace_id


def test_a_withheld_answer(traced: Traced) -> None:
    found = traced.post(
        vllm_xargs={"hallutracer_policy": "gate", "hallutracer_threshold": 0.0}
    ).json()
    spans = traced.trace()
    assert set(spans) == {"POST /v1/chat/completions", "chat scripted", "gate"}
    chat, gate = spans["chat scripted"], spans["gate"]
    assert found["choices"][0]["finish_reason"] == "content_filter"
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["content_filter"]
    assert chat.attributes["gen_ai.usage.output_tokens"] == 0
    assert (gate.attributes["hallutracer.decision"], gate.attributes["hallutracer.flagged"]) == (
        "abstain",
        True,
    )
    assert gate.end_ns == chat.end_ns


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_a_policy_falls_back_on(traced: Traced, stream: bool) -> None:
    assert "A secret." in traced.post(policy="send", stream=stream).text
    spans = traced.trace()
    root = spans["POST /v1/chat/completions"]
    theirs = spans["chat theirs"]
    chat = spans["chat scripted"]
    assert (theirs.kind, theirs.parent_id, theirs.failed) == ("client", root.span_id, False)
    address = traced.headers["host"].split(":")
    assert theirs.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "theirs",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "server.address": address[0],
        "server.port": int(address[1]),
    }
    assert traced.headers["traceparent"] == f"00-{theirs.trace_id}-{theirs.span_id}-01"
    assert "baggage" not in traced.headers
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["content_filter"]
    assert chat.attributes.get("gen_ai.request.stream") is (True if stream else None)
    assert chat.end_ns <= theirs.start_ns < theirs.end_ns <= root.end_ns


def test_an_upstream_that_fails(traced: Traced) -> None:
    traced.status = 500
    assert traced.post(policy="send").status_code == 502
    spans = traced.trace()
    root = spans["POST /v1/chat/completions"]
    theirs = spans["chat theirs"]
    chat = spans["chat scripted"]
    assert root.attributes["error.type"] == theirs.attributes["error.type"] == "upstream_failed"
    assert root.attributes["http.response.status_code"] == 502
    assert (root.failed, theirs.failed, chat.failed) == (
        True,
        True,
        False,
    )  # the model did what it should
    assert "error.type" not in chat.attributes
    assert theirs.attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_many_prompts(traced: Traced) -> None:
    response = httpx.post(
        f"{traced.service.url}/score", json={"prompt": [ASKED] * 20}, headers=traced.header()
    )
    assert len(response.json()["data"]) == 20
    until(lambda: any(one.kind == "server" for one in traced.collector.of(traced.trace_id)))
    spans = traced.collector.of(traced.trace_id)
    assert sorted(
        one.attributes["hallutracer.index"] for one in spans if one.name == "gate"
    ) == list(range(16))
    (score,) = (one for one in spans if one.name == "score scripted")
    assert score.attributes["hallutracer.prompts"] == 20
    told = {
        name
        for name in score.attributes
        if name.startswith(("gen_ai.request.m", "gen_ai.response.f"))
    }
    assert told == {"gen_ai.request.model"}


def test_a_refused_request_is_no_error_of_the_server(traced: Traced) -> None:
    for path, code, name in (
        (CHATS, "invalid_request", "POST /v1/chat/completions"),
        ("/no/So", "not_found", "POST"),
    ):
        status = traced.post(path, max_tokens=-1).status_code
        (root,) = traced.trace().values()
        assert (root.name, root.failed, root.attributes["error.type"]) == (name, False, code)
        assert root.attributes["http.response.status_code"] == status


def test_what_the_caller_does_not_sample_is_not_sent_and_routine_is_not_traced(
    traced: Traced,
) -> None:
    headers, unsampled = traced.header("00"), traced.trace_id
    assert (
        httpx.post(
            f"{traced.service.url}/score", json={"prompt": ASKED}, headers=headers
        ).status_code
        == 200
    )
    for path in ("/metrics", "/health/ready"):
        headers, routine = traced.header(), traced.trace_id
        assert httpx.get(f"{traced.service.url}{path}", headers=headers).status_code == 200
        assert not traced.lines(trace_id=routine)
    traced.post(policy="observe")
    traced.trace()
    assert traced.collector.of(unsampled) == traced.collector.of(routine) == []
    assert traced.lines(trace_id=unsampled)


def test_a_request_without_a_usable_traceparent_begins_a_trace(traced: Traced) -> None:
    for given in (
        {},
        {"traceparent": "00-xyz"},
        {"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"},
    ):
        found = httpx.post(f"{traced.service.url}/score", json={"prompt": ASKED}, headers=given)
        request_id = found.headers["x-request-id"]
        until(lambda: bool(traced.lines(request_id=request_id)))  # noqa: B023
        (line,) = traced.lines(request_id=request_id)
        assert traced.collector.trace(line["trace_id"])["POST /score"].parent_id == ""


def test_no_prompt_answer_or_key_is_sent(traced: Traced) -> None:
    traced.post(policy="send")
    traced.trace()
    answered = traced.post(policy="observe").json()["choices"][0]["message"]["content"]
    traced.trace()
    everything = " ".join(span.raw for span in traced.collector.spans)
    assert "hallutracer.risk" in everything
    for private in ("Solomon", "A secret.", KEY, "alice", "acme", answered.strip()):
        assert private
        assert private not in everything


def test_a_collector_that_fails_or_hangs_costs_no_request(traced: Traced) -> None:
    sink = traced.collector
    for status, free in ((503, True), (500, False)):  # the second takes a batch, and says nothing
        sink.status, calls = status, sink.calls
        if not free:
            sink.free.clear()
        for _ in range(3):
            assert traced.post(policy="observe").status_code == 200
        until(lambda: sink.calls > calls)  # noqa: B023
    assert traced.post(policy="observe").status_code == 200  # while it hangs
    assert not sink.free.is_set()
    sink.status = 200
    sink.free.set()
    traced.post(policy="observe")
    assert "gate" in traced.trace()  # well again, and so are the traces


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("TRACES_SAMPLER", "allways_on", "allways_on"),
        ("TRACES_SAMPLER_ARG", "a tenth", "SAMPLER_ARG"),
        ("EXPORTER_OTLP_TRACES_HEADERS", "s3cret", "eader"),
        ("EXPORTER_OTLP_TRACES_TIMEOUT", "soon", "soon"),
        ("EXPORTER_OTLP_TRACES_COMPRESSION", "zip", "zip"),
        ("BSP_MAX_QUEUE_SIZE", "many", "OTEL_BSP"),
        ("BSP_MAX_QUEUE_SIZE", "-1", "positive"),
        ("RESOURCE_ATTRIBUTES", "deployment", "deployment"),
    ],
)
def test_a_variable_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, word: str
) -> None:
    for given, text in {
        "TRACES_SAMPLER": "traceidratio",
        "TRACES_SAMPLER_ARG": "0.5",
        name: value,
    }.items():
        monkeypatch.setenv(f"OTEL_{given}", text)
    with pytest.raises(HalluTracerError, match=word) as caught:
        Tracing("http://127.0.0.1:9/v1/traces")
    assert "s3cret" not in str(caught.value)
    assert logging.getLogger("opentelemetry").propagate
    assert not logging.getLogger("opentelemetry").handlers


def end(
    found: Tracing, headers: dict[str, str], method: str = "GET", route: str | None = "/score"
) -> str | None:
    """Trace one request, and close."""
    request = found.request(headers, method)
    request.end("id", route, 200, None)
    found.close()
    return request.id


@pytest.mark.parametrize(
    ("url", "port"), [("https://h/v1", 443), ("http://h/v1", 80), ("http://h:81/v1", 81)]
)
def test_an_upstreams_span_has_its_port(url: str, port: int) -> None:
    with collector() as sink:
        result = Tracing(sink.endpoint)
        result.request({}, "POST").upstream(Upstream(url, "theirs"), CHATS).end(None)
        result.close()
        (span,) = sink.spans
    assert (span.attributes["server.address"], span.attributes["server.port"]) == ("h", port)


def test_sampled_away_switched_off_and_an_invented_method(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as sink:
        end(Tracing(sink.endpoint), {}, "SECRET", None)
        assert [(span.name, span.attributes["http.request.method"]) for span in sink.spans] == [
            ("_OTHER", "_OTHER")
        ]
        sampler = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
        for variables, headers in ((sampler, HEADERS), ({"OTEL_SDK_DISABLED": "true"}, {})):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            assert (end(Tracing(sink.endpoint), headers) is not None) is bool(headers)
        assert sink.calls == 1


def test_the_end_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_S", 0.2)
    with collector() as sink:
        sink.free.clear()
        end(Tracing(sink.endpoint), {})
        assert any(
            thread.name == "traces" for thread in threading.enumerate()
        )  # it hangs, and nobody waits for it
        result = Tracing(sink.endpoint)
        assert (
            result._provider._atexit_handler is None
        )  # nor does a process that ends without ``close``
        result.close()


def test_spans_that_nobody_takes_are_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{sink.address}")
    with running(tmp_path, tracing=endpoint) as service:
        for _ in range(3):
            assert service.post(prompt="Why?").status_code == 200
        until(
            lambda: any("opentelemetry" in record.name for record in caplog.records)
        )  # and the log tells


def test_a_prompt_that_is_never_judged_has_a_gate_that_failed(tmp_path: Path) -> None:
    with collector() as sink:
        with running(tmp_path, tracing=Tracing(sink.endpoint), deadline_s=0.2) as service:
            service.engine.sleep_s = 1.0
            assert service.post(prompt="Why?").status_code == 504
        spans = {span.name: span for span in sink.spans}
        assert {span.attributes.get("error.type") for span in spans.values()} == {
            "deadline_exceeded"
        }
        assert all(span.failed for span in spans.values())
        assert set(spans) == {"POST /score", "score scripted", "gate"}
        assert "hallutracer.risk" not in spans["gate"].attributes


def test_a_stream_whose_reader_leaves_ends_its_spans(tmp_path: Path) -> None:
    with collector() as sink:
        with running(tmp_path, tracing=Tracing(sink.endpoint)) as service:
            service.engine.answer, service.engine.sleep_s = "x" * 400, 0.02
            body = {
                "prompt": "Why?",
                "generate": {"max_tokens": 400},
                "policy": "observe",
                "stream": True,
            }
            with httpx.stream(
                "POST", f"{service.url}/score", json=body, headers=HEADERS, timeout=60
            ) as found:
                lines = found.iter_lines()
                assert all(next(lines) is not None for _ in range(8))
            until(lambda: service.metric("hallutracer_requests_in_flight") == 0)
        spans = {one.name: one for one in sink.spans}
        assert set(spans) == {"POST /score", "chat scripted", "gate", "decode"}
        root, chat, decode = spans["POST /score"], spans["chat scripted"], spans["decode"]
        assert decode.start_ns < decode.end_ns == chat.end_ns <= root.end_ns
        assert {one.attributes.get("error.type") for one in (root, chat, decode)} == {
            "client_closed_request"
        }
        assert "error.type" not in spans["gate"].attributes
        assert not any(one.failed for one in spans.values())  # nobody's fault
        tokens = [one.attributes["gen_ai.usage.output_tokens"] for one in (decode, chat)]
        assert 0 < tokens[0] == tokens[1] < 400
        for one in (decode, chat):
            assert one.attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_what_lies_outside_and_a_guarantee_are_told_as_the_answer_tells_them(
    tmp_path: Path,
) -> None:
    with collector() as sink:
        options: dict[str, Any] = {
            "names": (),
            "add": [known, guaranteed],
            "tracing": Tracing(sink.endpoint),
        }
        with running(tmp_path, **options) as service:
            outside = service.post(prompt="Why?").json()["data"][0]["outside_training"]
            sampled = {"bundle": "sure", "generate": {"max_tokens": 2, "temperature": 1.0}}
            told = [
                service.post(prompt="Why?", **more).json()["guarantee"]
                for more in ({"bundle": "sure"}, sampled)
            ]
        first, *gates = [one.attributes for one in sink.spans if one.name == "gate"]
        assert first["hallutracer.outside_training"] is outside
        assert [one["holds"] for one in told] == [True, False]
        for gate, guarantee in zip(gates, told, strict=True):
            assert gate["hallutracer.guarantee.holds"] is guarantee["holds"]
            assert gate["hallutracer.guarantee.void"] == guarantee["void"]


def test_a_caller_who_leaves_an_upstream_ends_its_span(tmp_path: Path) -> None:
    with collector() as sink, collector() as other:  # the other server never answers
        other.free.clear()
        sends = Policy(
            "send", Action.FALLBACK, 0.0, upstream=Upstream(f"http://{other.address}/v1", "theirs")
        )
        with running(tmp_path, policies={"send": sends}, tracing=Tracing(sink.endpoint)) as service:
            body = CHAT | {"model": "scripted", "vllm_xargs": {"hallutracer_policy": "send"}}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{service.url}{CHATS}", json=body, timeout=1.0)
            until(lambda: service.metric("hallutracer_upstream_requests_total") == 1)
        (theirs,) = (span for span in sink.spans if span.name == "chat theirs")
        assert theirs.attributes["error.type"] == "given_up"


def test_a_failed_export_of_another_thread_is_no_fault_of_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exporter(endpoint: str) -> OTLPSpanExporter:
        warn = logging.getLogger("opentelemetry.exporter").warning
        earlier = threading.Thread(target=warn, args=("Failed to export: it timed out",))
        earlier.start()
        earlier.join()
        return OTLPSpanExporter(endpoint)

    monkeypatch.setattr(tracing, "OTLPSpanExporter", exporter)
    with collector() as sink:
        Tracing(sink.endpoint).close()
