"""Tools, their schemas and the arguments of earlier calls: how much of them a request may hold, all
together."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from service.access.routes import COUNT_ROUTE
from service.api import tools_schema
from service.api.messages_schema import MessagesRequest
from service.api.openai_schema import ChatRequest
from service.api.responses_schema import ResponsesRequest
from service.json_limits import MOST_CHARACTERS, MOST_CONTAINERS, MOST_VALUES
from service.tool_calls import MOST_CHARACTERS as MOST_OF_CALL
from tests.kit.api import CHAT, MESSAGES, QUESTION, RESPONSES, Wire, refusal_of
from tests.running import App, app_of_module

COUNT = replace(MESSAGES, route=COUNT_ROUTE)
EACH = pytest.mark.parametrize("wire", [CHAT, RESPONSES, MESSAGES, COUNT])
OF_OPENAI = pytest.mark.parametrize("wire", [CHAT, RESPONSES])
MODELS: dict[Wire, Any] = {CHAT: ChatRequest, RESPONSES: ResponsesRequest}


app = app_of_module()


def asked(wire: Wire, **more: Any) -> dict[str, Any]:
    body = {"model": "scripted", wire.messages: QUESTION}
    return body | ({"max_tokens": 1} if wire is MESSAGES else {}) | more


def tool(wire: Wire, name: str, schema: dict[str, Any], description: str = "d") -> dict[str, Any]:
    named = {"name": name, "description": description}
    if wire in (MESSAGES, COUNT):
        return named | {"input_schema": schema}
    function = named | {"parameters": schema}
    return {"type": "function"} | ({"function": function} if wire is CHAT else function)


FIELD = {CHAT: "tools.0.function.parameters", RESPONSES: "tools.0.parameters"}


@pytest.mark.parametrize("told", [True, False], ids=["told", "none"])
@EACH
def test_tools_are_bounded_one_by_one_and_together(app: App, wire: Wire, told: bool) -> None:
    more = {} if told else {"tool_choice": wire.no_tools}
    field = FIELD.get(wire, "tools.0.input_schema")
    each, some = "d" * (MOST_CHARACTERS // 100), {"enum": [1] * (MOST_VALUES // 100)}
    for tools, beginning, words in (
        ([({"enum": [1] * MOST_VALUES}, "d")], field, f"at most {MOST_VALUES} values"),
        ([({"type": "array"}, "d")], field, "of type object"),
        ([({}, each)] * 101, "'tools'", f"at most {MOST_CHARACTERS} characters are taken, in all"),
        ([(some, "d")] * 101, "'tools'", f"at most {MOST_VALUES} values"),
    ):
        offered = [tool(wire, f"f{n}", *fields) for n, fields in enumerate(tools)]
        message = refusal_of(app, wire, asked(wire, tools=offered, **more))
        assert (message.partition(":")[0], words in message) == (beginning, True), message


def with_calls(wire: Wire, *arguments: str) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for number, text in enumerate(arguments):
        function, name = {"name": "f", "arguments": text}, f"c{number}"
        if wire is RESPONSES:
            turns.append({"type": "function_call", "call_id": name} | function)
        else:
            call = {"id": name, "type": "function", "function": function}
            turns.append({"role": "assistant", "tool_calls": [call]})
    return {"model": "scripted", wire.messages: turns}


LISTS = '{"a":[' + ",".join(["[]"] * 1000) + "]}"


@OF_OPENAI
def test_earlier_arguments_are_counted_before_any_is_parsed(
    app: App, monkeypatch: pytest.MonkeyPatch, wire: Wire
) -> None:
    parsed = list[int]()
    loads = json.loads
    monkeypatch.setattr(
        tools_schema.json, "loads", lambda text, **o: parsed.append(len(text)) or loads(text, **o)
    )
    long = '{"a":"' + "b" * (MOST_OF_CALL - 10) + '"}'
    for arguments, said in (
        ([long] * 9, f"bytes together; at most {MOST_CHARACTERS} are taken"),
        ([LISTS] * 9, f"more than {MOST_CONTAINERS} lists and objects together"),
        (['{"a":[' + "1," * 9_000 + "1]}"] * 4, f"more than {MOST_VALUES} values together"),
    ):
        parsed.clear()
        message = refusal_of(app, wire, with_calls(wire, *arguments))
        assert message.startswith(f"{wire.messages}: the arguments of earlier calls have "), message
        assert said in message
        assert not set(map(len, arguments)) & set(parsed)


@OF_OPENAI
def test_what_fits_is_taken_and_what_is_wrong_is_told(wire: Wire) -> None:
    model = MODELS[wire]
    model.model_validate(with_calls(wire, *[LISTS] * 8))
    texts = json.dumps({"code": "[{" * 20_000})
    model.model_validate(with_calls(wire, *[texts] * 8))
    for arguments in ('{"a":"\\ud800"}', '{"\\ud800":1}'):
        with pytest.raises(ValueError, match="lone surrogate U\\+D800"):
            model.model_validate(with_calls(wire, arguments))
    odd: list[Any] = [
        None,
        1,
        "a",
        [1],
        {"tool_calls": 1},
        {"tool_calls": [1, {"function": 1}]},
        {"arguments": 1},
    ]
    for turns in (None, 1, odd):
        with pytest.raises(ValueError):
            model.model_validate({"model": "a", wire.messages: turns})


@pytest.mark.parametrize("wire", [MESSAGES, COUNT])
def test_the_input_of_earlier_calls_is_bounded(app: App, wire: Wire) -> None:
    def message_of(*values: Any) -> str:
        call = {"type": "tool_use", "name": "f"}
        blocks = [call | {"id": f"c{n}", "input": {"a": value}} for n, value in enumerate(values)]
        return refusal_of(
            app, wire, asked(wire, messages=[{"role": "assistant", "content": blocks}])
        )

    in_block = f"messages.0.content.0.input: at most {MOST_VALUES} values"
    assert message_of([1] * MOST_VALUES).startswith(in_block)
    each = [1] * (MOST_VALUES // 8)
    assert message_of(*[each] * 9).startswith(f"'messages': at most {MOST_VALUES} values")
    assert message_of(*["a" * MOST_OF_CALL] * 9).endswith("in all blocks' 'input' together")


@pytest.mark.parametrize("wire", [CHAT, RESPONSES, MESSAGES])
def test_tools_are_measured_once_for_all_that_ask(
    monkeypatch: pytest.MonkeyPatch, wire: Wire
) -> None:
    """Each by itself, and all together; whoever renders, counts or repeats them does it with what
    was made then."""
    measured = list[Any]()
    measure = tools_schema.size_within
    monkeypatch.setattr(
        tools_schema,
        "size_within",
        lambda value, **o: measured.append(type(value)) or measure(value, **o),
    )
    schema = {"type": "object", "default": None}
    tools = [tool(wire, "f", schema)]
    body = MODELS.get(wire, MessagesRequest).model_validate(asked(wire, tools=tools))
    assert measured == [dict, tuple]
    assert body.offered is body.offered
    (definition,) = body.offered.definitions
    function = {"name": "f", "description": "d", "parameters": schema}
    assert definition == {"type": "function", "function": function}
    assert 0 < body.offered.characters < 2 * len(json.dumps(definition))
    assert measured == [dict, tuple]
