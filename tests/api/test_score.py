"""The wire of /score on the scripted engine: what is asked, answered, streamed and refused; clients
that leave."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.engines.base import Update
from service.policies.guard import Action, Policy
from tests.engine_kinds import KINDS
from tests.kit.api import check_error, stream_events
from tests.kit.in_loop import InLoop, Message
from tests.kit.tables import values
from tests.matching import Held
from tests.running import App, Running, app_of_module, running, until

JSON = {"content-type": "application/json"}
# For tests that change nothing of it.
app = app_of_module(aliases_of=lambda name: {"canary": 1} if name == "two" else {})


@pytest.fixture(params=KINDS)
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(tmp_path, request.param) as service:
        yield service


def send(
    service: Running, body: dict[str, Any], *, cut: int = 0, buffer: int | None = None
) -> socket.socket:
    """Send a request without its last ``cut`` bytes; ``buffer`` bytes of an answer fit in."""
    content = json.dumps(body).encode()
    head = (
        "POST /score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return service.connect(head.encode(), content[: len(content) - cut], buffer=buffer)


def idle(service: Running) -> bool:
    """Whether nothing of any request is left."""
    gauges = ("queue_depth", "running_decodes", "requests_in_flight")
    left = sum(service.series(name) for name in gauges)
    return left + service.engine.counters.open_continuations == 0


# --- what is answered ---


def test_bundles_by_name_and_reference_and_what_is_loaded(app: App) -> None:
    for reference in ("two", "two:1", "two@canary"):
        assert app.ask(prompt="b", bundle=reference)["bundle"]["name"] == "two"
    for missing in ("two@other", "one@canary", "nosuch@x", "three"):
        error = app.ask(status=404, prompt="b", bundle=missing)["error"]
        assert (error["code"], "/" in error["message"]) == (
            "not_found",
            False,
        ), "no path of the server is told"
        assert "one:1, two:1" in error["message"]
    (model,) = app.client.get("/v1/models").json()["data"]
    assert (model["object"], model["bundles"]) == ("model", ["one:1", "two:1"])
    one, _ = app.client.get("/v1/bundles").json()["data"]
    assert (one["signals"], one["digest"]) == (["depth_mean"], app.bundles[0].manifest.digest)


def test_the_operators_reference_names_what_was_loaded(tmp_path: Path) -> None:
    """Also where the alias moved meanwhile."""
    app = App(tmp_path, aliases_of=lambda name: {"production": 2})
    load = app.state.lifecycle.load
    app.state.lifecycle.load = lambda: dict(
        zip(["one@production", "two"], load().values(), strict=True)
    )
    with app.started():
        assert app.ask(prompt="b", bundle="one@production")["bundle"]["version"] == 1
        app.ask(status=404, prompt="b", bundle="two@production")


def test_policies_and_whose_threshold_counts(tmp_path: Path) -> None:
    """The service's threshold counts where the policy names none."""
    support = Policy("support", Action.ABSTAIN, threshold=0.0, message="Ask Ada.")
    told = ("policy", "decision", "threshold", "flagged", "message")
    with App(
        tmp_path, policies={"support": support}, policy="support", threshold=1.0
    ).started() as app:
        for choice, *expected in values(
            """
            {} | "support" | "abstain" | 0.0 | true | "Ask Ada."
            {"policy": "gate"} | "gate" | "continue" | 1.0 | false | null
            {"policy": "gate", "threshold": 0} | "gate" | "abstain" | 0.0 | true | "I am not sure."
            {"policy": "observe", "threshold": 0} | "observe" | "continue" | 0.0 | true | null
            """
        ):
            answer = app.ask(prompt="a", **choice)
            row = answer | answer["data"][0]
            assert [row.get(name) for name in told] == expected
        policies = app.client.get("/v1/bundles").json()["policies"]
        assert policies == ["support", "block", "gate", "observe"]


