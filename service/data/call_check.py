"""Whether a model's function calls meet an expectation (``references.expectation``), by BFCL's rules.

As BFCL's checker for Python functions: as many calls as expected, in any order; the right function; every given
argument is known and has an accepted value; no required argument is missing.  Strings are compared without case,
spaces and ``,./-_*^``.  More lenient in three points, which are spelling and not hallucination: 5 equals 5.0, "."
equals "_" in a function's name, and any assignment of calls to expected ones counts (BFCL takes the first that fits).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from service.data.calls import Call, parse_calls


def meets(answer: str, expected: dict[str, Any]) -> bool:
    """Whether an answer meets an expectation (an object of ``references.expected``)."""
    if expected["expect"] == "text":
        text = _plain_text(answer)
        return any(
            re.search(rf"(?<!\w){re.escape(_plain_text(accepted))}(?!\w)", text) for accepted in expected["texts"]
        )
    calls = parse_calls(answer)
    if expected["expect"] == "no_call":
        return not calls
    if expected["expect"] == "some_call":
        return bool(calls)
    return _all_paired(calls, expected["calls"])


def problem(expected: dict[str, Any]) -> str | None:
    """What is wrong with the shape of an expectation, or None."""
    kind = expected["expect"]
    if kind == "text":
        texts = expected.get("texts")
        fine = isinstance(texts, list) and texts and all(isinstance(text, str) and _plain_text(text) for text in texts)
        return None if fine else "'texts' must be a non-empty list of texts"
    if kind == "calls":
        calls = expected.get("calls")
        fine = isinstance(calls, list) and calls and all(map(_is_specification, calls))
        return None if fine else "'calls' must be a non-empty list of objects with name, arguments and optional"
    return None


def _is_specification(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("optional"), list)
        and isinstance(value.get("arguments"), dict)
        and all(isinstance(accepted, list) for accepted in value["arguments"].values())
    )


def _all_paired(calls: Sequence[Call], wanted: Sequence[dict[str, Any]]) -> bool:
    """Whether calls and wanted calls can be matched one to one."""
    if len(calls) != len(wanted):
        return False
    fits = np.array([[_is_right(call, want) for want in wanted] for call in calls])
    return bool(fits[linear_sum_assignment(fits, maximize=True)].all())


def _is_right(call: Call, wanted: dict[str, Any]) -> bool:
    if call.name.replace(".", "_") != wanted["name"].replace(".", "_"):
        return False
    accepted, optional = wanted["arguments"], wanted["optional"]
    given = all(name in accepted and _is_accepted(value, accepted[name]) for name, value in call.arguments.items())
    return given and all(name in call.arguments or name in optional for name in accepted)


def _is_accepted(value: Any, accepted: Sequence[Any]) -> bool:
    return any(_is_same(value, candidate) for candidate in accepted)


def _is_same(value: Any, wanted: Any) -> bool:
    """Equality by type: booleans, numbers, strings, None, lists in order, objects by key."""
    if isinstance(wanted, str) or isinstance(value, str):
        return isinstance(wanted, str) and isinstance(value, str) and _plain(value) == _plain(wanted)
    if isinstance(wanted, bool) or isinstance(value, bool) or wanted is None or value is None:
        return value is wanted
    if isinstance(wanted, list):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(_is_same, value, wanted))
    if isinstance(wanted, dict):
        return isinstance(value, dict) and _is_same_object(value, wanted)
    return isinstance(value, int | float) and bool(value == wanted)


def _is_same_object(value: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """In BFCL's objects each key has a list of accepted values; with "" among them the key is optional."""
    for key, item in value.items():
        options = wanted.get(key)
        if key not in wanted or not (isinstance(options, list) and _is_accepted(item, options)):
            return False
    return all(key in value or (isinstance(options, list) and "" in options) for key, options in wanted.items())


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


def _plain_text(text: str) -> str:
    return " ".join(re.sub(r"[,./\-_*^()]", "", text).lower().replace("'", '"').split())
