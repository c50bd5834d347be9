"""What becomes of a flagged prompt beside abstaining: a warning, a passage to fetch, another server's answer.

The other server is a second service of ours behind the real routes; only its failures are made by hand.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hallutracer_client.results import ScoreResult, parse
from service.access.callers import ApiKey
from service.policies.guard import Action, Policy, Upstream
from service.policies.policy import Policies, Rule
from tests.running import Running, running, until

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
SAID = "From the other server."
KEY = "OTHER_SERVERS_KEY"
WARN = Policy("warn", Action.ANNOTATE, 0.0, "Take care (risk {risk}).")
FETCH = Policy("fetch", Action.RETRIEVE, 0.0, "Fetch a passage.")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("other"), policy="observe", api_keys=["theirs"]) as service:
        service.engine.answer = SAID
        yield service


@pytest.fixture
def service(tmp_path: Path, other: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv(KEY, "theirs")
    with running(tmp_path, policies={"send": sends(other.url), "fetch": FETCH, "warn": WARN}) as service:
        yield service


def sends(url: str, timeout_s: float = 20.0, key: str | None = KEY) -> Policy:
    return Policy("send", Action.FALLBACK, 0.0, upstream=Upstream(f"{url}/v1", "scripted", key, timeout_s))


def ask(service: Running, policy: str, **given: Any) -> Any:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=20)
    xargs = {"hallutracer_policy": policy} | given.pop("xargs", {})
    given = {"model": "scripted", "messages": ASKED, "temperature": 0} | given
    return client.chat.completions.create(**given, extra_body={"vllm_xargs": xargs})


def note(found: Any) -> dict[str, Any]:
    return dict(found.model_extra["hallutracer"])


def streamed(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


# --- annotate ---


def test_an_annotated_answer_begins_with_the_warning(service: Running) -> None:
    found = ask(service, "warn")
    (row,) = note(found)["data"]
    said = f"Take care (risk {row['risk']:.2f})."
    assert (row["decision"], row["flagged"], row["message"]) == ("continue", True, said)
    choice = found.choices[0]
    assert (choice.message.content, choice.message.refusal) == (f"{said}\n\nIt is so.", None)
    assert streamed(list(ask(service, "warn", stream=True))) == choice.message.content
    score = service.post(messages=ASKED, policy="warn", generate={"max_tokens": 20}).json()["data"][0]
    assert (score["message"], score["completion"]["text"]) == (said, "It is so.")


def test_an_answer_that_is_not_flagged_has_no_warning(service: Running) -> None:
    assert ask(service, "warn", xargs={"hallutracer_threshold": 1.0}).choices[0].message.content == "It is so."


# --- retrieve ---


def test_a_second_call_names_the_first_and_tells_the_drop(service: Running) -> None:
    decoded = service.engine.counters.decode_steps
    first = ask(service, "fetch")
    choice = first.choices[0]
    assert (choice.message.content, choice.message.refusal) == (None, "Fetch a passage.")
    assert choice.finish_reason == "content_filter"
    before = note(first)["data"][0]
    assert before["decision"] == "retrieve"
    assert service.engine.counters.decode_steps == decoded
    again = [{"role": "user", "content": "Paris is the capital of France. What is the capital of France?"}]
    named = {"hallutracer_retrieval_of": first.id}
    second = ask(service, "fetch", messages=again, xargs=named | {"hallutracer_threshold": 1.0})
    now = note(second)["data"][0]
    assert note(second)["retrieval"] == {
        "of": first.id, "known": True, "risk_before": before["risk"],
        "drop": pytest.approx(before["risk"] - now["risk"], abs=1e-9),
    }  # fmt: skip
    assert second.choices[0].message.content == "It is so."


def test_nobody_is_sent_twice(service: Running) -> None:
    first = service.post(messages=ASKED, policy="fetch").json()
    assert first["data"][0]["decision"] == "retrieve"
    second = service.post(messages=ASKED, policy="fetch", retrieval_of=first["id"]).json()
    assert (second["data"][0]["decision"], second["data"][0]["message"]) == ("abstain", "I am not sure.")
    parsed = parse(ScoreResult, json.dumps(second).encode()).retrieval
    assert parsed is not None
    assert (parsed.known, parsed.drop) == (True, 0.0)
    assert second["retrieval"] == {
        "of": first["id"], "known": True, "risk_before": first["data"][0]["risk"], "drop": 0.0
    }  # fmt: skip


def test_an_unknown_first_call_is_told(service: Running) -> None:
    assert service.post(messages=ASKED, retrieval_of="risk-nope").json()["retrieval"] == {
        "of": "risk-nope",
        "known": False,
    }
    first = service.post(messages=ASKED, policy="fetch").json()
    other_bundle = service.post(messages=ASKED, retrieval_of=first["id"], bundle="two").json()
    assert other_bundle["retrieval"]["known"] is False
    two = service.post(prompt=["a", "b"], retrieval_of=first["id"])
    assert (two.status_code, two.json()["error"]["param"]) == (422, "retrieval_of")


def test_another_callers_first_call_is_unknown(tmp_path: Path) -> None:
    with running(tmp_path, policies={"fetch": FETCH}, api_keys=["one", "two"]) as service:

        def post(key: str, **more: Any) -> Any:
            body = {"messages": ASKED, "policy": "fetch"} | more
            return httpx.post(f"{service.url}/score", json=body, headers={"authorization": f"Bearer {key}"}).json()

        first = post("one")["id"]
        assert post("two", retrieval_of=first)["retrieval"] == {"of": first, "known": False}
        assert post("one", retrieval_of=first)["retrieval"]["known"]


# --- fallback ---


def test_another_server_answers(service: Running, other: Running) -> None:
    decoded, asked = service.engine.counters.decode_steps, other.engine.counters.decode_steps
    found = ask(service, "send", max_tokens=50)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (SAID, "stop")
    assert note(found)["data"][0]["decision"] == "fallback"
    assert found.id.startswith("chatcmpl-")
    assert found.usage.completion_tokens > 0
    assert service.engine.counters.decode_steps == decoded
    assert other.engine.counters.decode_steps > asked
    chunks = list(ask(service, "send", stream=True, max_tokens=50, stream_options={"include_usage": True}))
    assert streamed(chunks) == SAID
    assert note(chunks[0])["data"][0]["decision"] == "fallback"
    assert not any("hallutracer" in chunk.model_extra for chunk in chunks[1:])  # the other server's note is its own
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens
    assert service.metric("hallutracer_upstream_requests_total") == 2


def test_a_prompt_that_is_not_flagged_is_answered_here(service: Running, other: Running) -> None:
    asked = other.engine.counters.decode_steps
    found = ask(service, "send", xargs={"hallutracer_threshold": 1.0})
    assert found.choices[0].message.content == "It is so."
    assert other.engine.counters.decode_steps == asked


def test_a_text_is_sent_on_and_token_ids_are_not(service: Running) -> None:
    def post(prompt: Any) -> httpx.Response:
        body = {"model": "scripted", "prompt": prompt, "vllm_xargs": {"hallutracer_policy": "send"}, "max_tokens": 50}
        return httpx.post(f"{service.url}/v1/completions", json=body)

    assert post("A").json()["choices"][0]["text"] == SAID
    for wrong in (["A", "B"], [256, 65]):
        assert post(wrong).status_code == 422
        assert "exactly one, as text" in post(wrong).json()["error"]["message"]


def test_score_sends_nothing_on(service: Running, other: Running) -> None:
    asked = other.engine.counters.decode_steps
    (row,) = service.post(messages=ASKED, policy="send", generate={"max_tokens": 3}).json()["data"]
    assert row["decision"] == "fallback"
    assert "completion" not in row
    assert other.engine.counters.decode_steps == asked


@contextmanager
def answering(answer: Callable[[socket.socket], Any]) -> Iterator[str]:
    """A server whose only answer, to one connection at a time, is what ``answer`` writes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                received = b""
                while b"\r\n\r\n" not in received:
                    received += connection.recv(65536)
                length = int(received.lower().split(b"content-length:")[1].split()[0])
                while len(received.partition(b"\r\n\r\n")[2]) < length:
                    received += connection.recv(65536)
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


