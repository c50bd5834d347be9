"""Tools in requests: how definitions, calls and results are read, and which are refused.

What becomes of the calls of an answer: test_turns.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import EngineOptions, TransformersEngine
from service.scoring import Scorer
from tests.api.test_fields import answer_turns
from tests.engines import tiny
from tests.engines.tool_template import CALL, FORCED, SECRET, TOOL_TEMPLATE
from tests.kit.api import (
    CHAT,
    EVERYTHING,
    FIND,
    MESSAGES,
    NOTHING,
    RESPONSES,
    SCHEMA,
    WITH_TOOLS,
    Wire,
    note_of,
    request_of,
    send_to,
    values_of,
)
from tests.matching import matching_bundle
from tests.running import App, app_of_module, in_process, until

USER, GO_ON = {"role": "user", "content": "Who?"}, {"role": "user", "content": "So?"}
app = app_of_module(takes_tools=True)


def test_calls_that_pass_a_gate_are_counted(app: App) -> None:
    app.engine.answer = CALL
    for wire in WITH_TOOLS.values():
        for stream in (False, True):
            send_to(app, wire, tokens=200, stream=stream, tools=wire.tools, chosen=EVERYTHING)
    for bundle, calls in (("one:1", 6), ("two:1", 0)):
        assert app.series("tool_calls_let_through_total", bundle=bundle) == calls


def test_a_held_answer_ends_as_soon_as_it_is_no_call(app: App) -> None:
    before, app.engine.sleep_s = app.engine.counters.decode_steps, 0.01
    app.engine.answer = " <tool" + "x" * 200
    try:
        send_to(app, CHAT, tokens=300, tools=CHAT.tools, chosen=EVERYTHING)
        until(lambda: app.engine.counters.open_continuations == 0)
    finally:
        app.engine.sleep_s = 0.0
    assert app.engine.counters.decode_steps - before < 100


# --- calls and results in a conversation ---


def follow_up(wire: Wire, document: dict[str, Any]) -> tuple[list[Any], str]:
    """A conversation that goes on behind an answer with a call, as this wire's clients write it,
    and the call's id."""
    turns = answer_turns(wire, document)
    *_, call = values_of(turns, ("call_id",) if wire is RESPONSES else ("id",))
    if wire is CHAT:
        turns += [{"role": "tool", "content": "Ann", "tool_call_id": call}, GO_ON]
    elif wire is RESPONSES:
        turns += [{"type": "function_call_output", "call_id": call, "output": "Ann"}, GO_ON]
    else:
        text = [{"type": "text", "text": "Ann"}]
        result = {"type": "tool_result", "tool_use_id": call, "content": text}
        turns.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
    return [USER, *turns], call


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_calls_and_results_are_rendered_and_scored(app: App, name: str) -> None:
    wire = WITH_TOOLS[name]
    app.engine.answer = f"So. {CALL}"
    first = send_to(app, wire, messages=[USER], tools=wire.tools, tokens=200, chosen=NOTHING).json()
    turns, call_id = follow_up(wire, first)
    response = send_to(app, wire, messages=turns, tools=wire.tools, chosen=EVERYTHING)
    assert "Pâris" not in response.text, "the turn after a result is gated as any"

    find, add = FIND | {"parameters": SCHEMA}, {"name": "add"}
    if wire is MESSAGES:
        add |= {"parameters": {"type": "object"}}
    definitions: Any = [{"type": "function", "function": function} for function in (find, add)]
    arguments = {"name": "find", "arguments": {"q": "Pâris"}}
    call = {"id": call_id, "type": "function", "function": arguments}
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
    scorer = Scorer(Scheduled(engine), matching_bundle(engine, tmp_path))
    tokens = iter([*tokenizer(text, add_special_tokens=False)["input_ids"], tiny.EOS])

    def write(_: object, __: object, logits: Any) -> Any:
        logits[:, -1] = -1e4
        logits[:, -1, next(tokens)] = 1e4
        return logits

    asked = {"tokens": 200, "tools": CHAT.tools, "chosen": EVERYTHING, "model": "tiny-llama"}
    with in_process(lambda: {"one": scorer}, policy="gate") as client:
        forcing = model.get_output_embeddings().register_forward_hook(write)
        try:
            answer = client.post(CHAT.route, json=request_of(CHAT, [USER], **asked)).json()
        finally:
            forcing.remove()
    [choice], [row] = answer["choices"], note_of(answer)["data"]
    calls = [call["function"]["name"] for call in choice["message"].get("tool_calls") or ()]
    assert (row["flagged"], row["decision"] == "continue") == (True, is_call)
    assert (choice["finish_reason"] == "tool_calls") is is_call
    assert calls == (re.findall(r'"name": "(\w+)"', text) if is_call else [])
    assert SECRET not in json.dumps(answer)
    if name == "text":
        assert next(tokens, None) is not None, "the engine was stopped"
