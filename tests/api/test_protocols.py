"""Chats, Responses and Messages are one gate: what one withholds, ends, says or refuses, the others do, too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.access.callers import Scope
from service.access.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE, TEXT_ROUTE
from service.policies.guard import Action, Policy, Upstream
from service.serving import admission
from tests.api.protocols import ASKED, NEW, ROUTES, ask, body_of, post, sse
from tests.api.test_answer_risk import two_parts
from tests.api.test_auth import bearer, named
from tests.api.test_recheck import all_flagged
from tests.api.test_reply import guaranteed, known
from tests.api.test_score import Held, send
from tests.engine_kinds import KINDS
from tests.kit.bundles import ANSWER
from tests.running import App, Running, running, until

EVERYTHING, NOTHING = {"hallutracer_threshold": 0.0}, {"hallutracer_threshold": 1.0}
FIRST = {
    "gate": Policy("gate", Action.ABSTAIN, message="I am not sure."),
    "warn": Policy("warn", Action.ANNOTATE, 0.0, "Take care (risk {risk})."),
    "fetch": Policy("fetch", Action.RETRIEVE, 0.0, "Fetch a passage."),
    "send": Policy("send", Action.FALLBACK, 1.0, upstream=Upstream("http://127.0.0.1:9/v1", "x")),
}
POLICIES = FIRST | {
    "again": Policy("again", Action.ABSTAIN, message="No: {risk}.", recheck=True),
    "stops": Policy("stops", Action.ABSTAIN, message="No.", stop_at=0.6),
}
STREAMS = pytest.mark.parametrize("stream", [False, True])
EACH = pytest.mark.parametrize("route", ROUTES)
EACH_NEW = pytest.mark.parametrize("route", NEW)
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


@pytest.fixture(scope="module", params=KINDS)
def service(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    with running(folder, request.param, names=(), add=[two_parts], policies=POLICIES) as service:
        yield service


def refused_with(route: str, response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of an error; on Anthropic's route the whole of it is in Anthropic's shape."""
    document = response.json()
    if route == MESSAGES_ROUTE:
        assert (set(document), document["type"]) == ({"type", "error", "request_id"}, "error")
        assert document["request_id"] == response.headers["x-request-id"]
        assert set(document["error"]) == {"type", "message"}
    else:
        assert set(document["error"]) == {"message", "type", "param", "code"}
    return response.status_code, document["error"]["type"], document["error"]["message"]


# --- what each policy makes of a prompt ---


@STREAMS
@EACH
def test_an_answer_and_its_risk(service: Running, route: str, stream: bool) -> None:
    found = ask(service, route, stream, ASKED, NOTHING)
    score = service.post(messages=ASKED, threshold=1.0, generate={"max_tokens": 40}).json()
    [row] = score["data"]
    answer = {name: row.pop(name) for name in ("answer_risk", "answer_flagged", "answer_tokens")}
    del row["completion"]
    assert (found.text, found.refusal, found.reason) == ("It is so.", None, "stop")
    assert (found.first["bundle"], found.first["policy"]) == (score["bundle"], "gate")
    assert found.first["data"] == [row if stream else row | answer]
    if stream:
        last = {"data": [row | answer]} if route == RESPONSES_ROUTE else answer
        assert {name: (found.last or {}).get(name) for name in last} == last


@STREAMS
@EACH
def test_a_withheld_answer_costs_no_token(service: Running, route: str, stream: bool) -> None:
    decoded = service.engine.counters.decode_steps
    for policy, message in (("gate", "I am not sure."), ("fetch", "Fetch a passage."), ("block", None)):
        found = ask(service, route, stream, ASKED, EVERYTHING | {"hallutracer_policy": policy})
        said = (message or "", None) if route == MESSAGES_ROUTE else ("", message)
        assert (found.text, found.refusal, found.reason) == (*said, "content_filter"), policy
        assert "It" not in found.text
    assert service.engine.counters.decode_steps == decoded


@STREAMS
@EACH
def test_a_warning_stands_before_an_annotated_answer(service: Running, route: str, stream: bool) -> None:
    found = ask(service, route, stream, ASKED, {"hallutracer_policy": "warn"})
    [row] = found.first["data"]
    assert found.text == f"Take care (risk {row['risk']:.2f}).\n\nIt is so."
    assert (found.refusal, found.reason, row["decision"]) == (None, "stop", "continue")


