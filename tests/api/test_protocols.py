"""What all protocols share: ids and headers, doors that no request opens, words of failures.

Bodies and events of every turn: test_turns.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.policies.guard import Action, Policy, Upstream
from service.policies.policy import Rule
from tests.api.test_reply import ALONE, guaranteed
from tests.api.test_score import send
from tests.engine_kinds import KINDS
from tests.kit.api import (
    CHAT,
    MESSAGES,
    QUESTION,
    RESPONSES,
    SCORE,
    TEXT,
    WIRES,
    Wire,
    note_of,
    request_of,
    send_to,
)
from tests.matching import Held
from tests.running import App, Running, app_of_module, running, until

EVERYTHING, NOTHING = {"threshold": 0.0}, {"threshold": 1.0}
FIRST = {
    "gate": Policy("gate", Action.ABSTAIN, message="I am not sure."),
    "warn": Policy("warn", Action.ANNOTATE, 0.0, "Take care (risk {risk})."),
    "fetch": Policy("fetch", Action.RETRIEVE, 0.0, "Fetch a passage."),
    "send": Policy("send", Action.FALLBACK, 1.0, upstream=Upstream("http://127.0.0.1:9/v1", "x")),
}
CHATS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
EACH = pytest.mark.parametrize("wire", CHATS.values(), ids=CHATS)
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
PREFIX = {
    "score": "risk-",
    "chat": "chatcmpl-",
    "text": "cmpl-",
    "responses": "resp_",
    "messages": "msg_",
}
SYSTEM_FIELD = {RESPONSES.route: "instructions", MESSAGES.route: "system"}
PREFILL = [*QUESTION, {"role": "assistant", "content": "It is"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *QUESTION]


app = app_of_module(policies=FIRST)


# --- ids, headers, counts ---


@pytest.mark.parametrize("name", WIRES)
def test_ids_headers_and_counts(app: App, name: str) -> None:
    response = send_to(app, WIRES[name], chosen=NOTHING, tokens=200)
    document, headers = response.json(), response.headers
    [row] = note_of(document)["data"]
    assert document["id"] == PREFIX[name] + headers["x-request-id"]
    if name == "responses":
        assert document["output"][0]["id"] == f"msg_{headers['x-request-id']}"
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
    streamed = send_to(app, WIRES[name], chosen=NOTHING, stream=True).headers
    assert streamed["content-type"].startswith("text/event-stream")
    assert streamed["x-hallutracer-risk"] == headers["x-hallutracer-risk"]


@EACH
def test_a_second_call_names_the_first_by_its_id(app: App, wire: Wire) -> None:
    first = send_to(app, wire, chosen=EVERYTHING | {"policy": "fetch"}).json()
    passage = [{"role": "user", "content": "Paris."}]
    chosen = NOTHING | {"policy": "fetch", "retrieval_of": first["id"]}
    second = note_of(send_to(app, wire, messages=passage, chosen=chosen).json())
    before = note_of(first)["data"][0]["risk"]
    drop = pytest.approx(before - second["data"][0]["risk"])
    assert second["retrieval"] == {
        "of": first["id"],
        "known": True,
        "risk_before": before,
        "drop": drop,
    }


# --- doors ---


def test_a_request_cannot_open_the_gate(tmp_path: Path) -> None:
    """Nor one that is refused for its form: refusals.json."""
    choices = ({"policy": "observe"}, NOTHING, {"bundle": "two"}, {"policy": "warn"})
    with App(tmp_path, threshold=0.0, callers_may=(), policies=FIRST).started() as app:
        for wire, chosen in product(CHATS.values(), choices):
            kind, _ = error_of(wire, send_to(app, wire, 403, chosen=chosen), 403)
            assert kind == ("permission_error" if wire is MESSAGES else "invalid_request_error")
            send_to(app, wire)
        assert app.engine.counters.decode_steps == 0


def test_a_rule_chooses_by_route(tmp_path: Path) -> None:
    with App(tmp_path, policies=FIRST, policy="observe").started() as app:
        rules = (
            Rule(policy="block", route=RESPONSES.route),
            Rule(policy="gate", route=MESSAGES.route),
        )
        app.state.catalogue.policies = replace(app.state.catalogue.policies, rules=rules)
        policies = [note_of(send_to(app, wire).json())["policy"] for wire in CHATS.values()]
        assert policies == ["observe", "block", "gate"]


@pytest.mark.parametrize("wire", [SCORE, *CHATS.values()], ids=["score", *CHATS])
def test_a_special_token_is_read_as_its_characters(app: App, wire: Wire) -> None:
    """Where they are refused: refusals.json."""
    odd = "a <|end|> b"
    system = [{"role": "system", "content": odd}, *QUESTION]
    user = [{"role": "user", "content": odd}]
    cases: list[tuple[Any, dict[str, Any], Any]] = [(user, {}, user), (system, {}, system)]
    if wire.route in SYSTEM_FIELD:
        cases.append((QUESTION, {SYSTEM_FIELD[wire.route]: odd}, system))
    for messages, fields, same in cases:
        response = send_to(app, wire, messages=messages, chosen=EVERYTHING, **fields)
        [row] = app.ask(messages=same)["data"]
        assert note_of(response.json())["data"][0]["risk"] == row["risk"]


@STREAMS
def test_texts_that_end_an_answer_are_few_and_short(app: App, stream: bool) -> None:
    """Each costs work at each token.  Beyond these bounds they are refused: refusals.json."""
    for wire in (SCORE, CHAT, TEXT, MESSAGES):
        send_to(app, wire, stream=stream, stop=["x" * 256] * 8)
    for wire in (CHAT, TEXT):  # which take a text alone, too
        send_to(app, wire, stream=stream, stop="x" * 256)


promised = app_of_module(
    names=(), add=[lambda engine, folder: guaranteed(engine, folder, "alone", (ALONE,))]
)


@EACH
def test_a_guarantee_is_void_for_the_reasons_of_chats(promised: App, wire: Wire) -> None:
    def void(**options: Any) -> str:
        status = note_of(send_to(promised, wire, **options).json())["guarantee"]
        assert status["holds"] is not bool(status["void"])
        return "\n".join(status["void"])

    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 1}, "temperature 1"),
        ({"chosen": {"threshold": 0.1}}, "threshold"),
        ({"chosen": {"policy": "observe"}}, "withholds nothing"),
        ({"messages": SYSTEM}, "conversation"),
        ({"messages": PREFILL}, "the last message is the assistant's"),
    ]
    assert void() == ""
    assert [reason in void(**options) for options, reason in cases] == [True] * len(cases)
    if wire.route in SYSTEM_FIELD:
        assert void(**{SYSTEM_FIELD[wire.route]: "Be brief."}) == void(messages=SYSTEM)


# --- failures ---

TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_of(wire: Wire, response: httpx.Response, status: int) -> tuple[str, str]:
    """Type and message of an error; on Anthropic's route it has Anthropic's shape."""
    document = response.json()
    assert response.status_code == status, response.text
    if wire is MESSAGES:
        assert (set(document), document["type"]) == ({"type", "error", "request_id"}, "error")
        assert document["request_id"] == response.headers["x-request-id"]
        assert set(document["error"]) == {"type", "message"}
    else:
        assert set(document["error"]) == {"message", "type", "param", "code"}
    return (
        document["error"]["type"],
        document["error"]["message"],
    )


def type_of(wire: Wire, status: int) -> str:
    """The type that an error of a status has."""
    if wire is MESSAGES:
        return TYPES.get(status, "invalid_request_error")
    return "invalid_request_error" if status < 500 else "server_error"


@EACH
def test_errors_are_in_the_protocol_s_words(
    app: App, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bodies, whether they can be read or not: refusals.json."""
    error_of(wire, app.client.post(wire.route, content=b"a"), wire.refuses)
    assert error_of(wire, app.client.get(wire.route), 405)[0] == "invalid_request_error"
    monkeypatch.setattr(app.engine, "fail", RuntimeError("secret detail"))
    kind, message = error_of(wire, send_to(app, wire, 500), 500)
    assert (kind, "secret" in message) == (type_of(wire, 500), False)


