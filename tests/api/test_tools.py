"""Tools in requests: how definitions, calls and results are read, and which are refused.

What becomes of the calls of an answer: test_turns.py."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from service.api.tools_schema import Function, offered
from service.engines.base import Sampling
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import EngineOptions, TransformersEngine
from service.policies.guard import Action, Policy
from service.scoring import RiskReport, Scorer
from tests.engines import tiny
from tests.engines.tool_template import CALL, FORCED, TOOL_TEMPLATE
from tests.kit.api import (
    CHAT,
    FIND,
    MESSAGES,
    RESPONSES,
    SCHEMA,
    WIRES,
    Wire,
    note_of,
    send_to,
)
from tests.matching import matching_bundle
from tests.running import App, app_of_module, until

USER, GO_ON = {"role": "user", "content": "Who?"}, {"role": "user", "content": "So?"}
WITH_TOOLS = {name: wire for name, wire in WIRES.items() if wire.tools}
OPEN = {"threshold": 1.0}
SHUT = {"threshold": 0.0}


app = app_of_module(takes_tools=True)


def test_calls_that_pass_a_gate_are_counted(app: App) -> None:
    app.engine.answer = CALL
    for wire in WITH_TOOLS.values():
        for stream in (False, True):
            send_to(app, wire, tokens=200, stream=stream, tools=wire.tools, chosen=SHUT)
    assert app.state.metrics.render()[0].decode().count("tool_calls_let_through_total{") == 2
    assert counted(app) == 6


def counted(app: App) -> float:
    """Calls that were let through, of all bundles."""
    lines = app.state.metrics.render()[0].decode().splitlines()
    counters = [line for line in lines if "_tool_calls_let_through_total{" in line]
    return sum(float(line.split()[-1]) for line in counters)


def test_a_held_answer_ends_as_soon_as_it_is_no_call(app: App) -> None:
    before, app.engine.sleep_s = app.engine.counters.decode_steps, 0.01
    app.engine.answer = " <tool" + "x" * 200
    try:
        send_to(app, CHAT, tokens=300, tools=CHAT.tools, chosen=SHUT)
        until(lambda: app.engine.counters.open_continuations == 0)
    finally:
        app.engine.sleep_s = 0.0
    assert app.engine.counters.decode_steps - before < 100


# --- calls and results in a conversation ---


def follow_up(wire: Wire, document: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation that goes on behind an answer with a call, as this wire's clients write it."""
    if wire is CHAT:
        message = document["choices"][0]["message"]
        result = {"role": "tool", "content": "Ann", "tool_call_id": message["tool_calls"][0]["id"]}
        return [USER, message, result, GO_ON]
    if wire is RESPONSES:
        call_id = document["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "Ann"}
        return [USER, *document["output"], result, GO_ON]
    text = [{"type": "text", "text": "Ann"}]
    result = {"type": "tool_result", "tool_use_id": document["content"][-1]["id"], "content": text}
    return [
        USER,
        {"role": "assistant", "content": document["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_calls_and_results_are_rendered_and_scored(app: App, name: str) -> None:
    wire = WITH_TOOLS[name]
    app.engine.answer = f"So. {CALL}"
    first = send_to(app, wire, messages=[USER], tools=wire.tools, tokens=200, chosen=OPEN).json()
    turns = follow_up(wire, first)
    response = send_to(app, wire, messages=turns, tools=wire.tools, chosen=SHUT)
    assert "Pâris" not in response.text, "the turn after a result is gated as any"

    find, add = FIND | {"parameters": SCHEMA}, {"name": "add"}
    if wire is MESSAGES:
        add |= {"parameters": {"type": "object"}}
    definitions: Any = [{"type": "function", "function": function} for function in (find, add)]
    arguments = {"name": "find", "arguments": {"q": "Pâris"}}
    call = {"id": call_id_of(turns), "type": "function", "function": arguments}
    rendered: Any = [
        USER,
        {"role": "assistant", "content": "So.", "tool_calls": [call]},
        {"role": "tool", "content": "Ann"},
        GO_ON,
    ]
    ids = app.engine.render_chat(rendered, definitions)
    [row] = app.ask(input_ids=ids)["data"]
    assert note_of(response.json())["data"][0]["risk"] == row["risk"]
    hidden = send_to(
        app,
        wire,
        messages=[USER],
        tools=wire.tools,
        tool_choice=wire.no_tools,
    ).json()["usage"]
    tokens = len(app.engine.render_chat([USER]))  # type: ignore[list-item]
    assert tokens in (hidden.get("prompt_tokens"), hidden.get("input_tokens"))


def call_id_of(turns: list[dict[str, Any]]) -> str:
    """The id that the result names."""
    names = re.findall(r'"(?:tool_call_id|call_id|tool_use_id)": "([^"]+)"', json.dumps(turns))
    return str(names[-1])


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_that_the_model_is_not_told_of_need_no_place_in_the_template(
    app: App, name: str
) -> None:
    """Others are refused there: refusals.json."""
    wire = WITH_TOOLS[name]
    app.engine.takes_tools = False
    try:
        send_to(app, wire, tools=wire.tools, tool_choice=wire.no_tools)
    finally:
        app.engine.takes_tools = True


# --- the embedded engine's own calls ---


@pytest.mark.parametrize("name", FORCED)
def test_a_real_model_s_call_is_shown_and_its_answer_is_not(tmp_path: Path, name: str) -> None:
    """Its output layer is forced to write the text; everything else is the embedded engine's."""
    tokenizer, (text, is_call) = tiny.tokenizer(template=TOOL_TEMPLATE), FORCED[name]
    model = tiny.model("llama")
    model.config.max_position_embeddings = tokenizer.model_max_length = 512
    engine = TransformersEngine(model, tokenizer, options=EngineOptions(model="tiny-llama"))
    served = Scheduled(engine)
    scorer = Scorer(served, matching_bundle(engine, tmp_path))
    tools = offered([Function(name="find"), Function(name="add")])
    assert tools is not None
    tokens = iter([*tokenizer(text, add_special_tokens=False)["input_ids"], tiny.EOS])

    def write(_: object, __: object, logits: Any) -> Any:
        logits[:, -1] = -1e4
        logits[:, -1, next(tokens)] = 1e4
        return logits

    policy = Policy("gate", Action.ABSTAIN, message="I am not sure.").at(0.0)
    prompt = scorer.render(messages=[USER], tools=tools.definitions)
    forcing = model.get_output_embeddings().register_forward_hook(write)

    async def run() -> list[tuple[RiskReport, str]]:
        steps = scorer.run(prompt, policy, Sampling(max_tokens=200), tools=tools)
        return [(report, update.piece) async for report, update in steps]

    try:
        steps = asyncio.run(run())
    finally:
        forcing.remove()
        served.close()
    report, pieces = steps[-1][0], "".join(piece for _, piece in steps)
    assert (report.tool_call, report.held, report.verdict.flagged) == (is_call, False, True)
    assert (report.decision, pieces) == (("continue", text) if is_call else ("abstain", ""))
    assert all(piece == "" for _, piece in steps[:-1])
    if name == "text":
        assert next(tokens, None) is not None, "the engine was stopped"