def test_cached_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as service:
        answer_of = service.served.answer

        async def cached(*arguments: Any, **options: Any) -> AsyncGenerator[Update, None]:
            async for update in answer_of(*arguments, **options):
                yield dataclasses.replace(update, cached_tokens=4)

        monkeypatch.setattr(service.served, "answer", cached)
        assert service.post(prompt=["a", "b"]).json()["usage"]["cached_tokens"] == 8
        body = {"prompt": "a", "generate": {"max_tokens": 5}, "threshold": 1, "stream": True}
        first, *_, last, _ = stream_events(service.post(**body).text)
        assert first["usage"]["cached_tokens"] == last["usage"]["cached_tokens"] == 4
        assert last["usage"]["completion_tokens"] == 5


# --- what is refused ---


@pytest.mark.parametrize("declared", [None, "application/x-www-form-urlencoded", "x" * 500])
def test_another_content_type_is_named(app: App, declared: str | None) -> None:
    """As curl sends one by default."""

    def sent(headers: dict[str, str]) -> httpx.Response:
        return app.client.post("/score", content=b'{"prompt": "a"}', headers=headers)

    refused = sent({"content-type": declared} if declared else {})
    message = check_error(refused, 422, code="invalid_request")["message"]
    assert f"found Content-Type {(declared or 'none')[:80]}" in message
    assert len(message) < 200
    for right in ("application/json; charset=utf-8", "application/x+json"):
        assert sent({"content-type": right}).status_code == 200


def test_another_method_names_those_that_are_taken(app: App) -> None:
    for method, path, taken in (
        ("GET", "/score", "it takes POST"),
        ("POST", "/v1/models", "it takes GET"),
        ("DELETE", "/v1/models/x", "GET"),
    ):
        error = check_error(app.client.request(method, path), 405, code="method_not_allowed")
        assert taken in error["message"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nothing", "no such route: /nothing;"),
        ("/v1/scores", "no such route: /v1/scores;"),
        ("/nothing?a=b", "no such route: /nothing;"),
        ("/%1b%5b31mred", "no such route: /?[31mred;"),
        ("/%7Bpath%7D", "no such route: /{path};"),
        ("/" + "x" * 5000, "no such route: /" + "x" * 199 + "...;"),
        ("/v1/embeddings", "/health/ready"),
        (
            "/chat/completions",
            "ends in /v1",
        ),  # of clients whose address is short of /v1, or has two
        ("/v1/v1/chat/completions", "ends in /v1"),
    ],
)
def test_an_unknown_path_is_named_with_the_routes_that_there_are(
    app: App, path: str, words: str
) -> None:
    for method in ("GET", "POST"):
        message = check_error(app.client.request(method, path), 404, code="not_found")["message"]
        assert words in message
        routes = set(re.split(r"[ ,;:)]+", message))
        assert routes >= {"/score", "/v1/risk/score", "/v1/chat/completions"}


# --- failures, deadlines, clients that leave ---


