"""Streams: events in any pieces, the risk first, a gate that cannot be overlooked."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import combinations, pairwise
from typing import Any

import httpx
import pytest

import hallutracer_client as hc
from hallutracer_client.stream import BaseAnswer, EventReader
from tests.client.conftest import BlockingClient, MakeClient, Time
from tests.kit import bodies
from tests.kit.local_server import answer, listening

# Lines of one event are joined; comments are none; U+2028 ends no line.
STREAM = (
    b": a comment\n\ndata: YHOO\ndata: +2\ndata:10\n\nid: 1\nevent: other\ndata\ndata:\xe2\x80\xa8"
    b" x\n\ndata:\n\ndata: cut off"
)
EVENTS = [b"YHOO\n+2\n10", b"\n\xe2\x80\xa8 x"]


def cut_at(data: bytes, places: tuple[int, ...]) -> list[bytes]:
    return [data[start:end] for start, end in pairwise((0, *places, len(data)))]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_any_cut_gives_the_same_events(newline: bytes) -> None:
    sent = STREAM.replace(b"\n", newline)
    cuts = [c for n in (0, 1, 2) for c in combinations(range(1, len(sent), 1 if n < 2 else 3), n)]
    parted = [cut_at(sent, cut) for cut in cuts]
    # Byte by byte, empty ones between.
    parted.append([piece for byte in sent for piece in (bytes([byte]), b"")])
    for pieces in parted:
        reader = EventReader()
        assert [data for piece in pieces for data in reader.feed(piece)] == EVENTS, pieces

    for pieces in (
        [b"data: a\r", b"\n", b"\n"],
        [b"data: a\r", b"", b"\n", b"\r\n"],
        [b"data: a\n", b"\n"],
    ):
        reader = EventReader()
        assert [data for piece in pieces for data in reader.feed(piece)] == [b"a"]


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in given pieces, perhaps with a failure at its end; remembers being closed."""

    def __init__(self, pieces: list[bytes], failure: Exception | None = None) -> None:
        self.pieces = pieces
        self.failure = failure
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces
        if self.failure is not None:
            raise self.failure

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


def answering(body: bytes | Chunks) -> Any:
    content = body if isinstance(body, Chunks) else Chunks([body])
    return lambda _: httpx.Response(
        200, stream=content, headers={"content-type": "text/event-stream"}
    )


WHOLE = bodies.events(
    bodies.result(), bodies.chunk(" It"), bodies.chunk(" is."), bodies.chunk("", "stop", 2)
)
GATED = bodies.events(bodies.result(bodies.row(0.9, "abstain", message="I am not sure.")))


def test_the_risk_is_there_before_the_text(make_client: MakeClient) -> None:
    def look(answer: BaseAnswer) -> None:
        assert (answer.risk, answer.decision, answer.gated) == (0.1, "continue", False)
        assert (answer.completion, answer.usage.completion_tokens) == (None, 0)

    answer, pieces = make_client(answering(WHOLE)).stream(prompt="a", look=look)
    assert pieces == [" It", " is."]
    assert answer.completion == hc.Completion(" It is.", "stop", 2)
    assert answer.usage.total_tokens == 9
    assert answer.score.bundle.reference == "demo:3"


def iterated(made: BlockingClient, *given: Any, **options: Any) -> list[str]:
    """The pieces of a stream that is read without a ``with``."""
    if made.kind == "sync":
        return list(made.client.stream(*given, **options))

    async def read() -> list[str]:
        return [piece async for piece in made.client.stream(*given, **options)]

    return made._loop.run_until_complete(read())  # type: ignore[no-any-return]


def test_a_stream_is_iterated_over_without_a_block(make_client: MakeClient) -> None:
    body = Chunks([WHOLE])
    pieces = iterated(make_client(answering(body)), "a", generate={"max_tokens": 4})
    assert pieces == [" It", " is."]
    assert body.closed
    gated = Chunks([GATED])
    with pytest.raises(hc.Withheld):
        iterated(make_client(answering(gated)), prompt="a")
    assert gated.closed
    body = Chunks([WHOLE], httpx.ReadError("reset"))
    made = make_client(answering(body))
    stream = made.client.stream("a")
    assert not body.closed, "nothing is asked before somebody reads"
    if made.kind == "sync":
        reading = iter(stream)
        assert next(reading) == " It"
        reading.close()
        assert body.closed, "leaving a loop early closes the connection"


def test_reading_a_withheld_answer_is_an_error(make_client: MakeClient) -> None:
    answer, _ = make_client(answering(GATED)).stream(prompt="a", take=0)
    assert (answer.gated, answer.message, answer.completion) == (True, "I am not sure.", None)
    with pytest.raises(hc.Withheld):
        make_client(answering(GATED)).stream(prompt="a")


def test_leaving_early_closes_the_connection_and_leaves_no_completion(
    make_client: MakeClient,
) -> None:
    answer, pieces = make_client(answering(body := Chunks([WHOLE]))).stream(prompt="a", take=1)
    assert (pieces, answer.completion, body.closed) == ([" It"], None, True)


