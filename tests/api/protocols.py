"""One question in each protocol that answers conversations, and what comes back, in words that all three share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from anthropic import Anthropic
from openai import OpenAI

from service.access.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE
from tests.running import App, Running

ROUTES = (CHAT_ROUTE, RESPONSES_ROUTE, MESSAGES_ROUTE)
NEW = (RESPONSES_ROUTE, MESSAGES_ROUTE)
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
# Each protocol's words for how an answer ended, in chat's.
_ENDS = {
    "completed": "stop", "max_output_tokens": "length", "end_turn": "stop", "stop_sequence": "stop",
    "max_tokens": "length", "refusal": "content_filter",
}  # fmt: skip


def body_of(
    route: str, messages: list[dict[str, Any]] | str = ASKED, xargs: dict[str, Any] | None = None, tokens: int = 40,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """A request that asks greedily."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    given: dict[str, Any] = {"model": "scripted", "temperature": 0, "vllm_xargs": xargs}
    given |= {"input": turns} if route == RESPONSES_ROUTE else {"messages": turns}
    given |= {"max_output_tokens" if route == RESPONSES_ROUTE else "max_tokens": tokens}
    return given | more


@dataclass
class Answer:
    """What was said; ``reason`` in chat's words."""

    text: str
    refusal: str | None
    reason: str
    first: dict[str, Any]  # the note that came before the answer, or with it
    last: dict[str, Any] | None  # the note behind a streamed answer
    running: list[dict[str, Any]]  # the notes between
    raw: str


def ask(service: Running | App, route: str, stream: bool, *given: Any, **more: Any) -> Answer:
    """Ask and read."""
    response = post(service, route, body_of(route, *given, stream=stream, **more))
    assert response.status_code == 200, response.text
    return (read_stream if stream else read)(route, response.text)


def post(service: Running | App, route: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    if isinstance(service, Running):
        return httpx.post(f"{service.url}{route}", json=body, timeout=30, headers=headers)
    return service.client.post(route, json=body, headers=headers)


def sse(text: str) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Each event's name and its data."""
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines and lines["data"] != "[DONE]":
            assert set(lines) <= {"event", "data"}
            yield lines.get("event"), json.loads(lines["data"])


def read(route: str, text: str) -> Answer:
    """A whole answer."""
    found = json.loads(text)
    if route == CHAT_ROUTE:
        choice = found["choices"][0]
        said, refusal, reason = choice["message"]["content"], choice["message"]["refusal"], choice["finish_reason"]
    elif route == RESPONSES_ROUTE:
        said, refusal, reason = _of_response(found)
    else:
        said, refusal, reason = _of_message(found["content"], found["stop_reason"])
    return Answer(said or "", refusal, _ENDS.get(reason, reason), found["hallutracer"], None, [], text)


def _of_response(found: dict[str, Any]) -> tuple[str, str | None, str]:
    parts = [part for item in found["output"] for part in item["content"]]
    reason = (found["incomplete_details"] or {}).get("reason", found["status"])
    refusal = next((part["refusal"] for part in parts if part["type"] == "refusal"), None)
    return "".join(part.get("text", "") for part in parts), refusal, reason


def _of_message(content: list[dict[str, Any]], reason: str) -> tuple[str, str | None, str]:
    """A message has no place for a refusal: it is the text."""
    text = "".join(block["text"] for block in content)
    return text, None, reason


def read_stream(route: str, text: str) -> Answer:
    """A streamed answer, put together from its pieces."""
    told = list(sse(text))
    events = [event for _, event in told]
    assert not any("error" in event for event in events), text
    notes = [event["hallutracer"] for event in events if "hallutracer" in event]
    if route == CHAT_ROUTE:
        choices = [event["choices"][0] for event in events if event["choices"]]
        said = "".join(choice["delta"].get("content") or "" for choice in choices)
        refusal = next((found for one in choices if (found := one["delta"].get("refusal"))), None)
        reason, first = choices[-1]["finish_reason"], notes.pop(0)
        last = notes.pop() if notes else None
        return Answer(said, refusal, reason, first, last, notes, text)
    assert all(name == event["type"] for name, event in told)
    if route == RESPONSES_ROUTE:
        first, final = events[0]["response"]["hallutracer"], events[-1]["response"]
        said, refusal, reason = _of_response(final)
        pieces = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(pieces) == said
        return Answer(said, refusal, _ENDS.get(reason, reason), first, final["hallutracer"], notes, text)
    said = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    end = next(event for event in events if event["type"] == "message_delta")
    reason, first = end["delta"]["stop_reason"], events[0]["message"]["hallutracer"]
    last = notes.pop() if "hallutracer" in end else None
    return Answer(said, None, _ENDS.get(reason, reason), first, last, notes, text)


def in_openais_client(
    url: str, model: str, text: str, stream: bool, **xargs: Any
) -> tuple[str, str | None, str | None, int, Any]:
    """The text of a response, its refusal, why it is incomplete, its tokens, the risk."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    more: dict[str, Any] = {"extra_body": {"vllm_xargs": xargs}}
    asked = more | {"model": model, "input": text, "max_output_tokens": 40, "temperature": 0.0}
    if stream:
        with client.responses.stream(**asked) as events:
            seen = list(events)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        found = seen[-1].response  # type: ignore[union-attr]
        pieces = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
        assert pieces == found.output_text
        refused = "".join(event.delta for event in seen if event.type == "response.refusal.delta")
        assert seen[0].response.model_extra["hallutracer"]["data"]  # type: ignore[union-attr,index]
    else:
        found, refused = client.responses.create(**asked), ""
    parts = [part for item in found.output if item.type == "message" for part in item.content]
    refusal = next((part.refusal for part in parts if part.type == "refusal"), None)
    assert not stream or refused == (refusal or "")
    why = None if found.incomplete_details is None else found.incomplete_details.reason
    assert found.usage is not None
    assert found.model_extra is not None
    return found.output_text, refusal, why, found.usage.output_tokens, found.model_extra["hallutracer"]


def in_anthropics_client(
    url: str, model: str, text: str, stream: bool, **xargs: Any
) -> tuple[str, str | None, int, Any]:
    """The text of a message, its stop reason, its tokens, the risk."""
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    more = {"temperature": 0.0, "vllm_xargs": xargs}
    turns = [{"role": "user", "content": text}]
    asked: dict[str, Any] = {"model": model, "max_tokens": 40, "messages": turns, "extra_body": more}
    if stream:
        with client.messages.stream(**asked) as events:
            pieces = "".join(events.text_stream)
            found = events.get_final_message()
        assert pieces == "".join(block.text for block in found.content if block.type == "text")
    else:
        found = client.messages.create(**asked)
    said = "".join(block.text for block in found.content if block.type == "text")
    assert found.model_extra is not None
    return said, found.stop_reason, found.usage.output_tokens, found.model_extra["hallutracer"]
