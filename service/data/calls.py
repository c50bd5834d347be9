"""Finds the function calls in a model's text and checks them against the expected ones.  It
executes nothing.

A call is JSON in one of the usual shapes, or Python call syntax.  The search has this order:
``<tool_call>`` blocks (Qwen, Hermes), fenced blocks, the text after a marker such as
``[TOOL_CALLS]`` (Mistral) or ``<|python_tag|>`` (Llama), the whole text, then its single lines.  It
ignores reasoning in ``<think>`` tags and calls inside a sentence."""

from __future__ import annotations

import ast
import json
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)|\A.*?</think>", re.DOTALL)
_TAGGED = re.compile(r"<(tool_call|function_call)>(.*?)(?:</\1>|\Z)", re.DOTALL)
_FENCED = re.compile(r"```[\w+-]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_MARKED = re.compile(r"(?:\[TOOL_CALLS\]|<\|python_tag\|>)(.*)\Z", re.DOTALL)
_MAX_CHARACTERS = 20_000  # the rest is ignored: Python's parser has no limit of its own
_CONSTANTS = {"true": True, "false": False, "null": None}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Call:
    """One call.  Positional arguments are named by their position ("0", "1", ...)."""

    name: str
    arguments: dict[str, Any]


def parse_calls(text: str) -> list[Call]:
    """Return the calls in an answer, in order; none if it is prose."""
    answer = _THOUGHT.sub("", text[:_MAX_CHARACTERS]).strip()
    for pattern, group in ((_TAGGED, 2), (_FENCED, 1), (_MARKED, 1)):
        if calls := [
            call for match in pattern.finditer(answer) for call in _calls(match.group(group))
        ]:
            return calls
    return _calls(answer) or [call for line in answer.splitlines() for call in _calls(line)]


def _calls(text: str) -> list[Call]:
    text = text.strip().rstrip(";")
    try:
        return list(_json_calls(_json_values(text))) or _python_calls(text)
    except (ValueError, RecursionError, ArithmeticError, SyntaxError, MemoryError):
        return []  # not a function's name, nested too deep, 10**400 / 3, no Python


def _json_values(text: str) -> list[Any]:
    """Return JSON values separated by spaces, commas or semicolons; none if anything else stands
    between them."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    position = 0
    while position < len(text):
        if text[position] in " \t\r\n,;":
            position += 1
            continue
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        values.append(value)
    return values


def _json_calls(value: Any) -> Iterator[Call]:
    """``{"name", "arguments" | "parameters"}``, OpenAI's ``{"function": {...}}``, ``{name:
    {arguments}}``, or lists."""
    if isinstance(value, list):
        for item in value:
            yield from _json_calls(item)
    elif isinstance(value, dict):
        inner = value.get("function")
        if isinstance(inner, dict):
            yield from _json_calls(inner)
            return
        name = value.get("name") or (inner if isinstance(inner, str) else None)
        arguments = next(
            (value[key] for key in ("arguments", "parameters", "args") if key in value), None
        )
        if isinstance(arguments, str):  # OpenAI writes the arguments as a string of JSON
            arguments = values[0] if len(values := _json_values(arguments)) == 1 else None
        if not isinstance(name, str) and len(value) == 1:
            ((name, arguments),) = value.items()
        offered = (
            "description" in value and isinstance(arguments, dict) and "properties" in arguments
        )  # repeated
        if isinstance(name, str) and isinstance(arguments, dict) and not offered:
            yield Call(name, arguments)


def _python_calls(text: str) -> list[Call]:
    """``f(a=1)``, ``[f(a=1), g.h(b='x')]`` or ``f(a=1); g()``; none for any other text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as '\d' in an argument
        body = ast.parse(text).body
    nodes: list[ast.AST] = []
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    calls = [
        Call(_dotted(node.func), _arguments(node)) for node in nodes if isinstance(node, ast.Call)
    ]
    return calls if len(calls) == len(nodes) else []


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError("not a function's name")


def _arguments(node: ast.Call) -> dict[str, Any]:
    named = {word.arg or "**": _value(word.value) for word in node.keywords}
    return {str(position): _value(value) for position, value in enumerate(node.args)} | named


