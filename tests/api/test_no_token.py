"""Under a gate that every answer meets, no request gets a token: thousands of them, well formed or
not.

The same for vLLM's own server: tests/vllm_plugin/test_gated.py."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fastapi.testclient import TestClient

from probes_store.store import SHIPPED, Store
from service.access.routes import ANSWER_ROUTES, MESSAGES_ROUTE, RESPONSES_ROUTE, SCORE_ROUTES
from service.demo import MODEL_DIR
from service.engines.base import Counters, EngineOptions
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.scoring import Scorer
from tests.kit.api import whole
from tests.kit.in_loop import InLoop
from tests.running import App, in_process

# By route, values of each field, right ones and wrong ones.
FIELDS: dict[str, dict[str, list[Any]]] = whole(
    json.loads(Path(__file__).with_name("hostile_values.json").read_text(encoding="utf-8"))
)
TURNS = FIELDS["score"]["messages"]
BY_ROUTE = dict.fromkeys(SCORE_ROUTES, FIELDS["score"]) | {
    RESPONSES_ROUTE: FIELDS["responses"],
    MESSAGES_ROUTE: FIELDS["messages"],
}


def request(number: int, model: str, routes: Sequence[str] = ANSWER_ROUTES) -> tuple[str, bytes]:
    """A path and a body; the same for the same number."""
    draw = Random(number)
    path = draw.choice(routes)
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


def answered(text: str) -> bool:
    """Whether a response, or an event of a stream, holds any of an answer's text."""
    for event in text.split("\n\n"):
        try:
            content = json.loads(
                event[event.find("data: ") + 6 :] if "data: " in event[:60] else event
            )
        except ValueError:
            continue  # [DONE]
        if _answers(content):
            return True
        if (
            any("completion" in item for item in content.get("data", ()))
            or content.get("object") == "completion.chunk"
        ):
            return True
        for choice in content.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or choice
            if message.get("content") or message.get("text"):
                return True
    return False


def _answers(content: dict[str, Any]) -> bool:
    """Whether a response, a message, or one event of theirs has text; a message's refusal is its
    text, too."""
    kind, message = content.get("type"), content.get("message")
    if kind == "message":  # of Anthropic's
        return bool(content["content"]) and content["stop_reason"] != "refusal"
    if kind == "message_delta":
        return bool(content["delta"]["stop_reason"] != "refusal")
    if kind == "message_start" and isinstance(message, dict):
        return bool(message["content"])
    response = content if content.get("object") == "response" else content.get("response") or {}
    parts = [part for item in response.get("output", ()) for part in item["content"]]
    return kind == "response.output_text.delta" or any(
        part["type"] == "output_text" for part in parts
    )


def responses(client: TestClient, requests: int) -> Iterator[tuple[str, bytes, str]]:
    """What is answered to so many requests, which are some of each kind: what tells of it, the
    body, and the text."""
    statuses: Counter[int] = Counter()
    in_loop = InLoop(client)
    model = client.get("/v1/models").json()["data"][0]["id"]
    for number in range(requests):
        path, content = request(number, model)
        response = in_loop.post(path, content=content, headers={"content-type": "application/json"})
        statuses[response.status_code] += 1
        context = (
            f"request {number}: {content[:600]!r}: {response.status_code} {response.text[:600]}"
        )
        assert response.status_code < 500 or response.status_code == 504, context
        yield context, content, response.text
    assert {200, 400, 403, 404, 422} <= set(statuses), statuses
    assert statuses[200] > requests // 10, statuses


def check_all(client: TestClient, counters: Counters, requests: int) -> None:
    for context, _, text in responses(client, requests):
        assert not answered(text), context
        assert counters.decode_steps == 0, context


def test_no_request_gets_a_token(tmp_path: Path) -> None:
    with App(tmp_path, threshold=0.0, callers_may=()).started() as app:
        check_all(app.client, app.engine.counters, 1000)


@pytest.mark.long
def test_no_request_gets_a_token_of_the_demo_model() -> None:
    engine = Scheduled(TransformersEngine.load(EngineOptions(model=str(MODEL_DIR))))
    store = Store(Path("/nonexistent"), fallbacks=[SHIPPED])
    scorers = {name: Scorer(engine, store.load(name)) for name in ("demo", "demo-fused")}
    with in_process(lambda: scorers, policy="gate", threshold=0.0) as client:
        check_all(client, engine.counters, 5000)


def test_the_check_would_find_one(tmp_path: Path) -> None:
    """With the rights to loosen, the same requests get answers."""
    with (
        App(tmp_path, threshold=0.0).started() as app,
        pytest.raises(AssertionError, match="answered"),
    ):
        check_all(app.client, app.engine.counters, 1000)
