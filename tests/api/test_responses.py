"""POST /v1/responses through the real ``openai`` client; what it gets is checked by that client's own models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from service.access.routes import RESPONSES_ROUTE
from tests.api.protocols import sse
from tests.api.test_protocols import EVERYTHING, FIRST, NOTHING
from tests.running import Running, running

EVENTS = {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(get_args(ResponseStreamEvent)[0])}
TEXT = ("response.output_text.delta",) * 9
BEGIN = ("response.created", "response.in_progress")
ITEM = ("response.output_item.added", "response.content_part.added")
END = ("response.content_part.done", "response.output_item.done")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service"), policies=FIRST) as service:
        yield service


def client_of(service: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=20)


def asked(xargs: dict[str, Any] = NOTHING, **given: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": "Why?", "temperature": 0, "extra_body": {"vllm_xargs": xargs}} | given


def create(service: Running, xargs: dict[str, Any] = NOTHING, **given: Any) -> Any:
    return client_of(service).responses.create(**asked(xargs, **given))


def checked(document: dict[str, Any]) -> Response:
    """The response, every field of which the client knows, but for ours and ``store``."""
    found = Response.model_validate_json(json.dumps(document), strict=True)
    assert set(found.model_extra or {}) == {"store", "hallutracer"}
    for item in found.output:
        assert not item.model_extra
        assert not any(part.model_extra for part in getattr(item, "content", ()))
    assert found.usage is None or not found.usage.model_extra
    return found


def streamed(service: Running, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked."""
    given = {"model": "scripted", "input": "Why?", "temperature": 0, "stream": True} | body
    events = []
    for place, (name, event) in enumerate(sse(httpx.post(service.url + RESPONSES_ROUTE, json=given).text)):
        assert (name, event["sequence_number"]) == (event["type"], place)
        known = EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)
        assert set(known.model_extra) <= {"hallutracer"}
        if "response" in event:
            checked(event["response"])
        events.append(event)
    return events


def test_an_answer_is_a_response(service: Running) -> None:
    raw = client_of(service).responses.with_raw_response.create(**asked(instructions="Be brief.", max_output_tokens=50))
    found, document = raw.parse(), json.loads(raw.text)
    checked(document)
    assert (found.output_text, found.status, found.incomplete_details) == ("It is so.", "completed", None)
    assert (found.id, found.output[0].id) == (f"resp_{raw.headers['x-request-id']}", f"msg_{found.id[5:]}")
    assert (found.instructions, found.max_output_tokens, found.temperature) == ("Be brief.", 50, 0)
    assert (document["store"], document["background"], found.previous_response_id) == (False, False, None)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    score = service.post(messages=messages, threshold=1.0, generate={}).json()
    used = found.usage
    assert (used.input_tokens, used.output_tokens, used.total_tokens) == (
        score["usage"]["prompt_tokens"], 9, score["usage"]["total_tokens"],
    )  # fmt: skip
    [row] = document["hallutracer"]["data"]
    assert row == {name: value for name, value in score["data"][0].items() if name != "completion"}
    assert float(raw.headers["x-hallutracer-risk"]) == pytest.approx(row["risk"], abs=1e-6)
    assert raw.headers["x-hallutracer-decision"] == "continue"


@pytest.mark.parametrize("policy", ["gate", "block"])
def test_a_withheld_answer_is_an_incomplete_response(service: Running, policy: str) -> None:
    document = json.loads(
        client_of(service).responses.with_raw_response.create(**asked(EVERYTHING | {"hallutracer_policy": policy})).text
    )
    found = checked(document)
    assert (found.status, found.output_text, found.usage and found.usage.output_tokens) == ("incomplete", "", 0)
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "content_filter"
    refusals = [part.to_dict() for item in found.output for part in item.content]  # type: ignore[union-attr]
    assert refusals == ([{"type": "refusal", "refusal": "I am not sure."}] if policy == "gate" else [])


