"""Reads requests of OpenAI's API as rows: what an app sends is what a bundle is trained on."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from service.errors import DataError

ONE, MANY = ".json", ".jsonl"  # a file with one request; a file with a request in each line
PROMPT = ("prompt", "messages")


def requests_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield each request in a folder as a row, the files by name.

    Raises DataError, which names the file, where one cannot be read or holds something else; also
    where no file has the name of one with requests."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (ONE, MANY))
    if not files:
        problem = (
            f"is a folder without requests: name a file in it, or put requests into files {ONE}"
            f" (one each) or {MANY} (one in each line)"
        )
        raise DataError(str(folder), [problem])
    for path in files:
        try:
            data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            raise DataError(str(path), [f"cannot be read: {error.strerror}"]) from error
        several = path.suffix.lower() == MANY
        for number, document in enumerate(data.splitlines() if several else [data], 1):
            if document.strip():
                yield _request(path, f"line {number}: " if several else "", document)


def _request(path: Path, where: str, document: bytes) -> dict[str, Any]:
    try:
        value = json_value(document)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 at byte {error.start + 1}: save the file as UTF-8"
        raise DataError(str(path), [where + problem]) from None
    except (ValueError, RecursionError) as error:
        raise DataError(str(path), [f"{where}invalid JSON: {error}"]) from None
    if not isinstance(value, dict):
        problem = 'a request is a JSON object, such as {"messages": [..]}'
        raise DataError(str(path), [where + problem])
    return as_row(value)


def json_value(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises UnicodeDecodeError; ValueError or RecursionError for what is no JSON, a number that JSON
    does not have (NaN), or an object that names a key twice."""
    return json.loads(data.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_no_repeats)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return value


def as_row(value: dict[str, Any]) -> dict[str, Any]:
    """Return a request as a row: the body of a line for the batch API, contents without parts.

    Any other object, and what a row cannot hold (images, calls of tools), is returned as it is, for
    the checks of rows to name."""
    body = value.get("body")
    is_row = not value.keys().isdisjoint(PROMPT)
    if not is_row and isinstance(body, dict) and not body.keys().isdisjoint(PROMPT):
        value = body | ({"id": value["custom_id"]} if "custom_id" in value else {})
    messages = value.get("messages")
    if not isinstance(messages, list):
        return value
    return value | {"messages": [_as_turn(message) for message in messages]}


def _as_turn(message: Any) -> Any:
    """As the service reads it: text parts joined, no ``name``, no null, a developer's as a
    system's."""
    if not isinstance(message, dict):
        return message
    turn = {
        key: content
        for key, content in message.items()
        if key != "name" and content is not None and content != []
    }
    if turn.get("role") == "developer":
        turn["role"] = "system"
    parts = turn.get("content")
    if isinstance(parts, list) and all(map(_is_text, parts)):
        turn["content"] = "".join(part["text"] for part in parts)
    return turn


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )
