"""OpenAI's routes of our own service, through the real ``openai`` client where one would be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from service.policies.guard import Action, Policy
from tests.engine_kinds import KINDS
from tests.running import Running, running, until

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
EVERYTHING, NOTHING = {"hallutracer_threshold": 0.0}, {"hallutracer_threshold": 1.0}
SAY_NO = Policy("gate", Action.ABSTAIN, message="I am not sure.")


@pytest.fixture(params=KINDS)
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(tmp_path, request.param, policies={"gate": SAY_NO}) as service:
        yield service


def client_of(service: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=20)


def ask(service: Running, xargs: dict[str, Any] = NOTHING, **given: Any) -> Any:
    given = {"model": "scripted", "messages": ASKED, "temperature": 0} | given
    return client_of(service).chat.completions.create(**given, extra_body={"vllm_xargs": xargs})


def test_a_chat_is_answered_with_its_risk_beside(service: Running) -> None:
    found = ask(service)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "It is so.", None)
    assert (found.object, choice.finish_reason) == ("chat.completion", "stop")
    tokens = len(service.engine.render_chat(ASKED))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (tokens, tokens + found.usage.completion_tokens)
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    score = service.post(messages=ASKED, threshold=1.0).json()
    note = found.model_extra["hallutracer"]
    assert note["data"][0] == score["data"][0]
    assert (note["bundle"], note["policy"]) == (score["bundle"], "gate")


def test_a_withheld_answer_is_a_refusal_and_costs_no_token(service: Running) -> None:
    decoded = service.engine.counters.decode_steps
    found = ask(service, EVERYTHING)
    (choice,) = found.choices
    assert (choice.message.content, choice.message.refusal) == (None, "I am not sure.")
    assert (choice.finish_reason, found.usage.completion_tokens) == ("content_filter", 0)
    assert found.model_extra["hallutracer"]["data"][0]["decision"] == "abstain"
    assert service.engine.counters.decode_steps == decoded
    block = ask(service, EVERYTHING | {"hallutracer_policy": "block"}).choices[0]
    assert (block.message.content, block.message.refusal, block.finish_reason) == (None, None, "content_filter")


def test_headers_are_those_of_score(service: Running) -> None:
    raw = client_of(service).chat.completions.with_raw_response.create(model="scripted", messages=ASKED, max_tokens=1)  # type: ignore[arg-type]
    note = raw.parse().model_extra["hallutracer"]["data"][0]  # type: ignore[index]
    assert float(raw.headers["x-hallutracer-risk"]) == pytest.approx(note["risk"], abs=1e-6)
    assert raw.headers["x-hallutracer-decision"] == note["decision"]


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_begins_with_the_risk(service: Running, with_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks = list(ask(service, stream=True, **options))
    whole = ask(service)
    assert (
        chunks[0].model_extra["hallutracer"]["data"][0]["risk"] == whole.model_extra["hallutracer"]["data"][0]["risk"]
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any("hallutracer" in chunk.model_extra for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "It is so."
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [end for end in ends if end] == [ends[-1]] == ["stop"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert [usage.model_dump() for usage in usages] == ([whole.usage.model_dump()] if with_usage else [])


def test_a_withheld_stream_says_so_at_once(service: Running) -> None:
    first, *rest = ask(service, EVERYTHING, stream=True)
    assert (first.choices[0].delta.refusal, first.choices[0].finish_reason) == ("I am not sure.", "content_filter")
    assert first.choices[0].delta.content is None
    assert rest == []


def test_a_reader_that_leaves_ends_the_decoding(service: Running) -> None:
    service.engine.answer, service.engine.sleep_s = "a" * 300, 0.01
    stream = ask(service, stream=True, max_tokens=300)
    next(iter(stream))
    stream.close()
    until(lambda: service.engine.counters.open_continuations == 0, 10)
    assert service.engine.counters.decode_steps < 290


def test_text_completions_go_through_no_template(service: Running) -> None:
    client = client_of(service)
    found = client.completions.create(model="scripted", prompt=["one", "two"], max_tokens=4, temperature=0,
                                      extra_body={"vllm_xargs": NOTHING})  # fmt: skip
    assert [choice.text for choice in found.choices] == ["It i", "It i"]
    assert [choice.finish_reason for choice in found.choices] == ["length", "length"]
    ids = [service.engine.tokenize(text) for text in ("one", "two")]
    score = service.post(input_ids=ids, threshold=1.0).json()
    note = found.model_extra["hallutracer"]  # type: ignore[index]
    assert note["data"] == score["data"]
    again = client.completions.create(model="scripted", prompt=ids, max_tokens=4, temperature=0,
                                      extra_body={"vllm_xargs": NOTHING})  # fmt: skip
    assert again.model_extra["hallutracer"]["data"] == score["data"]  # type: ignore[index]
    streamed = client.completions.create(model="scripted", prompt="one", temperature=0, stream=True,
                                         extra_body={"vllm_xargs": EVERYTHING})  # fmt: skip
    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in streamed] == [("", "content_filter")]


def test_an_answer_that_comes_back_in_a_conversation_is_read(service: Running) -> None:
    for xargs, said in ((NOTHING, "It is so."), (EVERYTHING, "I am not sure.")):
        message = ask(service, xargs).choices[0].message
        turns = [
            *ASKED,
            message,
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        ]
        found = ask(service, messages=turns).model_extra["hallutracer"]["data"]
        litellms = {"role": "assistant", "content": message.content, "tool_calls": None,
                    "provider_specific_fields": {"refusal": message.refusal}}  # fmt: skip
        assert found == ask(service, messages=[turns[0], litellms, turns[2]]).model_extra["hallutracer"]["data"]
        spelt = [*ASKED, {"role": "assistant", "content": said}, {"role": "system", "content": "Be brief."}]
        assert found == service.post(messages=spelt, threshold=1.0).json()["data"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"n": 2}, "'n'"),
        ({"presence_penalty": 0.5}, "'presence_penalty'"),
        ({"logprobs": True}, "'logprobs'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools'"),
        ({"response_format": {"type": "json_object"}}, "'response_format'"),
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
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(service: Running, given: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client_of(service).chat.completions.create(**{"model": "scripted", "messages": ASKED} | given)
    assert named in str(refused.value.body), refused.value.body


def test_what_changes_nothing_is_taken(service: Running) -> None:
    same = {"n": 1, "presence_penalty": 0, "logit_bias": {}, "logprobs": False, "tools": None, "tool_choice": "auto",
            "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": False}  # fmt: skip
    found = client_of(service).chat.completions.create(
        model="scripted",
        messages=ASKED,
        temperature=0,
        extra_body={"vllm_xargs": NOTHING},
        **same,  # type: ignore[arg-type]
    )  # type: ignore[call-overload]
    assert found.choices[0].message.content == "It is so."


def test_errors_are_those_that_the_client_knows(service: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="is not loaded"):
        ask(service, model="other")
    for base in (service.url, f"{service.url}/v1/v1"):
        client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError, match="base URL of OpenAI's clients ends in /v1"):
            client.chat.completions.create(model="scripted", messages=ASKED)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client_of(service).responses.create(model="scripted", input="Why?")
    with pytest.raises(openai.NotFoundError, match="bundle"):
        ask(service, {"hallutracer_bundle": "nope"})


def test_keys_rights_and_a_gate_that_a_request_cannot_open(tmp_path: Path) -> None:
    with running(tmp_path, api_keys=["s" * 20], callers_may=(), threshold=0.0) as service:
        with pytest.raises(openai.AuthenticationError):
            client_of(service).chat.completions.create(model="scripted", messages=ASKED)  # type: ignore[arg-type]
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
    with running(tmp_path, policies={"gate": SAY_NO}, message_in_content=True) as service:
        (choice,) = ask(service, xargs).choices
        assert (choice.message.content, choice.message.refusal, choice.finish_reason) == (said, said, "content_filter")
        first, *rest = ask(service, xargs, stream=True)
        assert (first.choices[0].delta.content, first.choices[0].delta.refusal) == (said, said)
        assert (first.choices[0].finish_reason, rest) == ("content_filter", [])
        complete = client_of(service).completions.create
        for stream in (False, True):
            found = complete(
                model="scripted", prompt="a", temperature=0, stream=stream, extra_body={"vllm_xargs": xargs}
            )  # type: ignore[call-overload]
            (choice,) = (next(iter(found)) if stream else found).choices
            assert (choice.text, choice.finish_reason) == (said or "", "content_filter")
        assert service.engine.counters.decode_steps == 0
        assert ask(service).choices[0].message.content == "It is so."
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
                with pytest.raises(openai.NotFoundError, match="is not loaded; ask for 'scripted'"):
                    client.models.retrieve(name)
        assert client.models.retrieve("scripted").id == "scripted"
        assert [model.id for model in client.models.list()] == ["scripted", *(name for name in names if name != "*")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_length_ends_before_the_deadline_and_says_length(
    tmp_path: Path, kind: str, stream: bool
) -> None:
    with running(tmp_path, kind, deadline_s=1.5) as service:
        service.engine.answer, service.engine.sleep_s = "x" * 800, 0.01
        found = ask(service, stream=stream)
        ends = [chunk.choices[0] for chunk in found] if stream else found.choices
        text = "".join(end.delta.content or "" for end in ends) if stream else ends[0].message.content
        assert ends[-1].finish_reason == "length"
        assert 1 < len(text) < 800
        with pytest.raises(openai.APIError, match="deadline"):  # it named 500 tokens, and cannot have them
            list(ask(service, stream=True, max_tokens=500))
