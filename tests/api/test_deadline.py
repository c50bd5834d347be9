"""An answer that is not finished shortly before the deadline ends there, whatever length its
request named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from service.access.routes import (
    CHAT_ROUTE,
    MESSAGES_ROUTE,
    RESPONSES_ROUTE,
    SCORE_ROUTES,
    TEXT_ROUTE,
)
from service.serving.admission import Deadline
from tests.api.protocols import body_of
from tests.engine_kinds import KINDS
from tests.running import App

TOKENS = 30
ENDS = {
    CHAT_ROUTE: "length",
    TEXT_ROUTE: "length",
    SCORE_ROUTES[0]: "length",
    SCORE_ROUTES[1]: "length",
    RESPONSES_ROUTE: "max_output_tokens",
    MESSAGES_ROUTE: "max_tokens",
}


@pytest.fixture(scope="module", params=KINDS)
def app(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[App]:
    with App(tmp_path_factory.mktemp("service"), request.param).started() as app:
        app.engine.answer = "x" * 400
        yield app


def body_on(route: str, stream: bool) -> dict[str, Any]:
    """A request that names the length of its answer."""
    if route in SCORE_ROUTES:
        generate = {"max_tokens": TOKENS}
        return {
            "prompt": "a",
            "threshold": 1.0,
            "policy": "observe",
            "generate": generate,
            "stream": stream,
        }
    body = body_of(route, "a", {"hallutracer_threshold": 1.0}, TOKENS, stream=stream)
    return (
        {"prompt": "a", **{k: v for k, v in body.items() if k != "messages"}}
        if route == TEXT_ROUTE
        else body
    )


def values_of(document: Any, name: str) -> Iterator[Any]:
    """Every value that is not None under a name, at any depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == name and value is not None and not isinstance(value, dict | list):
                yield value
            yield from values_of(value, name)
    elif isinstance(document, list):
        for value in document:
            yield from values_of(value, name)


def ends_of(text: str) -> list[Any]:
    """How an answer or a stream says that it has ended, in its protocol's word."""
    lines = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
    ] or [text]
    documents = [json.loads(line) for line in lines]
    return [
        value
        for name in ("finish_reason", "stop_reason", "reason")
        for value in values_of(documents, name)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ENDS)
def test_an_answer_ends_shortly_before_the_deadline(
    app: App, route: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = app.client.post(route, json=body_on(route, stream))
    decoded = app.engine.counters.decode_steps
    monkeypatch.setattr(
        Deadline, "nearly", property(lambda _: 0.0)
    )  # it has come when the first token is decoded
    cut = app.client.post(route, json=body_on(route, stream))
    assert (whole.status_code, cut.status_code) == (200, 200), cut.text
    assert ends_of(cut.text) == ends_of(whole.text) == [ENDS[route]]
    assert app.engine.counters.decode_steps - decoded < 3
    assert (
        not list(values_of(json.loads(cut.text), "code"))
        if not stream
        else "deadline" not in cut.text
    )


def test_a_deadline_of_the_request_s_own_counts(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(
        Deadline, "nearly", property(lambda self: given.append(self.seconds) or 0.0)
    )
    answer = app.client.post(
        SCORE_ROUTES[0], json=body_on(SCORE_ROUTES[0], False) | {"deadline_ms": 25_000}
    )
    assert (ends_of(answer.text), set(given)) == (["length"], {25.0})
