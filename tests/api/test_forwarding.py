"""What becomes of a flagged prompt beside abstaining: a warning, a passage to fetch, another
server's answer.

The other server is a second service of ours behind the real routes; only its failures are made by
hand, and those that answer without end: what is read and kept of them is bounded."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hallutracer_client.results import ScoreResult, parse
from service.access.callers import ApiKey
from service.api.forwarding import MOST_BYTES
from service.policies.guard import Action, Policy, Upstream
from service.policies.policy import Rule
from tests.api.test_auth import bearer
from tests.kit.api import (
    CHAT,
    MESSAGES,
    POLICIES,
    QUESTION,
    REFUSAL,
    RESPONSES,
    SCORE,
    TEXT,
    WIRES,
    Wire,
    note_of,
    request_of,
)
from tests.kit.local_server import listening
from tests.kit.tables import values
from tests.running import App, Running, running, service_of_module, until

SAID = "From the other server."
KEY = "OTHER_SERVERS_KEY"


def sends(url: str, timeout_s: float = 20.0, key: str | None = None) -> Policy:
    return Policy(
        "send", Action.FALLBACK, 0.0, upstream=Upstream(f"{url}/v1", "scripted", key, timeout_s)
    )


other = service_of_module(policy="observe", api_keys=["theirs"], answer=SAID)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, other: Running) -> Iterator[Running]:
    policies = POLICIES | {"send": sends(other.url, key=KEY)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, "theirs")
        with running(tmp_path_factory.mktemp("one"), policies=policies) as service:
            yield service


def ask(service: Running, policy: str = "send", **given: Any) -> Any:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=20)
    xargs = {"hallutracer_policy": policy} | given.pop("xargs", {})
    given = {"model": "scripted", "messages": QUESTION, "temperature": 0} | given
    return client.chat.completions.create(**given, extra_body={"vllm_xargs": xargs})


def note(found: Any) -> dict[str, Any]:
    return dict(found.model_extra["hallutracer"])


def streamed(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


# --- retrieve, and whose policy it is ---


def test_nobody_is_sent_twice_and_an_unknown_first_call_is_told(service: Running) -> None:
    first = service.post(messages=QUESTION, policy="fetch").json()
    id, risk = first["id"], first["data"][0]["risk"]
    second = service.post(messages=QUESTION, policy="fetch", retrieval_of=id).json()
    [row] = second["data"]
    assert (row["decision"], row["message"]) == ("abstain", REFUSAL)
    assert second["retrieval"] == {"of": id, "known": True, "risk_before": risk, "drop": 0.0}
    parsed = parse(ScoreResult, json.dumps(second).encode()).retrieval
    assert parsed is not None
    assert (parsed.known, parsed.drop) == (True, 0.0)
    beside = [{"role": "user", "content": "Paris."}]
    asked = request_of(CHAT, beside, chosen={"policy": "fetch", "retrieval_of": id})
    chat = note_of(httpx.post(service.url + CHAT.route, json=asked).json())
    assert chat["retrieval"]["drop"] == pytest.approx(risk - chat["data"][0]["risk"]) != 0
    for named, bundle in (("risk-nope", "one"), (id, "two")):
        answer = service.post(messages=QUESTION, retrieval_of=named, bundle=bundle).json()
        assert answer["retrieval"] == {"of": named, "known": False}


def test_another_callers_first_call_is_unknown_and_rules_choose_by_route_and_key(
    tmp_path: Path,
) -> None:
    keys = [ApiKey("secret-a", "rag", frozenset({"policy"})), ApiKey("secret-b", "web")]
    with App(tmp_path, policies=POLICIES, api_keys=keys, callers_may=()).started() as app:
        rules = (
            Rule(policy="fetch", key="rag"),
            Rule(policy="warn", route=CHAT.route, model="scripted"),
            Rule(policy="observe", model="another"),
            *(Rule(policy="block", route=wire.route) for wire in (RESPONSES, MESSAGES)),
        )
        app.state.catalogue.policies = replace(app.state.catalogue.policies, rules=rules)

        def judged(key: str, wire: Wire, **chosen: Any) -> dict[str, Any]:
            headers = bearer(f"secret-{key}")
            body = request_of(wire, chosen=chosen)
            return note_of(app.client.post(wire.route, json=body, headers=headers).json())

        for key, wire, chosen, policy in values(
            """
            "a" | "score" | {} | "fetch"
            "a" | "chat" | {} | "fetch"
            "b" | "chat" | {} | "warn"
            "b" | "responses" | {} | "block"
            "b" | "messages" | {} | "block"
            "b" | "score" | {} | "gate"
            "b" | "score" | {"policy": "observe"} | null
            "a" | "score" | {"policy": "gate", "threshold": 0.0} | "gate"
            "b" | "chat" | {"policy": "observe"} | null
            "b" | "chat" | {"policy": "gate", "threshold": 0.0} | "gate"
            """
        ):
            answer = judged(key, WIRES[wire], **chosen)
            assert answer.get("policy") == policy
            assert ("error" in answer) is (policy is None)
        first = judged("a", SCORE)["id"]
        fetch = {"retrieval_of": first, "policy": "fetch"}
        assert judged("b", SCORE, **fetch)["retrieval"] == {"of": first, "known": False}
        assert judged("a", SCORE, **fetch)["retrieval"]["known"]


# --- fallback ---


def test_another_server_answers(service: Running, other: Running) -> None:
    decoded, asked = service.engine.counters.decode_steps, other.engine.counters.decode_steps
    counted = service.series("upstream_requests_total")
    answer = ask(service, max_tokens=50)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (SAID, "stop")
    assert (note(answer)["data"][0]["decision"], answer.id[:9]) == ("fallback", "chatcmpl-")
    assert answer.usage.completion_tokens > 0
    assert service.engine.counters.decode_steps == decoded
    assert other.engine.counters.decode_steps > asked
    chunks = list(ask(service, stream=True, max_tokens=50, stream_options={"include_usage": True}))
    assert (streamed(chunks), note(chunks[0])["data"][0]["decision"]) == (SAID, "fallback")
    # The other server's note is its own.
    assert not any("hallutracer" in chunk.model_extra for chunk in chunks[1:])
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert service.series("upstream_requests_total") == counted + 2


def test_what_is_not_flagged_or_not_to_be_answered_is_not_sent_on(
    service: Running, other: Running
) -> None:
    asked = other.engine.counters.decode_steps
    assert (
        ask(service, xargs={"hallutracer_threshold": 1.0}).choices[0].message.content == "It is so."
    )
    (row,) = service.post(messages=QUESTION, policy="send", generate={"max_tokens": 3}).json()[
        "data"
    ]
    assert (row["decision"], "completion" in row) == ("fallback", False)

    assert other.engine.counters.decode_steps == asked
    body = request_of(TEXT, chosen={"policy": "send"}, tokens=50)
    answer = httpx.post(service.url + TEXT.route, json=body).json()
    assert answer["choices"][0]["text"] == SAID


def test_a_missing_key_is_not_left_out(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY)
    with pytest.raises(openai.InternalServerError, match=f"{KEY} holds no key"):
        ask(service)


# --- its failures, told apart from ours ---


def http(
    status: str, body: str, kind: str = "application/json", length: int | None = None
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length:"
        f" {len(body) if length is None else length}\r\n"
    )
    return f"{head}connection: close\r\n\r\n{body}".encode()


Answer = Callable[[BaseHTTPRequestHandler], Any]


class Other:
    """A server that answers as a test has it: bytes, or what ``answer`` writes."""

    answer: Answer | bytes = b""

    def __call__(self, request: BaseHTTPRequestHandler, _: Any) -> None:
        request.close_connection = True
        if isinstance(self.answer, bytes):
            request.wfile.write(self.answer)
        else:
            self.answer(request)


@contextmanager
def sending_on(
    folder: Path, timeout_s: float = 20.0, **settings: Any
) -> Iterator[tuple[Running, Other]]:
    other = Other()
    with (
        listening(other) as address,
        running(
            folder, policies={"send": sends(f"http://{address}", timeout_s)}, **settings
        ) as service,
    ):
        yield service, other


@pytest.fixture(scope="module")
def forwarding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Other]]:
    with sending_on(tmp_path_factory.mktemp("forwarding")) as both:
        yield both


def refused(service: Running, stream: bool, said: str) -> list[Any]:
    """Ask, and see the error of an upstream; what came of a stream before it.  The service is
    well."""
    seen, before = list[Any](), service.series("upstream_requests_total", outcome="failed")
    with pytest.raises(openai.APIError) as error:
        seen.extend(ask(service, stream=stream))
    assert (said in error.value.message, "secret" in error.value.message) == (True, False)
    assert error.value.code == "upstream_failed"
    assert (
        stream
        or isinstance(error.value, openai.InternalServerError)
        and error.value.status_code == 502
    )
    assert service.series("upstream_requests_total", outcome="failed") == before + 1
    assert service.post(prompt="A").status_code == 200
    return seen


CHUNK = (
    "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "Half an "}}]}) + "\n\n"
)
SSE = "text/event-stream"
BRACKETS = {"objects": '{"choices": [' + "{}," * 2**16 + "{}]}", "depth": "[" * 8000}


NO_ANSWER = "something else than an answer"
WHOLE = [
    (http("500 Oops", '{"error": "their secret"}'), "status 500"),
    (http("302 Found", ""), "status 302"),
    (http("200 OK", '{"choices": []', length=900), "could not be reached or read"),
]
WHOLE += [
    (http("200 OK", content), NO_ANSWER)
    for content in ("hello", '{"choices": null}', '{"choices": [NaN]}', *BRACKETS.values())
]
STREAMS = [(http("200 OK", content, SSE), "closed its stream") for content in (CHUNK, "")]
STREAMS += [
    (http("200 OK", content, SSE), NO_ANSWER)
    for content in (
        f"{CHUNK}data: {{}}\n\n",
        *(f"data: {bracket}\n\n" for bracket in BRACKETS.values()),
    )
]


@pytest.mark.parametrize(
    ("stream", "written", "message"),
    [*((False, *case) for case in WHOLE), *((True, *case) for case in STREAMS)],
    ids=range(len(WHOLE) + len(STREAMS)),
)
def test_its_failure_is_told_apart_from_ours(
    forwarding: tuple[Running, Other], stream: bool, written: bytes, message: str
) -> None:
    service, other = forwarding
    other.answer = written
    seen = refused(service, stream, message)
    if stream:
        assert streamed(seen) == ("Half an " if CHUNK.encode() in written else "")
        assert note(seen[0])["data"][0]["decision"] == "fallback"


def test_an_upstream_that_is_not_there_or_too_slow(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running(tmp_path, policies={"send": sends(f"http://127.0.0.1:{port}")}) as service:
        refused(service, False, "could not be reached")
    ended = threading.Event()
    with sending_on(tmp_path / "slow", timeout_s=0.2) as (service, other):
        other.answer = lambda _: ended.wait(20)
        refused(service, False, "took longer than 0.2 s")
        ended.set()


def test_a_stalled_stream_ends_at_the_deadline_and_a_client_that_leaves_ends_it(
    tmp_path: Path,
) -> None:
    hung_up = threading.Event()

    def stops(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(http("200 OK", CHUNK, SSE, length=10_000))
        request.connection.settimeout(20)
        with suppress(ConnectionResetError):
            assert request.connection.recv(1) == b""
        hung_up.set()  # our service has closed it

    with sending_on(tmp_path, deadline_s=2.0) as (service, other):
        other.answer = stops
        with pytest.raises(openai.APIError, match="deadline"):
            list(ask(service, stream=True))
        assert hung_up.wait(20)
        hung_up.clear()
        chunks = ask(service, stream=True)
        assert streamed([next(chunks), next(chunks)]) == "Half an "
        chunks.close()
        assert hung_up.wait(20)
        until(lambda: service.series("requests_in_flight") == 0)


# --- one that answers without end, or more than it seems ---


def begin(request: BaseHTTPRequestHandler, stream: bool, **headers: str) -> None:
    request.send_response(200)
    for name, value in {"Content-Type": SSE if stream else "application/json", **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """What is allocated meanwhile, at any time, by all threads."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("stream", "beginning", "again"),
    [
        (False, b'{"choices": [{"text": "', b"x"),
        (True, b"data: ", b"x"),
        (True, CHUNK.encode() + b"data: ", b"x"),
        (True, b"", b"data: %b\n" % (b"x" * 1000)),
        (True, b"", b": %b\r" % (b"x" * 1000)),
    ],
    ids=["whole", "a line", "a line after an event", "an event of lines", "comments"],
)
def test_an_answer_without_end_is_cut_off(
    forwarding: tuple[Running, Other], stream: bool, beginning: bytes, again: bytes
) -> None:
    service, other = forwarding
    hung_up, block = threading.Event(), again * (65536 // len(again))

    def floods(request: BaseHTTPRequestHandler) -> None:
        begin(request, stream)
        request.connection.settimeout(20)
        with suppress(ConnectionError):
            request.wfile.write(beginning)
            for _ in range((MOST_BYTES + 2**20) // len(block) + 1):
                request.wfile.write(block)
            if request.connection.recv(1):
                return
        hung_up.set()

    other.answer = floods
    with memory_below(6 * MOST_BYTES):
        refused(service, stream, f"more than {MOST_BYTES} bytes")
        assert hung_up.wait(20)


def test_a_stream_may_be_longer_than_one_of_its_events(forwarding: tuple[Running, Other]) -> None:
    service, other = forwarding
    pieces = MOST_BYTES // 2**20 + 2
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 2**20}}]}).encode()

    def answers(request: BaseHTTPRequestHandler) -> None:
        begin(request, True)
        for content in [chunk] * pieces + [b"[DONE]"]:
            request.wfile.write(b"data: " + content + b"\n\n")

    other.answer = answers
    assert len(streamed(list(ask(service, stream=True)))) == pieces * 2**20


