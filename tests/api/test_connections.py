"""Connections as uvicorn serves them here: what a client without a key can cost, one write an answer, and leaving."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from service.api import connections
from tests.matching import Held
from tests.running import Served, listening, until

BODY = b'{"prompt": "a"}'
POST = b"POST /score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SCORE = POST + b"content-length: %d\r\n" % len(BODY)
LAST = SCORE + b"connection: close\r\n\r\n" + BODY
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with listening(Served(tmp_path, max_connections=16)) as served:
        yield served


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    content = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            content += piece
    connection.close()
    return content


# --- bounds on heads ---


@pytest.mark.parametrize(
    ("begin", "chunk"),
    [
        (b"GET /health HTTP/1.1\r\n", b"a:b\r\n" * 2000),
        (b"GET /health HTTP/1.1\r\na: ", b"b" * 10000),
        (b"GET /", b"b" * 10000),
        (POST + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a:b\r\n" * 2000),
        (POST + b"transfer-encoding: chunked\r\n\r\n0\r\na: ", b"b" * 10000),
        (POST + b"transfer-encoding: chunked\r\n\r\n1;", b"b" * 10000),
    ],
    ids=["many headers", "a long header", "a long path", "many trailers", "a long trailer", "a long chunk extension"],
)
def test_a_head_without_end_is_cut_off(service: Served, begin: bytes, chunk: bytes) -> None:
    connection, sent = service.connect(begin), 0
    with suppress(OSError):
        while sent < 50_000_000:
            connection.sendall(chunk)
            sent += len(chunk)
    assert sent < 20_000_000  # what fits into the sockets' buffers
    connection.close()
    until(lambda: len(service.server.server_state.connections) == 0)
    assert service.connect(HEALTH).recv(100).startswith(b"HTTP/1.1 200")


def test_what_is_refused_says_so(service: Served) -> None:
    answer = received(service.connect(b"GET /health HTTP/1.1\r\n", b"a:b\r\n" * 101, b"\r\n"))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert b'"invalid_http"' in received(service.connect(b"\x16\x03\x01nonsense\r\n\r\n"))
    hundred = b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * 99 + b"connection: close\r\n\r\n"
    assert received(service.connect(hundred)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_length_of_a_head_is_bounded_to_the_byte_however_it_arrives(service: Served, pieces: int) -> None:
    begin, end = b"GET /health HTTP/1.1\r\nhost: x\r\na: ", b"\r\nconnection: close\r\n\r\n"
    for size, status in ((0, b"200"), (1, b"431"), (36_000, b"431"), (500_000, b"431")):  # beyond the bound
        head = begin + b"b" * (connections.HEAD_BYTES - len(begin) - len(end) + size) + end
        connection = service.connect()
        with suppress(OSError):  # it hangs up before all is sent
            for first, last in pairwise(len(head) * n // pieces for n in range(pieces + 1)):
                connection.sendall(head[first:last])
                time.sleep(0.02 * (pieces > 1))
        answer = received(connection)  # which a reset may overtake
        assert answer.startswith(b"HTTP/1.1 " + status) or (size > 1 and not answer), (size, answer[:100])


def test_a_body_in_one_read_with_its_head_is_whole(service: Served) -> None:
    """The head is small; what is beyond the bound is body."""
    text = json.dumps({"prompt": "a" * 300_000}).encode()
    spaces = json.dumps({"prompt": "a", "policy": "observe"}).encode() + b" " * 300_000
    for body, said in ((text, b"prompt_too_long"), (spaces, b"HTTP/1.1 200")):
        head = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        assert said in received(service.connect(head + body))


@pytest.mark.parametrize("begin", [b"", b"GET /hea", HEALTH], ids=repr)
def test_a_connection_that_asks_for_nothing_is_ended(service: Served, begin: bytes) -> None:
    started = time.monotonic()
    answer = received(service.connect(begin))
    assert 0.4 < time.monotonic() - started < 15
    assert (b" 408 " in answer) == (begin == b"GET /hea")
    if begin == HEALTH:  # a second head has no more time than the first
        connection = service.connect(HEALTH)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert b" 408 " in received(connection)


# --- so many connections ---


def test_idle_connections_make_room_and_busy_ones_stay(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 60)
    service.engine.before = held = Held()
    busy = service.connect(LAST)
    assert held.entered.wait(20)
    idle = [service.connect() for _ in range(100)]
    for _ in range(3):
        assert httpx.get(f"{service.url}/health/live", timeout=20).status_code == 200
    held.release.set()
    assert received(busy).startswith(b"HTTP/1.1 200")
    closed = 0
    for connection in idle:
        connection.settimeout(0.05)
        try:
            closed += not connection.recv(1)
        except OSError as error:
            closed += not isinstance(error, TimeoutError)
        connection.close()
    assert closed >= 80
    assert len(service.server.server_state.connections) <= 16


def test_no_place_is_taken_from_those_that_wait_for_an_answer(service: Served) -> None:
    service.engine.before = held = Held()
    busy = [service.connect(LAST) for _ in range(16)]
    until(lambda: len(service.server.server_state.connections) == 16)
    until(lambda: not service.server.config.http.idle)  # type: ignore[union-attr]
    assert received(service.connect(LAST)) == b""
    held.release.set()
    assert all(received(connection).startswith(b"HTTP/1.1 200") for connection in busy)


# --- what comes with or after a request ---


def test_requests_sent_ahead_and_junk_end_the_connection_after_the_answer(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    one = SCORE + b"\r\n" + BODY
    for chunks in ([one * 50 + b"junk" * 1000], [one, b"junk\r\n\r\n" * 100], [one + HEALTH], [one, one[:50]]):
        answer = received(service.connect(*chunks))
        assert answer.startswith(b"HTTP/1.1 200")
        assert len(re.findall(rb"HTTP/1\.1 \d{3} ", answer)) <= 2  # what comes after the answer may be refused, once
    assert 'hallutracer_errors_total{code="internal_error"} 0.0' in httpx.get(f"{service.url}/metrics").text
    assert not [record for record in caplog.records if record.exc_info]


def test_what_is_sent_while_an_answer_is_under_way_does_not_cost_the_answer(service: Served) -> None:
    service.engine.before = held = Held()
    connection = service.connect(SCORE + b"\r\n" + BODY)
    assert held.entered.wait(20)
    connection.sendall(HEALTH * 5000)  # more than a head may have
    time.sleep(0.2)
    held.release.set()
    assert received(connection).startswith(b"HTTP/1.1 200")


def test_a_websocket_is_answered_like_any_get(service: Served) -> None:
    handshake = (
        b"host: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    for path, status in ((b"/score", b"405"), (b"/nothing", b"404")):
        answer = received(service.connect(b"GET " + path + b" HTTP/1.1\r\n", handshake))
        assert answer.startswith(b"HTTP/1.1 " + status)


# --- an answer leaves in one piece: of a process that dies it leaves none or all, so that another can be asked ---


class Recorder(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def get(endpoint: Callable[[Request], Any], end: bytes, *headers: bytes) -> Recorder:
    """What was written when it ended so; TimeoutError where it never does."""
    recorder = Recorder()

    async def answered() -> None:
        app = Starlette(routes=[Route("/", endpoint)])
        config = uvicorn.Config(app, http=connections.connections(16), ws="none", log_config=None)
        config.load()
        made: Callable[..., Any] = config.http_protocol_class
        protocol = made(config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(recorder)
        protocol.data_received(b"\r\n".join((b"GET / HTTP/1.1", b"Host: localhost", *headers, b"", b"")))
        async with asyncio.timeout(30):
            while not b"".join(recorder.writes).endswith(end):
                await asyncio.sleep(0.001)
        protocol.connection_lost(None)

    asyncio.run(answered())
    return recorder


@pytest.mark.parametrize("close", [False, True])
def test_a_head_does_not_leave_without_its_body(close: bool) -> None:
    async def plain(request: Request) -> Response:
        return JSONResponse({"risk": 0.5})

    recorder = get(plain, b'\r\n\r\n{"risk":0.5}', *([b"Connection: close"] if close else []))
    [written] = recorder.writes
    assert written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert recorder.closed or not close


def test_a_piece_of_a_stream_waits_for_no_other() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(60)
        yield b"second"

    async def stream(request: Request) -> Response:
        return StreamingResponse(endless())

    assert get(stream, b"5\r\nfirst\r\n").writes


# --- a server that is told to stop refuses first, so that a balancer can take each request elsewhere, then closes ---


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, threading.Thread]]:
    for name in ("LEAVING_S", "MOST_S"):
        monkeypatch.setattr(connections, name, 60.0)  # each test ends it earlier
    served = Served(tmp_path)
    thread = threading.Thread(target=lambda: served.server.run(sockets=[served.socket]))
    thread.start()
    until(lambda: served.state.lifecycle.is_ready)
    yield served, thread
    served.server.should_exit = served.server.force_exit = True
    thread.join(30)
    assert not thread.is_alive()


def told_to_stop(served: Served) -> None:
    served.server.should_exit = True
    until(lambda: served.state.lifecycle.stopping)


def test_a_request_is_refused_and_not_reset(leaving: tuple[Served, threading.Thread]) -> None:
    served, _ = leaving
    with httpx.Client(base_url=served.url, timeout=30) as client:
        assert client.post("/score", json={"prompt": "x"}).headers.get("connection") is None
        told_to_stop(served)
        found = client.post("/score", json={"prompt": "x"})
        assert (found.status_code, found.json()["error"]["code"]) == (503, "not_ready")
        assert (int(found.headers["retry-after"]) > 0, found.headers["connection"]) == (True, "close")
        # So is one on a new connection.
        assert [httpx.get(f"{served.url}/health/{name}").status_code for name in ("ready", "live")] == [503, 200]
        assert httpx.post(f"{served.url}/score", json={"prompt": "x"}).status_code == 503


def test_without_clients_it_stops_at_once(leaving: tuple[Served, threading.Thread]) -> None:
    served, thread = leaving
    served.server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def test_a_request_under_way_is_answered(leaving: tuple[Served, threading.Thread]) -> None:
    served, thread = leaving
    served.engine.before = held = Held()
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(served.post(prompt="x")))
    asking.start()
    assert held.entered.wait(30)
    told_to_stop(served)
    held.release.set()
    asking.join(30)
    assert [answer.status_code for answer in answers] == [200]
    assert thread.is_alive()  # it goes on refusing


@pytest.mark.parametrize(
    ("gaps", "seconds"),
    [
        ((), connections.LEAVING_S),
        ((0.9, 0.9), 1.8 + connections.LEAVING_S),
        ((0.9, 1.2), 0.9 + connections.LEAVING_S),
        ((0.5,) * 100, connections.MOST_S),
    ],
    ids=["none comes", "two come", "one comes too late", "they never end"],
)
def test_it_refuses_until_no_request_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gaps: tuple[float, ...], seconds: float
) -> None:
    server, due, now = Served(tmp_path).server, list(accumulate(gaps)), 0.0

    async def sleep(slept: float) -> None:
        nonlocal now
        now += slept
        server.server_state.total_requests = sum(moment <= now for moment in due)

    async def refusing() -> float:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        monkeypatch.setattr(connections.asyncio, "sleep", sleep)
        await server._refuse()
        return now

    assert asyncio.run(refusing()) == pytest.approx(seconds, abs=0.06)
