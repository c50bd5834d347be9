"""What all protocols share: ids and headers, doors that no request opens, words of failures.

Bodies and events of every turn: test_turns.py."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import httpx
import pytest

from service.access.routes import COUNT_ROUTE
from tests.api.test_score import idle, send
from tests.engine_kinds import KINDS
from tests.kit.api import (
    CHATS,
    MESSAGES,
    NOTHING,
    POLICIES,
    QUESTION,
    TEXT,
    WIRES,
    Wire,
    note_of,
    request_of,
    send_to,
)
from tests.matching import Held
from tests.running import App, app_of_module, running, until

EACH = pytest.mark.parametrize("wire", CHATS.values(), ids=CHATS)
PREFIX = {
    "score": "risk-",
    "chat": "chatcmpl-",
    "text": "cmpl-",
    "responses": "resp_",
    "messages": "msg_",
}


app = app_of_module(policies=POLICIES)


# --- ids, headers, counts ---


@pytest.mark.parametrize("name", WIRES)
def test_ids_headers_and_counts(app: App, name: str) -> None:
    own_id = {"x-request-id": "abc-1"}
    response = send_to(app, WIRES[name], headers=own_id, chosen=NOTHING, tokens=200)
    document, headers = response.json(), response.headers
    note = note_of(document)
    [row] = note["data"]
    assert (headers["x-request-id"], document["id"]) == ("abc-1", f"{PREFIX[name]}abc-1")
    if name == "responses":
        assert document["output"][0]["id"] == "msg_abc-1"
    for what in ("queue", "inference", "total"):
        assert float(headers[f"x-{what}-time"]) >= 0
    assert note["bundle"]["digest"] == app.bundles[0].manifest.digest
    assert float(headers["x-hallutracer-risk"]) == pytest.approx(row["risk"], abs=1e-6)
    assert headers["x-hallutracer-decision"] == "continue"
    rendered = app.engine.render_chat(QUESTION)  # type: ignore[arg-type]
    if name == "text":
        rendered = app.engine.tokenize(QUESTION[0]["content"])
    usage = document["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(rendered)
    assert usage.get("completion_tokens", usage.get("output_tokens")) == len("It is so.")
    [scored] = app.client.post("/score", json={"input_ids": rendered}).json()["data"]
    assert row["risk"] == scored["risk"]
    bad_id = {"x-request-id": "bad id\t"}
    streamed = send_to(app, WIRES[name], headers=bad_id, chosen=NOTHING, stream=True).headers
    assert len(streamed["x-request-id"]) == 32
    assert streamed["content-type"].startswith("text/event-stream")
    assert streamed["x-hallutracer-risk"] == headers["x-hallutracer-risk"]


def test_text_completions_go_through_no_template(app: App) -> None:
    texts = ["one", "two"]
    ids = [app.engine.tokenize(text) for text in texts]
    score = app.ask(input_ids=ids, threshold=1.0)["data"]
    for prompt in (texts, ids):
        document = send_to(app, TEXT, tokens=4, chosen=NOTHING, prompt=prompt).json()
        choices = [(choice["text"], choice["finish_reason"]) for choice in document["choices"]]
        assert choices == [("It i", "length")] * 2
        assert note_of(document)["data"] == score


# --- doors ---


def test_a_request_cannot_open_the_gate(tmp_path: Path) -> None:
    """Nor one that is refused for its form: refusals.json."""
    choices = ({"policy": "observe"}, NOTHING, {"bundle": "two"}, {"policy": "warn"})
    with App(tmp_path, threshold=0.0, callers_may=(), policies=POLICIES).started() as app:
        for wire, chosen in product(CHATS.values(), choices):
            message_of(wire, send_to(app, wire, 403, chosen=chosen), 403)
            send_to(app, wire)
        assert app.engine.counters.decode_steps == 0


# --- failures ---

OF_ANTHROPIC = {
    403: "permission_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def message_of(wire: Wire, response: httpx.Response, status: int) -> str:
    """Of an error of this status, in its protocol's form and with its type."""
    document, kind = response.json(), "invalid_request_error" if status < 500 else "server_error"
    assert response.status_code == status, response.text
    fields = {"message", "type", "param", "code"}
    if wire is MESSAGES:
        fields, kind = {"message", "type"}, OF_ANTHROPIC.get(status, "invalid_request_error")
        assert (set(document), document["type"]) == ({"type", "error", "request_id"}, "error")
        assert document["request_id"] == response.headers["x-request-id"]
    assert (set(document["error"]), document["error"]["type"]) == (fields, kind)
    return str(document["error"]["message"])


@EACH
def test_errors_are_in_the_protocol_s_words(
    app: App, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bodies, whether they can be read or not: refusals.json."""
    message_of(wire, app.client.post(wire.route, content=b"a"), wire.refuses)
    message_of(wire, app.client.get(wire.route), 405)
    monkeypatch.setattr(app.engine, "fail", RuntimeError("secret detail"))
    assert "secret" not in message_of(wire, send_to(app, wire, 500), 500)


def test_a_service_that_is_not_ready_says_when_to_come_back(tmp_path: Path) -> None:
    app = App(tmp_path)  # which nobody has started
    for wire in WIRES.values():
        response = send_to(app, wire, 503)
        message_of(wire, response, 503)
        assert response.headers["retry-after"] == "1"
    body = {"model": "scripted", "messages": QUESTION}
    message_of(MESSAGES, app.client.post(COUNT_ROUTE, json=body), 503)


def test_a_full_queue_refuses_before_the_body_is_read(tmp_path: Path) -> None:
    with running(tmp_path, max_queue=1, max_prompts=1) as service:
        service.engine.before = held = Held()
        first = send(service, {"prompt": "held"})
        assert held.entered.wait(20)
        headers = {"content-type": "application/json"}
        for wire in WIRES.values():
            response = httpx.post(service.url + wire.route, content=b"{", headers=headers)
            message_of(wire, response, 429)
            assert int(response.headers["retry-after"]) >= 1
        held.release.set()
        assert first.recv(4096).startswith(b"HTTP/1.1 200")
        first.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_leaves_ends_the_work(tmp_path: Path, kind: str) -> None:
    with running(tmp_path, kind) as service:
        service.engine.answer, service.engine.sleep_s = "x" * 800, 0.01
        for wire in WIRES.values():
            decoded = service.engine.counters.decode_steps
            body = request_of(wire, chosen=NOTHING, tokens=700, stream=True)
            with httpx.stream("POST", service.url + wire.route, json=body) as response:
                assert next(response.iter_lines())
            until(lambda: idle(service))
            assert service.engine.counters.decode_steps - decoded < 500
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(service.url + wire.route, json=body | {"stream": False}, timeout=0.5)
            until(lambda: idle(service))


def test_without_a_length_an_answer_is_of_the_service_s_limit(tmp_path: Path) -> None:
    """In Anthropic's protocol each request names a length: its own default as often as a wish."""
    with App(tmp_path, max_new_tokens=3).started() as app:
        for wire in (*CHATS.values(), TEXT):
            body = request_of(wire, chosen=NOTHING, tokens=200)
            if wire is not MESSAGES:
                body.pop(wire.tokens)
            assert '"It "' in app.client.post(wire.route, json=body).text
