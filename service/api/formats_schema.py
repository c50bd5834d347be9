"""The format of an answer in requests of OpenAI's and Anthropic's: a text, or JSON of a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import AfterValidator

from service.api.request_schema import at_fault
from service.engines.formats import MOST_CHARACTERS, MOST_LEVELS, Format, check_schema
from service.json_limits import size_within

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NAMED = frozenset(("name", "schema", "strict", "description"))


def checked_format(
    fields: Mapping[str, Any] | None, param: str, inner: str | None = None
) -> Format | None:
    """Return the format that ``asked_format`` has taken, without checking its schema again; None: a
    text."""
    if fields is None or fields.get("type") != "json_schema":
        return asked_format(fields, param, inner)
    schema = (fields if inner is None else fields[inner])["schema"]
    return Format(json.dumps(schema, ensure_ascii=False, allow_nan=False), param)


def asked_format(
    fields: Mapping[str, Any] | None, param: str, inner: str | None = None
) -> Format | None:
    """Return what is asked for; None: a text.  Raises ValueError, which names what is wrong.

    ``inner``: the field that holds name and schema; None: they stand beside the type."""
    kind = "text" if fields is None else fields.get("type")
    if fields is None or kind in ("text", "json_object"):
        if fields is not None and (unknown := fields.keys() - {"type"}):
            raise ValueError(f"no field {min(unknown)!r} belongs to the type {kind!r}")
        return None if kind == "text" else Format('{"type": "object"}', param)
    if kind != "json_schema":
        raise ValueError("'type' is 'text', 'json_object' or 'json_schema' here")
    where, named = "", dict(fields)
    del named["type"]
    if inner is not None:
        if named.keys() != {inner} or not isinstance(named[inner], Mapping):
            raise ValueError(f"the type 'json_schema' has {inner!r}, an object, and nothing else")
        named, where = dict(named[inner]), f"{inner}."
    if unknown := named.keys() - _NAMED:
        raise ValueError(f"no field '{where}{min(unknown)}' is known")
    if not isinstance(name := named.get("name"), str) or not _NAME.fullmatch(name):
        raise ValueError(f"'{where}name' is 1 to 64 letters, digits, - and _")
    if not isinstance(schema := named.get("schema"), Mapping):
        raise ValueError(f"'{where}schema' is a JSON schema, an object")
    if not isinstance(named.get("strict"), bool | None) or not isinstance(
        named.get("description"), str | None
    ):
        raise ValueError(f"'{where}strict' is true or false, and '{where}description' a text")
    if (length := len(named.get("description") or "")) > MOST_CHARACTERS:
        raise ValueError(
            f"'{where}description' has {length} characters; at most {MOST_CHARACTERS} are taken"
        )
    try:
        size_within(
            schema, levels=MOST_LEVELS, values=MOST_CHARACTERS // 2, characters=MOST_CHARACTERS
        )
        return Format(check_schema(schema), param)
    except ValueError as error:
        raise ValueError(f"'{where}schema': {error}") from None


def asked_schema(asked: Mapping[str, Any] | None, param: str) -> Format | None:
    """Return what a request of Anthropic's asks for, which has no name and no other type; None: a
    text.  Raises ValueError as ``asked_format`` does."""
    if asked is None:
        return None
    if asked.get("type") != "json_schema":
        raise ValueError("'type' is 'json_schema' here")
    if other := asked.keys() - {"type", "schema"}:
        raise ValueError(f"no field {min(other)!r} is known beside 'type' and 'schema'")
    return asked_format({**asked, "name": "answer"}, param)


def taken_by(check: Callable[..., object], *where: str) -> AfterValidator:
    """Return what has pydantic refuse a format that ``check`` refuses; ``where``: its further
    arguments."""

    def checked(fields: dict[str, Any]) -> dict[str, Any]:
        check(fields, *where)
        return fields

    return AfterValidator(checked)


def check_alone(format: Format | None, tools: object) -> None:
    """Raise ValueError for a format beside tools: a call of one is not of the format."""
    if format is not None and tools is not None:
        raise at_fault(
            format.param,
            f"{format.param!r} and 'tools' exclude each other here: a call of a tool is not of the"
            " format",
        )
