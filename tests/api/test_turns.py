"""Every turn on every wire, whole and streamed: bodies and events are those of ``turns.json``.

Which turn a policy makes of an answer is decided in ``service.turn``: tests/test_turn.py.  After an
intended change of a wire, ``python -m tests.api.test_turns`` records it again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from service.policies.guard import Action, Policy
from tests.engine_kinds import KINDS
from tests.engines.tool_template import ADD, CALL, SECRET
from tests.kit.api import (
    WIRES,
    WITH_TOOLS,
    Plain,
    Wire,
    documents_of,
    reads_answers,
    send_to,
    stream_events,
    values_of,
)
from tests.running import App

FILE = Path(__file__).with_name("turns.json")
GATE = Policy("gate", Action.ABSTAIN, message="I am not sure.")
POLICIES = {
    "gate": GATE,
    "strict": replace(GATE, name="strict", tools="gate"),
    "warn": Policy("warn", Action.ANNOTATE, message="Careful, {risk}."),
    "fetch": Policy("fetch", Action.RETRIEVE, message="Fetch a passage."),
    "again": Policy("again", Action.ABSTAIN, message="No: {risk}.", recheck=True),
    "stops": replace(GATE, name="stops", stop_at=0.6),
}


@dataclass(frozen=True)
class Turn:
    """A request, and what the model writes; the gate holds or opens by ``threshold``."""

    answer: str = "Yes."
    policy: str = "gate"
    threshold: float = 1.0
    bundle: str = "both"
    tokens: int = 200
    stop: tuple[str, ...] = ()
    running: bool = False  # the risk of the answer so far is wanted
    tools: str = ""  # "offered", "one call" at most, or "hidden" from the model
    in_content: bool = False  # the operator wants a refusal's message as text, too
    wires: tuple[str, ...] = tuple(WIRES)
    stream_fields: tuple[tuple[str, Any], ...] = ()  # fields of a request for a stream

    @property
    def decodes(self) -> bool:
        """Whether the model may write anything."""
        calls_pass = self.tools and self.policy != "strict"
        return bool(self.threshold or self.policy == "warn" or calls_pass)

    def send(self, app: App, wire: Wire, stream: bool) -> str:
        """The text of the response."""
        app.engine.answer = self.answer
        app.state.settings = replace(app.state.settings, message_in_content=self.in_content)
        chosen: dict[str, Any] = {
            "policy": self.policy,
            "threshold": self.threshold,
            "bundle": self.bundle,
        }
        if self.running:
            chosen["include"] = ["answer_risk"]
        fields: dict[str, Any] = {"tools": wire.tools} if self.tools else {}
        if self.tools == "one call":
            fields |= wire.one_call or {}
        elif self.tools == "hidden":
            fields["tool_choice"] = wire.no_tools
        fields |= dict(self.stream_fields) if stream else {}
        return send_to(
            app,
            wire,
            stream=stream,
            tokens=self.tokens,
            stop=self.stop,
            chosen=chosen,
            **fields,
        ).text


SHORT_CALL = '<tool_call>{"name":"add","arguments":{}}</tool_call>'
COUNTED = (("stream_options", {"include_usage": True}),)
TURNS = {
    "answered": Turn(),
    "answered with nothing": Turn(""),
    "answered with a warning": Turn(policy="warn", threshold=0.0),
    "withheld": Turn(threshold=0.0),
    "withheld without a message": Turn(policy="block", threshold=0.0),
    "withheld for a passage": Turn(policy="fetch", threshold=0.0),
    "withheld, the message as text": Turn(
        threshold=0.0,
        in_content=True,
        wires=("chat", "text", "responses"),
    ),
    "cut": Turn(tokens=2),
    "answered and counted": Turn(stream_fields=COUNTED, wires=("chat", "text")),
    "withheld and counted": Turn(threshold=0.0, stream_fields=COUNTED, wires=("chat", "text")),
    "ended by a text of the request": Turn(stop=("x", "s.")),
    "answered, the risk on its way": Turn(running=True),
    "stopped": Turn("It is so.", policy="stops", bundle="flagged"),
    "read again and answered": Turn(policy="again", bundle="trusted"),
    "read again and withheld": Turn(policy="again", bundle="flagged"),
    "withheld, since no token was read": Turn(policy="again", bundle="trusted", tokens=1),
    "called": Turn(f"{CALL}\n{ADD}\n", threshold=0.0, tools="offered"),
    "called once": Turn(CALL + ADD, tools="one call"),
    "called with a warning": Turn(CALL, policy="warn", threshold=0.0, tools="offered"),
    "called between texts": Turn(f"So\n{CALL}{ADD} <so>", tools="offered"),
    "called and cut": Turn(f"{CALL} so", tokens=len(CALL.encode()) + 2, tools="offered"),
    "answered with tools": Turn("a <tool_call>b</tool_call>", tools="offered"),
    "answered with nothing, with tools": Turn("", tools="offered"),
    "answered without the tools": Turn(SHORT_CALL, tools="hidden"),
    "no call, withheld": Turn(f"{CALL} {SECRET}", threshold=0.0, tools="offered"),
    "calls are withheld": Turn(CALL, policy="strict", threshold=0.0, tools="offered"),
}
ENDS = ("answered", "withheld", "stopped", "called")  # played on each kind of engine
CASES = [
    (name, wire)
    for name, turn in TURNS.items()
    for wire in turn.wires
    if (WIRES[wire].tools or not turn.tools) and (WIRES[wire].stop or not turn.stop)
]


def app_of(folder: Path, kind: str = KINDS[0]) -> App:
    """A service that reads answers: by the bundle, all, some or none of them are flagged."""
    add = [reads_answers("both"), reads_answers("flagged", -60.0), reads_answers("trusted", 60.0)]
    app = App(folder, kind, names=(), add=add, policies=POLICIES)
    app.engine.takes_tools = True
    return app


# --- what the clients' own models take ---


def events_by_type(union: Any) -> dict[str, type[BaseModel]]:
    """A client's models of a stream's events."""
    models = get_args(get_args(union)[0])
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in models}


WHOLE: dict[str, type[BaseModel]] = {
    "chat": ChatCompletion,
    "text": Completion,
    "responses": Response,
    "messages": Message,
}
EVENTS = {
    "responses": events_by_type(ResponseStreamEvent),
    "messages": events_by_type(RawMessageStreamEvent),
}
OURS = {"hallutracer", "store"}  # fields that the clients do not know


def check_models(wire: str, body: dict[str, Any], events: list[Any]) -> None:
    """The clients of a protocol know every field, at any depth, but for ours at the top."""
    if wire == "score":
        return
    check_model(WHOLE[wire], body)
    for event in events:
        if wire in EVENTS:
            check_model(EVENTS[wire][event["type"]], event)
        elif wire == "chat" and event != "[DONE]":
            check_model(ChatCompletionChunk, event)


def check_model(model: type[BaseModel], document: Any) -> None:
    """The document is one of the model."""
    check_fields(model.model_validate_json(json.dumps(document), strict=True), OURS)


def check_fields(value: BaseModel, ours: set[str]) -> None:
    """Nothing is unknown to the client."""
    assert set(value.model_extra or {}) <= ours
    for name in type(value).model_fields:
        field = getattr(value, name)
        for item in field if isinstance(field, list) else [field]:
            if isinstance(item, BaseModel):
                check_fields(item, OURS if name in ("response", "message") else set())


# --- every turn ---


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, App]]:
    """A service for each kind of engine."""
    with ExitStack() as stack:
        services = {kind: app_of(tmp_path_factory.mktemp("app"), kind) for kind in KINDS}
        yield {kind: stack.enter_context(app.started()) for kind, app in services.items()}


@pytest.fixture(scope="module")
def recorded() -> Any:
    return json.loads(FILE.read_text())


def play(app: App, name: str, wire: str) -> tuple[dict[str, Any], list[Any]]:
    """The turn's body and its events."""
    turn = TURNS[name]
    body: dict[str, Any] = json.loads(turn.send(app, WIRES[wire], stream=False))
    return (
        body,
        stream_events(turn.send(app, WIRES[wire], stream=True)),
    )