LARGE = b"data: " + b"x" * 2**26
GZIP = gzip.compress(LARGE, 6)
PACKED = {
    "gzip": GZIP,
    "deflate": zlib.compress(LARGE, 6),
    "gzip, gzip": gzip.compress(GZIP, 9),
    "GZIP": GZIP,
    "identity,gzip": GZIP,
    "br": b"\x0b\x02\x80hello\x03",
    "zstd": b"\x28\xb5\x2f\xfd",
}
MESSAGE = {
    "index": 0,
    "finish_reason": "stop",
    "message": {"role": "assistant", "content": "Half an "},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("encoding", [*PACKED, " Identity", ""])
def test_a_compressed_answer_is_not_unpacked(
    forwarding: tuple[Running, Other], encoding: str, stream: bool
) -> None:
    (service, other), asked = forwarding, list[str | None]()
    plain = (CHUNK + "data: [DONE]\n\n" if stream else json.dumps({"choices": [MESSAGE]})).encode()

    def answers(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.headers["Accept-Encoding"])
        begin(request, stream, Content_Encoding=encoding)
        request.wfile.write(PACKED.get(encoding, plain))

    other.answer = answers
    if encoding in PACKED:
        with memory_below(MOST_BYTES):
            refused(service, stream, "compressed")
    else:
        answer = ask(service, stream=stream)
        assert (
            streamed(list(answer)) if stream else answer.choices[0].message.content
        ) == "Half an "
    assert asked == ["identity"]
