"""Function calls in what models write, and whether they are the right ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.data.calls import Call, meets, parse_calls
from service.data.calls import expectation_problem as problem

ONE = Call("area", {"base": 3, "unit": "cm"})


@pytest.mark.parametrize(
    "text",
    [
        "area(base=3, unit='cm')",
        '[area(base=3, unit="cm")]',
        "  area(base=1 + 2, unit='cm');",
        "```python\n[area(base=3, unit='cm')]\n```",
        "Sure.\n```\narea(base=3, unit='cm')\n```\nDone.",
        "I shall call it:\narea(base=3, unit='cm')",
        "<think>area(base=9)</think>\narea(base=3, unit='cm')",
        "thoughts without a first tag area(base=9)</think>[area(base=3, unit='cm')]",
        '{"name": "area", "arguments": {"base": 3, "unit": "cm"}}',
        '[{"name": "area", "parameters": {"base": 3, "unit": "cm"}}]',
        '{"type": "function", "function": {"name": "area", "arguments": "{\\"base\\": 3, \\"unit\\": \\"cm\\"}"}}',
        '{"type": "function", "function": "area", "parameters": {"base": 3, "unit": "cm"}}',
        '[{"area": {"base": 3, "unit": "cm"}}]',
        '<tool_call>\n{"name": "area", "arguments": {"base": 3, "unit": "cm"}}\n</tool_call>',
        'Well: <tool_call>{"name": "area", "arguments": {"base": 3, "unit": "cm"}}',
        '[TOOL_CALLS] [{"name": "area", "arguments": {"base": 3, "unit": "cm"}}]',
        "<|python_tag|>area(base=3, unit='cm')",
    ],
)
def test_one_call_in_many_shapes(text: str) -> None:
    assert parse_calls(text) == [ONE]


@pytest.mark.parametrize(
    "text",
    [
        "[area(base=3, unit='cm'), g.h(x=None)]",
        "area(base=3, unit='cm'); g.h(x=null)",
        "area(base=3, unit='cm')\ng.h(x=None)",
        '{"name": "area", "arguments": {"base": 3, "unit": "cm"}}; {"name": "g.h", "arguments": {"x": null}}',
        '<tool_call>{"name": "area", "arguments": {"base": 3, "unit": "cm"}}</tool_call>\n'
        '<tool_call>{"name": "g.h", "arguments": {"x": null}}</tool_call>',
    ],
)
def test_several_calls_in_order(text: str) -> None:
    assert parse_calls(text) == [ONE, Call("g.h", {"x": None})]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "None of the functions fits.",
        "I would need area(base=3, unit='cm') but the unit is missing.",  # inside a sentence
        "42",
        "[]",
        "{}",
        "[1, 2]",
        "x = area(base=3)",
        "import os\nos.system",
        '{"answer": "Paris"}',
        '{"name": "area", "description": "Area.", "parameters": {"type": "dict", "properties": {}}}',  # the offer again
        "<think>area(base=3)",
        "f()()",
        "lambda: 1",
        "[" * 5_000,
        "(" * 5_000 + "f()" + ")" * 5_000,
        "f(" * 2_000 + ")" * 2_000,
        '{"a":' * 3_000,
        "\x00",
    ],
)
def test_what_is_no_call(text: str) -> None:
    assert parse_calls(text) == []


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("-2.5", -2.5), ("[1, (2, 3)]", [1, [2, 3]]), ("{'a': [true, False]}", {"a": [True, False]}),
        ("5 / 100", 0.05), ("1 / 0", "1 / 0"), ("speed", "speed"), ("f(x=1)", "f(x=1)"), ("2 ** 9", "2 ** 9"),
        ("'\\d'", "\\d"),
    ],
)  # fmt: skip
def test_values_of_arguments(source: str, value: Any) -> None:
    assert parse_calls(f"g(a={source})") == [Call("g", {"a": value})]


def test_positional_arguments_are_known_by_place() -> None:
    assert parse_calls("g(3, b=4)") == [Call("g", {"0": 3, "b": 4})]


@given(st.text(alphabet="f(a=1,)[]{}\"':; \n<think>/`", max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    for call in parse_calls(text):
        assert call.name


def calls(*wanted: dict[str, Any]) -> dict[str, Any]:
    return {"expect": "calls", "calls": list(wanted)}


def wanted(name: str = "area", optional: tuple[str, ...] = (), **arguments: list[Any]) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, "optional": list(optional)}


@pytest.mark.parametrize(
    ("given", "accepted", "right"),
    [
        (3, [3], True), (3.0, [3], True), (3, [3.0, 4], True), (4, [3], False), ("3", [3], False), (3, ["3"], False),
        (True, [True], True), (1, [True], False), (True, [1], False), (None, [None], True), (0, [None], False),
        ("New York, NY", ["new york ny"], True), ("New  York", ["York"], False), ("it's", ['it"s'], True),
        ("", ["", "x"], True), ([1, 2], [[1, 2]], True), ([2, 1], [[1, 2]], False), ([1], [[1, 2]], False),
        (["A.b"], [["a b"]], True), ([], [[]], True), ([[1], [2]], [[[1], [2]]], True),
        ({"a": 1}, [{"a": [1], "b": ["", 2]}], True), ({"a": 1, "b": 2}, [{"a": [1], "b": ["", 2]}], True),
        ({"a": 2}, [{"a": [1]}], False), ({"a": 1, "c": 1}, [{"a": [1]}], False), ({}, [{"a": [1]}], False),
        ({}, [{}], True), ([{"a": 1}], [[{"a": [1]}]], True), ([{"a": 1}], [[{"a": [2]}]], False),
    ],
)  # fmt: skip
def test_accepted_values(given: Any, accepted: list[Any], right: bool) -> None:
    said = json.dumps({"name": "area", "arguments": {"x": given}})
    assert meets(said, calls(wanted(x=accepted))) is right


def test_arguments_that_are_missing_or_unknown() -> None:
    expected = calls(wanted(base=[3], unit=["cm", ""], optional=("unit",)))
    assert meets("area(base=3)", expected)
    assert meets("area(base=3, unit='cm')", expected)
    assert not meets("area(base=3, unit='inch')", expected)
    assert not meets("area(unit='cm')", expected)
    assert not meets("area(base=3, height=2)", expected)
    assert not meets("area(3)", expected)
    assert not meets("volume(base=3)", expected)
    assert not meets("It is 3.", expected)


def test_dots_in_a_functions_name() -> None:
    assert meets("math_area(base=3)", calls(wanted("math.area", base=[3])))


def test_as_many_calls_as_wanted_in_any_order() -> None:
    expected = calls(wanted(base=[1]), wanted(base=[2]))
    assert meets("[area(base=2), area(base=1)]", expected)
    assert not meets("[area(base=2), area(base=2)]", expected)
    assert not meets("[area(base=1)]", expected)
    assert not meets("[area(base=1), area(base=2), area(base=1)]", expected)


def test_an_assignment_is_found_where_the_first_fit_fails() -> None:
    # The first call fits both, the second only the first wanted one.
    expected = calls(wanted(base=[1, 2]), wanted(base=[1]))
    assert meets("[area(base=1), area(base=2)]", expected)
    assert not meets("[area(base=2), area(base=2)]", expected)


def test_no_call_some_call_and_texts() -> None:
    assert meets("None fits.", {"expect": "no_call"})
    assert not meets("area(base=3)", {"expect": "no_call"})
    assert meets("area(base=3)", {"expect": "some_call"})
    assert not meets("None fits.", {"expect": "some_call"})
    assert meets("It was ADA (Lovelace).", {"expect": "text", "texts": ["Bob", "Ada Lovelace"]})
    assert meets("It cost $5 then.", {"expect": "text", "texts": ["$5"]})
    assert not meets("It was Adams.", {"expect": "text", "texts": ["Ada"]})


@pytest.mark.parametrize(
    ("damaged", "part"),
    [
        ({"expect": "calls"}, "'calls'"),
        ({"expect": "calls", "calls": []}, "'calls'"),
        ({"expect": "calls", "calls": [{"name": "f", "arguments": {"a": 1}, "optional": []}]}, "'calls'"),
        ({"expect": "text", "texts": ["(.)"]}, "'texts'"),  # nothing is left of it, so it would be in every answer
    ],
)
def test_a_damaged_expectation_is_named(damaged: dict[str, Any], part: str) -> None:
    assert part in (problem(damaged) or "")
    assert problem(calls(wanted(base=[1]))) is problem({"expect": "no_call"}) is None