def plain(body: dict[str, Any], events: list[Any]) -> dict[str, Any]:
    """Both, without what differs from run to run and what a response's second event repeats."""
    if body.get("object") == "response":
        created, *further = events
        assert further[0]["response"] == created["response"]
        events = [created, {**further[0], "response": "as before"}, *further[1:]]
    return {"whole": Plain()(body), "stream": Plain()(events)}


OF_KINDS = [(KINDS[0], *case) for case in CASES]
OF_KINDS += [(KINDS[1], *case) for case in CASES if case[0] in ENDS]


@pytest.mark.parametrize(("kind", "name", "wire"), OF_KINDS)
def test_the_body_and_the_events_of_a_turn(
    apps: dict[str, App],
    recorded: Any,
    kind: str,
    name: str,
    wire: str,
) -> None:
    app = apps[kind]
    decoded = app.engine.counters.decode_steps
    body, events = play(app, name, wire)
    assert plain(body, events) == recorded[name][wire]
    if not TURNS[name].decodes:
        assert app.engine.counters.decode_steps == decoded
    check_models(wire, body, events)


def test_the_file_has_no_further_turn(recorded: Any) -> None:
    assert [(name, wire) for name, wires in recorded.items() for wire in wires] == CASES


# --- no token leaves ---

HOSTILE = {
    "text": f"It is {SECRET}.",
    "text before": f"{SECRET}! {CALL}",
    "text behind": f"{CALL} {SECRET}",
    "text between": f"{CALL}{SECRET}{ADD}",
    "another tool": CALL.replace("find", SECRET),
    "another key": CALL.replace('"arguments"', f'"answer": "{SECRET}", "arguments"'),
    "no object": f'<tool_call>{{"name": "find", "arguments": "{SECRET}"}}</tool_call>',
    "no JSON": f"<tool_call>{SECRET}</tool_call>",
    "nested": f"<tool_call>{SECRET}{CALL}</tool_call>",
    "in the mark": f"<tool_call {SECRET}>{CALL}",
    "white space": " \n" * 40,
    "nothing": "",
}


