"""How long a stream may be silent, on a real socket: only there does the limit that was set become a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from hallutracer_client import TimedOut
from tests.client import bodies
from tests.client.blocking import Time
from tests.client.conftest import MakeClient
from tests.local_server import answer, listening

RISK = bodies.events(bodies.result(), done=False)
REST = bodies.events(bodies.chunk(" It"), bodies.chunk("", "stop", 1))
Step = Callable[[BaseHTTPRequestHandler, threading.Event], None]


@contextmanager
def serving(*steps: Step) -> Iterator[str]:
    """A server whose n-th request gets the n-th step; the event a step gets is set when the test is over."""
    over, left = threading.Event(), list(steps)
    with listening(lambda request, _: left.pop(0)(request, over)) as address:
        try:
            yield f"http://{address}"
        finally:
            over.set()


def busy(request: BaseHTTPRequestHandler, over: threading.Event) -> None:
    answer(request, 429, b"", retry_after="49")


def silent_for(*seconds: float) -> Step:
    """Head and risk at once, then the rest of the answer, each half of it after so long a silence."""

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


def test_after_a_retry_a_silence_may_still_last_the_whole_timeout(make_client: MakeClient, kind: str) -> None:
    time = Time()
    sleep = time.sleep if kind == "sync" else time.asleep
    with serving(busy, silent_for(1.5, 0.0)) as url:
        # The wait leaves the second attempt one second, and the first silence is longer.
        client = make_client(base_url=url, timeout=50.0, clock=time.clock, sleep=sleep, draw=lambda: 0.0)
        streamed, pieces = client.stream(prompt="a")
    assert time.slept == [49.0]
    assert pieces == [" It"]
    assert streamed.completion is not None


@pytest.mark.parametrize("pauses", [(60.0, 0.0), (0.0, 60.0)])
def test_a_silence_longer_than_the_timeout_ends_the_stream(
    make_client: MakeClient, pauses: tuple[float, float]
) -> None:
    with serving(silent_for(*pauses)) as url, pytest.raises(TimedOut, match="silent for 1 s"):
        make_client(base_url=url, timeout=1.0).stream(prompt="a")
