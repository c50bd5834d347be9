"""Connections as uvicorn serves them here: what a client without a key can cost, one write an
answer, and leaving."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
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
from service.errors import NotReady
from service.policies.guard import Action, Policy, Upstream
from service.serving.dispatcher import ENDS
from tests.kit.api import CHAT, WIRES, Wire, check_error, request_of
from tests.kit.tables import cells
from tests.matching import Held
from tests.running import Served, listening, running, until

BODY = b'{"prompt": "a"}'
POST = b"POST /score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SCORE = POST + b"content-length: %d\r\n" % len(BODY)
LAST = SCORE + b"connection: close\r\n\r\n" + BODY
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with listening(Served(tmp_path, max_connections=16, keep_alive_s=0.5)) as served:
        yield served


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Served]:
    """With limits that no test reaches, unless it sets its own."""
    with listening(Served(tmp_path, max_connections=16, keep_alive_s=600)) as served:
        yield served


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    content = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            content += piece
    connection.close()
    return content


def answers(connections: Iterable[socket.socket]) -> bool:
    """Whether all of them are answered with what they ask for."""
    return all(received(connection).startswith(b"HTTP/1.1 200 ") for connection in connections)


def error_of(answer: bytes) -> dict[str, Any]:
    """The error of a whole response."""
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return error


def open_at(service: Served) -> int:
    return len(service.server.server_state.connections)


def until_all_wait_for_answers(service: Served, count: int) -> None:
    until(lambda: open_at(service) == count)
    until(lambda: not waiting_for_clients(service))


def waiting_for_clients(service: Served) -> int:
    """The connections whose client has to send or to read before they go on."""
    return len(service.server.config.http.places.waiting)  # type: ignore[union-attr]


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
    ids=[
        "many headers",
        "a long header",
        "a long path",
        "many trailers",
        "a long trailer",
        "a long chunk extension",
    ],
)
def test_a_head_without_end_is_cut_off(service: Served, begin: bytes, chunk: bytes) -> None:
    connection, sent = service.connect(begin), 0
    with suppress(OSError):
        while sent < 50_000_000:
            connection.sendall(chunk)
            sent += len(chunk)
    assert sent < 20_000_000  # what fits into the sockets' buffers
    connection.close()
    until(lambda: open_at(service) == 0)
    assert service.connect(HEALTH).recv(100).startswith(b"HTTP/1.1 200")


def test_what_is_refused_says_so(service: Served) -> None:
    answer = received(service.connect(b"GET /health HTTP/1.1\r\n", b"a:b\r\n" * 101, b"\r\n"))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error_of(answer)["code"] == "headers_too_large"
    assert b'"invalid_http"' in received(service.connect(b"\x16\x03\x01nonsense\r\n\r\n"))
    post = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
    for sent, reason in (
        (b"\x16\x03\x01\x02\x00", "begins with no method; for HTTPS there is a proxy in front"),
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "it begins as HTTP/2 does, which a proxy in front may speak",
        ),
        (
            post + b"2\r\ntransfer-encoding: chunked\r\n\r\n",
            "Transfer-Encoding can't be present with Content-Length",
        ),
        (post + b"+2\r\n\r\n{}", "Invalid character in Content-Length"),
    ):
        answer = received(service.connect(sent))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert reason in error_of(answer)["message"]
    hundred = b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * 99 + b"connection: close\r\n\r\n"
    assert answers([service.connect(hundred)])


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_length_of_a_head_is_bounded_to_the_byte_however_it_arrives(
    service: Served, pieces: int
) -> None:
    begin, end = b"GET /health HTTP/1.1\r\nhost: x\r\na: ", b"\r\nconnection: close\r\n\r\n"
    for size, status in (
        (0, b"200"),
        (1, b"431"),
        (36_000, b"431"),
        (500_000, b"431"),
    ):  # beyond the bound
        head = begin + b"b" * (connections.HEAD_BYTES - len(begin) - len(end) + size) + end
        connection = service.connect()
        with suppress(OSError):  # it hangs up before all is sent
            for first, last in pairwise(len(head) * n // pieces for n in range(pieces + 1)):
                connection.sendall(head[first:last])
                time.sleep(0.02 * (pieces > 1))
        answer = received(connection)  # which a reset may overtake
        assert answer.startswith(b"HTTP/1.1 " + status) or (size > 1 and not answer), (
            size,
            answer[:100],
        )


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


def test_no_place_is_taken_from_those_that_wait_for_an_answer(service: Served) -> None:
    service.engine.before = held = Held()
    busy = [service.connect(LAST) for _ in range(16)]
    until_all_wait_for_answers(service, 16)
    refused = received(service.connect(LAST))
    assert refused.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1\r\n" in refused
    assert error_of(refused)["code"] == "overloaded"
    held.release.set()
    assert answers(busy)


BUNDLE = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\n\r\n"  # megabytes
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "chunks",
    [[BUNDLE], [CHUNKED, b"1\r\na\r\n"], [SCORE + b"\r\n", BODY[:3]], [b"GET /hea"], []],
    ids=["an answer", "a chunked body", "a body", "a head", "nothing"],
)
def test_who_makes_no_progress_gives_way_to_who_comes(patient: Served, chunks: list[bytes]) -> None:
    stuck = [patient.connect(*chunks, buffer=2048) for _ in range(48)]
    until(lambda: waiting_for_clients(patient) == 16)  # all answers that were begun are stuck
    for _ in range(3):
        assert answers([patient.connect(LIVE), patient.connect(LAST)])
    assert open_at(patient) <= 16
    for connection in stuck:
        connection.close()


def test_health_is_answered_beside_connections_that_all_wait_for_an_answer(
    patient: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEALTH_PLACES", 2)
    patient.engine.before = held = Held()
    busy = [patient.connect(LAST) for _ in range(16)]
    until_all_wait_for_answers(patient, 16)
    silent = [patient.connect() for _ in range(10)]
    for path, status in (
        (b"/health/live", b"200"),
        (b"/health/ready?x=1", b"200"),
        (b"/metrics", b"429"),
    ):
        answer = received(patient.connect(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 " + status), (path, answer)
        assert b"connection: close\r\n" in answer, "such a place is for one answer"
    assert received(patient.connect(b"OPTIONS / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 204")
    assert open_at(patient) <= 18
    held.release.set()
    assert answers(busy)
    for connection in silent:
        connection.close()


def test_an_address_leaves_places_to_others(
    patient: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "on_loopback", lambda host: False)
    patient.engine.before = held = Held()
    busy = [patient.connect(LAST) for _ in range(14)]
    until_all_wait_for_answers(patient, 14)
    other = patient.connect(host="127.0.0.2")
    assert received(patient.connect(LAST)).startswith(b"HTTP/1.1 429 ")
    assert answers([patient.connect(LIVE)])
    busy.append(patient.connect(LAST, host="127.0.0.2"))
    until(lambda: open_at(patient) == 16)
    held.release.set()
    assert answers(busy)
    idle = [patient.connect() for _ in range(30)]
    until(lambda: open_at(patient) == 15)
    other.sendall(LAST)  # older than all of them, and another's
    assert answers([other])
    for connection in idle:
        connection.close()


@pytest.mark.parametrize(
    ("host", "subscriber"),
    [
        ("", ""),
        *cells(
            """
            10.0.0.5 | 10.0.0.5
            2001:db8::1 | 2001:db8::
            2001:db8::ffff:0:1 | 2001:db8::
            ::1 | ::1
            2001:db8:0:1::1 | 2001:db8:0:1::
            ::ffff:10.0.0.5 | 10.0.0.5
            ::ffff:127.0.0.1 | 127.0.0.1
            """
        ),
    ],
)
def test_a_share_is_of_what_one_client_has_of_addresses(host: str, subscriber: str) -> None:
    assert connections._subscriber(host) == subscriber


# --- a clock for each state ---


def test_an_idle_connection_stays_beyond_a_heads_time(
    patient: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.2)
    connection = patient.connect()
    for _ in range(3):
        connection.sendall(SCORE + b"\r\n" + BODY)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)
    connection.sendall(b"GET /hea")  # now its next head's time begins
    assert b" 408 " in received(connection)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (CHUNKED, b"1\r\n \r\n"),
        (POST + b"content-length: 3000000\r\n\r\n", b" "),
        (SCORE + b"\r\n", b""),
    ],
    ids=["chunks", "a long body", "none of a short body"],
)
def test_a_body_without_progress_ends_the_connection(
    patient: Served, monkeypatch: pytest.MonkeyPatch, begin: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.5)
    connection, stop = patient.connect(begin), threading.Event()

    def dribble() -> None:
        with suppress(OSError):
            while not stop.wait(0.05):
                connection.sendall(piece)

    dribbling = threading.Thread(target=dribble)
    dribbling.start()
    try:
        answer = received(connection)  # which a reset may overtake
        assert not answer or b'"body_too_slow"' in answer
    finally:
        stop.set()
        dribbling.join()
    until(lambda: open_at(patient) == 0)


def test_an_answer_that_nobody_reads_ends_the_connection(
    patient: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.5)
    stuck = [patient.connect(request, buffer=2048) for request in (BUNDLE, BUNDLE, BUNDLE * 3)]
    until(lambda: open_at(patient) == 3)
    until(lambda: open_at(patient) == 0)
    for connection in stuck:
        connection.close()


class Recorder(asyncio.Transport):
    """A transport that keeps what is written; a test says how much of it is unsent."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = 0
        self.aborted = self.closed = False
        self.writes = list[bytes]()

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.aborted or self.closed

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(600)


