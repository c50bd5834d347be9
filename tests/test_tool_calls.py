"""The calls of tools in an answer: what is one, what is not, and in pieces the same as whole."""

from __future__ import annotations

import json
import time
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.tool_calls import (
    MOST_CHARACTERS,
    MOST_DEPTH,
    CallReader,
    Part,
    ToolCall,
    Tools,
    deeper_than,
    may_be_calls,
)


def tools(*names: str, parallel: bool = True) -> Tools:
    return Tools(
        tuple(
            {"type": "function", "function": {"name": name}} for name in names or ("find", "add")
        ),
        parallel,
    )


def block(name: str = "find", arguments: Any = None, **more: Any) -> str:
    body = {"name": name, "arguments": {"q": "x"} if arguments is None else arguments} | more
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


FOUND = ToolCall("find", '{"q": "x"}')
ADDED = ToolCall("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (block(), [FOUND]),
        (f"\n {block()}\n{block('add', {'a': 1})}  \n", [FOUND, ADDED]),
        (block() + block(), [FOUND, FOUND]),
        ("<tool_call>" + '{"arguments":{"q":"x"},"name":"find"}' + "</tool_call>", [FOUND]),
        (block(arguments={}), [ToolCall("find", "{}")]),
        (
            block(arguments={"q": '</tool_call> é \U0001f600 " \\'}),
            [
                ToolCall(
                    "find", json.dumps({"q": '</tool_call> é \U0001f600 " \\'}, ensure_ascii=False)
                )
            ],
        ),
        (block(arguments={"q": "<tool_call>"}), [ToolCall("find", '{"q": "<tool_call>"}')]),
        (f"Let me look.\n{block()}\nSo.", ["Let me look.", FOUND, "\nSo."]),
        (
            "It is Paris.\n ",
            [
                "It is Paris.\n ",
            ],
        ),
        ("", []),
    ],
)
def test_calls_and_text_are_told_apart(answer: str, parts: list[Part]) -> None:
    result = tools().parts(answer)
    assert merged(result) == merged(parts)
    assert tools().only_calls(answer) == (
        bool(parts) and all(isinstance(part, ToolCall) for part in parts)
    )


DEEP = json.loads('{"a":' * (MOST_DEPTH + 1) + "1" + "}" * (MOST_DEPTH + 1))
NO_CALLS = {
    "another tool": block("drop"),
    "no object": block(arguments=["x"]),
    "arguments as a text": block(arguments='{"q": "x"}'),
    "one more key": block(answer="Paris"),
    "no arguments": '<tool_call>{"name": "find"}</tool_call>',
    "a list": f"<tool_call>[{block()[11:-12]}]</tool_call>",
    "no JSON": "<tool_call>Paris</tool_call>",
    "cut in the middle": block()[:-14],
    "cut in its mark": block()[:-1],
    "only the mark": "<tool_call>",
    "nested": f"<tool_call>{block()}</tool_call>",
    "a key twice": '<tool_call>{"name": "find", "name": "add", "arguments": {}}</tool_call>',
    "NaN": '<tool_call>{"name": "find", "arguments": {"q": NaN}}</tool_call>',
    "too large a number": '<tool_call>{"name": "find", "arguments": {"q": 1e999}}</tool_call>',
    "too many digits": (
        f'<tool_call>{{"name": "find", "arguments": {{"q": {"9" * 5000}}}}}</tool_call>'
    ),
    "half a character": '<tool_call>{"name": "find", "arguments": {"q": "\\ud83d"}}</tool_call>',
    "too deep": block(arguments=DEEP),
    "far too deep": f'<tool_call>{{"name": "find", "arguments": {"[" * 30000}</tool_call>',
    "too long": block(arguments={"q": "x" * 2**20}),
    "an open text": '<tool_call>{"name": "find</tool_call>',
    "text before": f"Paris {block()}",
    "text behind": f"{block()} Paris",
    "text between": f"{block()}Paris{block()}",
    "no mark": '{"name": "find", "arguments": {"q": "x"}}',
    "another mark": block().replace("tool_call", "TOOL_CALL"),
    "white space": " \n",
    "nothing": "",
}


@pytest.mark.parametrize("name", NO_CALLS)
def test_anything_else_is_no_call_and_stays_text(name: str) -> None:
    answer, begun = NO_CALLS[name], time.monotonic()
    assert not tools().only_calls(answer)
    texts = [part for part in tools().parts(answer) if isinstance(part, str)]
    assert texts or not answer
    if not name.startswith("text "):
        assert "".join(texts) == answer, "nothing of it is lost"
    assert time.monotonic() - begun < 5, "in the time of its length"


def test_what_follows_a_block_too_long_is_read_again() -> None:
    long = block(arguments={"q": "x" * MOST_CHARACTERS})
    assert tools().parts(long + block())[-1] == FOUND


def test_without_parallel_calls_the_first_is_the_only_one() -> None:
    assert tools(parallel=False).parts(block() + block("add")) == [FOUND]
    assert tools(parallel=False).only_calls(block() + block("add"))


def test_a_beginning_tells_as_soon_as_it_can() -> None:
    whole = f" \n{block()}"
    assert all(may_be_calls(whole[:length]) for length in range(len(whole)))
    assert not any(
        may_be_calls(text) for text in ("P", " <tool_cal1", "<tool call>", "x<tool_call>")
    )


def merged(parts: list[Part]) -> list[Part]:
    """Texts that follow each other as one."""
    results = list[Part]()
    for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
        together = list(group)
        results += ["".join(map(str, together))] if is_text else together
    return results


PIECES = st.sampled_from(
    [
        block(),
        block("add"),
        block("drop"),
        "<tool_call>",
        "</tool_call>",
        "<tool",
        ' "',
        "\n",
        " a",
        "é",
    ]
)


@given(st.lists(PIECES, max_size=6).map("".join), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_in_pieces_it_is_the_same(answer: str, size: int) -> None:
    reader, found = CallReader(tools()), list[Part]()
    for start in range(0, len(answer), size):
        found += reader.feed(answer[start : start + size])
    assert merged([*found, *reader.end()]) == merged(tools().parts(answer))


def test_text_is_not_held_longer_than_it_may_begin_a_call() -> None:
    reader = CallReader(tools())
    fed = [
        reader.feed(piece)
        for piece in ("It is ", "so <", "b>", " \n<tool_", "call", '>{"name": "find", ', "x")
    ]
    assert fed == [["It is"], [" so"], [" <b>"], [], [], [], []]
    assert reader.end() == [' \n<tool_call>{"name": "find", x']


def test_depth_is_that_of_lists_and_objects() -> None:
    assert [deeper_than(value, 1) for value in ({}, {"a": 1}, {"a": []}, {"a": {"b": 1}})] == [
        False,
        False,
        True,
        True,
    ]
