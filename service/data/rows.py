"""Checks the rows of a file one by one and reports problems by line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from probes_store.records import GREEDY, Decoding
from service.data.requests import as_row, json_value
from service.data.row_files import field_of, read_lines
from service.errors import DataError, RequestError

Message = dict[str, str]
Given = TypeVar("Given")
Ids = TypeVar("Ids", bound=Sized)
MARK_DIGITS = 16  # hexadecimal
LABELS = {"factual": 1, "hallucinated": 0}  # a row's label is one of these words or numbers
DECODINGS = "greedy, or temperature=T or temperature=T,top_p=P, as in temperature=0.7,top_p=0.9"
ROLES = (
    "system",
    "user",
    "assistant",
)  # as in the service; many templates silently drop any other role


def label_of(value: Any) -> int | None:
    """Return 1 (factual) or 0 (hallucinated); None for anything else, also for true, which may mean
    the opposite."""
    if isinstance(value, str):
        return LABELS.get(value.strip().lower())
    return int(value) if type(value) in (int, float) and value in (0, 1) else None


def decoding_of(value: Any) -> Decoding | None:
    """Parse ``greedy``, ``temperature=0.7`` or ``temperature=0.7,top_p=0.9``; return None for
    anything else."""
    if value == "greedy":
        return GREEDY
    pairs = [part.partition("=") for part in value.split(",")] if isinstance(value, str) else []
    settings = {name.strip(): number for name, _, number in pairs}
    if len(settings) < len(pairs) or not {"temperature"} <= settings.keys() <= {
        "temperature",
        "top_p",
    }:
        return None
    try:
        decoding = Decoding(float(settings["temperature"]), float(settings.get("top_p", 1)))
    except ValueError:
        return None
    fine = 0 <= decoding.temperature < float("inf") and 0 < decoding.top_p <= 1
    return (decoding if decoding.temperature else GREEDY) if fine else None


def accepted_of(value: Any) -> Any:
    """Return a row's ``answers``: a single text is one accepted answer."""
    return [value] if isinstance(value, str) else value


def likely_columns(value: Mapping[str, Any], *fields: str) -> dict[str, str]:
    """Return for each of ``fields`` that the row lacks the key that probably holds it, if there is
    one."""
    missing = [field for field in fields if field not in value]
    likely: dict[str, str] = {}
    for key in value:
        if (field := field_of(key, missing)) is not None:
            likely.setdefault(field, key)
    if {"prompt", "messages"} <= likely.keys():  # a row has one of them
        del likely["messages"]
    return likely


