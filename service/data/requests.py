"""Reads requests of OpenAI's API as rows: what an app sends is what a bundle is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from service.errors import DataError

ONE, MANY = ".json", ".jsonl"  # a file with one request; a file with a request in each line
PROMPT = ("prompt", "messages")


def requests_in(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the file and the bytes of each request in a folder, the files by name.

    Raises DataError where no file has the name of one with requests, or one cannot be read."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (ONE, MANY))
    if not files:
        problem = (
            f"is a folder without requests: name a file in it, or put requests into files {ONE}"
            f" (one each) or {MANY} (one in each line)"
        )
        raise DataError(str(folder), [problem])
    for path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(str(path), [f"cannot be read: {error.strerror}"]) from error
        documents = [data] if path.suffix.lower() == ONE else data.splitlines()
        for document in documents:
            if document.strip():
                yield path, document


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