def recorded(app: Any = nothing) -> tuple[Any, Recorder]:
    """A connection to an app, and its transport.  Call on an event loop."""
    config = uvicorn.Config(app, http=connections.connections(16), ws="none", log_config=None)
    config.load()
    made: Callable[..., Any] = config.http_protocol_class
    protocol, transport = made(config=config, server_state=ServerState(), app_state={}), Recorder()
    protocol.connection_made(transport)
    return protocol, transport


@pytest.mark.anyio
async def test_who_reads_slowly_and_goes_on_is_served() -> None:
    protocol, transport = recorded()
    transport.unsent = 10 * connections.SEND_BYTES
    protocol.pause_writing()
    for _ in range(9):
        transport.unsent -= connections.SEND_BYTES
        protocol._answer_is_late()  # its time is over, and it has made progress
        assert not transport.aborted
    transport.unsent -= connections.SEND_BYTES - 1
    protocol._answer_is_late()
    assert transport.aborted


@pytest.mark.anyio
async def test_who_sends_slowly_and_goes_on_is_served() -> None:
    protocol, transport = recorded()
    protocol.data_received(POST + b"content-length: 3000000\r\n\r\n")
    for _ in range(9):
        protocol.data_received(b" " * connections.BODY_BYTES)
        protocol._body_is_late()
        assert not transport.written
    protocol.flow.pause_reading()  # the service reads no more for now: not the client's fault
    protocol._body_is_late()
    assert not transport.written
    protocol.flow.resume_reading()
    protocol.data_received(b" " * (connections.BODY_BYTES - 1))
    protocol._body_is_late()
    await asyncio.sleep(0)
    assert b"body_too_slow" in transport.written


