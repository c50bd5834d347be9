"""Generated requests to /v1/responses and /v1/messages under a gate that every answer meets; 20,000
in the long run.

Nothing that was decoded leaves, tools or not; every error has its protocol's form and no status is
a 5xx; the service gives the same risk as before."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from anthropic.types import ErrorResponse
from openai.types.shared import ErrorObject

from service.access.routes import MESSAGES_ROUTE, RESPONSES_ROUTE
from service.errors import EngineError
from tests.api import test_no_token as every_route
from tests.kit.api import MESSAGES, RESPONSES, request_of, send_to
from tests.kit.in_loop import InLoop
from tests.running import App, until

SHORT, LONG = 500, 20_000
# What no request and no message holds, each character two tokens: where one arrives, a decoded
# token did. Where tools are offered, an answer is decoded for as long as it may be nothing but a
# call; none of these is.
MARKS = "ΨΩ"
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "Ω"}}\n</tool_call>'
ANSWERS = (
    "ΨΩΨΩ",
    CALL + "Ψ",
    f"Ψ{CALL}",
    CALL[:-1],
    f"{CALL}\n<tool_call>Ω</tool_call>",
    " \n<tool_call",
    "",
)
CALLED = (
    "<tool",
    "tool_use",
    "function_call",
)  # of these three nothing is in an answer that is withheld

NEW = {wire.route: wire for wire in (RESPONSES, MESSAGES)}
# By route, values of what belongs to tools, beside those of every route.
TOOLS = {
    RESPONSES_ROUTE: every_route.FIELDS["tools of responses"],
    MESSAGES_ROUTE: every_route.FIELDS["tools of messages"],
}
XARGS = {"vllm_xargs": every_route.FIELDS["openai"]["vllm_xargs"]}


def request(number: int) -> tuple[str, bytes]:
    """A path and a body: as for every route, or well formed but for two fields at most, often with
    tools."""
    path, content = every_route.request(number, "scripted", list(NEW))
    draw = Random(-number)
    if draw.random() < 0.5:
        return path, content
    body = request_of(NEW[path], stream=draw.random() < 0.5)
    body |= {"tools": TOOLS[path]["tools"][0]} if draw.random() < 0.3 else {}
    for _ in range(draw.choice((0, 1, 2))):
        values = draw.choice((TOOLS[path], every_route.BY_ROUTE[path], XARGS))
        name = draw.choice(sorted(values))
        body[name] = draw.choice(values[name])
    return path, json.dumps(body).encode()


def checked_error(path: str, status: int, body: dict[str, Any], request_id: str) -> None:
    """An error as the protocol's own client reads it; neither protocol has a 422."""
    assert status in (400, 403, 404, 413, 429)
    if path == MESSAGES_ROUTE:
        error = ErrorResponse.model_validate(body, strict=True, extra="forbid")
        assert (error.type, error.request_id) == ("error", request_id)
        assert error.error.message
        assert error.error.type != "api_error"
        return
    assert body.keys() == {"error"}
    result = ErrorObject.model_validate(body["error"], strict=True, extra="forbid")
    assert result.message
    assert result.type == "invalid_request_error"


def check_all(app: App, requests: int) -> Counter[tuple[str, int]]:
    """How many were answered on which route with which status."""
    seen: Counter[tuple[str, int]] = Counter()
    app.engine.takes_tools = True
    client = InLoop(app.client)
    for number in range(requests):
        path, content = request(number)
        app.engine.answer = ANSWERS[number % len(ANSWERS)]
        decoded = app.engine.counters.decode_steps
        response = client.post(path, content=content, headers={"content-type": "application/json"})
        text, status = response.text, response.status_code
        seen[path, status] += 1
        context = f"request {number}: {content[:600]!r}: {status} {text[:600]}"
        assert status < 500, context
        assert not any(mark in text or json.dumps(mark)[1:-1] in text for mark in MARKS), (
            f"a token: {context}"
        )
        if status == 200:
            assert not any(mark in text for mark in CALLED), f"a token: {context}"
            assert not every_route.answered(text), f"answered: {context}"
            assert app.engine.counters.decode_steps == decoded or b'"tools"' in content, (
                f"decoded: {context}"
            )
        else:
            checked_error(path, status, response.json(), response.headers["x-request-id"])
    return seen


def risk(app: App, path: str) -> float:
    """That of a sound request, which is withheld."""
    answer = send_to(app, NEW[path]).json()["hallutracer"]
    assert answer["data"][0]["decision"] == "abstain"
    return float(answer["data"][0]["risk"])


@pytest.mark.parametrize("requests", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
def test_nothing_leaves_and_every_error_is_the_protocols(tmp_path: Path, requests: int) -> None:
    with App(tmp_path, threshold=0.0, callers_may=()).started() as app:
        before = [risk(app, path) for path in NEW]
        seen = check_all(app, requests)
        for path in NEW:
            results = {status: count for (route, status), count in seen.items() if route == path}
            assert {200, 400, 403, 404} <= results.keys(), results
            assert results[200] > requests // 10, results
        assert app.engine.counters.decode_steps > 0  # of answers that might have been calls
        assert [risk(app, path) for path in NEW] == before
        assert app.client.get("/health/ready").status_code == 200
        until(lambda: app.engine.counters.open_continuations == 0)


def test_the_checks_would_tell(tmp_path: Path) -> None:
    with App(tmp_path, threshold=0.0).started() as app:  # callers may loosen the gate
        with pytest.raises(AssertionError, match="a token: request"):
            check_all(app, SHORT)
        app.engine.fail = EngineError("broken")
        with pytest.raises(AssertionError, match=": 503 |: 500 "):
            check_all(app, SHORT)
    error = {"message": "No.", "type": "invalid_request_error", "param": None, "code": "x"}
    checked_error(RESPONSES_ROUTE, 400, {"error": error}, "id")
    theirs = {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "No."},
        "request_id": "id",
    }
    checked_error(MESSAGES_ROUTE, 400, theirs, "id")
    for path, status, body in (
        (RESPONSES_ROUTE, 422, {"error": error}),
        (RESPONSES_ROUTE, 400, theirs),
        (MESSAGES_ROUTE, 400, {"error": error}),
        (RESPONSES_ROUTE, 400, {"detail": "No."}),
        (MESSAGES_ROUTE, 400, theirs | {"request_id": "other"}),
    ):
        with pytest.raises((AssertionError, ValueError)):
            checked_error(path, status, body, "id")
