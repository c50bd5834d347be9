"""Encoding of what a judge needs besides accepted answers in a row's ``answers``.

``answers`` is the only part of a row that reaches a judge (service/data/training_rows.py).  A plain string is an
accepted answer; a string that is a JSON object with one of these keys is not:

``{"incorrect": "You die"}``
    a false reference answer, used by the judge ``similarity`` alone;
``{"expect": "calls", "calls": [{"name": ..., "arguments": {name: [accepted values]}, "optional": [names]}]}``
    the right function calls, in any order (judge ``calls``); or ``"expect": "no_call"``, ``"some_call"``, or
    ``{"expect": "text", "texts": [...]}``: one of the texts must occur in the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

EXPECTATIONS = ("calls", "no_call", "some_call", "text")


def incorrect(text: str) -> str:
    """A false reference answer, as a string for ``answers``."""
    return json.dumps({"incorrect": text}, ensure_ascii=False)


def expectation(expect: str, **what: Any) -> str:
    """An expectation on the answer, as a string for ``answers``; ``expect`` is one of EXPECTATIONS."""
    return json.dumps({"expect": expect, **what}, ensure_ascii=False)


def split(answers: Sequence[str]) -> tuple[list[str], list[str]]:
    """(accepted answers, false answers), without expectations."""
    accepted, false = [], []
    for answer in answers:
        value = _object(answer)
        if value is None:
            accepted.append(answer)
        elif "incorrect" in value:
            false.append(value["incorrect"])
    return accepted, false


def expected(answers: Sequence[str]) -> dict[str, Any] | None:
    """The first expectation among the answers, or None."""
    return next((value for value in map(_object, answers) if value is not None and "expect" in value), None)


def _object(answer: str) -> dict[str, Any] | None:
    """The decoded object, or None for a plain answer."""
    if not answer.startswith("{"):
        return None
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("incorrect"), str) and len(value) == 1:
        return value
    return value if value.get("expect") in EXPECTATIONS else None