def objects(
    path: Path, problems: list[str], columns: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each non-blank line; problems of the other lines are added to
    ``problems``.

    The file is JSON lines, or has a format of ``row_files``; ``-`` reads stdin.  ``columns`` maps
    our fields to the file's keys.  Raises DataError for any other file."""
    for line, data in read_lines(path):
        if isinstance(data, dict):
            yield line, _renamed(data, columns)
            continue
        if not data.strip():
            continue
        try:
            value = json_value(data)
        except UnicodeDecodeError as error:
            problems.append(
                f"line {line}: not UTF-8 at byte {error.start + 1}: save the file as UTF-8"
            )
        except json.JSONDecodeError as error:
            cure = (
                ""
                if data.lstrip().startswith(b"{")
                else ': an object is expected, such as {"prompt": "..."}; a file with a'
                " question a line is to be named .txt"
            )
            problems.append(
                f"line {line}: invalid JSON: {error.msg}, at character {error.pos + 1}{cure}"
            )
        except (ValueError, RecursionError) as error:
            problems.append(f"line {line}: invalid JSON: {error}")
        else:
            if isinstance(value, dict):
                yield line, _renamed(as_row(value), columns)
            else:
                problems.append(f"line {line}: a JSON object is expected, found {_kind(value)}")


def _renamed(value: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the object with the keys that ``columns`` lists renamed to our fields."""
    if not columns:
        return value
    named = {field: value[key] for field, key in columns.items() if key in value}
    return {
        key: cell for key, cell in value.items() if key not in {*columns.values(), *named}
    } | named


def id_of(value: dict[str, Any], line: int) -> str:
    """Return a row's ``id`` as text, or its line number if it has none."""
    return str(value.get("id", line))


def check_id(value: dict[str, Any]) -> Iterator[str]:
    """Yield problems of an object's ``id``: it may be missing, or be a text or a whole number."""
    if type(value.get("id")) is not int:
        yield from check_text(value, "id", required=False)


def id_problem(
    value: dict[str, Any], line: int, first: dict[str, int], numbered: set[int]
) -> Iterator[str]:
    """Yield a problem if an earlier line has this row's id.

    ``first`` maps each id to its first line.  ``numbered`` has the lines of rows without an id."""
    name = id_of(value, line)
    if (earlier := first.setdefault(name, line)) != line:
        if "id" in value and earlier not in numbered:
            yield f"id {name!r} is already that of line {earlier}"
        else:
            without, with_id = (earlier, line) if earlier in numbered else (line, earlier)
            yield (
                f"id {name!r} of line {with_id} is also the number of line {without}, which has no"
                " 'id'"
            )
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
    if value.get("tools"):
        yield "has 'tools', which change the prompt and which no row can offer: leave it out"
    if ("prompt" in value) == ("messages" in value):
        both = "prompt" in value
        yield (
            "has both 'prompt' and 'messages': keep one"
            if both
            else "'prompt' (or 'messages') is missing"
        )
    elif "prompt" in value:
        yield from check_text(value, "prompt", required=True)
    elif not isinstance(value["messages"], list) or not value["messages"]:
        yield "'messages' must be a non-empty list of objects with 'role' and 'content'"
    elif problems := [*_check_messages(value["messages"])]:
        yield from problems
    else:
        question, _ = split_answer(value["messages"])
        if not any(message["role"] == "user" for message in question):
            yield "'messages' has no turn of the user, so nothing is asked"
        elif question[-1]["role"] == "assistant":
            yield (
                "'messages' ends with several turns of the assistant: keep the last one, the"
                " answer, or none"
            )


def split_answer(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Return the messages before the final answer of the assistant, and that answer; "" if they end
    with a question.

    Rows for fine-tuning end with an answer."""
    *before, last = messages or [{}]
    ends = last.get("role") == "assistant" and set(last) == {"role", "content"}
    return (before, last["content"]) if ends else ([*messages], "")


def _check_messages(messages: list[Any]) -> Iterator[str]:
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            yield f"'messages[{position}]' must be an object with exactly 'role' and 'content'"
        else:
            for key in ("role", "content"):
                for problem in check_text(message, key, required=True):
                    yield f"'messages[{position}]': {problem}"
            if (
                isinstance(message["role"], str)
                and message["role"].strip()
                and message["role"] not in ROLES
            ):
                yield (
                    f"'messages[{position}]': role {message['role']!r} is none of"
                    f" {', '.join(ROLES)}"
                )


def _kind(value: Any) -> str:
    names: dict[type, str] = {
        type(None): "null",
        bool: "a boolean",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "a number")


def rendered(
    source: str,
    rows: Iterable[tuple[int, Given]],
    render: Callable[[Given], Ids],
    limit: int,
    reserved: Callable[[Given], int] = lambda _: 0,
) -> list[Ids]:
    """Return the token ids of all ``rows``, given with their lines, that leave room for
    ``reserved`` tokens of an answer.

    Raises DataError that names every row that the model, with its ``limit``, cannot take."""
    rendered, problems = [], []
    for line, row in rows:
        try:
            rendered.append(ids := render(row))
        except RequestError as error:
            problems.append(f"line {line}: {error}")
            continue
        if len(ids) + (reserve := reserved(row)) > limit:
            answer = f" and {reserve} of the answer" if reserve else ""
            problems.append(
                f"line {line}: {len(ids)} tokens{answer} are more than the model's {limit}"
            )
    if problems:
        raise DataError(source, problems)
    return rendered


def prompt_digest(value: Mapping[str, Any]) -> bytes:
    """Return the digest of an object's ``prompt``, or of its ``messages`` without a final
    answer."""
    # A prompt equals a conversation of one user message with the same text.
    if "messages" not in value:
        return _digest([{"role": "user", "content": value["prompt"]}])
    messages = value["messages"]
    return _digest(split_answer(messages)[0])


def prompt_mark(digest: bytes) -> str:
    """Return the mark of a row: the first 64 bits of its ``prompt_digest``."""
    return digest.hex()[:MARK_DIGITS]


def mark_of(value: Mapping[str, Any]) -> str:
    """Return the mark of an object.  Without ``prompt`` or ``messages`` it is the mark of the whole
    object."""
    return prompt_mark(
        prompt_digest(value) if "messages" in value or "prompt" in value else _digest(dict(value))
    )


def _digest(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