def test_the_events_of_an_answer_and_of_a_refusal(service: Running) -> None:
    events = streamed(service, vllm_xargs=NOTHING)
    kinds = (*BEGIN, *ITEM, *TEXT, "response.output_text.done", *END, "response.completed")
    assert tuple(event["type"] for event in events) == kinds
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert "".join(event["delta"] for event in events if event["type"] == TEXT[0]) == events[-4]["text"] == "It is so."
    assert events[-2]["item"] == last["output"][0]
    assert events[-3]["part"] == last["output"][0]["content"][0]
    assert len({event["item_id"] for event in events if "item_id" in event} | {last["output"][0]["id"]}) == 1
    assert first["hallutracer"]["data"][0]["decision"] == "continue"
    withheld = streamed(service, vllm_xargs=EVERYTHING)
    refusal = ("response.refusal.delta", "response.refusal.done")
    assert tuple(event["type"] for event in withheld) == (*BEGIN, *ITEM, *refusal, *END, "response.incomplete")
    assert (withheld[4]["delta"], withheld[5]["refusal"]) == ("I am not sure.",) * 2
    blocked = streamed(service, vllm_xargs=EVERYTHING | {"hallutracer_policy": "block"})
    assert tuple(event["type"] for event in blocked) == (*BEGIN, "response.incomplete")
    cut = streamed(service, vllm_xargs=NOTHING, max_output_tokens=4)
    assert (cut[-1]["type"], cut[-1]["response"]["incomplete_details"]) == (
        "response.incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip


def test_streams_of_the_client_sync_and_async(service: Running) -> None:
    events = list(create(service, stream=True))
    assert [event.type for event in events][-1] == "response.completed"
    assert events[-1].response.output_text == "It is so."
    given = asked()
    with client_of(service).responses.stream(**given) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "It is so."
        assert stream.get_final_response().output_text == "It is so."
    with client_of(service).responses.stream(**asked(EVERYTHING)) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"

    async def ask() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.responses.create(**given)
            kinds = [event.type async for event in await client.responses.create(**given, stream=True)]
            return whole.output_text, kinds

    text, kinds = asyncio.run(ask())
    assert (text, kinds) == ("It is so.", [event.type for event in events])


def test_a_stream_that_breaks_off_raises(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(service.engine, "wait", wait)
    with pytest.raises(openai.APIError, match="the engine failed") as error:
        list(create(service, stream=True))
    assert error.value.code == "engine_error"


def test_inputs_are_read_as_the_conversation_that_they_are(service: Running) -> None:
    asks, says = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is so."}
    refused = {"role": "assistant", "content": "I am not sure."}
    system = {"role": "system", "content": "Be brief."}
    answer, refusal = create(service).output, create(service, EVERYTHING).output
    parts = [{"type": "input_text", "text": "W"}, {"type": "input_text", "text": "hy?"}]
    link = {"type": "url_citation", "url": "x", "title": "x", "start_index": 0, "end_index": 1}
    cited = {"type": "output_text", "text": "It is so.", "annotations": [link], "logprobs": None}
    earlier = {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1", "phase": None}
    for given, same in (
        ({"input": "Why?"}, [asks]), ({"input": [asks]}, [asks]), ({"input": [{"type": "message", **asks}]}, [asks]),
        ({"input": [{"role": "user", "content": parts}]}, [asks]),
        ({"input": "Why?", "instructions": "Be brief."}, [system, asks]),
        ({"input": [{"role": "developer", "content": "Be brief."}, asks]}, [system, asks]),
        ({"input": [asks, *answer, asks]}, [asks, says, asks]),
        ({"input": [asks, *refusal, asks]}, [asks, refused, asks]),
        ({"input": [asks, earlier | {"content": [cited]}, asks]}, [asks, says, asks]),
        ({"input": [asks, *answer]}, [asks, says]),
    ):  # fmt: skip
        row = service.post(messages=same, threshold=1.0, generate={}).json()["data"][0]
        [found] = create(service, **given).model_extra["hallutracer"]["data"]
        assert found["risk"] == row["risk"], given


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"previous_response_id": "resp_1"}, "'previous_response_id'"), ({"conversation": "conv_1"}, "'conversation'"),
        ({"background": True}, "'background'"), ({"prompt": {"id": "p"}}, "'prompt'"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": []}]}, "'namespace'"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "text"}}]}, "'custom'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"), ({"tool_choice": "required"}, "'tool_choice'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"), ({"truncation": "auto"}, "'truncation'"),
        ({"include": ["message.output_text.logprobs"]}, "'include'"), ({"top_logprobs": 3}, "'top_logprobs'"),
        ({"include": ["answer_risk"]}, "'include'"), ({"reasoning": {"budget": 3}}, "budget"),
        ({"prompt_cache_options": {"prewarm": True}}, "'prewarm'"), ({"max_output_tokens": 10**6}, "at most"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"input": []}, "input"), ({"input": None}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "beside its thoughts"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"input": [{"type": "web_search_call", "id": "1", "status": "completed"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "refusal": "x"}]}]}, "content.0"),
        ({"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x", "text": "y"}]}]}, "content.0"),
        ({"input": [{"role": "user", "content": []}]}, "content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role"),
        ({"input": [{"role": "user", "content": "x", "tool_calls": []}]}, "tool_calls"),
        ({"extra_body": {"hallutracer_policy": "observe"}}, "hallutracer_policy"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens"), ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"vllm_xargs": {"hallutracer_polcy": "gate"}}}, "hallutracer_polcy"),
        ({"extra_body": {"temprature": 0}}, "temprature"),
        ({"stream_options": {"include_usage": True}}, "include_usage"),
    ],
)  # fmt: skip
def test_what_this_service_would_have_to_keep_or_do_is_refused_by_name(
    service: Running, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client_of(service).responses.create(**{"model": "scripted", "input": "Why?"} | given)
    assert named in str(refused.value.body), refused.value.body


def test_what_changes_nothing_is_taken(service: Running) -> None:
    same: dict[str, Any] = {
        "store": True, "background": False, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "user": "me", "service_tier": "auto",
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"},
        "previous_response_id": None, "prompt_cache_key": "a", "prompt_cache_options": {"mode": "implicit"},
        "top_logprobs": 0, "max_tool_calls": 3, "safety_identifier": "a",
    }  # fmt: skip
    found = create(service, **same)
    assert (found.output_text, found.model_extra["store"]) == ("It is so.", False)
    stream = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert list(create(service, **stream))[-1].response.output_text == "It is so."


def test_the_message_as_text_for_clients_that_show_nothing_else(tmp_path: Path) -> None:
    with running(tmp_path, policies=FIRST, message_in_content=True) as service:
        found = create(service, EVERYTHING)
        assert (found.status, found.output_text) == ("incomplete", "I am not sure.")
        assert [part.type for part in found.output[0].content] == ["output_text", "refusal"]
        events = streamed(service, vllm_xargs=EVERYTHING)
        assert events[-1]["response"]["output"][0]["content"] == found.to_dict()["output"][0]["content"]
        assert [event["content_index"] for event in events if "content_index" in event] == [0] * 4 + [1] * 4
        said = [{"role": "user", "content": "Why?"}, *found.output, {"role": "user", "content": "Who wrote Emma?"}]
        assert create(service, input=said).status == "completed"


def test_errors_are_those_that_the_client_knows(service: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="is not loaded"):
        create(service, model="other")
    with pytest.raises(openai.APIStatusError, match="never truncated"):
        create(service, input="a" * 5000)