def test_a_stream_is_read_inside_its_block() -> None:
    client = BlockingClient("sync", answering(WHOLE))
    for take in (0, 1):
        answer, _ = client.stream(prompt="a", take=take)
        with pytest.raises(RuntimeError, match="inside its 'with'"):
            list(answer)
    ended, _ = client.stream(prompt="a")
    assert (list(ended), ended.completion is None) == ([], False)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("deadline_exceeded", hc.DeadlineExceeded),
        ("engine_error", hc.ServerError),
        ("unheard_of", hc.ServerError),
    ],
)
def test_a_failure_under_way_or_instead_of_the_risk_is_raised(
    make_client: MakeClient, code: str, kind: type[Exception]
) -> None:
    failure = bodies.error(500, code, "the engine broke").json()
    body = Chunks([bodies.events(bodies.result(), bodies.chunk(" It"), failure)])
    with pytest.raises(kind, match=f"in the stream {code}: the engine broke") as caught:
        make_client(answering(body)).stream(prompt="a")
    assert caught.value.status is None  # type: ignore[attr-defined]
    assert body.closed
    refused = bodies.events(bodies.error(422, "empty_prompt").json())
    with pytest.raises(hc.RequestRefused):
        make_client(answering(refused)).stream(prompt="a")


@pytest.mark.parametrize(
    ("failure", "kind", "says"),
    [
        (httpx.ReadError("reset"), hc.TransportError, "broke: reset"),
        (httpx.ReadTimeout(""), hc.TimedOut, "silent for 30 s"),
        (httpx.RemoteProtocolError("cut"), hc.TransportError, "cut"),
    ],
)
def test_a_connection_that_breaks_is_no_end(
    make_client: MakeClient, failure: Exception, kind: type[Exception], says: str
) -> None:
    first = bodies.events(bodies.result(), bodies.chunk(" It"), done=False)
    for pieces in ([first], []):
        body = Chunks(pieces, failure)
        with pytest.raises(kind, match=says):
            make_client(answering(body)).stream(prompt="a")
        assert body.closed


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bodies.events(), "no risk"),
        (bodies.events(bodies.chunk("a")), "field 'object'"),
        (b"data: {\n\n", "Invalid JSON"),
        (bodies.events(bodies.result(bodies.row(), bodies.row())), "2 risks"),
        (bodies.events(bodies.result(), bodies.chunk("a")), "without 'finish_reason'"),
        (
            bodies.events(bodies.result(), {"object": "completion.chunk", "index": 0}),
            "field 'delta'",
        ),
    ],
)
def test_streams_of_others_are_said_to_be_so(
    make_client: MakeClient, content: bytes, says: str
) -> None:
    with pytest.raises(hc.UnexpectedAnswer, match=says):
        make_client(answering(content)).stream(prompt="a")


def test_a_plain_json_answer_is_no_stream_and_noise_is_read_over(make_client: MakeClient) -> None:
    with pytest.raises(hc.UnexpectedAnswer, match="not an event stream"):
        make_client(lambda _: httpx.Response(200, json=bodies.result())).stream(prompt="a")
    noisy = b": ping\n\nevent: message\nid: 4\nretry: 10\n" + WHOLE.replace(
        b"\n\n", b"\n\n: ping\n\ndata:\n\n"
    )
    assert make_client(answering(noisy)).stream(prompt="a")[1] == [" It", " is."]


# --- how long a stream may be silent, on a real socket: only there does the limit that was set
# become a wait ---

RISK = bodies.events(bodies.result(), done=False)
REST = bodies.events(bodies.chunk(" It"), bodies.chunk("", "stop", 1))
Step = Callable[[BaseHTTPRequestHandler, threading.Event], None]


@contextmanager
def serving(*steps: Step) -> Iterator[str]:
    """A server whose n-th request gets the n-th step; the event a step gets is set when the test is
    over."""
    over, left = threading.Event(), list(steps)
    with listening(lambda request, _: left.pop(0)(request, over)) as address:
        try:
            yield f"http://{address}"
        finally:
            over.set()


def too_busy(request: BaseHTTPRequestHandler, over: threading.Event) -> None:
    answer(request, 429, b"", retry_after="49")


def silent_for(*seconds: float) -> Step:
    """Head and risk at once, then the rest of the answer, each half of it after so long a
    silence."""

    def step(request: BaseHTTPRequestHandler, over: threading.Event) -> None:
        request.send_response(200)
        request.send_header("content-type", "text/event-stream")
        request.end_headers()
        request.wfile.write(RISK)
        half = len(REST) // 2
        for pause, piece in zip(seconds, (REST[:half], REST[half:]), strict=True):
            if over.wait(pause):
                return
            request.wfile.write(piece)

    return step


def test_after_a_retry_a_silence_may_still_last_the_whole_timeout(make_client: MakeClient) -> None:
    time = Time()
    with serving(too_busy, silent_for(1.5, 0.0)) as url:
        # The wait leaves the second attempt one second, and the first silence is longer.
        client = make_client(
            base_url=url, timeout=50.0, clock=time.clock, sleep=time.sleep, draw=lambda: 0.0
        )
        streamed, pieces = client.stream(prompt="a")
    assert time.slept == [49.0]
    assert pieces == [" It"]
    assert streamed.completion is not None


@pytest.mark.parametrize("pauses", [(60.0, 0.0), (0.0, 60.0)])
def test_a_silence_longer_than_the_timeout_ends_the_stream(
    make_client: MakeClient, pauses: tuple[float, float]
) -> None:
    with serving(silent_for(*pauses)) as url, pytest.raises(hc.TimedOut, match="silent for 1 s"):
        make_client(base_url=url, timeout=1.0).stream(prompt="a")
