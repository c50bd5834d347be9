"""Fields of OpenAI's and Anthropic's requests: what they are read as.  Which are refused:
test_refusals.py.

``alike.json`` has groups of requests that are read alike: ``requests`` by their routes, and the
first of them ``with`` further fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_protocols import EVERYTHING, FIRST, NOTHING
from tests.kit.api import RESPONSES, WIRES, note_of, request_of, send_to, stream_events
from tests.running import App, app_of_module

GROUPS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("alike.json").read_text())
USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is so."}
REFUSAL = {"role": "assistant", "content": "I am not sure."}
Fields = dict[str, Any]


app = app_of_module(policies=FIRST, policy="observe", takes_tools=True)


def reading_of(app: App, route: str, body: Fields) -> Any:
    """What a request was read as: its judged prompt, or its number of tokens."""
    response = app.client.post(route, json=body)
    assert response.status_code == 200, (body, response.text)
    if body.get("stream"):
        document = stream_events(response.text)[0]["response"]
    else:
        document = response.json()
    if "input_tokens" in document:
        return document
    [row] = note_of(document)["data"]
    return {name: row[name] for name in row.keys() - {"completion"}}


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_requests_of_a_group_are_read_alike(app: App, number: int) -> None:
    """Other forms of a conversation, fields that change nothing, and what clients keep of earlier
    turns."""
    [(route, body), *others] = GROUPS[number]["requests"]
    first = reading_of(app, route, body)
    for field in GROUPS[number].get("with", []):
        assert reading_of(app, route, body | field) == first, field
    for other_route, other in others:
        assert reading_of(app, other_route, other) == first, other


def answer_turns(wire: str, document: Fields) -> list[Any]:
    """The turns that an answer becomes, as each client sends it back: LiteLLM in its own form."""
    if wire == "chat":
        message = document["choices"][0]["message"]
        litellm = {"role": "assistant", "content": message["content"], "tool_calls": None}
        fields = {"provider_specific_fields": {"refusal": message["refusal"]}}
        return [[message], [litellm | fields]]
    if wire == "responses":
        return [document["output"]]
    return [[{"role": "assistant", "content": document["content"]}]]


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
def test_an_answer_that_comes_back_is_read(app: App, wire: str) -> None:
    for chosen, turn in ((NOTHING, ANSWER), (EVERYTHING | {"policy": "gate"}, REFUSAL)):
        document = send_to(app, WIRES[wire], messages=[USER], chosen=chosen).json()
        plain = reading_of(app, "/score", {"messages": [USER, turn, USER]})
        for turns in answer_turns(wire, document):
            body = request_of(WIRES[wire], [USER, *turns, USER])
            assert reading_of(app, WIRES[wire].route, body) == plain


def test_what_a_response_repeats_of_its_request(app: App) -> None:
    fields = {"instructions": "Be brief.", "store": True}
    document = send_to(app, RESPONSES, chosen=NOTHING, **fields).json()
    repeated = {name: document[name] for name in ("instructions", "store", "max_output_tokens")}
    assert repeated == fields | {"store": False, "max_output_tokens": 40}
    # A turn as it comes from a service that has a refusal's message as text, too.
    parts = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "a"}]
    earlier = {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1"}
    turns = [USER, earlier | {"phase": None, "content": parts}, USER]
    send_to(app, RESPONSES, messages=turns, chosen=NOTHING)
