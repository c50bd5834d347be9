"""Fields of OpenAI's and Anthropic's requests: what they are read as, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.test_protocols import EVERYTHING, FIRST, NOTHING
from tests.kit.api import RESPONSES, WIRES, note_of, refusal_of, request_of, send_to
from tests.running import App

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is so."}
REFUSAL = {"role": "assistant", "content": "I am not sure."}
BRIEF = {"role": "system", "content": "Be brief."}
Fields = dict[str, Any]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with App(tmp_path_factory.mktemp("app"), policies=FIRST).started() as app:
        yield app


# --- conversations ---


def texts(kind: str, *pieces: str, **fields: Any) -> list[Fields]:
    return [{"type": kind, "text": piece} | fields for piece in pieces]


def input_of(content: Any, role: str = "user", **fields: Any) -> Fields:
    return {"input": [{"role": role, "content": content} | fields]}


LINK = {"type": "url_citation", "url": "x", "title": "x", "start_index": 0, "end_index": 1}
CITED = {"type": "output_text", "text": "It is so.", "annotations": [LINK], "logprobs": None}
EARLIER = {
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "id": "msg_1",
    "phase": None,
}
BOTH_PARTS = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "a"}]
CACHED = {"cache_control": {"type": "ephemeral"}}
# A request's fields, and the plain conversation that they are.
CONVERSATIONS: dict[str, list[tuple[Fields, list[Fields]]]] = {
    "chat": [
        (
            {"messages": [USER, {"role": "developer", "content": texts("text", "Be ", "brief.")}]},
            [USER, BRIEF],
        ),
    ],
    "responses": [
        ({"input": "Why?"}, [USER]),
        ({"input": [{"type": "message", **USER}]}, [USER]),
        (input_of(texts("input_text", "W", "hy?")), [USER]),
        ({"input": "Why?", "instructions": "Be brief."}, [BRIEF, USER]),
        ({"input": [{"role": "developer", "content": "Be brief."}, USER]}, [BRIEF, USER]),
        ({"input": [USER, EARLIER | {"content": [CITED]}, USER]}, [USER, ANSWER, USER]),
    ],
    "messages": [
        ({"messages": [{"role": "user", "content": texts("text", "W", "hy?", **CACHED)}]}, [USER]),
        ({"system": "Be brief."}, [BRIEF, USER]),
        ({"system": texts("text", "Be ", "brief.")}, [BRIEF, USER]),
        ({"messages": [BRIEF, USER]}, [BRIEF, USER]),
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
    ],
}


def check_read_as(app: App, wire: str, fields: Fields, same: list[Fields]) -> None:
    """The fields have the risk of a plain conversation."""
    [row] = app.client.post(
        "/score",
        json={"messages": same, "threshold": 1.0, "generate": {}},
    ).json()["data"]
    body = request_of(WIRES[wire], [USER], chosen=NOTHING) | fields
    response = app.client.post(WIRES[wire].route, json=body)
    assert response.status_code == 200, response.text
    assert note_of(response.json())["data"][0]["risk"] == row["risk"], fields


@pytest.mark.parametrize("wire", CONVERSATIONS)
def test_a_conversation_is_read_as_what_it_is(app: App, wire: str) -> None:
    for fields, same in CONVERSATIONS[wire]:
        check_read_as(app, wire, fields, same)


def answer_turns(wire: str, document: Fields) -> list[Any]:
    """The turns that an answer becomes, as each client sends it back: LiteLLM in its own form."""
    if wire == "chat":
        message = document["choices"][0]["message"]
        litellm = {"role": "assistant", "content": message["content"], "tool_calls": None}
        return [
            [message],
            [litellm | {"provider_specific_fields": {"refusal": message["refusal"]}}],
        ]
    if wire == "responses":
        return [document["output"]]
    return [[{"role": "assistant", "content": document["content"]}]]


@pytest.mark.parametrize("wire", CONVERSATIONS)
def test_an_answer_that_comes_back_is_read(app: App, wire: str) -> None:
    for chosen, turn in ((NOTHING, ANSWER), (EVERYTHING, REFUSAL)):
        document = send_to(app, WIRES[wire], messages=[USER], chosen=chosen).json()
        for turns in answer_turns(wire, document):
            conversation = {WIRES[wire].messages: [USER, *turns, USER]}
            check_read_as(app, wire, conversation, [USER, turn, USER])
    if wire == "responses":  # as it comes from a service that has the message as text, too
        send_to(
            app,
            RESPONSES,
            messages=[USER, EARLIER | {"content": BOTH_PARTS}, USER],
            chosen=NOTHING,
        )


# --- what is refused ---


def user(content: Any, **fields: Any) -> Fields:
    return {"messages": [{"role": "user", "content": content} | fields]}


def assistant(content: Any = None, **fields: Any) -> Fields:
    return {"messages": [{"role": "assistant", "content": content} | fields]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
ENABLED = {"type": "enabled", "budget_tokens": 1024}
UNKNOWN_CHOICE = {"vllm_xargs": {"hallutracer_polcy": "gate"}}
OWN_FIELDS = [
    ({"hallutracer_policy": "observe"}, "hallutracer_policy"),
    (UNKNOWN_CHOICE, "hallutracer_polcy"),
    ({"temprature": 0}, "temprature"),
]
REFUSED: dict[str, list[tuple[Fields, str]]] = {
    "chat": [
        *OWN_FIELDS,
        ({"presence_penalty": 0.5}, "'presence_penalty'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools'"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"max_tokens": 10**6}, "at most"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages"),
        (user(None), "content"),
        (user("x", provider_specific_fields={}), "provider_specific_fields"),
        (assistant(provider_specific_fields={"refusal": 4}), "refusal"),
        (assistant(provider_specific_fields={}), "content"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"vllm_xargs": {"hallutracer_threshold": "1"}}, "hallutracer_threshold"),
    ],
    "responses": [
        *OWN_FIELDS,
        ({"previous_response_id": "resp_1"}, "'previous_response_id'"),
        ({"conversation": "conv_1"}, "'conversation'"),
        ({"background": True}, "'background'"),
        ({"prompt": {"id": "p"}}, "'prompt'"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": []}]}, "'namespace'"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "text"}}]}, "'custom'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"),
        ({"tool_choice": "required"}, "'tool_choice'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "'include'"),
        ({"include": ["answer_risk"]}, "'include'"),
        ({"top_logprobs": 3}, "'top_logprobs'"),
        ({"reasoning": {"budget": 3}}, "budget"),
        ({"prompt_cache_options": {"prewarm": True}}, "'prewarm'"),
        ({"max_output_tokens": 10**6}, "at most"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": None}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "beside its thoughts"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        (
            {"input": [{"type": "web_search_call", "id": "1", "status": "completed"}]},
            "input.0.type",
        ),
        (input_of([{"type": "input_image", "image_url": "x"}]), "content.0.type"),
        (input_of([{"type": "input_file", "file_id": "x"}]), "content.0.type"),
        (input_of([{"type": "input_text", "refusal": "x"}]), "content.0"),
        (input_of([{"type": "refusal", "refusal": "x", "text": "y"}]), "content.0"),
        (input_of([]), "content"),
        (input_of("x", "tool"), "role"),
        (input_of("x", tool_calls=[]), "tool_calls"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_usage": True}}, "include_usage"),
    ],
    "messages": [
        *OWN_FIELDS,
        ({"tools": [{"name": "f", "input_schema": {}}]}, "'tools'"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
        ({"thinking": ENABLED}, "'thinking'"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "'thinking'"),
        ({"container": "c"}, "'container'"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
        ({"output_config": {"format": [1]}}, "output_config.format"),
        ({"output_format": {"type": "json_object"}}, "output_format"),
        ({"top_k": 5}, "'top_k'"),
        ({"mcp_servers": [{"type": "url"}]}, "'mcp_servers'"),
        ({"context_management": {}}, "'context_management'"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "'context_management'",
        ),
        (user([IMAGE]), "content.0.type"),
        (user([{"type": "document", "source": {}}]), "content.0.type"),
        (user([RESULT]), "content.0.type"),
        (assistant([THOUGHT]), "beside its thoughts"),
        (user([THOUGHT, {"type": "text", "text": "x"}]), "role 'assistant'"),
        (user([]), "content"),
        (user("x", name="y"), "name"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "role"),
        ({"system": []}, "system"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": ["a"]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": "x"}, "prompt"),
    ],
}


@pytest.mark.parametrize("wire", REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(app: App, wire: str) -> None:
    for fields, name in REFUSED[wire]:
        body = request_of(WIRES[wire], [USER]) | fields
        error = refusal_of(app, WIRES[wire].route, body, WIRES[wire].refuses)
        assert error["type"] == "invalid_request_error"
        assert name in str(error), (fields, error)


# --- what changes nothing ---

CLEARED = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
SAME: dict[str, list[Fields]] = {
    "chat": [
        {
            "n": 1,
            "presence_penalty": 0,
            "logit_bias": {},
            "logprobs": False,
            "tools": None,
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "user": "me",
            "metadata": {"a": "b"},
            "store": False,
        },
    ],
    "responses": [
        {
            "store": True,
            "background": False,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
            "user": "me",
            "service_tier": "auto",
            "truncation": "disabled",
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "previous_response_id": None,
            "prompt_cache_key": "a",
            "prompt_cache_options": {"mode": "implicit"},
            "top_logprobs": 0,
            "max_tool_calls": 3,
            "safety_identifier": "a",
        },
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    "messages": [
        {
            "metadata": {"user_id": "me"},
            "service_tier": "auto",
            "tools": [],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "top_k": None,
            "cache_control": {"type": "ephemeral"},
            "container": None,
            "output_config": {"effort": "low"},
            "stop_sequences": [],
            "speed": "standard",
            "system": None,
        },
        {"thinking": {"type": "adaptive"}, "context_management": CLEARED},
        {"thinking": {"type": "adaptive", "display": "summarized"}, "context_management": CLEARED},
    ],
}


@pytest.mark.parametrize("wire", SAME)
def test_what_changes_nothing_is_taken(app: App, wire: str) -> None:
    [row] = note_of(send_to(app, WIRES[wire], messages=[USER], chosen=NOTHING).json())["data"]
    for fields in SAME[wire]:
        response = send_to(app, WIRES[wire], messages=[USER], chosen=NOTHING, **fields)
        assert "It is so." in response.text
        if "stream" not in fields:
            assert note_of(response.json())["data"] == [row]
    if wire == "responses":
        repeated = send_to(
            app,
            RESPONSES,
            chosen=NOTHING,
            instructions="Be brief.",
            store=True,
        ).json()
        assert (repeated["instructions"], repeated["store"], repeated["max_output_tokens"]) == (
            "Be brief.",
            False,
            40,
        )
