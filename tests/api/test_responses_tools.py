"""Tools in OpenAI's Responses API, through the real ``openai`` client: the gate of chats, in other words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import openai
import pytest

from tests.api.test_responses import BEGIN, ITEM, asked, checked, client_of, create, streamed
from tests.api.test_tools import ADD, CALL, FIND, HOSTILE, POLICIES, SECRET
from tests.api.test_tools import EVERYTHING as ALL
from tests.api.test_tools import NOTHING as NONE
from tests.running import Running, running

TOOLS: list[dict[str, Any]] = [{"type": "function", **FIND}, {"type": "function", "name": "add", "strict": True}]
USER = {"role": "user", "content": "Who?"}
CALL_EVENTS = (
    "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
    "response.output_item.done",
)  # fmt: skip
TEXT_EVENTS = (*ITEM, "response.output_text.delta", "response.output_text.done", "response.content_part.done",
               "response.output_item.done")  # fmt: skip
Seen = tuple[list[Any], str, dict[str, Any], str]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service"), policies=POLICIES) as service:
        service.engine.takes_tools = True
        yield service


def items(output: Any) -> list[Any]:
    """The texts and calls of an output, in its order; a refusal is a tuple of one."""
    found: list[Any] = []
    for item in output:
        if item.type == "function_call":
            assert (item.status, item.id[:3], item.call_id[:5]) == ("completed", "fc_", "call_")
            found.append((item.name, json.loads(item.arguments)))
        else:
            found += [part.text if part.type == "output_text" else (part.refusal,) for part in item.content]
    return found


def both(xargs: dict[str, Any], answer: str, service: Running, **given: Any) -> Iterator[Seen]:
    """Items, status, risk and bytes of the answer, and of the stream."""
    service.engine.answer = answer
    given = {"input": [USER], "tools": TOOLS} | given
    raw = client_of(service).responses.with_raw_response.create(**asked(xargs, **given))
    found = checked(json.loads(raw.text))
    yield items(found.output), str(found.status), found.model_extra["hallutracer"]["data"][0], raw.text  # type: ignore[index]
    events = streamed(service, vllm_xargs=xargs, **given)
    last = checked(events[-1]["response"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]
    assert len(set(added)) == len(added)
    with client_of(service).responses.stream(**asked(xargs, **given)) as stream:
        assert items(stream.get_final_response().output) == items(last.output) if last.status == "completed" else True
    row = events[0]["response"]["hallutracer"]["data"][0]
    yield items(last.output), str(last.status), row, json.dumps(events, ensure_ascii=False)


@pytest.mark.parametrize("policy", ["gate", "block", "fetch"])
def test_calls_are_given_whatever_the_risk_and_nothing_else_is(service: Running, policy: str) -> None:
    before = service.metric("hallutracer_tool_calls_let_through_total")
    xargs = ALL | {"hallutracer_policy": policy}
    for found, status, row, _ in both(xargs, f"{CALL}\n{ADD}", service):
        assert (found, status) == ([("find", {"q": "Pâris"}), ("add", {})], "completed")
        assert (row["decision"], row["tool_call"]) == ("continue", True)
    assert service.metric("hallutracer_tool_calls_let_through_total") == before + 3
    said = {"gate": [("I am not sure.",)], "block": [], "fetch": [("Fetch.",)]}[policy]
    for answer in HOSTILE.values():
        for found, status, row, raw in both(xargs, answer, service):
            assert (found, status, "tool_call" in row) == (said, "incomplete", False)
            assert SECRET not in raw


def test_a_call_that_is_cut_is_withheld_and_a_policy_can_gate_calls(service: Running) -> None:
    for most in (20, len(CALL.encode()) - 1, len(CALL.encode())):
        for found, status, _, _ in both(ALL, CALL + ADD, service, max_output_tokens=most):
            assert (found, status) == ([("I am not sure.",)], "incomplete")
    before = service.engine.counters.decode_steps
    for found, status, _, _ in both(ALL | {"hallutracer_policy": "strict"}, CALL, service):
        assert (found, status) == ([("I am not sure.",)], "incomplete")
    assert service.engine.counters.decode_steps == before, "withheld before it is decoded"


def test_under_the_threshold_text_and_calls_are_items_in_their_order(service: Running) -> None:
    find, add = ("find", {"q": "Pâris"}), ("add", {})
    for answer, wanted in (
        (f"Let me look.\n{CALL}\n{ADD}", ["Let me look.", find, add]), (f"{CALL} So. {ADD}", [find, " So.", add]),
        (CALL, [find]), ("It is so.", ["It is so."]), (f"So: {CALL[:-3]}", [f"So: {CALL[:-3]}"]), ("", [""]),
    ):  # fmt: skip
        for found, status, row, _ in both(NONE, answer, service):
            assert (found, status, "tool_call" in row) == (wanted, "completed", False)
    for found, _, _, _ in both(NONE, CALL + ADD, service, parallel_tool_calls=False):
        assert found == [find]
    for found, _, _, _ in both(NONE, CALL, service, tool_choice="none"):
        assert found == [CALL], "a model that is told of no tools calls none"
    for found, _, _, _ in both(ALL | {"hallutracer_policy": "warn"}, CALL, service):
        assert found == ["Careful.\n\n", find]
    for found, status, _, _ in both(NONE, f"{CALL} It is so.", service, max_output_tokens=len(CALL.encode()) + 4):
        assert (found, status) == ([find, " It"], "incomplete")


def test_the_events_come_in_the_documented_order(service: Running) -> None:
    service.engine.answer = f"So {CALL}{ADD} so"
    events = streamed(service, vllm_xargs=NONE, input="Why?", tools=TOOLS)
    kinds = [kind for kind, _ in groupby(event["type"] for event in events)]
    assert kinds == [*BEGIN, *TEXT_EVENTS, *CALL_EVENTS, *CALL_EVENTS, *TEXT_EVENTS, "response.completed"]
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)
    call = [event for event in events if event.get("output_index") == 1]
    assert (call[0]["item"]["arguments"], call[0]["item"]["status"]) == ("", "in_progress")
    assert call[1]["delta"] == call[2]["arguments"] == call[3]["item"]["arguments"] == '{"q": "Pâris"}'
    assert {event["item_id"] for event in call[1:3]} == {event["item"]["id"] for event in (call[0], call[3])}
    response = events[-1]["response"]
    assert [tool["name"] for tool in response["tools"]] == ["find", "add"]
    assert (response["tool_choice"], response["parallel_tool_calls"]) == ("auto", True)


def test_results_are_items_of_their_own_and_the_turn_is_gated(service: Running) -> None:
    service.engine.answer = f"So. {CALL}"
    made = create(service, NONE, input=[USER], tools=TOOLS).output
    result = {"type": "function_call_output", "call_id": made[1].call_id, "output": "Ann"}
    parts = result | {"output": [{"type": "input_text", "text": "Ann"}], "id": "fco_1", "status": "completed"}
    turns = [USER, *made, result, {"role": "user", "content": "So?"}]
    risks = set()
    for given in (turns, [USER, *(one.model_dump() for one in made), parts, turns[-1]]):
        found = create(service, ALL, input=given, tools=TOOLS)
        assert (found.status, items(found.output)) == ("incomplete", [("I am not sure.",)])
        risks.add(found.model_extra["hallutracer"]["data"][0]["risk"])
    definitions = [{"type": "function", "function": FIND}, {"type": "function", "function": {"name": "add"}}]
    call = {"id": made[1].call_id, "type": "function", "function": {"name": "find", "arguments": {"q": "Pâris"}}}
    messages = [USER, {"role": "assistant", "content": "So.", "tool_calls": [call]},
                {"role": "tool", "content": "Ann", "tool_call_id": call["id"]}, turns[-1]]  # fmt: skip
    [scored] = service.post(input_ids=service.engine.render_chat(messages, definitions), threshold=0).json()["data"]
    assert risks == {scored["risk"]}


DEEP = '{"a":' * 40 + "1" + "}" * 40
ONE = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Ann"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "'tool_choice'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "find"}}, "'tool_choice'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "'find'"), ({"tools": TOOLS * 65}, "128"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "'custom'"), ({"tools": [{"name": "f"}]}, "tools.0.type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "'mcp'"),
        ({"tools": [{"type": "function", "function": FIND}]}, "tools.0"),
        ({"tools": [TOOLS[0] | {"parameters": {"type": "array"}}]}, "type object"),
        ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "'defer_loading'"),
        ({"input": [USER, ONE | {"arguments": "[]"}]}, "JSON of an object"),
        ({"input": [USER, ONE | {"arguments": DEEP}]}, "levels"), ({"input": [USER, ONE | {"name": "a b"}]}, "name"),
        ({"input": [USER, ONE | {"arguments": None}]}, "needs 'arguments'"),
        ({"input": [USER, ONE | {"content": "x"}]}, "no 'content'"), ({"input": [USER, RESULT]}, "no earlier turn"),
        ({"input": [USER, ONE, RESULT | {"output": None}]}, "needs 'output'"),
        ({"input": [USER, ONE, RESULT | {"output": [{"type": "input_image", "image_url": "x"}]}]}, "output.0.type"),
        ({"input": [USER | {"call_id": "c1"}]}, "no 'call_id'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(service: Running, given: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(service, NONE, **{"input": [USER]} | given)
    assert named in str(refused.value.body), refused.value.body


def test_where_the_template_takes_no_tools_they_are_refused(service: Running) -> None:
    service.engine.takes_tools = False
    try:
        for given in ({"tools": TOOLS}, {"input": [USER, ONE, RESULT]}):
            with pytest.raises(openai.BadRequestError, match="no place for"):
                create(service, NONE, **{"input": [USER]} | given)
    finally:
        service.engine.takes_tools = True