@pytest.mark.parametrize("at_once", [1, 3000])
@pytest.mark.parametrize(
    ("size", "count", "refused"), [(1, 2080, False), (1, 2081, True), (64, 20_000, False)]
)
@pytest.mark.anyio
async def test_parts_of_a_body_are_bounded_by_its_bytes_and_given_together(
    size: int, count: int, refused: bool, at_once: int
) -> None:
    wakes = list[int]()
    protocol, transport = recorded()
    protocol.data_received(CHUNKED)
    cycle = protocol.cycle
    cycle.message_event.set = lambda: wakes.append(len(cycle.body))
    chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
    arriving, read = chunk * count, len(chunk) * at_once
    for start in range(0, len(arriving), read):
        protocol.data_received(arriving[start : start + read])
    await asyncio.sleep(0)
    assert (b"413 body_too_large" in transport.written) == refused
    assert bool(transport.written) == refused
    if not refused:
        protocol.data_received(b"0\r\n\r\n")
        assert len(cycle.body) == size * count
        assert len(wakes) <= 2 + size * count // connections.GIVEN_BYTES


@pytest.mark.anyio
async def test_who_has_read_more_is_not_the_one_that_gives_way() -> None:
    room = connections.Places(3)
    first, second, third, fourth = (recorded()[0] for _ in range(4))
    for protocol in (first, second, third):
        protocol.transport.unsent = 0
        protocol.places = room
        room.take(protocol)
        protocol.pause_writing()
    transports = [protocol.transport._transport for protocol in (first, second, third)]
    for protocol, transport in zip((first, second, third), transports, strict=True):
        transport.unsent = 5000
        protocol.has_sent_more()
    transports[0].unsent = 5000 - connections.SEND_BYTES
    fourth.places = room
    assert room.take(fourth)
    assert [transport.aborted for transport in transports] == [False, True, False]
    assert list(room.waiting) == [third, first]


