"""Answers that fail or come too late.

What the engine raises is ``engine_error`` on every route, and in the log once, with cause and
request id.  What is not finished in time ends shortly before the deadline."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import pytest

from service.errors import EngineBusy
from service.serving import observers
from service.serving.admission import Deadline
from tests.engine_kinds import KINDS
from tests.kit.api import (
    MESSAGES,
    NOTHING,
    RESPONSES,
    SCORE,
    WIRES,
    Wire,
    bodies_by_route,
    request_of,
    send_to,
    stream_events,
)
from tests.running import App, app_of_module

SECRET = "a detail that no caller is told"
BODIES = bodies_by_route("a")


app = app_of_module(kinds=KINDS, answer="x" * 400)


def counted(app: App) -> list[float]:
    """Errors of the engine, and all."""
    return [app.series("errors_total", code="engine_error"), app.series("errors_total")]


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that have one."""
    return [record.getMessage() for record in caplog.records if record.exc_info]


def check_logged(caplog: pytest.LogCaptureFixture, request_id: str) -> None:
    [message] = tracebacks(caplog)
    assert request_id in message
    assert f"RuntimeError: {SECRET}" in caplog.text


@pytest.mark.parametrize("route", BODIES)
def test_a_prefill_that_fails(app: App, route: str, caplog: pytest.LogCaptureFixture) -> None:
    before = counted(app)
    app.engine.fail = RuntimeError(SECRET)
    response = app.client.post(route, json=BODIES[route], headers={"x-request-id": "mine-1"})
    app.engine.fail = None
    assert (response.status_code, SECRET in response.text) == (500, False), response.text
    assert counted(app) == [errors + 1 for errors in before]
    check_logged(caplog, "mine-1")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WIRES)
def test_a_step_of_an_answer_that_fails(
    app: App,
    name: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = counted(app)
    steps = itertools.count()
    begun = threading.Event()
    judged, wire = observers.judged, WIRES[name]

    async def told(*given: Any) -> None:
        await judged(*given)
        begun.set()

    def wait() -> None:
        if next(steps) >= 3:  # as often as it is tried
            assert not stream or begun.wait(20)  # the risk has been sent
            raise RuntimeError(SECRET)

    monkeypatch.setattr(observers, "judged", told)
    monkeypatch.setattr(app.engine, "wait", wait)
    body = request_of(wire, chosen=NOTHING, stream=stream)
    response = app.client.post(wire.route, json=body, headers={"x-request-id": "mine-2"})
    assert (response.status_code, SECRET in response.text) == (200 if stream else 500, False)
    assert counted(app) == [errors + 1 for errors in before]
    check_logged(caplog, "mine-2")
    if stream:  # the failure is its last event, and nothing says that the answer is whole
        assert ("[DONE]" in response.text) is (name in ("score", "chat", "text"))
        *events, last = [event for event in stream_events(response.text) if event != "[DONE]"]
        assert any("delta" in str(event) or "text" in str(event) for event in events[1:])
        assert '"stop"' not in response.text
        ends = ("response.completed", "message_delta")
        assert not any(event.get("type") in ends for event in events)
        assert last["error"]["type"] == ("api_error" if wire is MESSAGES else "server_error")
        assert wire is MESSAGES or last["error"]["code"] == "engine_error"
        assert wire not in (RESPONSES, MESSAGES) or last["type"] == "error"


def test_an_engine_that_gives_up_one_request_is_503_and_says_when_to_come_back(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    app.engine.fail = EngineBusy("vLLM gave this request up; send it again")
    response = app.client.post("/score", json={"prompt": "a"})
    app.engine.fail = None
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "engine_error"
    assert len(tracebacks(caplog)) == 1


def test_what_the_request_did_wrong_has_no_traceback(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    app.ask(status=413, prompt="a" * 5000)
    assert not tracebacks(caplog)


def test_a_nan_is_no_risk(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.engine, "nan_layer", 0)
    assert app.ask(status=500, prompt="a")["error"]["code"] == "non_finite_readout"


# --- answers that are not finished shortly before the deadline, whatever length a request named ---

# How the protocols say that an answer was cut.
ENDS = {"responses": "max_output_tokens", "messages": "max_tokens"}


def answer_of(app: App, wire: Wire, *, stream: bool = False, **chosen: float) -> str:
    """The text of a response to a request that names the length of its answer."""
    return send_to(app, wire, tokens=30, stream=stream, chosen=NOTHING | chosen).text


def ends_of(text: str) -> list[str]:
    return re.findall(r'"(?:finish_reason|stop_reason|reason)": ?"(\w+)"', text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WIRES)
def test_an_answer_ends_shortly_before_the_deadline(
    app: App, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answer_of(app, WIRES[name], stream=stream)
    decoded = app.engine.counters.decode_steps
    # It has come when the first token is decoded.
    monkeypatch.setattr(Deadline, "nearly", property(lambda _: 0.0))
    cut = answer_of(app, WIRES[name], stream=stream)
    assert ends_of(cut) == ends_of(whole) == [ENDS.get(name, "length")]
    assert app.engine.counters.decode_steps - decoded < 3
    assert not re.search('"code": ?"', cut)


def test_a_deadline_of_the_request_s_own_counts(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    nearly = property(lambda self: given.append(self.seconds) or 0.0)
    monkeypatch.setattr(Deadline, "nearly", nearly)
    assert ends_of(answer_of(app, SCORE, deadline_ms=25_000)) == ["length"]
    assert set(given) == {25.0}