@EACH
def test_a_second_call_names_the_first_by_its_id(service: Running, route: str) -> None:
    fetch = {"hallutracer_policy": "fetch"}
    first = ask(service, route, False, ASKED, EVERYTHING | fetch)
    id = json.loads(first.raw)["id"]
    second = ask(service, route, False, "Paris.", NOTHING | fetch | {"hallutracer_retrieval_of": id})
    drop = first.first["data"][0]["risk"] - second.first["data"][0]["risk"]
    assert second.first["retrieval"]["known"]
    assert second.first["retrieval"]["drop"] == pytest.approx(drop)


@STREAMS
@EACH_NEW
def test_a_policy_that_may_send_a_prompt_on_is_refused(service: Running, route: str, stream: bool) -> None:
    body = body_of(route, ASKED, {"hallutracer_policy": "send", **NOTHING}, stream=stream)
    status, kind, message = refused_with(route, post(service, route, body))
    assert (status, kind) == (400, "invalid_request_error")
    assert "'send' may send a prompt on" in message
    assert CHAT_ROUTE in message


@STREAMS
@EACH
def test_an_answer_that_is_read_again_is_held(service: Running, route: str, stream: bool) -> None:
    told = set()
    for word in WORDS[:4]:
        found = ask(service, route, stream, word, NOTHING | {"hallutracer_policy": "again"}, 6)
        [row] = found.first["data"]
        told.add(row["decision"])
        if row["decision"] == "continue":
            assert (found.text, found.reason) == ("It is ", "length")
            continue
        assert row["answer_risk"] >= ANSWER.threshold
        assert "It" not in found.raw.replace("It is not", ""), "not a piece of the answer"
        assert (found.refusal or found.text, found.reason) == (f"No: {row['answer_risk']:.2f}.", "content_filter")
    assert told == {"continue", "abstain"}


@STREAMS
@EACH
def test_an_answer_ends_where_its_running_risk_is_too_high(service: Running, route: str, stream: bool) -> None:
    service.engine.answer = said = "It is so, and so it was."
    ends = {}
    try:
        for word in WORDS:
            given = {"policy": "stops", "threshold": 1, "generate": {"max_tokens": 40}}
            completion = service.post(prompt=word, **given).json()["data"][0]["completion"]
            found = ask(service, route, stream, word, NOTHING | {"hallutracer_policy": "stops"})
            assert (found.text, found.reason) == (completion["text"], completion["finish_reason"])
            assert found.refusal is None
            ends[found.reason] = found.text
    finally:
        service.engine.answer = "It is so."
    assert ends["stop"] == said
    assert 4 <= len(ends["content_filter"]) < len(said)


@EACH
def test_a_stream_tells_the_risk_of_the_answer_so_far(service: Running, route: str) -> None:
    xargs = NOTHING | {"hallutracer_include": ["answer_risk"]}
    found = ask(service, route, True, ASKED, xargs, 8)
    assert [note["answer_tokens"] for note in found.running] == list(range(1, 8))
    assert ask(service, route, True, ASKED, NOTHING, 8).running == []


@STREAMS
@EACH
def test_an_answer_that_is_cut_or_ends_at_a_text_of_the_request(service: Running, route: str, stream: bool) -> None:
    found = ask(service, route, stream, ASKED, NOTHING, 4)
    assert (found.text, found.reason) == ("It i", "length")
    if route != RESPONSES_ROUTE:  # which has no such field
        stops = {"stop" if route == CHAT_ROUTE else "stop_sequences": ["x", "so"]}
        found = ask(service, route, stream, ASKED, NOTHING, **stops)
        assert (found.text, found.reason) == ("It is ", "stop")
        assert route == CHAT_ROUTE or '"stop_sequence": "so"' in found.raw


