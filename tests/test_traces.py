"""Traces of the real service on the demo model, as a real OTLP receiver gets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest

from tests.local_server import answer, listening
from tests.otlp import Collector, Span, collector
from tests.running import until
from tests.serve_process import MAY_CHOOSE, ServeProcess, serve

ASKED = "What is the capital of the Solomon Islands?"
CHAT = {"messages": [{"role": "user", "content": ASKED}], "model": "m", "temperature": 0, "max_tokens": 8}
CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
KEY = "a-key-of-the-upstream"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "20"}
POLICIES = """
[send]
action = "fallback"
threshold = 0.0
upstream = "http://{address}/v1"
upstream_model = "theirs"
upstream_key_env = "UPSTREAM_KEY"
"""


@dataclass
class Traced:
    service: ServeProcess
    collector: Collector
    upstream: Other
    calls: int = 0

    def post(self, path: str = "/v1/chat/completions", policy: str | None = None, **body: Any) -> httpx.Response:
        xargs = {} if policy is None else {"vllm_xargs": {"hallutracer_policy": policy}}
        return httpx.post(f"{self.service.url}{path}", json=CHAT | xargs | body, headers=self.header(), timeout=60)

    def header(self, flags: str = "01") -> dict[str, str]:
        self.calls += 1
        return {"traceparent": f"00-{self.trace_id}-00f067aa0ba902b7-{flags}", "baggage": "user=alice"}

    @property
    def trace_id(self) -> str:
        """Of the newest call."""
        return f"{CALLER[:-4]}{self.calls:04x}"

    def trace(self) -> dict[str, Span]:
        return self.collector.trace(self.trace_id)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.service.log().splitlines() if line.startswith("{")]


class Other:
    """The server that a policy falls back on."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}

    def say(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        choice = {"index": 0, "finish_reason": "length"}
        usage = {"prompt_tokens": 12, "completion_tokens": 3}
        if json.loads(body).get("stream"):
            chunk = {"choices": [choice | {"delta": {"content": "A secret."}}], "usage": usage}
            answer(request, 200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")
            return
        whole = {"choices": [choice | {"message": {"role": "assistant", "content": "A secret."}}], "usage": usage}
        answer(request, self.status, json.dumps(whole).encode())


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    other, policies = Other(), tmp_path_factory.mktemp("traces") / "policies.toml"
    with listening(other.say) as address, collector() as sink:
        policies.write_text(POLICIES.format(address=address))
        with serve(
            "--otlp-traces-endpoint", sink.endpoint, "--policies", str(policies), "--served-model-name", "m",
            UPSTREAM_KEY=KEY, OTEL_EXPORTER_OTLP_HEADERS="x-tenant=acme", OTEL_RESOURCE_ATTRIBUTES="deployment=test",
            **SOON, **MAY_CHOOSE,
        ) as service:  # fmt: skip
            yield Traced(service, sink, other)


@pytest.fixture(autouse=True)
def _well(request: pytest.FixtureRequest) -> None:
    if "traced" in request.fixturenames:
        found: Traced = request.getfixturevalue("traced")
        found.collector.status, found.upstream.status = 200, 200
        found.collector.free.set()


def test_an_answer(traced: Traced) -> None:
    found = traced.post(policy="observe")
    request_id = found.headers["x-request-id"]
    document = found.json()
    spans = traced.trace()
    root, chat, gate, decode = (spans[name] for name in (
        "POST /v1/chat/completions", "chat hallutracer-demo", "gate", "decode"
    ))  # fmt: skip
    assert set(spans) == {one.name for one in (root, chat, gate, decode)}
    assert root.parent_id == "00f067aa0ba902b7"
    assert (root.kind, chat.kind, gate.kind, decode.kind) == ("server", "internal", "internal", "internal")
    assert (chat.parent_id, gate.parent_id, decode.parent_id) == (root.span_id, chat.span_id, chat.span_id)
    assert not any(one.failed for one in spans.values())
    assert root.start_ns <= gate.start_ns == chat.start_ns < gate.end_ns == decode.start_ns < decode.end_ns
    assert decode.end_ns == chat.end_ns <= root.end_ns
    assert root.attributes == {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "url.path": "/v1/chat/completions",
        "http.response.status_code": 200, "hallutracer.request_id": request_id,
    }  # fmt: skip
    judged, bundle = document["hallutracer"]["data"][0], document["hallutracer"]["bundle"]
    ours = {
        "hallutracer.bundle.name": bundle["name"], "hallutracer.bundle.version": bundle["version"],
        "hallutracer.bundle.digest": bundle["digest"], "hallutracer.policy": "observe",
    }  # fmt: skip
    usage = document["usage"]
    reasons = [document["choices"][0]["finish_reason"]]
    assert chat.attributes == ours | {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "hallutracer",
        "gen_ai.request.model": "hallutracer-demo", "gen_ai.response.model": "hallutracer-demo",
        "gen_ai.request.max_tokens": 8, "gen_ai.request.temperature": 0.0, "gen_ai.request.top_p": 1.0,
        "gen_ai.request.stream": False, "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "hallutracer.prompts": 1,
    }  # fmt: skip
    times = {name: gate.attributes[f"hallutracer.{name}_s"] for name in ("queue", "prefill", "probe")}
    assert all(value > 0 for value in times.values())
    assert gate.end_ns - gate.start_ns == pytest.approx(sum(times.values()) * 1e9, rel=1e-6)
    assert gate.attributes == ours | {f"hallutracer.{name}_s": value for name, value in times.items()} | {
        "hallutracer.index": 0, "hallutracer.risk": pytest.approx(judged["risk"], abs=1e-12),
        "hallutracer.decision": "continue", "hallutracer.threshold": judged["threshold"],
        "hallutracer.flagged": judged["flagged"], "hallutracer.outside_training": judged["outside_training"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
    }  # fmt: skip
    assert decode.attributes == {
        "gen_ai.usage.output_tokens": usage["completion_tokens"], "gen_ai.response.finish_reasons": reasons
    }  # fmt: skip
    assert root.resource["service.name"] == "hallutracer"
    assert root.resource["deployment"] == "test"
    assert traced.collector.headers[-1]["x-tenant"] == "acme"
    [line] = [line for line in traced.lines() if line.get("request_id") == request_id]
    assert line["trace_id"] == traced.trace_id


def test_a_withheld_answer(traced: Traced) -> None:
    found = traced.post(policy="gate", vllm_xargs={"hallutracer_policy": "gate", "hallutracer_threshold": 0.0}).json()
    spans = traced.trace()
    assert set(spans) == {"POST /v1/chat/completions", "chat hallutracer-demo", "gate"}
    chat, gate = spans["chat hallutracer-demo"], spans["gate"]
    assert found["choices"][0]["finish_reason"] == "content_filter"
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["content_filter"]
    assert chat.attributes["gen_ai.usage.output_tokens"] == 0
    assert (gate.attributes["hallutracer.decision"], gate.attributes["hallutracer.flagged"]) == ("abstain", True)
    assert gate.end_ns == chat.end_ns


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_a_policy_falls_back_on(traced: Traced, stream: bool) -> None:
    assert "A secret." in traced.post(policy="send", stream=stream).text
    spans = traced.trace()
    root, theirs = spans["POST /v1/chat/completions"], spans["chat theirs"]
    assert (theirs.kind, theirs.parent_id, theirs.failed) == ("client", root.span_id, False)
    address = traced.upstream.headers["host"].split(":")
    assert theirs.attributes == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "theirs",
        "gen_ai.usage.input_tokens": 12, "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"], "server.address": address[0], "server.port": int(address[1]),
    }  # fmt: skip
    assert traced.upstream.headers["traceparent"] == f"00-{theirs.trace_id}-{theirs.span_id}-01"
    assert "baggage" not in traced.upstream.headers
    chat = spans["chat hallutracer-demo"]
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["content_filter"]
    assert chat.attributes["gen_ai.request.stream"] is stream
    assert chat.end_ns <= theirs.start_ns
    assert theirs.end_ns <= root.end_ns


def test_an_upstream_that_fails(traced: Traced) -> None:
    traced.upstream.status = 500
    assert traced.post(policy="send").status_code == 502
    spans = traced.trace()
    root, theirs = spans["POST /v1/chat/completions"], spans["chat theirs"]
    assert root.failed
    assert theirs.failed
    assert root.attributes["error.type"] == theirs.attributes["error.type"] == "upstream_failed"
    assert root.attributes["http.response.status_code"] == 502
    chat = spans["chat hallutracer-demo"]
    assert not chat.failed  # the model did what it should
    assert "error.type" not in chat.attributes


def test_many_prompts(traced: Traced) -> None:
    response = httpx.post(f"{traced.service.url}/score", json={"prompt": [ASKED] * 20}, headers=traced.header())
    assert len(response.json()["data"]) == 20
    until(lambda: any(one.kind == "server" for one in traced.collector.of(traced.trace_id)))
    gates = [one for one in traced.collector.of(traced.trace_id) if one.name == "gate"]
    assert sorted(one.attributes["hallutracer.index"] for one in gates) == list(range(16))
    [score] = [one for one in traced.collector.of(traced.trace_id) if one.name == "score hallutracer-demo"]
    assert score.attributes["hallutracer.prompts"] == 20
    assert not {name for name in score.attributes if name.startswith(("gen_ai.request.m", "gen_ai.response.f"))} - {
        "gen_ai.request.model"
    }


@pytest.mark.parametrize(
    ("path", "body", "code", "name"),
    [
        ("/v1/chat/completions", {"max_tokens": -1}, "invalid_request", "POST /v1/chat/completions"),
        ("/no/Solomon", {}, "not_found", "POST"),
    ],
)
def test_a_refused_request_is_no_error_of_the_server(
    traced: Traced, path: str, body: dict[str, Any], code: str, name: str
) -> None:
    status = traced.post(path, **body).status_code
    [root] = traced.trace().values()
    assert (root.name, root.failed, root.attributes["error.type"]) == (name, False, code)
    assert root.attributes["http.response.status_code"] == status


def test_what_the_caller_does_not_sample_is_not_sent_and_routine_is_not_traced(traced: Traced) -> None:
    headers, unsampled = traced.header("00"), traced.trace_id
    assert httpx.post(f"{traced.service.url}/score", json={"prompt": ASKED}, headers=headers).status_code == 200
    for path in ("/metrics", "/health/ready"):
        headers, routine = traced.header(), traced.trace_id
        assert httpx.get(f"{traced.service.url}{path}", headers=headers).status_code == 200
        assert not any(line.get("trace_id") == routine for line in traced.lines())
    traced.post(policy="observe")
    traced.trace()
    assert traced.collector.of(unsampled) == traced.collector.of(routine) == []
    assert any(line.get("trace_id") == unsampled for line in traced.lines())


@pytest.mark.parametrize("given", ["", "00-xyz", f"00-{'0' * 32}-00f067aa0ba902b7-01"])
def test_a_request_without_a_usable_traceparent_begins_a_trace(traced: Traced, given: str) -> None:
    headers = {"traceparent": given} if given else {}
    found = httpx.post(f"{traced.service.url}/score", json={"prompt": ASKED}, headers=headers)
    request_id = found.headers["x-request-id"]
    until(lambda: any(line.get("request_id") == request_id for line in traced.lines()))
    [line] = [line for line in traced.lines() if line.get("request_id") == request_id]
    assert traced.collector.trace(line["trace_id"])["POST /score"].parent_id == ""


def test_no_prompt_answer_or_key_is_sent(traced: Traced) -> None:
    traced.post(policy="send")
    traced.trace()
    answered = traced.post(policy="observe").json()["choices"][0]["message"]["content"]
    traced.trace()
    everything = " ".join(one.raw for one in traced.collector.spans)
    assert "hallutracer.risk" in everything
    for private in ("Solomon", "A secret.", KEY, "alice", "acme", answered.strip()):
        assert private
        assert private not in everything


def test_a_collector_that_fails_hangs_or_is_gone_costs_no_request(traced: Traced) -> None:
    sink = traced.collector
    sink.status, calls = 503, sink.calls
    assert traced.post(policy="observe").status_code == 200
    until(lambda: sink.calls > calls)
    sink.status = 500
    sink.free.clear()  # it takes a batch, and says nothing
    calls = sink.calls
    for _ in range(5):
        assert traced.post(policy="observe").status_code == 200
    until(lambda: sink.calls > calls)
    assert traced.post(policy="observe").status_code == 200  # while it hangs
    assert not sink.free.is_set()
    sink.status = 200
    sink.free.set()
    traced.post(policy="observe")
    assert "gate" in traced.trace()  # well again, and so are the traces


def refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/health/live")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it took the connection and is about to close
        pass
    return False


def test_the_end_of_the_service_sends_what_is_left(traced: Traced) -> None:
    """The last test of this file: it ends the service."""
    sink, process = traced.collector, traced.service.process
    sink.free.clear()
    calls = sink.calls
    traced.post(policy="observe")
    until(lambda: sink.calls > calls)
    traced.post(policy="observe")  # waits behind the batch that hangs
    process.terminate()
    until(lambda: refused(traced.service.url))
    assert traced.collector.of(traced.trace_id) == []
    sink.free.set()
    assert process.wait(60) == 0
    assert set(traced.trace()) == {"POST /v1/chat/completions", "chat hallutracer-demo", "gate", "decode"}
