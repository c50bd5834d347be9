"""POST /v1/messages through the real ``anthropic`` client; what it gets is checked by that client's own models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse

from service.access.routes import MESSAGES_ROUTE
from tests.api.protocols import sse
from tests.api.test_auth import named
from tests.api.test_protocols import EVERYTHING, FIRST, NOTHING
from tests.running import Running, running

EVENTS = {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(get_args(RawMessageStreamEvent)[0])}
ASKED = [{"role": "user", "content": "Why?"}]
BEGIN, END = ("message_start", "content_block_start"), ("content_block_stop", "message_delta", "message_stop")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service"), policies=FIRST) as service:
        yield service


def client_of(service: Running, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=service.url, api_key=key, max_retries=0, timeout=20)


def asked(xargs: dict[str, Any] = NOTHING, **given: Any) -> dict[str, Any]:
    """``temperature`` in the body: newer clients have no argument for it."""
    more = {"temperature": 0, "vllm_xargs": xargs} | given.pop("more", {})
    return {"model": "scripted", "messages": ASKED, "max_tokens": 50, "extra_body": more} | given


def create(service: Running, xargs: dict[str, Any] = NOTHING, **given: Any) -> Any:
    return client_of(service).messages.create(**asked(xargs, **given))


def checked(document: dict[str, Any]) -> Message:
    """The message, every field of which the client knows but for ours."""
    found = Message.model_validate_json(json.dumps(document), strict=True)
    assert set(found.model_extra or {}) == {"hallutracer"}
    assert not any(block.model_extra for block in found.content)
    assert not found.usage.model_extra
    return found


def streamed(service: Running, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked."""
    given = {"model": "scripted", "messages": ASKED, "max_tokens": 50, "temperature": 0, "stream": True} | body
    events = []
    for name, event in sse(httpx.post(service.url + MESSAGES_ROUTE, json=given).text):
        assert name == event["type"]
        known = EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)
        assert set(known.model_extra) <= {"hallutracer"}
        if "message" in event:
            checked(event["message"])
        events.append(event)
    return events


def test_an_answer_is_a_message(service: Running) -> None:
    raw = client_of(service).messages.with_raw_response.create(**asked(system="Be brief."))
    found, document = raw.parse(), json.loads(raw.text())
    checked(document)
    assert [block.text for block in found.content] == ["It is so."]
    assert (found.role, found.stop_reason, found.stop_sequence) == ("assistant", "end_turn", None)
    assert found.id == f"msg_{raw.headers['x-request-id']}"
    messages = [{"role": "system", "content": "Be brief."}, *ASKED]
    score = service.post(messages=messages, threshold=1.0, generate={}).json()
    assert (found.usage.input_tokens, found.usage.output_tokens) == (score["usage"]["prompt_tokens"], 9)
    [row] = document["hallutracer"]["data"]
    assert row == {name: value for name, value in score["data"][0].items() if name != "completion"}
    assert float(raw.headers["x-hallutracer-risk"]) == pytest.approx(row["risk"], abs=1e-6)


@pytest.mark.parametrize("policy", ["gate", "block"])
def test_a_withheld_answer_is_a_refusal(service: Running, policy: str) -> None:
    found = create(service, EVERYTHING | {"hallutracer_policy": policy})
    assert (found.stop_reason, found.usage.output_tokens) == ("refusal", 0)
    assert [block.text for block in found.content] == (["I am not sure."] if policy == "gate" else [])
    checked(found.to_dict())


def test_the_events_of_an_answer_and_of_a_refusal(service: Running) -> None:
    events = streamed(service, vllm_xargs=NOTHING)
    assert tuple(event["type"] for event in events) == (*BEGIN, *["content_block_delta"] * 9, *END)
    first, end = events[0]["message"], events[-2]
    assert (first["content"], first["stop_reason"], first["usage"]["output_tokens"]) == ([], None, 0)
    assert first["hallutracer"]["data"][0]["decision"] == "continue"
    assert (end["delta"], end["usage"]["output_tokens"]) == ({"stop_reason": "end_turn", "stop_sequence": None}, 9)
    withheld = streamed(service, vllm_xargs=EVERYTHING)
    assert tuple(event["type"] for event in withheld) == (*BEGIN, "content_block_delta", *END)
    assert (withheld[2]["delta"]["text"], withheld[-2]["delta"]["stop_reason"]) == ("I am not sure.", "refusal")
    blocked = streamed(service, vllm_xargs=EVERYTHING | {"hallutracer_policy": "block"})
    assert tuple(event["type"] for event in blocked) == (BEGIN[0], *END[1:])
    for more, said in (
        ({"max_tokens": 4}, ("max_tokens", None)),
        ({"stop_sequences": ["so"]}, ("stop_sequence", "so")),
    ):
        delta = streamed(service, vllm_xargs=NOTHING, **more)[-2]["delta"]
        assert (delta["stop_reason"], delta["stop_sequence"]) == said


def test_streams_of_the_client_sync_and_async(service: Running) -> None:
    events = list(create(service, stream=True))
    assert events[-1].type == "message_stop"
    with client_of(service).messages.stream(**asked()) as stream:
        assert "".join(stream.text_stream) == "It is so."
        final = stream.get_final_message()
        assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == ("It is so.", "end_turn", 9)
    with client_of(service).messages.stream(**asked(EVERYTHING)) as stream:
        assert stream.get_final_message().stop_reason == "refusal"

    async def ask() -> tuple[str, list[str], str]:
        async with anthropic.AsyncAnthropic(base_url=service.url, api_key="none", max_retries=0) as client:
            whole = await client.messages.create(**asked())
            kinds = [event.type async for event in await client.messages.create(**asked(), stream=True)]
            async with client.messages.stream(**asked()) as stream:
                return whole.content[0].text, kinds, await stream.get_final_text()

    assert asyncio.run(ask()) == ("It is so.", [event.type for event in events], "It is so.")