@STREAMS
def test_texts_that_end_an_answer_are_few_and_short(service: Running, stream: bool) -> None:
    """Each costs work at each token; at the bounds they are taken."""
    for route, body, field in (
        (CHAT_ROUTE, body_of(CHAT_ROUTE, stream=stream), "stop"),
        (MESSAGES_ROUTE, body_of(MESSAGES_ROUTE, stream=stream), "stop_sequences"),
        (TEXT_ROUTE, {"model": "scripted", "prompt": "Is it so?", "max_tokens": 8, "stream": stream}, "stop"),
        ("/score", {"prompt": "Is it so?", "stream": stream}, "generate.stop"),
    ):
        outer, _, inner = field.rpartition(".")
        alone = route in (CHAT_ROUTE, TEXT_ROUTE)
        for stops, taken in (
            (["x" * 256] * 8, True), (["x" * 257], False), (["x"] * 9, False), ([""], False),
            *((("x" * 256, True), ("x" * 257, False), ("", False)) if alone else ()),
        ):  # fmt: skip
            response = post(service, route, body | ({outer: {inner: stops}} if outer else {inner: stops}))
            assert (response.status_code == 200) == taken, (route, stops, response.text)
            if not taken:
                error = response.json()["error"]
                assert response.status_code in (400, 422)
                assert inner in error["message"]
                assert len(response.text) < 600, "the text is not repeated"
                assert route == MESSAGES_ROUTE or error["param"].startswith(field), response.text


# --- doors ---


@EACH
def test_a_request_cannot_open_the_gate(tmp_path: Path, route: str) -> None:
    with App(tmp_path, threshold=0.0, callers_may=(), policies=FIRST).started() as app:
        for xargs in ({"hallutracer_policy": "observe"}, NOTHING, {"hallutracer_bundle": "two"},
                      {"hallutracer_policy": "warn"}):  # fmt: skip
            status, kind, _ = refused_with(route, post(app, route, body_of(route, ASKED, xargs)))
            assert (status, kind in ("permission_error", "invalid_request_error")) == (403, True), xargs
        for stream in (False, True):
            assert ask(app, route, stream).reason == "content_filter"
        wrong = 422 if route == CHAT_ROUTE else 400
        for more in ({"hallutracer_policy": "observe"}, {"policy": "observe"}, {"vllm_xargs": {"policy": "observe"}},
                     {"vllm_xargs": []}, {"stream": "yes"}, {"stream": 1}, {"temperature": "0"}, {"gate": False},
                     {"n": 2}, {"tools": [{"type": "function", "name": "f"}]}, {"prompt": "a"}):  # fmt: skip
            assert post(app, route, body_of(route) | more).status_code == wrong, more
        assert app.engine.counters.decode_steps == 0


def test_a_rule_chooses_by_the_new_routes_too(tmp_path: Path) -> None:
    from service.policies.policy import Rule

    with App(tmp_path, policies=FIRST, policy="observe").started() as app:
        policies = app.state.catalogue.policies
        rules = (Rule(policy="block", route=RESPONSES_ROUTE), Rule(policy="gate", route=MESSAGES_ROUTE))
        app.state.catalogue.policies = replace(policies, rules=rules)
        policy = {route: ask(app, route, False).first["policy"] for route in ROUTES}
        assert policy == {CHAT_ROUTE: "observe", RESPONSES_ROUTE: "block", MESSAGES_ROUTE: "gate"}


@STREAMS
@EACH
def test_no_token_of_answers_that_are_all_flagged(tmp_path: Path, route: str, stream: bool) -> None:
    options: dict[str, Any] = {"names": (), "add": [all_flagged], "policies": POLICIES, "policy": "again"}
    with App(tmp_path, threshold=1.0, callers_may=(), **options).started() as app:
        found = ask(app, route, stream)
        assert found.reason == "content_filter"
        assert "It" not in found.text
        assert app.engine.counters.decode_steps > 0, "it was begun, and held"


SYSTEM_FIELD = {RESPONSES_ROUTE: "instructions", MESSAGES_ROUTE: "system"}


@EACH
@pytest.mark.parametrize("refuses", [True, False])
def test_a_special_token_is_read_as_its_characters(tmp_path: Path, route: str, refuses: bool) -> None:
    odd = "a <|end|> b"
    system, asked = [{"role": "system", "content": odd}, *ASKED], [{"role": "user", "content": odd}]
    apart = [(body_of(route, ASKED, NOTHING) | {SYSTEM_FIELD[route]: odd}, system)] if route in SYSTEM_FIELD else []
    with App(tmp_path, refuse_special_tokens=refuses).started() as app:
        for body, same in ((body_of(route, asked, NOTHING), asked), (body_of(route, system, NOTHING), system), *apart):
            answer = post(app, route, body)
            if refuses:
                assert answer.status_code == (422 if route == CHAT_ROUTE else 400)
                continue
            score = app.client.post("/score", json={"messages": same}).json()
            assert answer.json()["hallutracer"]["data"][0]["risk"] == score["data"][0]["risk"]


