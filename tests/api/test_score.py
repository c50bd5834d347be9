"""The wire of /score on the scripted engine: what is asked, answered, streamed and refused; clients
that leave."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.engines.base import Update
from service.policies.guard import Action, Policy
from tests.engine_kinds import KINDS
from tests.matching import Held
from tests.running import App, Running, app_of_module, running, until

ALIASES = {"two": {"canary": 1}}


# For tests that change nothing of it.
app = app_of_module(aliases_of=lambda name: ALIASES.get(name, {}))


@pytest.fixture(params=KINDS)
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(tmp_path, request.param) as service:
        yield service


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def send(
    service: Running, body: dict[str, Any], *, cut: int = 0, buffer: int | None = None
) -> socket.socket:
    """Open a connection and send a request, without its last ``cut`` bytes; ``buffer`` bytes of an
    answer fit in."""
    content = json.dumps(body).encode()
    head = (
        "POST /score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length:"
        f" {len(content)}"
    )
    connection = socket.socket()
    connection.settimeout(20)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", service.port))
    connection.sendall(f"{head}\r\n\r\n".encode() + content[: len(content) - cut])
    return connection


def idle(service: Running) -> bool:
    gauges = (
        "hallutracer_queue_depth",
        "hallutracer_running_decodes",
        "hallutracer_requests_in_flight",
    )
    return (
        all(service.metric(name) == 0 for name in gauges)
        and service.engine.counters.open_continuations == 0
    )


# --- what is answered ---


def test_ids_and_times_are_headers(app: App) -> None:
    response = app.client.post("/score", json={"prompt": "a"}, headers={"X-Request-Id": "abc-1"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("abc-1", "risk-abc-1")
    assert response.json()["bundle"]["digest"] == app.bundles[0].manifest.digest
    assert all(
        float(response.headers[f"x-{name}-time"]) >= 0 for name in ("queue", "inference", "total")
    )
    response = app.client.post("/score", json={"prompt": "a"}, headers={"X-Request-Id": "bad id\t"})
    assert len(response.headers["x-request-id"]) == 32


def test_lists_messages_and_ids_agree_with_single_prompts_on_both_routes(app: App) -> None:
    message = [{"role": "user", "content": "b"}]
    ids = app.engine.render_chat(message)
    both = app.ask(prompt=["a", "b"])["data"]
    assert [row["index"] for row in both] == [0, 1]
    for body in (
        {"prompt": "b"},
        {"messages": message},
        {"input_ids": ids},
        {"input_ids": [ids, ids]},
    ):
        assert app.ask(**body)["data"][-1]["risk"] == both[1]["risk"], body
    alias = app.ask("/v1/risk/score", prompt=["a", "b"])
    assert alias["data"] == both
    (row,) = app.ask(prompt="b", include=["trajectory", "running_mean"])["data"]
    assert len(row["trajectory"]) == len(row["running_mean"]) == 4
    assert row["running_mean"][-1] == pytest.approx(row["depth_mean"])
    assert sum(row["trajectory"]) / 4 == pytest.approx(row["depth_mean"])


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
    assert app.ask(status=404, prompt="b", model="other")["error"]["param"] == "model"
    app.ask(prompt="b", model="scripted")
    (model,) = app.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["bundles"]) == (
        "scripted",
        "model",
        ["one:1", "two:1"],
    )
    one, _ = app.client.get("/v1/bundles").json()["data"]
    assert (one["id"], one["default"], one["signals"]) == ("one:1", True, ["depth_mean"])
    assert one["digest"].startswith("sha256:")


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
    support = Policy("support", Action.ABSTAIN, threshold=0.0, message="Ask Ada.")
    with App(
        tmp_path, policies={"support": support}, policy="support", threshold=1.0
    ).started() as app:
        for choice, expected in (
            ({}, ("support", "abstain", 0.0, True, "Ask Ada.")),
            (
                {"policy": "gate"},
                ("gate", "continue", 1.0, False, None),
            ),  # the service's: the policy names none
            (
                {"policy": "gate", "threshold": 0.0},
                ("gate", "abstain", 0.0, True, "I am not sure."),
            ),
            ({"policy": "observe", "threshold": 0.0}, ("observe", "continue", 0.0, True, None)),
        ):
            answer = app.ask(prompt="a", **choice)
            row = answer | answer["data"][0]
            assert (
                tuple(
                    row.get(name)
                    for name in ("policy", "decision", "threshold", "flagged", "message")
                )
                == expected
            )
        assert app.client.get("/v1/bundles").json()["policies"] == [
            "support",
            "block",
            "gate",
            "observe",
        ]


def test_cached_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as service:
        answer_of = service.served.answer

        async def cached(*arguments: Any, **options: Any) -> AsyncGenerator[Update, None]:
            async for update in answer_of(*arguments, **options):
                yield dataclasses.replace(update, cached_tokens=4)

        monkeypatch.setattr(service.served, "answer", cached)
        assert service.post(prompt=["a", "b"]).json()["usage"]["cached_tokens"] == 8
        first, *_, last = events(
            service.post(prompt="a", generate={"max_tokens": 5}, threshold=1, stream=True).text
        )
        assert first["usage"]["cached_tokens"] == last["usage"]["cached_tokens"] == 4
        assert last["usage"]["completion_tokens"] == 5


def test_the_same_answer_with_and_without_a_stream_in_a_crowd(service: Running) -> None:
    service.engine.answer = "Zürich, 日本 and 🙂"

    def ask(n: int) -> tuple[str, str]:
        body = {"prompt": f"prompt {n}", "generate": {"max_tokens": 64}, "policy": "observe"}
        plain = service.post(**body).json()["data"][0]["completion"]["text"]
        return plain, "".join(
            event["delta"]["text"] for event in events(service.post(**body, stream=True).text)[1:]
        )

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [(service.engine.answer, service.engine.answer)] * 6
    until(lambda: idle(service))


# --- what is refused ---

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("declared", [None, "application/x-www-form-urlencoded", "x" * 500])
def test_another_content_type_is_named(app: App, declared: str | None) -> None:
    """As curl sends one by default."""
    headers = {"content-type": declared} if declared else {}
    response = app.client.post("/score", content=b'{"prompt": "a"}', headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], len(error["message"]) < 200) == (
        422,
        "invalid_request",
        True,
    )
    assert f"found Content-Type {(declared or 'none')[:80]}" in error["message"]
    for right in ("application/json; charset=utf-8", "application/x+json"):
        assert (
            app.client.post(
                "/score", content=b'{"prompt": "a"}', headers={"content-type": right}
            ).status_code
            == 200
        )


def test_another_method_and_another_path_name_what_there_is(app: App) -> None:
    for method, path, code, said in (
        ("GET", "/score", "method_not_allowed", "it takes POST"),
        ("GET", "/no", "not_found", "/health/ready"),
        ("POST", "/v1/models", "method_not_allowed", "it takes GET"),
        ("DELETE", "/v1/models/x", "method_not_allowed", "GET"),
    ):
        error = app.client.request(method, path).json()["error"]
        assert (error["code"], said in error["message"]) == (code, True), error


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
    assert events(response.text)[-1]["error"]["code"] == "deadline_exceeded"
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
    assert (
        'errors_total{code="client_closed_request"} 4.0' in httpx.get(f"{service.url}/metrics").text
    )


def test_a_body_that_never_comes_is_408(tmp_path: Path) -> None:
    with running(tmp_path, deadline_s=0.3) as service:
        slow = send(service, {"prompt": "a"}, cut=3)
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        slow.close()
        assert service.metric("hallutracer_requests_in_flight") == 0


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
    requests = [{"type": "http.request", "body": body}]
    turns, decoded = 0, False
    sent_in_turn: Counter[int] = Counter()

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.Event().wait()
        return requests.pop()

    async def take(message: MutableMapping[str, Any]) -> None:
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

    async def stream() -> None:
        counting = asyncio.create_task(count_turns())
        async with service.app.router.lifespan_context(service.app):
            while not service.state.lifecycle.is_ready:
                await asyncio.sleep(0.01)
            headers = [(b"content-type", b"application/json")]
            scope = {
                "type": "http",
                "method": "POST",
                "path": "/score",
                "query_string": b"",
                "headers": headers,
            }
            await service.app(scope, receive, take)
        counting.cancel()

    asyncio.run(stream())
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
            assert (answer.status_code, "the engine broke" in answer.text) == (503, True)
        assert service.metric("hallutracer_ready") == 0


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
        until(lambda: "hallutracer_queue_depth 2.0" in app.client.get("/metrics").text)
        pool.submit(app.state.stop)
        time.sleep(0.2)
        held.release.set()
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert all(answer.headers["content-type"] == "application/json" for answer in answers)
