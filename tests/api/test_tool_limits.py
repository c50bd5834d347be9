"""Tools, their schemas and the arguments of earlier calls: how much of them a request may hold, all
together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.api import tools_schema
from service.api.messages_schema import MessagesRequest
from service.api.openai_schema import ChatRequest
from service.api.responses_schema import ResponsesRequest
from service.json_limits import MOST_CHARACTERS, MOST_CONTAINERS, MOST_VALUES
from service.tool_calls import MOST_CHARACTERS as MOST_OF_CALL
from tests.running import App, app_of_module

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ROUTES = (CHAT, RESPONSES, MESSAGES, COUNT)


app = app_of_module()


def asked(route: str, **more: Any) -> dict[str, Any]:
    turns = (
        {"input": "a"} if route == RESPONSES else {"messages": [{"role": "user", "content": "a"}]}
    )
    return {"model": "scripted"} | turns | ({"max_tokens": 1} if route == MESSAGES else {}) | more


def refusal(app: App, route: str, body: dict[str, Any]) -> str:
    answer = app.ask(route, status=422 if route == CHAT else 400, **body)
    message: str = answer["error"]["message"]
    return message


def tool(route: str, name: str, schema: dict[str, Any], description: str = "d") -> dict[str, Any]:
    if route in (MESSAGES, COUNT):
        return {"name": name, "description": description, "input_schema": schema}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function"} | ({"function": function} if route == CHAT else function)


FIELD = {
    CHAT: "tools.0.function.parameters",
    RESPONSES: "tools.0.parameters",
    MESSAGES: "tools.0.input_schema",
    COUNT: "tools.0.input_schema",
}


@pytest.mark.parametrize("told", [True, False], ids=["told", "none"])
@pytest.mark.parametrize("route", ROUTES)
def test_tools_are_bounded_one_by_one_and_together(app: App, route: str, told: bool) -> None:
    choice: Any = {"type": "none"} if route in (MESSAGES, COUNT) else "none"
    more = {} if told else {"tool_choice": choice}
    for schema, said in (
        ({"enum": [1] * MOST_VALUES}, f"at most {MOST_VALUES} values"),
        ({"type": "array"}, "of type object"),
    ):
        message = refusal(app, route, asked(route, tools=[tool(route, "f", schema)], **more))
        assert message.startswith(f"{FIELD[route]}: "), message
        assert said in message
    each = MOST_CHARACTERS // 100
    many = [tool(route, f"f{n}", {}, "d" * each) for n in range(101)]
    together = refusal(app, route, asked(route, tools=many, **more))
    assert (
        together
        == f"'tools': at most {MOST_CHARACTERS} characters are taken, in all tools together"
    )
    enums = [tool(route, f"f{n}", {"enum": [1] * (MOST_VALUES // 100)}) for n in range(101)]
    assert f"at most {MOST_VALUES} values" in refusal(app, route, asked(route, tools=enums, **more))


def call(route: str, number: int, arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    if route == RESPONSES:
        return {"type": "function_call", "call_id": f"c{number}"} | function
    return {"id": f"c{number}", "type": "function", "function": function}


def with_calls(route: str, *arguments: str) -> dict[str, Any]:
    calls = [call(route, number, one) for number, one in enumerate(arguments)]
    if route == RESPONSES:
        return {"model": "scripted", "input": calls}
    return {"model": "scripted", "messages": [{"role": "assistant", "tool_calls": calls}]}


LISTS = '{"a":[' + ",".join(["[]"] * 1000) + "]}"


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_earlier_arguments_are_counted_before_any_is_parsed(
    app: App, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    field = "input" if route == RESPONSES else "messages"
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
        message = refusal(app, route, with_calls(route, *arguments))
        assert message.startswith(f"{field}: the arguments of earlier calls have "), message
        assert said in message
        assert not set(map(len, arguments)) & set(parsed)


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_what_fits_is_taken_and_what_is_wrong_is_told(route: str) -> None:
    model = ResponsesRequest if route == RESPONSES else ChatRequest
    model.model_validate(with_calls(route, *[LISTS] * 8))
    texts = json.dumps({"code": "[{" * 20_000})
    model.model_validate(with_calls(route, *[texts] * 8))
    for arguments in ('{"a":"\\ud800"}', '{"\\ud800":1}'):
        with pytest.raises(ValueError, match="lone surrogate U\\+D800"):
            model.model_validate(with_calls(route, arguments))
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
            model.model_validate(
                {"model": "a", "input" if route == RESPONSES else "messages": turns}
            )


def block(number: int, values: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"c{number}", "name": "f", "input": {"a": values}}


@pytest.mark.parametrize("route", [MESSAGES, COUNT])
def test_the_input_of_earlier_calls_is_bounded(app: App, route: str) -> None:
    def said(*values: Any) -> str:
        blocks = [block(number, one) for number, one in enumerate(values)]
        return refusal(
            app, route, asked(route, messages=[{"role": "assistant", "content": blocks}])
        )

    assert said([1] * MOST_VALUES).startswith(
        f"messages.0.content.0.input: at most {MOST_VALUES} values"
    )
    each = [1] * (MOST_VALUES // 8)
    assert said(*[each] * 9).startswith(f"'messages': at most {MOST_VALUES} values")
    assert said(*["a" * MOST_OF_CALL] * 9).endswith("in all blocks' 'input' together")


@pytest.mark.parametrize("route", ROUTES)
def test_tools_are_measured_once_for_all_that_ask(
    monkeypatch: pytest.MonkeyPatch, route: str
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
    models = {CHAT: ChatRequest, RESPONSES: ResponsesRequest}
    body: Any = models.get(route, MessagesRequest).model_validate(
        asked(
            MESSAGES if route == COUNT else route,
            tools=[tool(route, "f", {"type": "object", "default": None})],
        )
    )
    assert measured == [dict, tuple]
    assert body.offered is body.offered
    (definition,) = body.offered.definitions
    assert definition == {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "default": None},
        },
    }
    assert 0 < body.offered.characters < 2 * len(json.dumps(definition))
    assert measured == [dict, tuple]
