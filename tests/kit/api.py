"""Requests in every protocol, bundles that read answers, documents of bodies and streams."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from probes_store.bundle import Bundle
from service.access.routes import (
    CHAT_ROUTE,
    MESSAGES_ROUTE,
    RESPONSES_ROUTE,
    SCORE_ROUTES,
    TEXT_ROUTE,
)
from service.annexes.guardrails import (
    CLASSIFY_ROUTE,
    CONTENTS_DETECTOR,
    LITELLM_ROUTE,
    MESSAGES_DETECTOR,
)
from service.policies.guard import Action, Policy, Upstream
from tests.kit.bundles import ANSWER, write_bundle
from tests.matching import answers_read, matching_draft, with_answer
from tests.running import App
from tests.scripted_engine import ScriptedEngine

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
# Each tool's fields but its schema: the strict flag says nothing to the model.
FIND = {"name": "find", "description": "Looks it up."}


@dataclass(frozen=True, eq=False)
class Wire:
    """How a protocol spells a request."""

    route: str
    messages: str = "messages"  # the field of the conversation
    tokens: str = "max_tokens"
    stop: str | None = "stop"
    tools: tuple[dict[str, Any], ...] = ()  # "find" and "add"; none where it takes no tools
    no_tools: Any = "none"  # the choice by which the model is told of none
    one_call: Mapping[str, Any] | None = None  # fields: one call at most
    refuses: int = 422  # the status of a body that is wrong


SCORE = Wire(SCORE_ROUTES[0])
TEXT = Wire(TEXT_ROUTE)
CHAT = Wire(
    CHAT_ROUTE,
    tools=(
        {"type": "function", "function": FIND | {"parameters": SCHEMA}},
        {"type": "function", "function": {"name": "add", "strict": True}},
    ),
    one_call={"parallel_tool_calls": False},
)
RESPONSES = Wire(
    RESPONSES_ROUTE,
    messages="input",
    tokens="max_output_tokens",
    stop=None,
    tools=(
        {"type": "function", "parameters": SCHEMA} | FIND,
        {"type": "function", "name": "add", "strict": True},
    ),
    one_call={"parallel_tool_calls": False},
    refuses=400,
)
MESSAGES = Wire(
    MESSAGES_ROUTE,
    stop="stop_sequences",
    tools=(FIND | {"input_schema": SCHEMA}, {"name": "add", "input_schema": {"type": "object"}}),
    no_tools={"type": "none"},
    one_call={"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    refuses=400,
)
CHATS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
WIRES = {"score": SCORE, "chat": CHAT, "text": TEXT, "responses": RESPONSES, "messages": MESSAGES}
WITH_TOOLS = {name: wire for name, wire in WIRES.items() if wire.tools}
EVERYTHING, NOTHING = {"threshold": 0.0}, {"threshold": 1.0}  # what is withheld
REFUSAL = "I am not sure."
POLICIES = {
    "gate": Policy("gate", Action.ABSTAIN, message=REFUSAL),
    "warn": Policy("warn", Action.ANNOTATE, 0.0, "Take care (risk {risk})."),
    "fetch": Policy("fetch", Action.RETRIEVE, 0.0, "Fetch a passage."),
    "send": Policy("send", Action.FALLBACK, 1.0, upstream=Upstream("http://127.0.0.1:9/v1", "x")),
}


def request_of(
    wire: Wire,
    messages: Sequence[Mapping[str, Any]] = QUESTION,
    *,
    tokens: int = 40,
    stop: Sequence[str] = (),
    stream: bool = False,
    chosen: Mapping[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A greedy request; ``chosen``: policy, threshold, bundle and so on, by plain names."""
    chosen = chosen or {}
    if wire is SCORE:
        generate = {"max_tokens": tokens, "stop": list(stop)}
        return {"messages": messages, "generate": generate, "stream": stream, **chosen, **fields}
    body: dict[str, Any] = {
        "model": "scripted",
        "temperature": 0,
        "stream": stream,
        wire.tokens: tokens,
    }
    body["vllm_xargs"] = {f"hallutracer_{name}": value for name, value in chosen.items()}
    body |= {"prompt": messages[-1]["content"]} if wire is TEXT else {wire.messages: messages}
    return body | ({wire.stop: stop} if wire.stop and stop else {}) | fields


