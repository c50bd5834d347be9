"""What a client without a key can cost: heads, idle connections, bodies.  On a real socket, with uvicorn as served."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from service.api import connections
from service.api.middleware import MAX_CONTAINERS, parse
from service.engines.checks import SEGMENT, check_length
from service.errors import PromptTooLong
from tests.matching import Held
from tests.running import App, Served, listening, until
from tests.scripted_engine import ScriptedEngine

SCORE = b"POST /score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with listening(Served(tmp_path, max_connections=16)) as served:
        yield served


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    content = b""
    try:
        while piece := connection.recv(65536):
            content += piece
    except ConnectionResetError:
        pass
    connection.close()
    return content


def flood(connection: socket.socket, chunk: bytes, most: int) -> int:
    """Send ``chunk`` until the other side hangs up; the bytes that were taken."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(chunk)
            sent += len(chunk)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("begin", "chunk"),
    [
        (b"GET /health HTTP/1.1\r\n", b"a:b\r\n" * 2000),
        (b"GET /health HTTP/1.1\r\na: ", b"b" * 10000),
        (b"GET /", b"b" * 10000),
        (SCORE + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a:b\r\n" * 2000),
        (SCORE + b"transfer-encoding: chunked\r\n\r\n0\r\na: ", b"b" * 10000),
        (SCORE + b"transfer-encoding: chunked\r\n\r\n1;", b"b" * 10000),
    ],
    ids=["many headers", "a long header", "a long path", "many trailers", "a long trailer", "a long chunk extension"],
)
def test_a_head_without_end_is_cut_off(service: Served, begin: bytes, chunk: bytes) -> None:
    connection = service.connect(begin)
    assert flood(connection, chunk, 50_000_000) < 20_000_000  # what fits into the sockets' buffers
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
        fill = connections.HEAD_BYTES - len(begin) - len(end) + size
        head = begin + b"b" * fill + end
        cuts = [len(head) * n // pieces for n in range(pieces + 1)]
        connection = service.connect()
        with suppress(OSError):  # it hangs up before all is sent
            for first, last in pairwise(cuts):
                connection.sendall(head[first:last])
                time.sleep(0.02 * (pieces > 1))
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 " + status) or (size > 1 and not answer), (
            size,
            answer[:100],
        )  # a reset may overtake it


def test_a_body_in_one_read_with_its_head_is_whole(service: Served) -> None:
    """The head is small; what is beyond the bound is body."""
    body = json.dumps({"prompt": "a" * 300_000}).encode()
    answer = received(service.connect(SCORE + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body))
    assert b"prompt_too_long" in answer
    text = json.dumps({"prompt": "a", "policy": "observe"}).encode() + b" " * 300_000
    answer = received(service.connect(SCORE + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(text) + text))
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("begin", [b"", b"GET /hea", HEALTH], ids=repr)
def test_a_connection_that_asks_for_nothing_is_ended(service: Served, begin: bytes) -> None:
    started = time.monotonic()
    answer = received(service.connect(begin))
    assert 0.4 < time.monotonic() - started < 15
    assert (b" 408 " in answer) == (begin == b"GET /hea")


def test_a_second_head_has_no_more_time_than_the_first(service: Served) -> None:
    connection = service.connect(HEALTH)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.sendall(b"GET /hea")
    assert b" 408 " in received(connection)


def test_idle_connections_make_room_and_busy_ones_stay(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 60)
    held = Held()
    service.engine.before = held
    body = b'{"prompt": "a"}'
    busy = service.connect(SCORE, b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body), body)
    assert held.entered.wait(20)
    idle = [service.connect() for _ in range(100)]
    for _ in range(3):
        assert httpx.get(f"{service.url}/health/live", timeout=20).status_code == 200
    held.release.set()
    assert received(busy).startswith(b"HTTP/1.1 200")
    assert sum(1 for connection in idle if not received_at_once(connection)) >= 80
    assert len(service.server.server_state.connections) <= 16


