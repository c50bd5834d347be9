"""What is tried again, when, and when no more."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

import hallutracer_client as hc
from hallutracer_client.wire import Attempts, refusal
from tests.client.conftest import MakeClient, Script, failing
from tests.kit import bodies
from tests.kit.tables import cells, lines


def ok() -> httpx.Response:
    return httpx.Response(200, json=bodies.result())


def busy(after: str | None = None) -> Callable[[], httpx.Response]:
    return lambda: bodies.error(429, "overloaded", **({"retry-after": after} if after else {}))


@pytest.mark.parametrize(
    "text",
    lines(
        """
        429 overloaded
        503 not_ready
        503
        ConnectError
        ConnectTimeout
        RemoteProtocolError
        ReadError
        """
    ),
)
def test_these_are_tried_again(make_client: MakeClient, text: str) -> None:
    script = Script(failing(text), failing(text), ok)
    client = make_client(script)
    assert client.score(prompt="a").risk == 0.1
    assert len(script.seen) == 3
    assert client.time.slept == [0.125, 0.25]  # half of 0.25 and of 0.5, the jitter drawing 0.5
    assert script.seen[0].content == script.seen[2].content


@pytest.mark.parametrize(
    ("text", "error"),
    cells(
        """
        500 engine_error | ServerError
        422 invalid_request | APIError
        504 deadline_exceeded | ServerError
        502 | UnexpectedAnswer
        200 | UnexpectedAnswer
        ReadTimeout | TimedOut
        WriteTimeout | TimedOut
        """
    ),
)
def test_these_are_not(make_client: MakeClient, text: str, error: str) -> None:
    client = make_client(script := Script(failing(text), ok))
    with pytest.raises(getattr(hc, error)):
        client.score(prompt="a")
    assert (len(script.seen), client.time.slept) == (1, [])


def test_the_last_error_is_the_one_raised(make_client: MakeClient) -> None:
    script = Script(httpx.ConnectError("refused"), busy("3"))
    with pytest.raises(hc.Overloaded) as caught:
        make_client(script, max_retries=1).score(prompt="a")
    assert (caught.value.retry_after, len(script.seen)) == (3.0, 2)


def test_at_most_max_retries(make_client: MakeClient) -> None:
    for most in (0, 1, 4):
        script = Script(httpx.ConnectError("refused"))
        with pytest.raises(hc.TransportError, match="running"):
            make_client(script, max_retries=most).score(prompt="a")
        assert len(script.seen) == most + 1


def test_an_unreadable_retry_after_leaves_it_to_the_backoff() -> None:
    asked = httpx.Request("GET", "http://guard.test")
    for after in ("Wed, 21 Oct 2026 07:28:00 GMT", "-3", "1e9", "", "\u0663"):
        error = refusal(
            httpx.Response(503, headers=[(b"retry-after", after.encode())], request=asked)
        )
        assert isinstance(error, hc.UnexpectedAnswer)
        assert error.retry_after is None


@pytest.mark.parametrize(("after", "timeout"), [("2", 2.0), ("61", 1000.0), ("999999999", 1e12)])
def test_retry_after_is_a_least_wait_and_one_that_is_too_long_fails_at_once(
    make_client: MakeClient, after: str, timeout: float
) -> None:
    patient = make_client(Script(busy("2"), ok))
    patient.score(prompt="a")
    assert patient.time.slept == [2.125]
    script = Script(busy(after), ok)
    client = make_client(script, timeout=timeout)
    with pytest.raises(hc.Overloaded):
        client.score(prompt="a")
    assert (client.time.slept, len(script.seen)) == ([], 1)


def test_the_timeout_bounds_all_attempts_together(make_client: MakeClient) -> None:
    left: list[float] = []

    def slow(request: httpx.Request) -> httpx.Response:
        left.append(request.extensions["timeout"]["read"])
        client.time.now += 4.0
        raise httpx.ReadError("reset")

    client = make_client(slow, timeout=10.0, max_retries=50)
    with pytest.raises(hc.TransportError):
        client.score(prompt="a")
    assert (
        client.time.now - 1000.0 <= 12.5
    )  # the third attempt may start inside the time and end outside
    assert (left[0], len(left), left) == (10.0, 3, sorted(left, reverse=True))


def test_connecting_may_not_take_the_whole_time(make_client: MakeClient) -> None:
    script = Script(ok)
    make_client(script, timeout=60.0).score(prompt="a")
    make_client(script, timeout=2.0).score(prompt="a")
    assert [request.extensions["timeout"]["connect"] for request in script.seen] == [5.0, 2.0]


def test_a_stream_is_tried_again_only_before_it_began(make_client: MakeClient) -> None:
    whole = bodies.events(bodies.result(), bodies.chunk("It"), bodies.chunk("", "stop", 1))
    script = Script(busy(), httpx.ConnectError("refused"), lambda: bodies.stream(whole))
    _, pieces = make_client(script).stream(prompt="a")
    assert pieces == ["It"]
    assert len(script.seen) == 3
    began = bodies.events(bodies.result(), bodies.chunk("It"), done=False)
    for content, said in ((began, "broke off after 1 piece"), (b"", "broke off after 0 pieces")):
        broken = Script(lambda content=content: bodies.stream(content))
        with pytest.raises(hc.TransportError, match=said):
            make_client(broken).stream(prompt="a")
        assert len(broken.seen) == 1


def test_readiness_is_asked_once(make_client: MakeClient) -> None:
    script = Script(lambda: bodies.error(503, "not_ready", "still loading"))
    ready = make_client(script).ready()
    assert (bool(ready), ready.reason, len(script.seen)) == (False, "still loading", 1)
    with pytest.raises(hc.UnexpectedAnswer):
        make_client(Script(httpx.Response(503, html="<h1>maintenance</h1>"))).ready()


def test_jitter_is_full_and_the_backoff_is_capped() -> None:
    for draw, waits in ((0.0, [0.0] * 8), (0.999, [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0])):
        attempts = Attempts(8, 1e6, lambda: 0.0, lambda draw=draw: draw)  # type: ignore[misc]
        got = [attempts.pause(hc.NotReady("", status=503, code="not_ready")) for _ in range(8)]
        assert got == pytest.approx([wait * 0.999 for wait in waits])


def test_settings_that_make_no_sense_are_refused(make_client: MakeClient) -> None:
    for timeout in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            make_client(Script(ok), timeout=timeout)
    with pytest.raises(ValueError):
        make_client(Script(ok), max_retries=-1)
