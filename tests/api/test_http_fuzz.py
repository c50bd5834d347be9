"""Bytes that no client sends, against the server as it is served; thousands of them in the long run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.api import http_fuzz
from tests.running import Running, Served, listening, until

SHORT, LONG = 300, 20_000


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    """On the scripted engine, behind the server that ``hallutracer serve`` makes."""
    with listening(Served(tmp_path)) as served:
        yield served


def test_nothing_that_is_sent_disturbs_the_service(service: Running) -> None:
    before = http_fuzz.risk(service.url)
    tally = http_fuzz.attack(service.port, SHORT, seed=7)
    assert tally.faults == []
    for name, statuses in tally.statuses.items():
        assert statuses.total() + tally.silent[name] > SHORT // 20, name
    assert {200, 400, 413, 431} <= set().union(*tally.statuses.values())  # it comes past the parser, and to its limits
    assert http_fuzz.risk(service.url) == before
    until(lambda: service.metric("hallutracer_requests_in_flight") == 0)
    assert httpx.get(f"{service.url}/health/live").status_code == 200


@pytest.mark.long
def test_twenty_thousand_attacks_and_two_thousand_idle_connections(capsys: pytest.CaptureFixture[str]) -> None:
    faults = http_fuzz.campaign(LONG, seed=11)
    assert faults == []
    assert f"{LONG} attacks" in capsys.readouterr().out


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
LOST = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A server that says the same to everything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(1)
                    try:
                        connection.recv(1 << 20)
                        connection.sendall(reply)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join(10)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n", "status 500"),
        (b"hello", "no response"),
        (OK + OK + OK + OK, "the hidden request was answered"),
        (LOST, "the hidden request was answered"),
        (OK * 600, "answers to"),
        (b"HTTP/1.1 200 OK\r\nx y: z\r\n\r\n", "no response"),
    ],
    ids=["a 5xx", "no HTTP", "two answers", "a 404", "more answers than requests", "a broken head"],
)
def test_the_fuzzer_would_tell(reply: bytes, said: str) -> None:
    with answering(reply) as port:
        tally = http_fuzz.attack(port, 60, seed=3, clients=2)
    assert any(said in fault for fault in tally.faults), tally.faults[:3]


@pytest.mark.parametrize("rest", [b"}", b"GET", b"\0" * 100])
def test_what_follows_a_request_in_a_later_packet_is_refused_and_no_answer_to_it(service: Running, rest: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(http_fuzz.PLAIN)
        answer = b""
        while not list(http_fuzz.responses(answer)):
            answer += connection.recv(65_536)
        connection.sendall(rest + b"\r\n\r\n")
        while piece := connection.recv(65_536):
            answer += piece
    found = list(http_fuzz.responses(answer))
    assert [status for status, _ in found] == [200, 400]
    assert http_fuzz.answers_to_requests(found) == found[:1]


def test_only_the_last_refusal_is_no_answer() -> None:
    refusal = (400, b'{"error": {"code": "invalid_http"}}')
    for found in ([refusal], [refusal, (200, b"{}")], [(200, b"{}"), (400, b'{"error": {"code": "invalid_json"}}')]):
        assert http_fuzz.answers_to_requests(found) == found
    assert http_fuzz.answers_to_requests([refusal, refusal]) == [refusal]


def test_responses_are_read_one_after_the_other() -> None:
    assert list(http_fuzz.responses(OK + LOST + OK)) == [(200, b"{}"), (404, b""), (200, b"{}")]
    assert list(http_fuzz.responses(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)) == [(200, b"{}")]
    assert list(http_fuzz.responses(OK[:-1])) == []