def test_a_service_that_is_not_ready_says_when_to_come_back(tmp_path: Path) -> None:
    app = App(tmp_path)  # which nobody has started
    for wire in WIRES.values():
        response = send_to(app, wire, 503)
        assert error_of(wire, response, 503)[0] == type_of(wire, 503)
        assert response.headers["retry-after"] == "1"


def test_a_full_queue_refuses_before_the_body_is_read(tmp_path: Path) -> None:
    with running(tmp_path, max_queue=1, max_prompts=1) as service:
        service.engine.before = held = Held()
        first = send(service, {"prompt": "held"})
        assert held.entered.wait(20)
        headers = {"content-type": "application/json"}
        for wire in WIRES.values():
            response = httpx.post(service.url + wire.route, content=b"{", headers=headers)
            assert error_of(wire, response, 429)[0] == type_of(wire, 429)
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
            until_idle(service)
            assert service.engine.counters.decode_steps - decoded < 500
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(service.url + wire.route, json=body | {"stream": False}, timeout=0.5)
            until_idle(service)


def until_idle(service: Running) -> None:
    until(lambda: service.engine.counters.open_continuations == 0, 10)
    until(lambda: service.metric("hallutracer_requests_in_flight") == 0)


def test_without_a_length_an_answer_is_of_the_service_s_limit(tmp_path: Path) -> None:
    """In Anthropic's protocol each request names a length: its own default as often as a wish."""
    with App(tmp_path, max_new_tokens=3).started() as app:
        for wire in (*CHATS.values(), TEXT):
            body = request_of(wire, chosen=NOTHING, tokens=200)
            if wire is not MESSAGES:
                body.pop(wire.tokens)
            assert '"It "' in app.client.post(wire.route, json=body).text
