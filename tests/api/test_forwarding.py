"""An upstream that answers without end, or more than it seems: what is read and kept of it is bounded."""

from __future__ import annotations

import gzip
import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import openai
import pytest

from service.api.forwarding import MOST_BYTES
from tests.api.test_policies import CHUNK, ask, sends
from tests.local_server import listening
from tests.running import Running, running

TOO_MUCH = MOST_BYTES + 2**20
KIND = {False: "application/json", True: "text/event-stream"}
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@contextmanager
def forwarding(tmp_path: Path, behave: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Running]:
    """A service that sends on to a server that answers so."""
    with (
        listening(lambda request, _: behave(request)) as address,
        running(tmp_path, policies={"send": sends(f"http://{address}", key=None)}) as service,
    ):
        yield service


def begin(request: BaseHTTPRequestHandler, stream: bool, **headers: str) -> None:
    request.send_response(200)
    for name, value in {"Content-Type": KIND[stream], **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()


def refused(service: Running, stream: bool, said: str) -> None:
    """Ask, and see the error of an upstream; the service is well."""
    with pytest.raises(openai.APIError, match=said) as error:
        list(ask(service, "send", stream=stream)) if stream else ask(service, "send")
    assert error.value.code == "upstream_failed"
    assert stream or isinstance(error.value, openai.InternalServerError) and error.value.status_code == 502
    assert 'upstream_requests_total{outcome="failed"} 1.0' in metrics(service)
    assert service.post(prompt="A").status_code == 200


def metrics(service: Running) -> str:
    return service.state.metrics.render()[0].decode()


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
def test_an_answer_without_end_is_cut_off(tmp_path: Path, stream: bool, beginning: bytes, again: bytes) -> None:
    hung_up = threading.Event()
    block = again * (65536 // len(again))

    def floods(request: BaseHTTPRequestHandler) -> None:
        begin(request, stream)
        request.connection.settimeout(20)
        try:
            request.wfile.write(beginning)
            for _ in range(TOO_MUCH // len(block) + 1):
                request.wfile.write(block)
            if request.connection.recv(1):
                return
        except ConnectionError:
            pass
        hung_up.set()

    with forwarding(tmp_path, floods) as service, memory_below(6 * MOST_BYTES):
        refused(service, stream, f"more than {MOST_BYTES} bytes")
        assert hung_up.wait(20)


def test_a_stream_may_be_longer_than_one_of_its_events(tmp_path: Path) -> None:
    piece = "x" * 2**20
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}).encode()
    pieces = MOST_BYTES // 2**20 + 2

    def answers(request: BaseHTTPRequestHandler) -> None:
        begin(request, True)
        for _ in range(pieces):
            request.wfile.write(b"data: " + chunk + b"\n\n")
        request.wfile.write(b"data: [DONE]\n\n")

    with forwarding(tmp_path, answers) as service:
        chunks = ask(service, "send", stream=True)
        assert sum(len(chunk.choices[0].delta.content or "") for chunk in chunks) == pieces * len(piece)


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, 9)


LARGE = b"data: " + b"x" * 2**28
PACKED = {"gzip": gzipped(LARGE), "deflate": zlib.compress(LARGE, 9)}
PACKED |= {"gzip, gzip": gzipped(PACKED["gzip"]), "GZIP": PACKED["gzip"], "identity,gzip": PACKED["gzip"]}
PACKED |= {"br": b"\x0b\x02\x80hello\x03", "zstd": b"\x28\xb5\x2f\xfd", "x-gzip": PACKED["gzip"]}


@both_ways
@pytest.mark.parametrize("encoding", PACKED)
def test_a_compressed_answer_is_not_unpacked(tmp_path: Path, encoding: str, stream: bool) -> None:
    asked: list[str | None] = []

    def packs(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.headers["Accept-Encoding"])
        begin(request, stream, Content_Encoding=encoding)
        request.wfile.write(PACKED[encoding])

    with forwarding(tmp_path, packs) as service, memory_below(MOST_BYTES):
        refused(service, stream, "compressed")
    assert asked == ["identity"]


@both_ways
@pytest.mark.parametrize("encoding", ["identity", " Identity", ""])
def test_an_answer_that_says_that_it_is_not_compressed_is_read(tmp_path: Path, encoding: str, stream: bool) -> None:
    whole = {
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Half an "}}]
    }

    def answers(request: BaseHTTPRequestHandler) -> None:
        begin(request, stream, Content_Encoding=encoding)
        request.wfile.write((CHUNK + "data: [DONE]\n\n" if stream else json.dumps(whole)).encode())

    with forwarding(tmp_path, answers) as service:
        found: Any = ask(service, "send", stream=stream)
        if stream:
            assert [chunk.choices[0].delta.content for chunk in found][-1] == "Half an "
        else:
            assert found.choices[0].message.content == "Half an "


@both_ways
@pytest.mark.parametrize("content", ['{"choices": [' + "{}," * 2**16 + "{}]}", "[" * 8000], ids=["objects", "depth"])
def test_an_answer_of_brackets_is_not_parsed(tmp_path: Path, content: str, stream: bool) -> None:
    def answers(request: BaseHTTPRequestHandler) -> None:
        begin(request, stream)
        request.wfile.write((f"data: {content}\n\n" if stream else content).encode())

    with forwarding(tmp_path, answers) as service:
        refused(service, stream, "something else than an answer")
