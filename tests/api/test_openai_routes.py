"""OpenAI's routes of our own service, through the real ``openai`` client where one would be used; the guardrails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from service.access.routes import CLASSIFY_ROUTE, LITELLM_ROUTE
from service.policies.guard import Action, Policy
from tests.engine_kinds import KINDS
from tests.running import App, Running, running, until

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
EVERYTHING, NOTHING = {"hallutracer_threshold": 0.0}, {"hallutracer_threshold": 1.0}
POLICIES = {
    "gate": Policy("gate", Action.ABSTAIN, message="I am not sure."),
    "warn": Policy("warn", Action.ANNOTATE, 0.0, "Take care."),
    "fetch": Policy("fetch", Action.RETRIEVE, 0.0, "Fetch a passage."),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service"), policies=POLICIES) as service:
        yield service


def client_of(service: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=20)


def ask(service: Running, xargs: dict[str, Any] = NOTHING, **given: Any) -> Any:
    given = {"model": "scripted", "messages": ASKED, "temperature": 0} | given
    return client_of(service).chat.completions.create(**given, extra_body={"vllm_xargs": xargs})


def complete(service: Running, xargs: dict[str, Any] = NOTHING, **given: Any) -> Any:
    given = {"model": "scripted", "temperature": 0, "extra_body": {"vllm_xargs": xargs}} | given
    return client_of(service).completions.create(**given)


def risks(found: Any) -> list[dict[str, Any]]:
    return list(found.model_extra["hallutracer"]["data"])


# --- chat and text completions ---


def test_a_chat_is_answered_with_its_risk_beside(service: Running) -> None:
    found = ask(service)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "It is so.", None)
    assert (found.object, choice.finish_reason) == ("chat.completion", "stop")
    tokens = len(service.engine.render_chat(ASKED))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (tokens, tokens + found.usage.completion_tokens)
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    score, noted = service.post(messages=ASKED, threshold=1.0).json(), found.model_extra["hallutracer"]
    assert (noted["data"][0], noted["bundle"], noted["policy"]) == (score["data"][0], score["bundle"], "gate")
    create = client_of(service).chat.completions.with_raw_response.create
    headers = create(model="scripted", messages=ASKED, max_tokens=1).headers  # type: ignore[arg-type]
    assert float(headers["x-hallutracer-risk"]) == pytest.approx(noted["data"][0]["risk"], abs=1e-6)
    assert headers["x-hallutracer-decision"] in ("continue", "abstain")


def test_the_id_of_an_answer_begins_as_its_kind_does(service: Running) -> None:
    ids = [ask(service).id, complete(service, prompt="Why?").id, service.post(prompt="Why?").json()["id"]]
    assert [one.partition("-")[0] for one in ids] == ["chatcmpl", "cmpl", "risk"]


def test_a_withheld_answer_is_a_refusal_and_costs_no_token(service: Running) -> None:
    decoded = service.engine.counters.decode_steps
    for policy, said in (("gate", "I am not sure."), ("block", None)):
        xargs = EVERYTHING | {"hallutracer_policy": policy}
        found = ask(service, xargs)
        (choice,), (row,) = found.choices, risks(found)
        assert (choice.message.content, choice.message.refusal, choice.finish_reason) == (None, said, "content_filter")
        assert (found.usage.completion_tokens, row["decision"]) == (0, {"gate": "abstain"}.get(policy, policy))
        (only,) = ask(service, xargs, stream=True)
        (choice,) = only.choices
        assert (choice.delta.content, choice.delta.refusal, choice.finish_reason) == (None, said, "content_filter")
        streamed = complete(service, xargs, prompt="one", stream=True)
        assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in streamed] == [
            ("", "content_filter")
        ]
    assert service.engine.counters.decode_steps == decoded


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_begins_with_the_risk(service: Running, with_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks, whole = list(ask(service, stream=True, **options)), ask(service)
    assert risks(chunks[0])[0]["risk"] == risks(whole)[0]["risk"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any("hallutracer" in chunk.model_extra for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "It is so."
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [end for end in ends if end] == [ends[-1]] == ["stop"]
    assert ({chunk.object for chunk in chunks}, len({chunk.id for chunk in chunks})) == ({"chat.completion.chunk"}, 1)
    usages = [chunk.usage.model_dump() for chunk in chunks if chunk.usage]
    assert usages == ([whole.usage.model_dump()] if with_usage else [])


def test_text_completions_go_through_no_template(service: Running) -> None:
    found = complete(service, prompt=["one", "two"], max_tokens=4)
    assert [(choice.text, choice.finish_reason) for choice in found.choices] == [("It i", "length")] * 2
    ids = [service.engine.tokenize(text) for text in ("one", "two")]
    score = service.post(input_ids=ids, threshold=1.0).json()["data"]
    assert risks(found) == risks(complete(service, prompt=ids, max_tokens=4)) == score


def test_an_answer_that_comes_back_in_a_conversation_is_read(service: Running) -> None:
    for xargs, said in ((NOTHING, "It is so."), (EVERYTHING, "I am not sure.")):
        message = ask(service, xargs).choices[0].message
        parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
        litellms = {"role": "assistant", "content": message.content, "tool_calls": None,
                    "provider_specific_fields": {"refusal": message.refusal}}  # fmt: skip
        spelt = [*ASKED, {"role": "assistant", "content": said}, {"role": "system", "content": "Be brief."}]
        scored = service.post(messages=spelt, threshold=1.0).json()["data"]
        for turn in (message, litellms):
            assert risks(ask(service, messages=[*ASKED, turn, {"role": "developer", "content": parts}])) == scored


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"n": 2}, "'n'"),
        ({"presence_penalty": 0.5}, "'presence_penalty'"),
        ({"logprobs": True}, "'logprobs'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools'"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"max_tokens": 10**6}, "at most"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "user", "content": "x", "provider_specific_fields": {}}]}, "provider_specific_fields"),
        ({"messages": [{"role": "assistant", "provider_specific_fields": {"refusal": 4}}]}, "refusal"),
        ({"messages": [{"role": "assistant", "provider_specific_fields": {}}]}, "content"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"hallutracer_policy": "observe"}}, "hallutracer_policy"),
        ({"extra_body": {"vllm_xargs": {"hallutracer_polcy": "gate"}}}, "hallutracer_polcy"),
        ({"extra_body": {"temprature": 0}}, "temprature"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"vllm_xargs": {"hallutracer_threshold": "1"}}}, "hallutracer_threshold"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(service: Running, given: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client_of(service).chat.completions.create(**{"model": "scripted", "messages": ASKED} | given)
    assert named in str(refused.value.body), refused.value.body


def test_what_changes_nothing_is_taken(service: Running) -> None:
    same: dict[str, Any] = {
        "n": 1, "presence_penalty": 0, "logit_bias": {}, "logprobs": False, "tools": None, "tool_choice": "auto",
        "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": False,
    }  # fmt: skip
    assert ask(service, **same).choices[0].message.content == "It is so."


def test_errors_are_those_that_the_client_knows(service: Running) -> None:
    for xargs, given, said in ((NOTHING, {"model": "other"}, "is not loaded"),
                               ({"hallutracer_bundle": "nope"}, {}, "bundle")):  # fmt: skip
        with pytest.raises(openai.NotFoundError, match=said):
            ask(service, xargs, **given)
    for base in (service.url, f"{service.url}/v1/v1"):
        client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError, match="ends in /v1"):
            client.chat.completions.create(model="scripted", messages=ASKED)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client_of(service).embeddings.create(model="scripted", input="Why?")


def test_keys_rights_and_a_gate_that_a_request_cannot_open(tmp_path: Path) -> None:
    with running(tmp_path, api_keys=["s" * 20], callers_may=(), threshold=0.0) as service:
        with pytest.raises(openai.AuthenticationError):
            ask(service)
        client = client_of(service, "s" * 20)
        for xargs in ({"hallutracer_policy": "observe"}, NOTHING, {"hallutracer_bundle": "two"}):
            with pytest.raises(openai.PermissionDeniedError):
                client.chat.completions.create(model="scripted", messages=ASKED, extra_body={"vllm_xargs": xargs})  # type: ignore[arg-type]
        for route, body in (("chat/completions", {"messages": ASKED}), ("completions", {"prompt": "a"})):
            for stream in (False, True):
                whole = client.post(f"/{route}", body={"model": "scripted", "stream": stream, **body}, cast_to=object)
                assert "It is" not in json.dumps(whole, default=str)
        assert service.engine.counters.decode_steps == 0


@pytest.mark.parametrize("policy", ["gate", "block"])
def test_the_message_as_text_for_clients_that_show_nothing_else(tmp_path: Path, policy: str) -> None:
    said = "I am not sure." if policy == "gate" else None
    xargs = EVERYTHING | {"hallutracer_policy": policy}
    with running(tmp_path, policies=POLICIES, message_in_content=True) as service:
        (choice,) = ask(service, xargs).choices
        assert (choice.message.content, choice.message.refusal, choice.finish_reason) == (said, said, "content_filter")
        (only,) = ask(service, xargs, stream=True)
        (choice,) = only.choices
        assert (choice.delta.content, choice.delta.refusal, choice.finish_reason) == (said, said, "content_filter")
        for stream in (False, True):
            found = complete(service, xargs, prompt="a", stream=stream)
            (choice,) = (next(iter(found)) if stream else found).choices
            assert (choice.text, choice.finish_reason) == (said or "", "content_filter")
        assert service.engine.counters.decode_steps == 0
        turns = [*ASKED, ask(service, EVERYTHING).choices[0].message, *ASKED]
        assert ask(service, messages=turns).choices[0].message.content == "It is so."


@pytest.mark.parametrize("names", [(), ("gpt-4o", "org/model"), ("*",)])
def test_a_model_answers_to_the_names_that_it_is_given(tmp_path: Path, names: tuple[str, ...]) -> None:
    with running(tmp_path, model_names=names) as service:
        client = client_of(service)
        for name in ("gpt-4o", "org/model", "other"):
            if name in names or "*" in names:
                assert ask(service, model=name).model == "scripted"
                assert service.post(prompt="a", model=name).status_code == 200
                assert (client.models.retrieve(name).id, client.models.retrieve(name).root) == (name, "scripted")  # type: ignore[attr-defined]
            else:
                with pytest.raises(openai.NotFoundError, match="--served-model-name"):
                    ask(service, model=name)
                with pytest.raises(openai.NotFoundError, match="ask for 'scripted'"):
                    client.models.retrieve(name)
        assert client.models.retrieve("scripted").id == "scripted"
        assert [model.id for model in client.models.list()] == ["scripted", *(name for name in names if name != "*")]


@pytest.mark.parametrize(("kind", "stream"), zip(KINDS, (False, True), strict=True))
def test_an_answer_without_a_length_ends_before_the_deadline_and_a_reader_that_leaves_ends_it(
    tmp_path: Path, kind: str, stream: bool
) -> None:
    with running(tmp_path, kind, deadline_s=3.0) as service:
        service.engine.answer, service.engine.sleep_s = "x" * 800, 0.01
        found = ask(service, stream=stream)
        ends = [chunk.choices[0] for chunk in found] if stream else found.choices
        text = "".join(end.delta.content or "" for end in ends) if stream else ends[0].message.content
        assert (ends[-1].finish_reason, 1 < len(text) < 800) == ("length", True)
        *_, last = ask(service, stream=True, max_tokens=500)  # it named 500 tokens, and cannot have them
        assert last.choices[0].finish_reason == "length"
        decoded = service.engine.counters.decode_steps
        leaving = ask(service, stream=True, max_tokens=300)
        next(iter(leaving))
        leaving.close()
        until(lambda: service.engine.counters.open_continuations == 0, 10)
        assert service.engine.counters.decode_steps - decoded < 140


# --- LiteLLM's guardrail and a router's classifier; LiteLLM's own code asks in clients/quickstarts ---


def guard(app: App, chosen: dict[str, Any] | None = None, status: int = 200, **given: Any) -> Any:
    body = {"input_type": "request", "request_data": {"user_api_key_alias": "a"}, "litellm_version": "1"}
    params = {} if chosen is None else {"additional_provider_specific_params": chosen}
    found = app.client.post(LITELLM_ROUTE, json=body | params | given)
    assert found.status_code == status, found.text
    return found.json()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with App(tmp_path_factory.mktemp("app"), policies=POLICIES).started() as app:
        yield app


def test_a_guarded_call_is_judged_as_the_other_routes_judge_it(app: App) -> None:
    risk = app.client.post("/score", json={"messages": ASKED}).json()["data"][0]["risk"]
    for threshold, action, reason, decision in ((1.0, "NONE", None, "continue"),
                                                (0.0, "BLOCKED", "I am not sure.", "abstain")):  # fmt: skip
        found = guard(app, {"threshold": threshold}, structured_messages=ASKED, texts=["not this"])
        (row,) = found["hallutracer"]["data"]
        assert (found["action"], found.get("blocked_reason")) == (action, reason)
        assert (row["risk"], row["decision"]) == (risk, decision)
    both = [row["risk"] for row in app.client.post("/score", json={"prompt": ["A", "B"]}).json()["data"]]
    found = guard(app, {"threshold": max(both)}, texts=["A", "B"])  # one that is withheld stops the call
    assert (found["action"], [row["risk"] for row in found["hallutracer"]["data"]]) == ("BLOCKED", both)
    assert guard(app, {"threshold": max(both)}, texts=["AB"[both.index(min(both))]])["action"] == "NONE"


def test_a_guarded_call_chooses_policy_and_bundle(app: App, tmp_path: Path) -> None:
    blocked = guard(app, {"policy": "block", "threshold": 0.0}, texts=["A"])
    assert (blocked["action"], blocked["blocked_reason"][:14]) == ("BLOCKED", "withheld: risk")
    assert "outside" not in blocked["blocked_reason"]
    both = [{"role": "user", "content": "What is the capital of Italy? Also: what is the capital of Samoa?"}]
    reason = guard(app, {"policy": "block", "threshold": 1.0}, structured_messages=both)["blocked_reason"]
    assert reason.endswith(", threshold 1.00, outside training"), "its risk is below the threshold, and it is withheld"
    assert guard(app, {"policy": "fetch"}, texts=["A"])["blocked_reason"] == "Fetch a passage."
    assert guard(app, {"policy": "observe", "threshold": 0.0}, texts=["A"])["action"] == "NONE"
    assert guard(app, {"policy": "warn"}, 422, texts=["A"])["error"]["param"] == "policy"
    assert guard(app, {"bundle": "two"}, texts=["A"])["hallutracer"]["bundle"]["name"] == "two"
    assert guard(app, {"bundle": "three"}, 404, texts=["A"])["error"]["param"] == "bundle"
    with App(tmp_path, callers_may=()).started() as strict:
        for chosen in ({"policy": "observe"}, {"threshold": 1.0}, {"bundle": "two"}):
            assert guard(strict, chosen, 403, texts=["A"])["error"]["code"] == "not_allowed"


@pytest.mark.parametrize(
    "given",
    [
        *({"structured_messages": ASKED, name: [{"id": "a"}]} for name in ("images", "tools", "tool_calls")),
        {"structured_messages": [{"role": "tool", "content": "12", "tool_call_id": "a"}]},
        {"structured_messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
        {"structured_messages": [{"role": "user", "content": None}]},
        {"structured_messages": [{"content": "a"}], "texts": ["a"]},
    ],
)
def test_what_cannot_be_read_does_not_pass(app: App, given: dict[str, Any]) -> None:
    found, observed = guard(app, {"threshold": 1.0}, **given), guard(app, {"policy": "observe"}, **given)
    assert (found["action"], "read" in found["blocked_reason"]) == ("BLOCKED", True)
    assert (observed["action"], "read" in observed["hallutracer"]["error"]) == ("NONE", True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"texts": ["A"], "input_type": "response"}, "pre_call"),
        ({"texts": ["A"], "input_type": "both"}, "input_type"),
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"structured_messages": []}, "structured_messages"),
        ({"texts": ["A"], "additional_provider_specific_params": {"treshold": 0.4}}, "treshold"),
        ({"texts": ["A"], "additional_provider_specific_params": {"threshold": "0.4"}}, "threshold"),
        ({"texts": ["A"] * 1000}, "prompts in one request"),
    ],
)
def test_bad_guarded_calls_are_refused(app: App, given: dict[str, Any], said: str) -> None:
    assert said in str(guard(app, status=422, **given)["error"])


def test_a_classifier_gives_the_risk_as_a_probability(app: App) -> None:
    both = [row["risk"] for row in app.client.post("/score", json={"prompt": ["A", "B"]}).json()["data"]]
    two, one = (app.client.post(CLASSIFY_ROUTE, json={"inputs": inputs}) for inputs in (["A", "B"], "A"))
    assert [{row["label"]: row["score"] for row in of_text} for of_text in two.json()] == [
        {"hallucinated": risk, "factual": pytest.approx(1 - risk)} for risk in both
    ]
    assert (one.json(), one.headers["x-hallutracer-bundle"]) == (two.json()[0], "one:1")
    for wrong in ({"inputs": []}, {"inputs": 1}, {}, {"inputs": "A", "truncate": True}):
        assert app.client.post(CLASSIFY_ROUTE, json=wrong).status_code == 422