def bodies_by_route(text: str) -> dict[str, dict[str, Any]]:
    """One prompt, on each route that reads prompts."""
    messages = [{"role": "user", "content": text}]
    return {
        **{wire.route: request_of(wire, messages) for wire in WIRES.values()},
        CLASSIFY_ROUTE: {"inputs": text},
        LITELLM_ROUTE: {"input_type": "request", "texts": [text]},
        CONTENTS_DETECTOR: {"contents": [text]},
        MESSAGES_DETECTOR: {"messages": messages},
    }


def send_to(
    app: App,
    wire: Wire,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> httpx.Response:
    """Ask by ``request_of``'s options."""
    response = app.client.post(wire.route, json=request_of(wire, **options), headers=headers)
    assert response.status_code == status, response.text
    return response


def note_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Bundle, policy and risks of a whole answer in any protocol."""
    note: dict[str, Any] = document.get("hallutracer") or dict(document)
    return note


def check_error(response: httpx.Response, status: int, **fields: str) -> dict[str, Any]:
    """The error of a response that has this status; it has these fields."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.items() >= fields.items(), error
    return error


def refusal_of(app: App, wire: Wire, body: Mapping[str, Any]) -> str:
    """The words with which a body that is wrong is refused."""
    error = check_error(app.client.post(wire.route, json=body), wire.refuses)
    return str(error["message"])


def whole(value: Any) -> Any:
    """A request of a file, with each text and list that it repeats, ``{"times": [it, count]}``, and
    each text of several parts, ``{"join": [parts]}``."""
    if isinstance(value, list):
        return [whole(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"times"}:
        item, count = value["times"]
        return whole(item) * count
    if value.keys() == {"join"}:
        return "".join(map(whole, value["join"]))
    return {name: whole(item) for name, item in value.items()}


def stream_events(text: str) -> list[Any]:
    """The documents of a stream, each under the name that it has; the end mark as its text."""
    events = list[Any]()
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        assert set(fields) <= {"event", "data"}
        done = fields["data"] == "[DONE]"
        events.append("[DONE]" if done else json.loads(fields["data"]))
        assert fields.get("event") == (None if done else events[-1].get("type"))
    return events


def documents_of(text: str) -> list[Any]:
    """The documents of a whole response or of a stream."""
    return stream_events(text) if text.startswith(("data:", "event:")) else [json.loads(text)]


def values_of(document: Any, names: Collection[str], name: str = "") -> Iterator[Any]:
    """What stands under one of these names, at any depth; items of lists one by one."""
    if isinstance(document, dict):
        for key, item in document.items():
            yield from values_of(item, names, key)
    elif isinstance(document, list):
        for item in document:
            yield from values_of(item, names, name)
    elif name in names:
        yield document


_ID = re.compile(
    r"(?P<kind>chatcmpl-|cmpl-|risk-|resp_|msg_|call_|fc_|toolu_)?"
    r"(?P<id>[0-9a-f]{32})(?P<part>_\d+)?",
)
_TIMES = {"created", "created_at", "completed_at"}


class Plain:
    """Documents without what differs from run to run: ids, times, digests, last digits."""

    def __init__(self) -> None:
        self._numbers = dict[str, int]()

    def __call__(self, value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: self(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [self(item) for item in value]
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, int) and name in _TIMES:
            return "time"
        if name == "digest":
            return "digest"
        if isinstance(value, str) and (match := _ID.fullmatch(value)):
            number = self._numbers.setdefault(match["id"], len(self._numbers) + 1)
            return f"{match['kind'] or ''}#{number}{match['part'] or ''}"
        return value


def reads_answers(
    name: str,
    intercept: float = ANSWER.intercept,
) -> Callable[[ScriptedEngine, Path], Bundle]:
    """Makes a bundle with probes of answers; an intercept of -60 flags all answers, 60 none."""

    def make(engine: ScriptedEngine, folder: Path) -> Bundle:
        draft = with_answer(matching_draft(engine, name, 3), engine)
        manifest = draft.manifest = replace(
            draft.manifest,
            answer=replace(ANSWER, intercept=intercept),
        )
        draft.answer = answers_read(engine, manifest)
        return write_bundle(draft, folder / name)

    return make


two_parts = reads_answers("both")
all_flagged = reads_answers("both", -60.0)