def test_a_stream_that_breaks_off_raises(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(service.engine, "wait", wait)
    with pytest.raises(anthropic.APIStatusError, match="the engine failed") as error:
        list(create(service, stream=True))
    assert ErrorResponse.model_validate(error.value.body).error.type == "api_error"


def test_messages_are_read_as_the_conversation_that_they_are(service: Running) -> None:
    asks, says = ASKED[0], {"role": "assistant", "content": "It is so."}
    system, refused = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "I am not sure."}
    parts = [{"type": "text", "text": "W", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "hy?"}]
    answer, refusal = create(service), create(service, EVERYTHING)
    for given, same in (
        ({"messages": [{"role": "user", "content": parts}]}, [asks]), ({"system": "Be brief."}, [system, asks]),
        ({"system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}, [system, asks]),
        ({"messages": [asks, {"role": "assistant", "content": answer.content}, asks]}, [asks, says, asks]),
        ({"messages": [asks, {"role": "assistant", "content": refusal.content}, asks]}, [asks, refused, asks]),
        ({"messages": [system, asks]}, [system, asks]), ({"messages": [asks, says]}, [asks, says]),
    ):  # fmt: skip
        row = service.post(messages=same, threshold=1.0, generate={}).json()["data"][0]
        [found] = create(service, **given).model_extra["hallutracer"]["data"]
        assert found["risk"] == row["risk"], given


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
TOOL = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": [{"name": "f", "input_schema": {}}]}, "'tools'"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "'thinking'"), ({"container": "c"}, "'container'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "'format'"), ({"top_k": 5}, "'top_k'"),
        ({"mcp_servers": [{"type": "url"}]}, "'mcp_servers'"), ({"context_management": {}}, "'context_management'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "content.0.type"),
        ({"messages": [{"role": "user", "content": [TOOL]}]}, "content.0.type"),
        ({"messages": [{"role": "assistant", "content": [THOUGHT]}]}, "beside its thoughts"),
        ({"messages": [{"role": "user", "content": [THOUGHT, {"type": "text", "text": "x"}]}]}, "role 'assistant'"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "'context_management'"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "'thinking'"),
        ({"messages": [{"role": "user", "content": []}]}, "content"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "name"), ({"system": []}, "system"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "role"), ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"), ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"), ({"stop": ["a"]}, "stop"), ({"stream": "yes"}, "stream"),
        ({"hallutracer_policy": "observe"}, "hallutracer_policy"), ({"temprature": 0}, "temprature"),
        ({"vllm_xargs": {"hallutracer_polcy": "gate"}}, "hallutracer_polcy"), ({"prompt": "x"}, "prompt"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(service: Running, given: dict[str, Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(service, more=given)
    error = ErrorResponse.model_validate(refused.value.body).error
    assert error.type == "invalid_request_error"
    assert named in error.message


def test_what_changes_nothing_is_taken(service: Running) -> None:
    same: dict[str, Any] = {
        "metadata": {"user_id": "me"}, "service_tier": "auto", "tools": [], "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"}, "top_k": None, "cache_control": {"type": "ephemeral"}, "container": None,
        "output_config": {"effort": "low"}, "stop_sequences": [], "speed": "standard", "system": None,
    }  # fmt: skip
    assert create(service, more=same).content[0].text == "It is so."
    cleared = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    for thinking in ({"type": "adaptive"}, {"type": "adaptive", "display": "summarized"}):
        assert create(service, more={"thinking": thinking, "context_management": cleared}).content[0].text


def test_errors_are_those_that_the_client_knows(tmp_path: Path) -> None:
    with running(tmp_path, api_keys=[named("mine"), named("held", policies=("block",))], threshold=0.0,
                 callers_may=(), policies=FIRST) as service:  # fmt: skip
        for key, given, kind, name in (
            ("other", {}, anthropic.AuthenticationError, "authentication_error"),
            ("held", {}, anthropic.PermissionDeniedError, "permission_error"),
            ("mine", {"xargs": NOTHING}, anthropic.PermissionDeniedError, "permission_error"),
            ("mine", {"model": "other", "xargs": {}}, anthropic.NotFoundError, "not_found_error"),
        ):  # fmt: skip
            with pytest.raises(kind) as refused:
                client_of(service, key).messages.create(**asked(**{"xargs": {}} | given))
            assert ErrorResponse.model_validate(refused.value.body).error.type == name
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: 50\d\d tokens > 512 maximum"
        ) as refused:
            client_of(service, "mine").messages.create(**asked({}, messages=[{"role": "user", "content": "a" * 5000}]))
        assert ErrorResponse.model_validate(refused.value.body).error.type == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError) as refused:
            client_of(service, "mine").messages.batches.list()
        assert ErrorResponse.model_validate(refused.value.body).error.type == "not_found_error"
        found = client_of(service, "mine").messages.create(**asked({}))
        assert found.stop_reason == "refusal"
        bearer = anthropic.Anthropic(base_url=service.url, auth_token="mine", max_retries=0)
        assert bearer.messages.create(**asked({})).stop_reason == "refusal"
        assert service.engine.counters.decode_steps == 0
