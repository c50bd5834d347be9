"""OpenAI's and Anthropic's own clients: answers, streams, and the errors they raise.

What they send beside a question: test_real_clients.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types.shared import ErrorResponse

from tests.api.protocols import in_anthropics_client, in_openais_client
from tests.api.test_auth import named
from tests.api.test_protocols import FIRST
from tests.running import Running, running, service_of_module

EVERYTHING = {"vllm_xargs": {"hallutracer_threshold": 0.0}, "temperature": 0}
NOTHING = {"vllm_xargs": {"hallutracer_threshold": 1.0}, "temperature": 0}
USER: Any = [{"role": "user", "content": "Why?"}]
TEXT, REFUSAL = "It is so.", "I am not sure."


service = service_of_module(policies=FIRST)


def openai_client(service: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=20)


def anthropic_client(service: Running, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=service.url, api_key=key, max_retries=0, timeout=20)


def chat(extra: Any = NOTHING, **fields: Any) -> Any:
    return {"model": "scripted", "messages": USER, "extra_body": extra} | fields


def response(extra: Any = NOTHING, **fields: Any) -> Any:
    return {"model": "scripted", "input": "Why?", "extra_body": extra} | fields


def message(extra: Any = NOTHING, **fields: Any) -> Any:
    return chat(extra, max_tokens=50, **fields)


def test_chats_and_completions(service: Running) -> None:
    client = openai_client(service)
    whole = client.chat.completions.create(**chat())
    assert whole.choices[0].message.content == TEXT
    chunks = list(client.chat.completions.create(**chat(stream=True)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[0].model_extra["hallutracer"]["data"] == whole.model_extra["hallutracer"]["data"]
    withheld = client.chat.completions.create(**chat(EVERYTHING)).choices[0]
    assert (withheld.message.refusal, withheld.finish_reason) == (REFUSAL, "content_filter")
    completion = {"model": "scripted", "prompt": "Why?", "extra_body": NOTHING}
    assert client.completions.create(**completion).choices[0].text == TEXT
    stream = client.completions.create(**completion, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_responses_and_messages(service: Running, stream: bool) -> None:
    asked = service.url, "scripted", "Why?", stream
    opened, shut = {"hallutracer_threshold": 1.0}, {"hallutracer_threshold": 0.0}
    assert in_openais_client(*asked, **opened)[:4] == (TEXT, None, None, len(TEXT))
    assert in_openais_client(*asked, **shut)[:4] == ("", REFUSAL, "content_filter", 0)
    assert in_anthropics_client(*asked, **opened)[:3] == (TEXT, "end_turn", len(TEXT))
    assert in_anthropics_client(*asked, **shut)[:3] == (REFUSAL, "refusal", 0)


def test_a_stream_that_breaks_off_raises(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(service.engine, "wait", wait)
    for create, fields in (
        (openai_client(service).chat.completions.create, chat),
        (openai_client(service).responses.create, response),
    ):
        with pytest.raises(openai.APIError, match="the engine failed") as broken:
            list(create(**fields(stream=True)))
        assert broken.value.code == "engine_error"
    with pytest.raises(anthropic.APIStatusError, match="the engine failed") as failure:
        list(anthropic_client(service).messages.create(**message(stream=True)))
    assert ErrorResponse.model_validate(failure.value.body).error.type == "api_error"


def test_the_errors_of_openai_s_client(service: Running) -> None:
    client = openai_client(service)
    unknown = {"vllm_xargs": {"hallutracer_bundle": "nope"}}
    for create, fields, text in (
        (client.chat.completions.create, chat(model="other"), "is not loaded"),
        (client.responses.create, response(model="other"), "is not loaded"),
        (client.chat.completions.create, chat(unknown), "bundle"),
        (client.embeddings.create, {"model": "scripted", "input": "Why?"}, "/v1/chat/completions"),
    ):
        with pytest.raises(openai.NotFoundError, match=text):
            create(**fields)
    for base in (service.url, f"{service.url}/v1/v1"):
        client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError, match="ends in /v1"):
            client.chat.completions.create(**chat())
    with pytest.raises(openai.APIStatusError, match="never truncated"):
        openai_client(service).responses.create(**response(input="a" * 5000))


def test_the_errors_of_keys_and_rights(tmp_path: Path) -> None:
    keys = [named("mine"), named("held", policies=("block",))]
    with running(tmp_path, api_keys=keys, threshold=0.0, callers_may=(), policies=FIRST) as service:
        for key, fields, name in (
            ("wrong", {}, "AuthenticationError"),
            ("held", {}, "PermissionDeniedError"),
            ("mine", {"extra_body": NOTHING}, "PermissionDeniedError"),
            ("mine", {"model": "other"}, "NotFoundError"),
            ("mine", {"messages": [{"role": "user", "content": "a" * 5000}]}, "BadRequestError"),
        ):
            with pytest.raises(getattr(openai, name)):
                openai_client(service, key).chat.completions.create(**chat({}) | fields)
            with pytest.raises(getattr(anthropic, name)) as failure:
                anthropic_client(service, key).messages.create(**message({}) | fields)
            kind = ErrorResponse.model_validate(failure.value.body).error.type
            assert kind == KINDS[name]
        assert "prompt is too long: 50" in str(failure.value)
        assert "tokens > 512 maximum" in str(failure.value)
        with pytest.raises(anthropic.NotFoundError) as failure:
            anthropic_client(service, "mine").messages.batches.list()
        assert ErrorResponse.model_validate(failure.value.body).error.type == "not_found_error"
        bearer = anthropic.Anthropic(base_url=service.url, auth_token="mine", max_retries=0)
        for client in (anthropic_client(service, "mine"), bearer):
            assert client.messages.create(**message({})).stop_reason == "refusal"
        assert service.engine.counters.decode_steps == 0


KINDS = {
    "AuthenticationError": "authentication_error",
    "PermissionDeniedError": "permission_error",
    "NotFoundError": "not_found_error",
    "BadRequestError": "invalid_request_error",
}