class Reading:
    """A connection whose reader goes on; ``asked`` counts how often anything was looked at."""

    asked = 0
    ended = False

    def __init__(self, address: str) -> None:
        self._address, self.closed = address, False

    @property
    def address(self) -> str:
        Reading.asked += 1
        return self._address

    def has_sent_more(self) -> bool:
        Reading.asked += 1
        return True

    def give_way(self) -> None:
        self.closed = True


def test_who_gives_way_is_chosen_without_a_look_at_all() -> None:
    """With thousands of connections each newcomer would hold up all others."""
    room: Any = connections.Places(1600)
    share = room.share("10.0.0.0")
    for number in range(1600):
        reader = Reading("10.0.0.0" if number < share else f"10.0.1.{number - share}")
        assert room.take(reader)
        room.progressed(reader)
    held = list(room.waiting)
    for address in ("10.0.0.0", "10.9.9.9"):
        Reading.asked = 0
        assert room.take(Reading(address))
        assert Reading.asked < 100
    assert [reader.closed for reader in held].count(True) == 2


# --- what comes with or after a request ---


def test_requests_sent_ahead_and_junk_end_the_connection_after_the_answer(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    request = SCORE + b"\r\n" + BODY
    for chunks in (
        [request * 50 + b"junk" * 1000],
        [request, b"junk\r\n\r\n" * 100],
        [request + HEALTH],
        [request, request[:50]],
    ):
        answer = received(service.connect(*chunks))
        assert answer.startswith(b"HTTP/1.1 200")
        assert (
            len(re.findall(rb"HTTP/1\.1 \d{3} ", answer)) <= 2
        )  # what comes after the answer may be refused, once
    for further in (b"}", b"GET", b"\0" * 100):  # in a later packet, once the answer is there
        connection = service.connect(request)
        answer = connection.recv(65536)
        connection.sendall(further + b"\r\n\r\n")
        answer += received(connection)
        assert re.findall(rb"HTTP/1\.1 (\d{3}) ", answer) == [b"200", b"400"]
    assert service.series("errors_total", code="internal_error") == 0
    assert not [record for record in caplog.records if record.exc_info]


def test_what_is_sent_while_an_answer_is_under_way_does_not_cost_the_answer(
    service: Served,
) -> None:
    service.engine.before = held = Held()
    connection = service.connect(SCORE + b"\r\n" + BODY)
    assert held.entered.wait(20)
    connection.sendall(HEALTH * 5000)  # more than a head may have
    time.sleep(0.2)
    held.release.set()
    assert answers([connection])


def test_a_websocket_is_answered_like_any_get(service: Served) -> None:
    handshake = (
        b"host: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    for path, status in ((b"/score", b"405"), (b"/nothing", b"404")):
        answer = received(service.connect(b"GET " + path + b" HTTP/1.1\r\n", handshake))
        assert answer.startswith(b"HTTP/1.1 " + status)


# --- an answer leaves in one piece: of a process that dies it leaves none or all, so that another
# can be asked ---


def get(endpoint: Callable[[Request], Any], end: bytes, *headers: bytes) -> Recorder:
    """What was written when it ended so; TimeoutError where it never does."""

    async def answered() -> Recorder:
        protocol, recorder = recorded(Starlette(routes=[Route("/", endpoint)]))
        protocol.data_received(
            b"\r\n".join((b"GET / HTTP/1.1", b"Host: localhost", *headers, b"", b""))
        )
        async with asyncio.timeout(30):
            while not recorder.written.endswith(end):
                await asyncio.sleep(0.001)
        protocol.connection_lost(None)
        return recorder

    return asyncio.run(answered())


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


# --- a server that is told to stop refuses first, so that a balancer can take each request
# elsewhere, then closes ---


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for name in ("LEAVING_S", "MOST_S"):
        monkeypatch.setattr(connections, name, 60.0)  # each test ends it earlier
    with listening(Served(tmp_path)) as served:
        yield served
        served.server.force_exit = True


def told_to_stop(served: Served) -> None:
    served.server.should_exit = True
    until(lambda: served.state.lifecycle.stopping)


def test_a_request_is_refused_and_not_reset(leaving: Served) -> None:
    with httpx.Client(base_url=leaving.url, timeout=30) as client:
        assert client.post("/score", json={"prompt": "x"}).headers.get("connection") is None
        told_to_stop(leaving)
        answer = client.post("/score", json={"prompt": "x"})
        check_error(answer, 503, code="not_ready")
        assert (int(answer.headers["retry-after"]) > 0, answer.headers["connection"]) == (
            True,
            "close",
        )
        # So is one on a new connection.
        assert [
            httpx.get(f"{leaving.url}/health/{name}").status_code for name in ("ready", "live")
        ] == [503, 200]
        assert httpx.post(f"{leaving.url}/score", json={"prompt": "x"}).status_code == 503


def test_without_clients_it_stops_at_once(leaving: Served) -> None:
    leaving.server.should_exit = True
    leaving.thread.join(30)
    assert not leaving.thread.is_alive()


def cut_stream(served: Served, wire: Wire) -> list[dict[str, Any]]:
    """Have a stream cut once its answer has begun, with no time to drain; return its events."""
    lines, body = list[str](), request_of(wire, tokens=400, stream=True)
    with httpx.stream("POST", served.url + wire.route, json=body, timeout=60) as response:
        for line in response.iter_lines():
            served.server.should_exit |= "~" in line
            lines.append(line)
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("name", WIRES)
def test_a_stream_that_is_cut_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(connections, "LEAVING_S", 0.0)
    served = Served(tmp_path, drain_s=0.0, policy="observe")
    served.engine.answer = "~" * 400
    with listening(served):
        served.engine.sleep_s = 0.05  # 20 s for the whole answer
        *answer, last = cut_stream(served, WIRES[name])
    assert "~" in json.dumps(answer)
    error = last["error"]
    assert (ENDS in error["message"], error.get("code", NotReady.code)) == (True, NotReady.code)
    assert (
        last.get("type", "error") == "error"
    )  # as OpenAI's newer protocol and Anthropic's name the event
    assert dict(served.state.lifecycle.ended) == {"unfinished": 1}


def test_a_stream_from_another_server_that_is_cut_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LEAVING_S", 0.0)
    with running(tmp_path / "other", policy="observe") as other:
        other.engine.answer = "~" * 400
        other.engine.sleep_s = 0.05
        send = Policy(
            "send", Action.FALLBACK, 0.0, upstream=Upstream(f"{other.url}/v1", "scripted")
        )
        served = Served(tmp_path / "own", drain_s=0.0, policy="send", policies={"send": send})
        with listening(served):
            *answer, last = cut_stream(served, CHAT)
        other.engine.sleep_s = 0.0
    assert "~" in json.dumps(answer)
    assert last["error"]["code"] == NotReady.code


def test_a_request_under_way_is_answered_and_what_becomes_of_each_is_counted_from_the_signal_on(
    leaving: Served,
) -> None:
    ended, statuses = leaving.state.lifecycle.ended, list[int]()
    leaving.post(prompt="before")
    leaving.engine.before = held = Held()
    asking = threading.Thread(target=lambda: statuses.append(leaving.post(prompt="x").status_code))
    asking.start()
    assert held.entered.wait(30)
    told_to_stop(leaving)
    assert leaving.post(prompt="late").status_code == 503
    assert httpx.get(f"{leaving.url}/health/live").status_code == 200
    held.release.set()
    asking.join(30)
    assert statuses == [200]
    until(lambda: ended.total() == 2)
    assert dict(ended) == {"finished": 1, "refused": 1}
    assert leaving.thread.is_alive()  # it goes on refusing


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
    server = Served(tmp_path).server
    due = list(accumulate(gaps))
    now = 0.0

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
