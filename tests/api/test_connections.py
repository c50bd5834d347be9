"""What needs a real socket: clients that leave, streams, a stop while requests run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.engines.base import Update
from tests.engine_kinds import KINDS
from tests.matching import Held
from tests.running import App, Running, running, until

both_kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=KINDS)
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(tmp_path, request.param) as service:
        yield service


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("shared")) as service:
        yield service


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def send(service: Running, body: dict[str, Any], *, cut: int = 0, buffer: int | None = None) -> socket.socket:
    """Open a connection and send a request, without its last ``cut`` bytes; ``buffer`` bytes of an answer fit in."""
    content = json.dumps(body).encode()
    head = (
        f"POST /score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection = socket.socket()
    connection.settimeout(20)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", service.port))
    connection.sendall(head.encode() + content[: len(content) - cut])
    return connection


def idle(service: Running) -> bool:
    gauges = ("hallutracer_queue_depth", "hallutracer_running_decodes", "hallutracer_requests_in_flight")
    return all(service.metric(name) == 0 for name in gauges) and service.engine.counters.open_continuations == 0


def test_a_stream_is_the_risk_then_the_answer(service: Running) -> None:
    response = service.post(prompt="a", generate={"max_tokens": 5}, threshold=1, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *pieces, last = events(response.text)
    plain = service.post(prompt="a", generate={"max_tokens": 5}, threshold=1).json()
    assert first["object"] == "risk.list"
    assert "completion" not in first["data"][0]
    assert first["data"][0]["risk"] == plain["data"][0]["risk"] == pytest.approx(
        float(response.headers["x-hallutracer-risk"]), abs=1e-6
    )  # fmt: skip
    assert {piece["object"] for piece in pieces} == {"completion.chunk"}
    assert "".join(piece["delta"]["text"] for piece in pieces) == plain["data"][0]["completion"]["text"]
    assert last["finish_reason"] == plain["data"][0]["completion"]["finish_reason"] == "length"
    assert last["usage"] == plain["usage"]
    assert {event["id"] for event in (first, *pieces, last)} == {f"risk-{response.headers['x-request-id']}"}


def test_cached_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as service:
        answer_of = service.served.answer

        async def cached(*arguments: Any, **options: Any) -> AsyncGenerator[Update, None]:
            async for update in answer_of(*arguments, **options):
                yield dataclasses.replace(update, cached_tokens=4)

        monkeypatch.setattr(service.served, "answer", cached)
        assert service.post(prompt=["a", "b"]).json()["usage"]["cached_tokens"] == 8
        answer: dict[str, Any] = {"prompt": "a", "generate": {"max_tokens": 5}, "threshold": 1}
        plain = service.post(**answer).json()["usage"]
        assert (plain["cached_tokens"], plain["completion_tokens"]) == (4, 5)
        first, *_, last = events(service.post(**answer, stream=True).text)
        assert first["usage"]["cached_tokens"] == last["usage"]["cached_tokens"] == 4


@pytest.mark.parametrize("policy", ["gate", "block"])
def test_a_gated_stream_carries_no_token(service: Running, policy: str) -> None:
    response = service.post(prompt="a", generate={}, threshold=0, policy=policy, stream=True)
    (only,) = events(response.text)
    assert only["data"][0]["decision"] == {"gate": "abstain", "block": "block"}[policy]
    assert only["data"][0].get("message") == {"gate": "I am not sure.", "block": None}[policy]
    assert service.engine.counters.decode_steps == 0


def test_a_failure_after_the_risk_is_an_event(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    def wait() -> None:
        nonlocal turns
        turns += 1
        time.sleep(0.05)
        if turns == 5:
            raise ZeroDivisionError

    monkeypatch.setattr(service.engine, "wait", wait)
    response = service.post(prompt="a", generate={}, threshold=1, stream=True)
    assert response.status_code == 200
    assert events(response.text)[-1]["error"]["code"] == "internal_error"
    assert service.metric("hallutracer_errors_total") == 1


def test_an_error_before_the_risk_is_a_plain_error(service: Running) -> None:
    response = service.post(prompt="a" * 5000, generate={}, stream=True)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "prompt_too_long"


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (json.dumps({"input_ids": [65] * 100_000}).encode(), 413, "prompt_too_long"),
        (json.dumps({"prompt": "why " * 100_000}).encode(), 413, "prompt_too_long"),
        (b'{"input_ids": []}', 422, "empty_prompt"),
        (b'{"input_ids": [[]]}', 422, "empty_prompt"),
        (b'{"prompt": ""}', 422, "empty_prompt"),
        (b'{"prompt": [""]}', 422, "empty_prompt"),
        (b'{"prompt": []}', 422, "empty_prompt"),
        (b'{"messages": []}', 422, "empty_prompt"),
        (b"[]", 422, "invalid_request"),
        (b"", 422, "invalid_request"),
        (b'{"prompt": "a"', 400, "invalid_json"),
        (b'{"prompt": "\xff\xfe"}', 400, "invalid_json"),
        (b'{"prompt": "\\ud800"}', 422, "invalid_request"),
        (b'{"prompt": "a", "threshold": NaN}', 422, "invalid_request"),
        (b'{"prompt": "a", "threshold": "0.5"}', 422, "invalid_request"),
        (b'{"prompt": {"a": 1}}', 422, "invalid_request"),
        (b'{"prompt": "' + b"a" * (4 * 1024 * 1024) + b'"}', 413, "body_too_large"),
        (b'{"prompt": "a", "stream": true}', 422, "invalid_request"),
        (b'{"prompt": ["a", "b"], "generate": {}, "stream": true}', 422, "invalid_request"),
        (b'{"prompt": "a", "deadline_ms": 0}', 422, "invalid_request"),
        (b'{"prompt": "a", "deadline_ms": 40000}', 422, "invalid_request"),
        (b'{"prompt": "a", "policy": "none"}', 404, "not_found"),
        (b"[" * 5_000, 400, "invalid_json"),
        (b"[" * 100_000, 413, "body_too_large"),
    ],
)
def test_what_cannot_be_scored_gets_its_documented_error(
    shared: Running, content: bytes, status: int, code: str
) -> None:
    response = httpx.post(f"{shared.url}/score", content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text[:300]
    assert response.json()["error"]["message"]
    assert idle(shared)


def test_a_deadline_under_way_is_an_event(service: Running) -> None:
    service.engine.answer = "x" * 400
    service.engine.sleep_s = 0.01
    response = service.post(prompt="a", generate={"max_tokens": 400}, threshold=1, stream=True, deadline_ms=1500)
    assert events(response.text)[-1]["error"]["code"] == "deadline_exceeded"
    until(lambda: idle(service))


def test_clients_that_leave_take_their_work_with_them(service: Running) -> None:
    service.engine.answer = "x" * 400
    service.engine.before = held = Held()
    holder = send(service, {"prompt": "held"})
    assert held.entered.wait(20)
    prefills = service.engine.counters.prefills
    answer = {"prompt": "a", "threshold": 1, "generate": {"max_tokens": 400}}
    for body, cut in (({"prompt": "b"}, 0), (answer, 0), (answer | {"stream": True}, 0), ({"prompt": "c"}, 3)):
        send(service, body, cut=cut).close()
    until(lambda: service.metric("hallutracer_errors_total") == 4)
    until(lambda: all(one.cancelled for one in service.served._queue._requests))  # told by a thread of its own
    held.release.set()
    until(lambda: idle(service))
    assert service.engine.counters.prefills == prefills + 1  # only the one that was held
    holder.close()
    assert 'errors_total{code="client_closed_request"} 4.0' in httpx.get(f"{service.url}/metrics").text

    service.engine.before, service.engine.sleep_s = None, 0.02
    streaming = send(service, answer | {"stream": True})
    text = b""
    while b"risk.list" not in text:
        text += streaming.recv(4096)
    steps = service.engine.counters.decode_steps
    streaming.close()
    until(lambda: idle(service))
    assert service.engine.counters.decode_steps - steps < 300
    assert service.post(prompt="a").status_code == 200


def test_a_body_that_never_comes_is_408(tmp_path: Path) -> None:
    with running(tmp_path, deadline_s=0.3) as service:
        slow = send(service, {"prompt": "a"}, cut=3)
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        slow.close()
        assert service.metric("hallutracer_requests_in_flight") == 0


@both_kinds
def test_a_reader_that_takes_nothing_is_let_go(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.reply.SLOW_READER_S", 0.2)
    with running(tmp_path, kind, deadline_s=3.0, max_new_tokens=50_000, max_kv_tokens=200_000) as service:
        service.engine.answer = "x" * 50_000
        service.engine.identity = dataclasses.replace(service.engine.identity, max_tokens=60_000)
        body = {"prompt": "a", "threshold": 1, "generate": {"max_tokens": 50_000}, "stream": True}
        readers = [send(service, body, buffer=1024) for _ in range(2)]
        until(lambda: service.metric("hallutracer_http_requests_total") == 2)
        until(lambda: idle(service))
        for connection in readers:
            connection.close()


@both_kinds
def test_a_backlog_of_pieces_does_not_hold_the_event_loop(tmp_path: Path, kind: str) -> None:
    service = App(tmp_path, kind, max_new_tokens=500)
    service.engine.answer = "x" * 500
    body = json.dumps({"prompt": "a", "threshold": 1, "generate": {"max_tokens": 500}, "stream": True}).encode()
    requests = [{"type": "http.request", "body": body}]
    turns, decoded = 0, False
    sent_in_turn: Counter[int] = Counter()

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.Event().wait()
        return requests.pop()

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal decoded
        while not decoded and "body" in message:  # the first write: until the whole answer waits to be written
            await asyncio.sleep(0.05)
            decoded = service.engine.counters.open_continuations == 0
        sent_in_turn[turns] += message.get("body", b"").count(b"completion.chunk")

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def stream() -> None:
        counting = asyncio.create_task(count_turns())
        async with service.app.router.lifespan_context(service.app):
            while not service.state.lifecycle.is_ready:
                await asyncio.sleep(0.01)
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/score", "query_string": b"", "headers": headers}
            await service.app(scope, receive, send)
        counting.cancel()

    asyncio.run(stream())
    assert sent_in_turn.total() == 501
    assert max(sent_in_turn.values()) <= 64


@both_kinds
def test_stopping_finishes_what_is_in_flight(tmp_path: Path, kind: str) -> None:
    with running(tmp_path, kind) as service:
        service.engine.answer, service.engine.sleep_s = "x" * 100, 0.01
        streaming = send(service, {"prompt": "a", "threshold": 1, "generate": {"max_tokens": 100}, "stream": True})
        text = streaming.recv(4096)
        service.server.should_exit = True
        while chunk := streaming.recv(4096):
            text += chunk
        assert text.count(b"completion.chunk") == 101
        assert b"[DONE]" in text
        with pytest.raises(httpx.ConnectError):
            service.post(prompt="b")


def test_the_same_answer_with_and_without_a_stream_in_a_crowd(service: Running) -> None:
    service.engine.answer = "Zürich, 日本 and 🙂"

    def ask(n: int) -> tuple[str, str]:
        body = {"prompt": f"prompt {n}", "generate": {"max_tokens": 64}, "policy": "observe"}
        plain = service.post(**body).json()["data"][0]["completion"]["text"]
        streamed = events(service.post(**body, stream=True).text)
        return plain, "".join(event["delta"]["text"] for event in streamed[1:])

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == [(service.engine.answer, service.engine.answer)] * 12
    until(lambda: idle(service))


@both_kinds
def test_a_broken_engine_is_neither_ready_nor_alive(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, kind) as service:
        told = threading.Event()
        service.state.lifecycle.on_broken = told.set
        assert httpx.get(f"{service.url}/health/live").status_code == 200
        monkeypatch.setattr(service.served, "on_prefill", lambda *_: 1 / 0)
        assert service.post(prompt="a").status_code == 503
        assert told.wait(20)
        for path in ("live", "ready"):
            answer = httpx.get(f"{service.url}/health/{path}")
            assert answer.status_code == 503
            assert "the engine broke" in answer.json()["error"]["message"]
        assert service.metric("hallutracer_ready") == 0


@both_kinds
def test_a_full_queue_is_429_with_retry_after(tmp_path: Path, kind: str) -> None:
    with running(tmp_path, kind, max_queue=3, max_prompts=2) as service:
        service.engine.before = held = Held()
        first = send(service, {"prompt": "held"})
        assert held.entered.wait(20)
        second = send(service, {"prompt": ["a", "b"]})
        until(lambda: service.metric("hallutracer_queue_depth") == 3)
        refused = service.post(prompt="c")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        held.release.set()
        for connection in (first, second):
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connection.close()
