"""Fields of OpenAI's and Anthropic's requests: what they are read as.  Which are refused:
test_refusals.py.

``alike.json`` has groups of requests that are read alike: ``requests`` by their routes, and the
first of them ``with`` further fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.api import (
    CHAT,
    CHATS,
    EVERYTHING,
    NOTHING,
    POLICIES,
    REFUSAL,
    RESPONSES,
    Wire,
    note_of,
    request_of,
    send_to,
    stream_events,
    whole,
)
from tests.running import App, app_of_module

GROUPS: list[dict[str, Any]] = whole(json.loads(Path(__file__).with_name("alike.json").read_text()))
USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is so."}
REFUSED = {"role": "assistant", "content": REFUSAL}
Fields = dict[str, Any]


app = app_of_module(policies=POLICIES, policy="observe", takes_tools=True)


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
    """Other forms of a conversation, fields that change nothing, texts that end an answer as many
    and as long as are taken, and what clients keep of earlier turns."""
    [(route, body), *others] = GROUPS[number]["requests"]
    first = reading_of(app, route, body)
    for field in GROUPS[number].get("with", []):
        assert reading_of(app, route, body | field) == first, field
    for other_route, other in others:
        assert reading_of(app, other_route, other) == first, other


def answer_turns(wire: Wire, document: Fields) -> list[Any]:
    """The turns that an answer becomes, as each client sends it back."""
    if wire is CHAT:
        return [document["choices"][0]["message"]]
    if wire is RESPONSES:
        return list(document["output"])
    return [{"role": "assistant", "content": document["content"]}]


def of_litellm(message: Fields) -> Fields:
    """A chat's message in its own form."""
    refusal = {"provider_specific_fields": {"refusal": message["refusal"]}}
    return {"role": "assistant", "content": message["content"], "tool_calls": None} | refusal


@pytest.mark.parametrize("wire", CHATS.values(), ids=CHATS)
def test_an_answer_that_comes_back_is_read(app: App, wire: Wire) -> None:
    for chosen, turn in ((NOTHING, ANSWER), (EVERYTHING | {"policy": "gate"}, REFUSED)):
        document = send_to(app, wire, messages=[USER], chosen=chosen).json()
        plain = reading_of(app, "/score", {"messages": [USER, turn, USER]})
        turns = answer_turns(wire, document)
        for sent in (turns, *([of_litellm(turns[0])] for _ in range(wire is CHAT))):
            body = request_of(wire, [USER, *sent, USER])
            assert reading_of(app, wire.route, body) == plain


def test_what_a_response_repeats_of_its_request(app: App) -> None:
    fields = {"instructions": "Be brief.", "store": True}
    document = send_to(app, RESPONSES, chosen=NOTHING, **fields).json()
    repeated = {name: document[name] for name in ("instructions", "store", "max_output_tokens")}
    assert repeated == fields | {"store": False, "max_output_tokens": 40}
