"""Tools in Anthropic's protocol, through the real ``anthropic`` client: the gate of chats, in other words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.api.test_messages import EVERYTHING, NOTHING, checked, client_of, create, streamed
from tests.api.test_tools import ADD, CALL, FIND, HOSTILE, POLICIES, SECRET
from tests.running import Running, running

TOOLS = [{"name": "find", "description": FIND["description"], "input_schema": FIND["parameters"]},
         {"name": "add", "input_schema": {"type": "object"}}]  # fmt: skip
USER = {"role": "user", "content": "Who?"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service"), policies=POLICIES) as service:
        service.engine.takes_tools = True
        yield service


def both(xargs: dict[str, Any], answer: str, service: Running, **given: Any) -> Iterator[tuple[Any, ...]]:
    """Text, calls, stop reason, risk and bytes of the answer, and of the stream."""
    service.engine.answer = answer
    given = {"messages": [USER], "tools": TOOLS, "max_tokens": 300} | given
    found = create(service, xargs, **given)
    checked(json.loads(found.model_dump_json()))
    text = "".join(block.text for block in found.content if block.type == "text")
    calls = [(block.name, block.input) for block in found.content if block.type == "tool_use"]
    row = found.model_extra["hallutracer"]["data"][0]
    yield text, calls, found.stop_reason, row, found.model_dump_json()
    events = streamed(service, vllm_xargs=xargs, **given)
    more = {"temperature": 0, "vllm_xargs": xargs}
    with client_of(service).messages.stream(model="scripted", extra_body=more, **given) as stream:
        whole = stream.get_final_message()
    text = "".join(block.text for block in whole.content if block.type == "text")
    calls = [(block.name, block.input) for block in whole.content if block.type == "tool_use"]
    row = events[0]["message"]["hallutracer"]["data"][0]
    yield text, calls, whole.stop_reason, row, json.dumps(events, ensure_ascii=False)


def test_calls_are_given_whatever_the_risk_and_nothing_else_is(service: Running) -> None:
    for text, calls, ended, row, _ in both(EVERYTHING, f"{CALL}\n{ADD}", service):
        assert (text, calls, ended) == ("", [("find", {"q": "Pâris"}), ("add", {})], "tool_use")
        assert (row["decision"], row["tool_call"]) == ("continue", True)
    for answer in HOSTILE.values():
        for text, calls, ended, row, raw in both(EVERYTHING, answer, service):
            assert (text, calls, ended, row["decision"]) == ("I am not sure.", [], "refusal", "abstain")
            assert SECRET not in raw
    for text, calls, ended, _, _ in both(EVERYTHING | {"hallutracer_policy": "strict"}, CALL, service):
        assert (text, calls, ended) == ("I am not sure.", [], "refusal")


def test_under_the_threshold_text_and_calls_are_blocks(service: Running) -> None:
    for text, calls, ended, _, _ in both(NOTHING, f"Let me <b> look.\n{CALL}\n{ADD}", service):
        assert (text, calls) == ("Let me <b> look.", [("find", {"q": "Pâris"}), ("add", {})])
        assert ended == "tool_use"
    for text, calls, ended, _, _ in both(NOTHING, "It is so.", service):
        assert (text, calls, ended) == ("It is so.", [], "end_turn")
    one = {"type": "auto", "disable_parallel_tool_use": True}
    for _, calls, _, _, _ in both(NOTHING, CALL + ADD, service, tool_choice=one):
        assert calls == [("find", {"q": "Pâris"})]
    for text, calls, ended, _, _ in both(NOTHING, CALL, service, tool_choice={"type": "none"}):
        assert (text, calls, ended) == (CALL, [], "end_turn")


def test_results_are_messages_of_their_own_and_the_turn_is_gated(service: Running) -> None:
    service.engine.answer = CALL
    made = create(service, NOTHING, messages=[USER], tools=TOOLS, max_tokens=300).content
    result = {"type": "tool_result", "tool_use_id": made[0].id, "content": [{"type": "text", "text": "Ann"}]}
    asked = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
    as_they_came = [USER, {"role": "assistant", "content": made}, asked]
    assert create(service, NOTHING, messages=as_they_came, tools=TOOLS, max_tokens=300).stop_reason == "tool_use"
    turns = [USER, {"role": "assistant", "content": [one.model_dump() for one in made]}, asked]
    risks = set()
    for _, calls, ended, row, _ in both(EVERYTHING, "It is Ann.", service, messages=turns):
        assert (calls, ended) == ([], "refusal")
        risks.add(row["risk"])
    definitions = [
        {"type": "function", "function": {"name": one["name"]} | (
            {"description": one["description"]} if "description" in one else {}) | {"parameters": one["input_schema"]}}
        for one in TOOLS
    ]  # fmt: skip
    call = {"id": made[0].id, "type": "function", "function": {"name": "find", "arguments": {"q": "Pâris"}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "Ann"}, {"role": "user", "content": "So?"}]  # fmt: skip
    [scored] = service.post(input_ids=service.engine.render_chat(messages, definitions), threshold=0).json()["data"]
    assert risks == {scored["risk"]}


DEEP = json.loads('{"a":' * 40 + "1" + "}" * 40)
USE = {"type": "tool_use", "id": "t1", "name": "find", "input": {}}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "find"}}, "'tool_choice'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "'find'"), ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "type object"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "'assistant'"),
        ({"messages": [USER, {"role": "assistant", "content": [USE | {"input": None}]}]}, "'input'"),
        ({"messages": [USER, {"role": "assistant", "content": [USE | {"text": "x"}]}]}, "'text'"),
        ({"messages": [USER, {"role": "assistant", "content": [USE | {"input": DEEP}]}]}, "levels"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(service: Running, given: dict[str, Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(service, NOTHING, **{"messages": [USER]} | given)
    assert named in str(refused.value.body)