@contextmanager
def forwarding(
    tmp_path: Path, answer: Callable[[socket.socket], Any], timeout_s: float = 20.0, **settings: Any
) -> Iterator[Running]:
    """A service that sends on to such a server."""
    with answering(answer) as url:
        policies = {"send": sends(url, timeout_s, key=None)}
        with running(tmp_path, policies=policies, **settings) as service:
            yield service


def http(status: str, body: str, kind: str = "application/json", length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body) if length is None else length}\r\n"
    return f"{head}connection: close\r\n\r\n{body}".encode()


CHUNK = "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "Half an "}}]}) + "\n\n"
FAILURES = {
    "status": (http("500 Oops", '{"error": "their secret"}'), "status 500"),
    "redirect": (http("302 Found", ""), "status 302"),
    "no json": (http("200 OK", "hello"), "something else than an answer"),
    "no choices": (http("200 OK", '{"choices": null}'), "something else than an answer"),
    "nan": (http("200 OK", '{"choices": [NaN]}'), "something else than an answer"),
    "cut": (http("200 OK", '{"choices": []', length=900), "could not be reached or read"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_its_failure_is_told_apart_from_ours(tmp_path: Path, name: str) -> None:
    written, said = FAILURES[name]
    with forwarding(tmp_path, lambda connection: connection.sendall(written)) as service:
        with pytest.raises(openai.InternalServerError) as refused:
            ask(service, "send")
        assert refused.value.status_code == 502
        assert refused.value.code == "upstream_failed"
        assert said in refused.value.message
        assert "secret" not in refused.value.message
        assert service.metric("hallutracer_upstream_requests_total") == 1
        assert service.post(prompt="A").status_code == 200  # this service is well


def test_an_upstream_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    policy = sends(f"http://127.0.0.1:{port}", key=None)
    with (
        running(tmp_path, policies={"send": policy}) as service,
        pytest.raises(openai.InternalServerError, match="could not be reached"),
    ):
        ask(service, "send")


def test_an_upstream_that_is_too_slow(tmp_path: Path) -> None:
    ended = threading.Event()
    with forwarding(tmp_path, lambda connection: ended.wait(20) and None, timeout_s=0.2) as service:
        with pytest.raises(openai.InternalServerError, match="took longer than 0.2 s"):
            ask(service, "send")
        ended.set()


@pytest.mark.parametrize(
    ("body", "said"),
    [(CHUNK, "closed its stream"), (CHUNK + "data: {}\n\n", "something else"), ("", "closed its stream")],
)
def test_a_stream_that_ends_early_is_an_error(tmp_path: Path, body: str, said: str) -> None:
    written = http("200 OK", body, "text/event-stream")
    with forwarding(tmp_path, lambda connection: connection.sendall(written)) as service:
        seen: list[Any] = []
        with pytest.raises(openai.APIError, match=said):
            seen.extend(ask(service, "send", stream=True))
        assert streamed(seen) == ("Half an " if body else "")
        assert note(seen[0])["data"][0]["decision"] == "fallback"


def test_a_stream_that_stops_coming_ends_at_the_deadline(tmp_path: Path) -> None:
    ended = threading.Event()

    def stops(connection: socket.socket) -> None:
        connection.sendall(http("200 OK", CHUNK, "text/event-stream", length=10_000))
        ended.wait(20)

    with forwarding(tmp_path, stops, deadline_s=2.0) as service:
        with pytest.raises(openai.APIError, match="deadline"):
            list(ask(service, "send", stream=True))
        ended.set()


def test_a_client_that_leaves_ends_what_was_sent_on(tmp_path: Path) -> None:
    ended = threading.Event()

    def slow(connection: socket.socket) -> None:
        connection.sendall(http("200 OK", CHUNK, "text/event-stream", length=10_000))
        connection.settimeout(20)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        ended.set()  # our service has closed it

    with forwarding(tmp_path, slow) as service:
        chunks = ask(service, "send", stream=True)
        assert streamed([next(chunks), next(chunks)]) == "Half an "
        chunks.close()
        assert ended.wait(20)
        until(lambda: service.metric("hallutracer_requests_in_flight") == 0)


def test_a_redirect_is_not_followed_and_a_missing_key_is_not_left_out(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY)
    with pytest.raises(openai.InternalServerError, match=f"{KEY} holds no key"):
        ask(service, "send")


# --- who may choose what, and rules ---


@pytest.mark.parametrize(
    ("own", "wanted", "status"),
    [
        ("gate", "send", 403), ("gate", "warn", 403), ("gate", "fetch", 200), ("fetch", "gate", 200),
        ("send", "warn", 403), ("send", "observe", 403), ("send", "gate", 200), ("warn", "observe", 403),
        ("warn", "send", 200), ("observe", "warn", 200), ("observe", "send", 200),
    ],
)  # fmt: skip
def test_a_request_may_only_be_stricter(tmp_path: Path, own: str, wanted: str, status: int) -> None:
    policies = {"warn": WARN, "fetch": FETCH, "send": sends("http://127.0.0.1:9", key=None)}
    with running(tmp_path, policies=policies, policy=own, callers_may=["none"]) as service:
        named = service.state.catalogue.policies.named
        service.state.catalogue.policies = Policies({name: policy.at(0.5) for name, policy in named.items()})
        assert service.post(prompt="A", policy=wanted).status_code == status
        assert service.post(prompt="A", threshold=1.0).status_code == (200 if own == "observe" else 403)
        assert service.post(prompt="A", bundle="two").status_code == (200 if own == "observe" else 403)


def test_rules_choose_by_route_and_key(tmp_path: Path) -> None:
    keys = [ApiKey("secret-a", "rag"), ApiKey("secret-b", "web")]
    with running(tmp_path, policies={"warn": WARN, "fetch": FETCH}, api_keys=keys, callers_may=()) as service:
        rules = (
            Rule(policy="fetch", key="rag"),
            Rule(policy="warn", route="/v1/chat/completions", model="scripted"),
            Rule(policy="observe", model="another"),
        )
        service.state.catalogue.policies = replace(service.state.catalogue.policies, rules=rules)

        def decided(secret: str, path: str, **more: Any) -> tuple[int, str | None]:
            headers = {"authorization": f"Bearer {secret}"}
            body = {"model": "scripted", "messages": ASKED} | more
            found = httpx.post(service.url + path, json=body, headers=headers)
            document = found.json()
            return found.status_code, document.get("policy") or document.get("hallutracer", {}).get("policy")

        assert decided("secret-a", "/score") == (200, "fetch")
        assert decided("secret-a", "/v1/chat/completions") == (200, "fetch")
        assert decided("secret-b", "/v1/chat/completions") == (200, "warn")
        assert decided("secret-b", "/v1/risk/score") == (200, "gate")
        assert decided("secret-b", "/score", policy="observe")[0] == 403
        assert decided("secret-a", "/score", policy="gate", threshold=0.0) == (200, "gate")
        loosened = {"vllm_xargs": {"hallutracer_policy": "observe"}}
        assert decided("secret-b", "/v1/chat/completions", **loosened)[0] == 403
        loosened = {"vllm_xargs": {"hallutracer_policy": "gate", "hallutracer_threshold": 0.0}}
        assert decided("secret-b", "/v1/chat/completions", **loosened) == (200, "gate")