def _value(node: ast.expr) -> Any:
    """Return an argument's value, or its source code if it is not a constant (a variable, a
    call)."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {
                str(_value(key)): _value(value)
                for key, value in zip(keys, values, strict=True)
                if key
            }
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand) if _is_number(inner := _value(operand)):
            return -inner
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
            a, b = _value(left), _value(right)
            if _is_number(a) and _is_number(b) and not (isinstance(sign, ast.Div) and b == 0):
                return _ARITHMETIC[type(sign)](a, b)
    return ast.unparse(node)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def meets(answer: str, expected: dict[str, Any]) -> bool:
    """Return whether an answer meets an expectation (an object of ``judges.expected``), by BFCL's
    rules.

    As BFCL's checker for Python functions: as many calls as expected, in any order; the right
    function; every given argument is known and has an accepted value; no required argument is
    missing.  Strings are compared without case, spaces and ``,./-_*^``.  More lenient in three
    points, which are spelling and not hallucination: 5 equals 5.0, "." equals "_" in a function's
    name, and any assignment of calls to expected ones counts (BFCL takes the first to fit).
    """
    if expected["expect"] == "text":
        text = _plain_text(answer)
        return any(
            re.search(rf"(?<!\w){re.escape(_plain_text(candidate))}(?!\w)", text)
            for candidate in expected["texts"]
        )
    calls = parse_calls(answer)
    if expected["expect"] != "calls":
        return bool(calls) == bool(expected["expect"] == "some_call")
    wanted = expected["calls"]
    if len(calls) != len(wanted):
        return False
    from scipy.optimize import (
        linear_sum_assignment,
    )  # .3 s at the start of a service, which judges no calls

    fits = np.array([_is_right(*pair) for pair in product(calls, wanted)]).reshape(len(calls), -1)
    return bool(fits[linear_sum_assignment(fits, maximize=True)].all())


def expectation_problem(expected: dict[str, Any]) -> str | None:
    """Return what is wrong with the shape of an expectation, or None."""

    def is_call(value: Any) -> bool:
        parts = {"name": str, "optional": list, "arguments": dict}
        known = isinstance(value, dict) and all(
            isinstance(value.get(key), kind) for key, kind in parts.items()
        )
        return known and all(isinstance(accepted, list) for accepted in value["arguments"].values())

    shapes: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
        "text": ("texts", "texts", lambda item: isinstance(item, str) and bool(_plain_text(item))),
        "calls": ("calls", "objects with name, arguments and optional", is_call),
    }
    if expected["expect"] not in shapes:
        return None
    key, what, fine = shapes[expected["expect"]]
    values = expected.get(key)
    return (
        None
        if isinstance(values, list) and values and all(map(fine, values))
        else f"'{key}' must list {what}"
    )


def _is_right(call: Call, wanted: dict[str, Any]) -> bool:
    accepted, optional = wanted["arguments"], wanted["optional"]
    return (
        call.name.replace(".", "_") == wanted["name"].replace(".", "_")
        and all(
            name in accepted and _is_accepted(value, accepted[name])
            for name, value in call.arguments.items()
        )
        and all(name in call.arguments or name in optional for name in accepted)
    )


def _is_accepted(value: Any, accepted: Any) -> bool:
    return isinstance(accepted, list) and any(_is_same(value, candidate) for candidate in accepted)


def _is_same(value: Any, wanted: Any) -> bool:
    """Return equality by type: booleans, numbers, strings, None, lists in order, BFCL's objects.

    Each key of an object has a list of accepted values; with "" in it the key is optional."""
    if isinstance(wanted, str) or isinstance(value, str):
        return (
            isinstance(wanted, str) and isinstance(value, str) and _plain(value) == _plain(wanted)
        )
    if isinstance(wanted, bool) or isinstance(value, bool) or wanted is None or value is None:
        return value is wanted
    if isinstance(wanted, list):
        return (
            isinstance(value, list)
            and len(value) == len(wanted)
            and all(map(_is_same, value, wanted))
        )
    if isinstance(wanted, dict):
        known = isinstance(value, dict) and all(
            _is_accepted(item, wanted.get(key)) for key, item in value.items()
        )
        return known and all(
            key in value or (isinstance(accepted, list) and "" in accepted)
            for key, accepted in wanted.items()
        )
    return isinstance(value, int | float) and bool(value == wanted)


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


def _plain_text(text: str) -> str:
    return " ".join(re.sub(r"[,./\-_*^()]", "", text).lower().replace("'", '"').split())