def test_a_deadline_under_way_is_an_event(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, late = itertools.count(), threading.Event()
    monkeypatch.setattr(
        service.engine, "wait", lambda: next(steps) < 4 or late.wait(20)
    )  # a step that hangs
    response = service.post(
        prompt="a", generate={"max_tokens": 400}, threshold=1, stream=True, deadline_ms=1500
    )
    late.set()
    assert stream_events(response.text)[-2]["error"]["code"] == "deadline_exceeded"
    until(lambda: idle(service))


def test_clients_that_leave_take_their_work_with_them(service: Running) -> None:
    service.engine.answer = "x" * 400
    service.engine.before = held = Held()
    holder = send(service, {"prompt": "held"})
    assert held.entered.wait(20)
    prefills = service.engine.counters.prefills
    answer = {"prompt": "a", "threshold": 1, "generate": {"max_tokens": 400}}
    for body, cut in (
        ({"prompt": "b"}, 0),
        (answer, 0),
        (answer | {"stream": True}, 0),
        ({"prompt": "c"}, 3),
    ):
        send(service, body, cut=cut).close()
    until(lambda: service.metric("hallutracer_errors_total") == 4)
    until(
        lambda: all(one.cancelled for one in service.served._queue.waiting)
    )  # told by a thread of its own
    held.release.set()
    until(lambda: idle(service))
    assert service.engine.counters.prefills == prefills + 1  # only the one that was held
    holder.close()
    assert service.series("errors_total", code="client_closed_request") == 4


def test_a_reader_that_takes_nothing_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.reply.SLOW_READER_S", 0.2)
    with running(tmp_path, deadline_s=3.0, max_new_tokens=50_000, max_kv_tokens=200_000) as service:
        service.engine.answer = "x" * 50_000
        service.engine.identity = dataclasses.replace(service.engine.identity, max_tokens=60_000)
        body = {"prompt": "a", "threshold": 1, "generate": {"max_tokens": 50_000}, "stream": True}
        reader = send(service, body, buffer=1024)
        until(lambda: service.metric("hallutracer_http_requests_total") == 1)
        until(lambda: idle(service))
        reader.close()


def test_a_backlog_of_pieces_does_not_hold_the_event_loop(tmp_path: Path) -> None:
    service = App(tmp_path, max_new_tokens=500)
    service.engine.answer = "x" * 500
    body = json.dumps(
        {"prompt": "a", "threshold": 1, "generate": {"max_tokens": 500}, "stream": True}
    ).encode()
    turns, decoded = 0, False
    sent_in_turn: Counter[int] = Counter()

    async def take(message: Message) -> None:
        nonlocal decoded
        while (
            not decoded and "body" in message
        ):  # the first write: until the whole answer waits to be written
            await asyncio.sleep(0.05)
            decoded = service.engine.counters.open_continuations == 0
        sent_in_turn[turns] += message.get("body", b"").count(b"completion.chunk")

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with service.started():
        assert service.client.portal is not None
        counting = service.client.portal.start_task_soon(count_turns)
        InLoop(service.client).post("/score", content=body, headers=JSON, taken=take)
        counting.cancel()
    assert (sent_in_turn.total(), max(sent_in_turn.values()) <= 64) == (501, True)


# --- ready, alive, stopping ---


def test_an_engine_that_stands_still_is_not_ready_and_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with App(tmp_path).started() as app:  # the engine stands still
        monkeypatch.setattr(app.state.lifecycle.dispatcher, "stalled", True)
        assert app.client.get("/health/live").status_code == 200
        for answer in (
            app.client.get("/health/ready"),
            app.client.post("/score", json={"prompt": "a"}),
        ):
            assert (answer.status_code, "has given nothing for 20 s" in answer.text) == (503, True)
        monkeypatch.undo()
        app.ask(prompt="a")


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_engine_is_neither_ready_nor_alive(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, kind) as service:
        told = threading.Event()
        service.state.lifecycle.on_broken = told.set
        assert httpx.get(f"{service.url}/health/live").status_code == 200
        monkeypatch.setattr(service.served, "on_prefill", lambda *_: 1 / 0)
        assert service.post(prompt="a").status_code == 503
        assert told.wait(20)
        for path in ("live", "ready"):
            answer = httpx.get(f"{service.url}/health/{path}")
            assert "the engine broke" in check_error(answer, 503)["message"]
        assert service.series("ready") == 0


def test_stopping_finishes_what_is_in_flight(service: Running) -> None:
    service.engine.answer, service.engine.sleep_s = "x" * 100, 0.01
    streaming = send(
        service, {"prompt": "a", "threshold": 1, "generate": {"max_tokens": 100}, "stream": True}
    )
    text = streaming.recv(4096)
    service.server.should_exit = True
    while chunk := streaming.recv(4096):
        text += chunk
    assert (text.count(b"completion.chunk"), b"[DONE]" in text) == (101, True)
    with pytest.raises(httpx.ConnectError):
        service.post(prompt="b")


@pytest.mark.parametrize("kind", KINDS)
def test_shutting_down_answers_503_to_queued_work(tmp_path: Path, kind: str) -> None:
    with App(tmp_path, kind).started() as app, ThreadPoolExecutor(3) as pool:
        app.engine.before = held = Held()
        asked = [pool.submit(app.client.post, "/score", json={"prompt": "a"}) for _ in range(2)]
        assert held.entered.wait(10)
        until(lambda: app.series("queue_depth") == 2)
        pool.submit(app.state.stop)
        time.sleep(0.2)
        held.release.set()
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert all(answer.headers["content-type"] == "application/json" for answer in answers)
