"""JSONL input: one object per line, problems reported by line."""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from service.errors import DataError

Message = dict[str, str]
MARK_DIGITS = 16  # hexadecimal
ROLES = ("system", "user", "assistant")  # as the service takes them; many templates drop any other silently


def objects(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each non-blank line; problems of the other lines are added to ``problems``.

    ``-`` reads stdin.  Raises DataError where the file cannot be opened."""
    with ExitStack() as stack:
        try:
            file = sys.stdin.buffer if str(path) == "-" else stack.enter_context(path.open("rb"))
        except OSError as error:
            raise DataError(str(path), [f"cannot be read: {error.strerror}"]) from error
        for line, data in enumerate(file, 1):
            if not data.strip():
                continue
            if line == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            try:
                value = json.loads(data.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_no_repeats)
            except UnicodeDecodeError as error:
                problems.append(f"line {line}: not UTF-8 at byte {error.start + 1}: save the file as UTF-8")
            except (ValueError, RecursionError) as error:
                problems.append(f"line {line}: invalid JSON: {error}")
            else:
                if isinstance(value, dict):
                    yield line, value
                else:
                    problems.append(f"line {line}: a JSON object is expected, found {_kind(value)}")


def id_of(value: dict[str, Any], line: int) -> str:
    """Return a row's ``id`` as text; the number of its line where it has none."""
    return str(value.get("id", line))


def check_id(value: dict[str, Any]) -> Iterator[str]:
    """Yield problems of an object's ``id``, which may be missing, a text or a whole number."""
    if type(value.get("id")) is not int:
        yield from check_text(value, "id", required=False)


def id_problem(value: dict[str, Any], line: int, first: dict[str, int], numbered: set[int]) -> Iterator[str]:
    """Yield a problem if another line has this row's id; ``first``: its line by id; ``numbered``: lines without."""
    name = id_of(value, line)
    if (other := first.setdefault(name, line)) != line:
        if "id" in value and other not in numbered:
            yield f"id {name!r} is already that of line {other}"
        else:
            without, with_id = (other, line) if other in numbered else (line, other)
            yield f"id {name!r} of line {with_id} is also the number of line {without}, which has no 'id'"
    if "id" not in value:
        numbered.add(line)


def check_text(value: dict[str, Any], key: str, *, required: bool) -> Iterator[str]:
    """Yield problems of an object's text field ``key``."""
    if key not in value:
        if required:
            yield f"{key!r} is missing"
    elif not isinstance(value[key], str):
        yield f"{key!r} must be a string, found {_kind(value[key])}"
    elif not value[key].strip():
        yield f"{key!r} is empty"
    elif any("\ud800" <= char <= "\udfff" for char in value[key]):
        yield f"{key!r} has half of a surrogate pair (\\ud800 to \\udfff): it is not text"


def check_prompt(value: dict[str, Any]) -> Iterator[str]:
    """Yield problems of an object's ``prompt`` or ``messages``."""
    if ("prompt" in value) == ("messages" in value):
        both = "prompt" in value
        yield "has both 'prompt' and 'messages': keep one" if both else "'prompt' (or 'messages') is missing"
    elif "prompt" in value:
        yield from check_text(value, "prompt", required=True)
    elif not isinstance(value["messages"], list) or not value["messages"]:
        yield "'messages' must be a non-empty list of objects with 'role' and 'content'"
    elif problems := [*_check_messages(value["messages"])]:
        yield from problems
    else:
        asked, _ = split_answer(value["messages"])
        if not any(message["role"] == "user" for message in asked):
            yield "'messages' has no turn of the user, so nothing is asked"
        elif asked[-1]["role"] == "assistant":
            yield "'messages' ends with several turns of the assistant: keep the last one, the answer, or none"


def split_answer(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Return the turns up to the answer, and the assistant's answer with which they end, as in fine-tuning rows; ""
    where they end with what is asked."""
    *before, last = messages or [{}]
    ends = last.get("role") == "assistant" and set(last) == {"role", "content"}
    return (before, last["content"]) if ends else ([*messages], "")


def _check_messages(messages: list[Any]) -> Iterator[str]:
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            yield f"'messages[{place}]' must be an object with exactly 'role' and 'content'"
        else:
            for key in ("role", "content"):
                for problem in check_text(message, key, required=True):
                    yield f"'messages[{place}]': {problem}"
            if isinstance(message["role"], str) and message["role"].strip() and message["role"] not in ROLES:
                yield f"'messages[{place}]': role {message['role']!r} is none of {', '.join(ROLES)}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return value


def _kind(value: Any) -> str:
    names: dict[type, str] = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def prompt_digest(value: Mapping[str, Any]) -> bytes:
    """Return the digest of an object's ``prompt`` or ``messages``, without the answer with which they may end."""
    # A prompt and a conversation of one user turn with the same words are the same prompt.
    if "messages" not in value:
        return _digest([{"role": "user", "content": value["prompt"]}])
    messages = value["messages"]
    return _digest(split_answer(messages)[0])


def prompt_mark(digest: bytes) -> str:
    """Return the mark of a row's ``prompt_digest``: 64 bits of it."""
    return digest.hex()[:MARK_DIGITS]


def mark_of(value: Mapping[str, Any]) -> str:
    """Return the mark of an object with ``prompt`` or ``messages``; any other is told from all of those."""
    return prompt_mark(prompt_digest(value) if "messages" in value or "prompt" in value else _digest(dict(value)))


def _digest(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
