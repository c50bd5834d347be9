"""Under a gate that every answer meets, no request gets a token: thousands of them, well formed or
not, with tools or without.

Every error of the newer protocols has their form, no status is a 5xx, and the service gives the
same risk as before.  The same for vLLM's own server: tests/vllm_plugin/test_gated.py."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
from anthropic.types import ErrorResponse
from fastapi.testclient import TestClient
from openai.types.shared import ErrorObject

from probes_store.store import SHIPPED, Store
from service.access.routes import ANSWER_ROUTES, MESSAGES_ROUTE, RESPONSES_ROUTE, SCORE_ROUTES
from service.demo import MODEL_DIR
from service.engines.base import Counters, EngineOptions
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.errors import EngineError
from service.scoring import Scorer
from tests.kit.api import (
    MESSAGES,
    REFUSAL,
    RESPONSES,
    documents_of,
    request_of,
    send_to,
    values_of,
    whole,
)
from tests.kit.in_loop import InLoop
from tests.running import App, in_process, until
from tests.scripted_engine import ScriptedEngine

# By route, values of each field, right ones and wrong ones.
FIELDS: dict[str, dict[str, list[Any]]] = whole(
    json.loads(Path(__file__).with_name("hostile_values.json").read_text(encoding="utf-8"))
)
TURNS = FIELDS["score"]["messages"]
BY_ROUTE = dict.fromkeys(SCORE_ROUTES, FIELDS["score"]) | {
    RESPONSES_ROUTE: FIELDS["responses"],
    MESSAGES_ROUTE: FIELDS["messages"],
}
NEW = {wire.route: wire for wire in (RESPONSES, MESSAGES)}
# By route, values of what belongs to tools, beside those of every route.
TOOLS = {
    RESPONSES_ROUTE: FIELDS["tools of responses"],
    MESSAGES_ROUTE: FIELDS["tools of messages"],
}
XARGS = {"vllm_xargs": FIELDS["openai"]["vllm_xargs"]}
# What no request and no message holds, each character two tokens: where one arrives, a decoded
# token did.  Where tools are offered, an answer is decoded for as long as it may be nothing but a
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
CALLED = ("<tool", "tool_use", "function_call")  # none of it is in an answer that is withheld
JSON = {"content-type": "application/json"}


def request(number: int, model: str) -> tuple[str, bytes]:
    """A path and a body; the same for the same number."""
    draw = Random(number)
    path = draw.choice(ANSWER_ROUTES)
    if path in NEW and draw.random() < 0.5:
        return path, with_tools(path, model, draw)
    body: dict[str, Any] = draw.choice([{"prompt": "Who was Ada?"}, {"messages": TURNS[0]}, {}])
    values = BY_ROUTE.get(path, FIELDS["openai"])
    if path == RESPONSES_ROUTE:
        body = draw.choice([{"input": "Who was Ada?"}, {"input": TURNS[0]}, {}])
    elif path == MESSAGES_ROUTE:
        body = {"messages": TURNS[0], "max_tokens": 5}
    body = body | ({"generate": {"max_tokens": 4}} if path in SCORE_ROUTES else {"model": model})
    for name in draw.sample(sorted(values), draw.choice([0, 1, 1, 2, 3])):
        body[name] = draw.choice(values[name])
    text = json.dumps(body)
    if draw.random() < 0.05:
        text = text[:-1] + ', "policy": "observe"}'  # perhaps a key twice
    content = text.encode(draw.choice(["utf-8"] * 18 + ["utf-16", "utf-8-sig"]))
    if draw.random() < 0.1:
        position = draw.randrange(len(content))
        content = (
            content[:position]
            + bytes([draw.randrange(256)])
            + content[position + draw.choice([0, 1, 50]) :]
        )
    return path, content


def with_tools(path: str, model: str, draw: Random) -> bytes:
    """A body that is well formed but for two fields at most, often with tools."""
    body = request_of(NEW[path], stream=draw.random() < 0.5, model=model)
    body |= {"tools": TOOLS[path]["tools"][0]} if draw.random() < 0.3 else {}
    for _ in range(draw.choice((0, 1, 2))):
        values = draw.choice((TOOLS[path], BY_ROUTE[path], XARGS))
        name = draw.choice(sorted(values))
        body[name] = draw.choice(values[name])
    return json.dumps(body).encode()


def answered(text: str) -> bool:
    """Whether a response, or an event of a stream, holds an answer's text; a refusal's message is
    none."""
    values = [
        v for document in documents_of(text) for v in values_of(document, ("text", "content"))
    ]
    return '"completion":' in text or not {*values} <= {None, "", REFUSAL}


class Answer(NamedTuple):
    """What was answered to a generated request."""

    told: str  # both, for messages of failures
    path: str
    content: bytes
    response: httpx.Response


def responses(client: TestClient, requests: int) -> Iterator[Answer]:
    """What is answered to so many requests, which are some of each kind."""
    statuses: Counter[int] = Counter()
    in_loop = InLoop(client)
    model = client.get("/v1/models").json()["data"][0]["id"]
    for number in range(requests):
        path, content = request(number, model)
        response = in_loop.post(path, content=content, headers=JSON)
        statuses[response.status_code] += 1
        told = f"request {number}: {content[:600]!r}: {response.status_code} {response.text[:600]}"
        assert response.status_code < 500 or response.status_code == 504, told
        yield Answer(told, path, content, response)
    assert {200, 400, 403, 404, 422} <= set(statuses), statuses
    assert statuses[200] > requests // 10, statuses


def checked_error(path: str, status: int, body: dict[str, Any], request_id: str) -> None:
    """An error as the protocol's own client reads it; neither newer protocol has a 422."""
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