PREFILL = [*ASKED, {"role": "assistant", "content": "It is"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *ASKED]


@EACH
def test_a_guarantee_is_void_for_the_reasons_of_chats(tmp_path: Path, route: str) -> None:
    alone = "0 earlier turns, no passage, no system prompt"

    def shaped(engine: Any, folder: Path) -> Any:
        return guaranteed(engine, folder, "alone", (alone,))

    with App(tmp_path, names=(), add=[shaped]).started() as app:

        def status(xargs: dict[str, Any] | None = None, messages: Any = ASKED, **more: Any) -> Any:
            answer = post(app, route, body_of(route, messages, xargs) | more)
            assert answer.status_code == 200, answer.text
            return answer.json()["hallutracer"]["guarantee"]

        assert status()["holds"], status()
        for given, reason in (
            (status(temperature=1), "temperature 1"), (status({"hallutracer_threshold": 0.1}), "threshold"),
            (status({"hallutracer_policy": "observe"}), "withholds nothing"), (status(messages=SYSTEM), "conversation"),
            (status(messages=PREFILL), "the last message is the assistant's"),
        ):  # fmt: skip
            assert not given["holds"]
            assert any(reason in one for one in given["void"]), given
        if route in SYSTEM_FIELD:
            assert status(**{SYSTEM_FIELD[route]: "Be brief."}) == status(messages=SYSTEM)


@EACH
def test_an_answer_s_beginning_is_judged_as_what_went_through_no_template(tmp_path: Path, route: str) -> None:
    with App(tmp_path, names=(), add=[known]).started() as app:
        chat = post(app, CHAT_ROUTE, body_of(CHAT_ROUTE, PREFILL)).json()["hallutracer"]
        assert post(app, route, body_of(route, PREFILL)).json()["hallutracer"] == chat


@EACH
def test_keys_scopes_and_rights(tmp_path: Path, route: str) -> None:
    keys = [named("asks"), named("looks", scopes=frozenset({Scope.OBSERVE}))]
    with App(tmp_path, api_keys=keys, callers_may=()).started() as app:
        body, anthropic = body_of(route), route == MESSAGES_ROUTE
        status, kind, _ = refused_with(route, post(app, route, body))
        assert (status, kind) == (401, "authentication_error" if anthropic else "invalid_request_error")
        status, kind, _ = refused_with(route, post(app, route, body, **bearer("looks")))
        assert (status, kind) == (403, "permission_error" if anthropic else "invalid_request_error")
        for headers in (bearer("asks"), {"x-api-key": "asks"}):
            assert post(app, route, body, **headers).status_code == 200
        text = app.client.get("/metrics").text
        counted = [line for line in text.splitlines() if "route_prompts_total{" in line and f'route="{route}"' in line]
        assert sum(float(line.rpartition(" ")[2]) for line in counted) == 2


# --- failures ---

TYPES = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
         504: "timeout_error", 500: "api_error", 405: "invalid_request_error"}  # fmt: skip


def type_on(route: str, status: int) -> str:
    if route == MESSAGES_ROUTE:
        return TYPES.get(status, "invalid_request_error")
    return "invalid_request_error" if status < 500 else "server_error"


@EACH
def test_errors_are_said_in_the_protocol_s_words(tmp_path: Path, route: str) -> None:
    with App(tmp_path, max_body_bytes=9000).started() as app:
        wrong = 422 if route == CHAT_ROUTE else 400
        for body, status in (
            (body_of(route, model="other"), 404), (body_of(route, "x" * 8000), 400), (body_of(route, "x" * 9000), 413),
            (body_of(route, tokens=-1 if route == MESSAGES_ROUTE else 10**6), wrong),
            (body_of(route, model=3), wrong), (body_of(route, []), wrong),
            (body_of(route, [{"role": "tool", "content": "a"}]), wrong), (body_of(route, tokens=0), wrong),
            (body_of(route, [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]), wrong),
            (body_of(route, [{"role": "user", "content": None}]), wrong), (body_of(route, top_p=0), wrong),
        ):  # fmt: skip
            assert refused_with(route, post(app, route, body))[:2] == (status, type_on(route, status)), body
        for content, status in ((b"{", 400), (b'{"model": "a", "model": "b"}', 400), (b"[" * 5000, 400)):
            answer = app.client.post(route, content=content, headers={"content-type": "application/json"})
            assert refused_with(route, answer)[:2] == (status, type_on(route, status)), content
        assert refused_with(route, app.client.post(route, content=b"a"))[0] == wrong
        assert refused_with(route, app.client.get(route))[:2] == (405, type_on(route, 405))
        app.engine.fail = RuntimeError("secret detail")
        status, kind, message = refused_with(route, post(app, route, body_of(route)))
        assert (status, kind, "secret" in message) == (500, type_on(route, 500), False)