def received_at_once(connection: socket.socket) -> bool:
    """Whether the connection is still open."""
    connection.settimeout(0.05)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        connection.close()


def test_no_place_is_taken_from_those_that_wait_for_an_answer(service: Served) -> None:
    held = Held()
    service.engine.before = held
    body = b'{"prompt": "a"}'
    request = SCORE + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
    busy = [service.connect(request) for _ in range(16)]
    until(lambda: len(service.server.server_state.connections) == 16)
    until(lambda: not service.server.config.http.idle)  # type: ignore[union-attr]
    assert received(service.connect(request)) == b""
    held.release.set()
    assert all(received(connection).startswith(b"HTTP/1.1 200") for connection in busy)


def test_requests_sent_ahead_and_junk_end_the_connection_after_the_answer(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"prompt": "a"}'
    one = SCORE + b"content-length: %d\r\n\r\n" % len(body) + body
    for chunks in ([one * 50 + b"junk" * 1000], [one, b"junk\r\n\r\n" * 100], [one + HEALTH], [one, one[:50]]):
        answer = received(service.connect(*chunks))
        assert answer.startswith(b"HTTP/1.1 200")
        assert len(re.findall(rb"HTTP/1\.1 \d{3} ", answer)) <= 2  # what comes after the answer may be refused, once
    assert 'hallutracer_errors_total{code="internal_error"} 0.0' in httpx.get(f"{service.url}/metrics").text
    assert not [record for record in caplog.records if record.exc_info]


def test_what_is_sent_while_an_answer_is_under_way_does_not_cost_the_answer(service: Served) -> None:
    held = Held()
    service.engine.before = held
    body = b'{"prompt": "a"}'
    connection = service.connect(SCORE + b"content-length: %d\r\n\r\n" % len(body) + body)
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
    assert received(service.connect(b"GET /score HTTP/1.1\r\n", handshake)).startswith(b"HTTP/1.1 405 ")
    assert received(service.connect(b"GET /nothing HTTP/1.1\r\n", handshake)).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"input_ids": [' + b"[]," * 1_000_000 + b"[]]}", 413, "lists and objects"),
        (b'{"prompt": "a", "x": [' + b"{}," * 1_000_000 + b"{}]}", 413, "lists and objects"),
        (b'{"prompt": "' + b"[{" * 100_000, 400, "not valid JSON"),
        (b'{"prompt": "a", "prompt": "b"}', 400, "same key twice"),
        (b'{"prompt": "a", "generate": {"max_tokens": 1, "max_tokens": 2}}', 400, "same key twice"),
        ('{"prompt": "a"}'.encode("utf-16"), 400, "not UTF-8"),
        (b'{"prompt": "\xff"}', 400, "not UTF-8, at byte 12"),
        (b"[" * 8000, 400, "not valid JSON"),
    ],
    ids=range(8),
)
def test_bodies_that_nobody_means(tmp_path: Path, body: bytes, status: int, said: str) -> None:
    with App(tmp_path).started() as app:
        answer = app.client.post("/score", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text
        assert said in answer.json()["error"]["message"]


def test_brackets_in_texts_are_not_counted() -> None:
    text = '[{\\"' * MAX_CONTAINERS
    assert parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    nested = {"prompt": [text], "x": [[]] * (MAX_CONTAINERS - 3)}
    assert parse(json.dumps(nested).encode()) == nested


def test_a_text_far_beyond_the_context_is_not_encoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    encoded: list[int] = []
    tokenize = engine.tokenize

    def counting(text: str) -> list[int]:
        encoded.append(len(text))
        return tokenize(text)

    monkeypatch.setattr(engine, "tokenize", counting)
    for texts in (["x" * 4_000_000], ["x" * 2000] * 2000):
        encoded.clear()
        with pytest.raises(PromptTooLong, match="context holds 512"):
            check_length(texts, engine)
        assert sum(encoded) <= SEGMENT + 2000
    encoded.clear()
    check_length(["x" * SEGMENT], engine)
    assert encoded == []