@pytest.mark.parametrize("wire", WITH_TOOLS)
def test_of_what_is_no_call_no_token_leaves(apps: dict[str, App], wire: str) -> None:
    """It is answered as the same request without tools, which ends before anything is decoded."""
    app, policies = apps[KINDS[0]], ("gate", "block", "fetch")
    withheld = {
        (policy, stream): answers_of(Turn("", policy, 0.0).send(app, WIRES[wire], stream))
        for policy in policies
        for stream in (False, True)
    }
    for number, (name, answer) in enumerate(HOSTILE.items()):
        policy = policies[number % 3]
        for stream in (False, True):
            text = Turn(answer, policy, 0.0, tools="offered").send(app, WIRES[wire], stream)
            assert SECRET not in text, name
            assert answers_of(text) == withheld[policy, stream], name


def answers_of(text: str) -> list[Any]:
    """Every text and every end of a response or a stream."""
    names = ("text", "content", "refusal", "delta", "arguments")
    names += ("finish_reason", "stop_reason", "status")
    return [value for document in documents_of(text) for value in values_of(document, names)]


def write_file() -> None:
    """Record every turn: an event a line."""
    lines = []
    with tempfile.TemporaryDirectory() as folder, app_of(Path(folder)).started() as app:
        for name in TURNS:
            wires = []
            for wire in [wire for case, wire in CASES if case == name]:
                turn = plain(*play(app, name, wire))
                parts = (turn["whole"], *turn["stream"])
                whole, *events = (json.dumps(part, ensure_ascii=False) for part in parts)
                listed = ",\n".join(events)
                wires.append(f'{json.dumps(wire)}: {{"whole": {whole},\n"stream": [\n{listed}]}}')
            lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(wires) + "}")
    FILE.write_text("{" + ",\n\n".join(lines) + "}\n")


if __name__ == "__main__":
    write_file()