@EACH
def test_a_service_that_is_not_ready_says_when_to_come_back(tmp_path: Path, route: str) -> None:
    answer = post(App(tmp_path), route, body_of(route))  # which nobody has started
    assert refused_with(route, answer)[:2] == (503, type_on(route, 503))
    assert answer.headers["retry-after"]


@EACH
def test_a_full_queue_refuses_before_the_body_is_read(tmp_path: Path, route: str) -> None:
    with running(tmp_path, max_queue=1, max_prompts=1) as service:
        service.engine.before = held = Held()
        first = send(service, {"prompt": "held"})
        assert held.entered.wait(20)
        answer = httpx.post(service.url + route, content=b"{", headers={"content-type": "application/json"})
        assert refused_with(route, answer)[:2] == (429, type_on(route, 429))
        assert int(answer.headers["retry-after"]) >= 1
        held.release.set()
        assert first.recv(4096).startswith(b"HTTP/1.1 200")
        first.close()


@EACH_NEW
def test_what_fails_under_way_is_the_last_event(service: Running, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    def wait() -> None:
        nonlocal turns
        turns += 1
        time.sleep(0.05)  # a piece is sent meanwhile
        if turns == 5:
            raise ZeroDivisionError

    monkeypatch.setattr(service.engine, "wait", wait)
    response = post(service, route, body_of(route, ASKED, NOTHING, stream=True))
    *events, (name, last) = list(sse(response.text))
    assert (response.status_code, name, last["type"]) == (200, "error", "error")
    assert any(event["type"] in ("response.output_text.delta", "content_block_delta") for _, event in events)
    assert not any(event["type"] in ("response.completed", "message_delta") for _, event in events)
    wanted = {"api_error"} if route == MESSAGES_ROUTE else {"server_error"}
    assert {last["error"]["type"]} == wanted
    assert "Zero" not in response.text


@EACH_NEW
def test_an_answer_that_may_be_long_ends_before_the_deadline(
    tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SPARE_S", 2.5)  # as long as a busy machine may stand still
    with running(tmp_path, deadline_s=5.0) as service:
        service.engine.answer, service.engine.sleep_s = "x" * 800, 0.02
        named = body_of(route, ASKED, NOTHING, 700)
        unnamed = {name: value for name, value in named.items() if name != "max_output_tokens"}
        for body in (named, unnamed)[: 1 + (route == RESPONSES_ROUTE)]:  # in Anthropic's protocol each names a length
            answer = post(service, route, body).json()
            assert answer.get("stop_reason", answer.get("incomplete_details")) in (
                "max_tokens", {"reason": "max_output_tokens"},
            )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@EACH_NEW
def test_a_reader_that_leaves_ends_the_work(tmp_path: Path, route: str, kind: str) -> None:
    with running(tmp_path, kind) as service:
        service.engine.answer, service.engine.sleep_s = "x" * 800, 0.01
        with httpx.stream("POST", service.url + route, json=body_of(route, ASKED, NOTHING, 700, stream=True)) as answer:
            assert next(answer.iter_lines())
        until(lambda: service.engine.counters.open_continuations == 0, 10)
        until(lambda: service.metric("hallutracer_requests_in_flight") == 0)
        assert service.engine.counters.decode_steps < 500
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(service.url + route, json=body_of(route, ASKED, NOTHING, 700), timeout=0.5)
        until(lambda: service.engine.counters.open_continuations == 0, 10)
        until(lambda: service.metric("hallutracer_requests_in_flight") == 0)
