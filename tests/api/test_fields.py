"""Fields of OpenAI's and Anthropic's requests: what they are read as.  Which are refused:
test_refusals.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.test_protocols import EVERYTHING, FIRST, NOTHING
from tests.kit.api import RESPONSES, WIRES, note_of, request_of, send_to
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
