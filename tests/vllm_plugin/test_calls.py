"""Tools on vLLM's own server: a turn of nothing but calls is let through, in each protocol, and
nothing else is."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from service.access.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE
from service.demo import MODEL_DIR
from tests.engines.vllm.installed import vllm_or_skip
from tests.kit.api import stream_events

vllm_or_skip()

from service.vllm_plugin.calls import offered, used  # noqa: E402
from tests.vllm_plugin import conftest  # noqa: E402
from tests.vllm_plugin.conftest import KNOWN, UNKNOWN  # noqa: E402

NAME = "look_up"
CALL = f'<tool_call>{{"name": "{NAME}", "arguments": {{"of": "Honiara"}}}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"of": {"type": "string"}}}
FUNCTION = {"name": NAME, "description": "Looks it up.", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {
    CHAT_ROUTE: [{"type": "function", "function": FUNCTION}],
    RESPONSES_ROUTE: [{"type": "function"} | FUNCTION],
    MESSAGES_ROUTE: [{"name": NAME, "input_schema": SCHEMA}],
}


@pytest.mark.parametrize("route", TOOLS)
def test_the_tools_that_a_body_offers(route: str) -> None:
    tools = offered({"tools": TOOLS[route]})
    assert tools is not None
    assert tools.names == {NAME}
    for choice in ("none", {"type": "none"}):
        assert offered({"tools": TOOLS[route], "tool_choice": choice}) is None


@pytest.mark.parametrize(
    "tools", [None, [], {}, "x", [1, None], [{"function": 1}], [{"name": 2}], [{"function": {}}]]
)
def test_what_names_no_function_offers_nothing(tools: Any) -> None:
    assert offered({"tools": tools}) is None


@pytest.mark.parametrize(
    ("content", "turns", "with_tools"),
    [
        ('{"tools": [{}]}', "[]", True),
        ("{}", '[{"role": "user", "content": "x"}]', False),
        ('{"tools": []}', '[null, "x"]', False),
        ("{}", '[{"role": "assistant", "tool_calls": []}]', True),
        ("{}", '[{"role": "tool", "content": "x"}]', True),
        ("{}", '[{"type": "function_call"}]', True),
        ("{}", '[{"type": ["function_call"]}]', False),
        ("{}", '[{"role": "user", "content": [{"type": "tool_result"}, null]}]', True),
        ("{}", '[{"role": "user", "content": [{"type": "text"}]}]', False),
    ],
)
def test_a_conversation_with_tools_is_unlike_the_calibrations(
    content: str, turns: str, with_tools: bool
) -> None:
    assert used(json.loads(content), json.loads(turns)) is with_tools


@pytest.fixture
def url(choosing_url: str) -> str:
    return choosing_url


def ask(
    url: str,
    route: str,
    question: str,
    says: str | None,
    stream: bool = False,
    by: str = "grammar",
    **more: Any,
) -> httpx.Response:
    """Ask with a tool; ``says`` is what the model is made to say, by a grammar or by its logits."""
    fields = {"tokens": 200, "stream": stream, "tools": TOOLS[route]} | more
    if says is not None and by == "logits":
        tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
        tokens = tokenizer.encode(says, add_special_tokens=False)
        fields["vllm_xargs"] = {"says": [*tokens, tokenizer.eos_token_id]}
    elif says is not None:
        fields["structured_outputs"] = {"choice": [says]}
    response = conftest.ask(url, route, question, **fields)
    assert response.status_code == 200, response.text
    return response


def read(route: str, stream: bool, text: str) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """What is said, the calls' arguments, and the note of the last event that has one."""
    if not stream:
        document = json.loads(text)
        if route == CHAT_ROUTE:
            message = document["choices"][0]["message"]
            calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
            return message["content"] or "", list(map(json.loads, calls)), document["hallutracer"]
        calls = [
            item["arguments"] for item in document["output"] if item["type"] == "function_call"
        ]
        spoken = [
            part.get("text", "")
            for item in document["output"]
            for part in item.get("content") or ()
        ]
        return "".join(spoken), list(map(json.loads, calls)), document["hallutracer"]
    spoken = ""
    written = ""
    note = None
    for event in (event for event in stream_events(text) if event != "[DONE]"):
        note = event.get("hallutracer") or (event.get("response") or {}).get("hallutracer") or note
        if event.get("type") == "response.output_text.delta":
            spoken += event["delta"]
        if event.get("type") == "response.function_call_arguments.delta":
            written += event["delta"]
        for choice in event.get("choices") or ():
            spoken += choice["delta"].get("content") or ""
            written += "".join(
                call["function"].get("arguments") or ""
                for call in choice["delta"].get("tool_calls") or ()
            )
    assert note is not None
    return spoken, [json.loads(written)] if written else [], note


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT_ROUTE, RESPONSES_ROUTE])
@pytest.mark.parametrize("by", ["grammar", "logits"])
def test_a_turn_of_nothing_but_calls_is_let_through_and_counted(
    url: str, route: str, stream: bool, by: str
) -> None:
    before = counted(url)
    spoken, calls, note = read(route, stream, ask(url, route, UNKNOWN, CALL, stream, by).text)
    assert (spoken.strip(), calls) == ("", [{"of": "Honiara"}])
    assert (note["data"][0]["decision"], note["data"][0]["tool_call"]) == ("continue", True)
    assert counted(url) == before + 1
    spoken, calls, note = read(
        route, stream, ask(url, route, KNOWN, CALL, stream, by).text
    )  # not withheld anyway
    assert (calls, "tool_call" in note["data"][0], counted(url)) == (
        [{"of": "Honiara"}],
        False,
        before + 1,
    )


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT_ROUTE, RESPONSES_ROUTE])
@pytest.mark.parametrize(
    ("says", "more"),
    [
        ("Honiara", {}),
        (f"{CALL} Honiara", {}),
        (CALL.replace(NAME, "other"), {}),
        (CALL, {"tool_choice": "none"}),
        (CALL, {"chosen": {"policy": "calls-too"}}),
        (CALL, {"tokens": 9}),
        (f"{CALL} Honiara", {"by": "logits"}),
    ],
)
def test_whatever_else_is_said_is_withheld(
    url: str, route: str, stream: bool, says: str, more: dict[str, Any]
) -> None:
    before = counted(url)
    answer = ask(url, route, UNKNOWN, says, stream, **more).text
    assert not [word for word in ("Honiara", "tool_call>") if word in answer]
    spoken, calls, note = read(route, stream, answer)
    assert (spoken, calls, note["data"][0]["decision"], "tool_call" in note["data"][0]) == (
        "",
        [],
        "abstain",
        False,
    )
    assert "content_filter" in answer
    assert counted(url) == before


@pytest.mark.long
def test_an_answer_with_tools_is_gated_as_any(url: str) -> None:
    for route in TOOLS:
        known, unknown = (ask(url, route, question, None).text for question in (KNOWN, UNKNOWN))
        assert "Rome" in known
        assert ("refusal" if route == MESSAGES_ROUTE else "content_filter") in unknown


def counted(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    [line] = [
        series
        for series in lines
        if series.startswith("hallutracer_tool_calls_let_through_total{") and '"demo:' in series
    ]
    return float(line.rpartition(" ")[2])
