"""What a judge needs beside accepted answers, written into the strings of a row's ``answers``.

``answers`` is the one thing of a row that reaches a judge (service/data/training_rows.py), so nothing else has to
change for a set whose verdict needs more.  A plain string is an accepted answer, as ever.  A string that is a JSON
object with one of these keys is something else:

``{"incorrect": "You die"}``
    a reference answer that is false (judge ``similarity``); judges that know only accepted answers are not shown it;
``{"expect": "calls", "calls": [{"name": ..., "arguments": {name: [accepted values]}, "optional": [names]}]}``
    the calls of functions that are right, in any order (judge ``calls``); or ``"expect": "no_call"``, ``"some_call"``,
    or ``{"expect": "text", "texts": [...]}``, a short answer of which one must occur in the answer.

Knows no set and no judge.
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
    """What an answer must do, as a string for ``answers``; ``expect`` is one of EXPECTATIONS."""
    return json.dumps({"expect": expect, **what}, ensure_ascii=False)


def split(answers: Sequence[str]) -> tuple[list[str], list[str]]:
    """Accepted answers and false ones; expectations are in neither."""
    accepted, false = [], []
    for answer in answers:
        value = _object(answer)
        if value is None:
            accepted.append(answer)
        elif "incorrect" in value:
            false.append(value["incorrect"])
    return accepted, false


def expected(answers: Sequence[str]) -> dict[str, Any] | None:
    """The first expectation among the answers, None where there is none."""
    return next((value for value in map(_object, answers) if value is not None and "expect" in value), None)


def _object(answer: str) -> dict[str, Any] | None:
    """The object that an answer is written as, None for a plain answer."""
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