def check_all(
    client: TestClient, counters: Counters, requests: int, script: ScriptedEngine | None = None
) -> None:
    """Nothing of any answer leaves, and nothing is decoded where no tools are offered; a
    ``script`` writes what may begin as a call."""
    seen: dict[str, Counter[int]] = {path: Counter() for path in ANSWER_ROUTES}
    decoded, answers = counters.decode_steps, cycle(ANSWERS)
    for told, path, content, response in responses(client, requests):
        text, status = response.text, response.status_code
        seen[path][status] += 1
        assert not any(mark in text or json.dumps(mark)[1:-1] in text for mark in MARKS), (
            f"a token: {told}"
        )
        assert not answered(text), f"answered: {told}"
        if b'"tools"' in content:  # a step may be under way when the response has ended
            until(lambda: counters.open_continuations == 0)
            decoded = counters.decode_steps
        assert counters.decode_steps == decoded, f"decoded: {told}"
        if path in NEW and status == 200:
            assert not any(mark in text for mark in CALLED), f"a token: {told}"
        elif path in NEW:
            checked_error(path, status, response.json(), response.headers["x-request-id"])
        if script is not None:
            script.answer = next(answers)
    for path in NEW:
        assert seen[path].keys() >= {200, 400, 403, 404}, seen
        assert seen[path][200] > seen[path].total() // 5, seen


def risks(app: App) -> list[float]:
    """Those of sound requests, which are withheld."""
    rows = [send_to(app, wire).json()["hallutracer"]["data"][0] for wire in NEW.values()]
    assert {row["decision"] for row in rows} == {"abstain"}
    return [row["risk"] for row in rows]


@pytest.mark.parametrize("requests", [1500, pytest.param(60_000, marks=pytest.mark.long)])
def test_no_request_gets_a_token(tmp_path: Path, requests: int) -> None:
    with App(tmp_path, threshold=0.0, callers_may=()).started() as app:
        app.engine.takes_tools, before = True, risks(app)
        check_all(app.client, app.engine.counters, requests, app.engine)
        assert app.engine.counters.decode_steps > 0  # of answers that might have been calls
        assert risks(app) == before
        assert app.client.get("/health/ready").status_code == 200
        until(lambda: app.engine.counters.open_continuations == 0)


@pytest.mark.long
def test_no_request_gets_a_token_of_the_demo_model() -> None:
    engine = Scheduled(TransformersEngine.load(EngineOptions(model=str(MODEL_DIR))))
    store = Store(Path("/nonexistent"), fallbacks=[SHIPPED])
    scorers = {name: Scorer(engine, store.load(name)) for name in ("demo", "demo-fused")}
    with in_process(lambda: scorers, policy="gate", threshold=0.0) as client:
        check_all(client, engine.counters, 5000)
    assert engine.counters.decode_steps == 0


def test_the_checks_would_tell(tmp_path: Path) -> None:
    """With the rights to loosen, the same requests get answers."""
    with App(tmp_path, threshold=0.0).started() as app:
        app.engine.takes_tools = True
        ask = app.client, app.engine.counters, 1000
        for answer, fault in (("ΨΩΨΩ", "a token: request"), ("It is so.", "answered: request")):
            app.engine.answer = answer
            with pytest.raises(AssertionError, match=fault):
                check_all(*ask)
        app.engine.fail = EngineError("broken")
        with pytest.raises(AssertionError, match=": 503 |: 500 "):
            check_all(*ask)
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
