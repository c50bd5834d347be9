"""Strict JSON into frozen dataclasses: no unknown or missing fields, no conversions.

Types that a dataclass may use: str, int, float, bool, Literal, X | None, tuple[X, ...], dict[str, X], dataclasses.
A float is written with a point or an exponent (1.0, not 1), so that reading and writing again gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from probes_store.errors import BadValue, MissingField, NotFinite, Truncated, UnknownField

Record = TypeVar("Record")
MAX_INT = 2**53  # larger integers lose digits in some JSON readers


def canonical_json(value: object) -> bytes:
    """Sorted keys, compact separators, UTF-8, no NaN: the form that digests are computed from."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def readable_json(value: object) -> bytes:
    """Sorted keys, two spaces, a final newline, UTF-8, no NaN: the form that is written to disk."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def plain(value: object, file: str, where: str = "") -> Any:
    """Convert Python and numpy values to JSON types, for writing.  Raises NotFinite and BadValue."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise NotFinite("not finite", file=file, field=where, expected="a finite number", found=value)
        return float(value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item, file, _join(where, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, file, f"{where}[{i}]") for i, item in enumerate(value)]
    raise _bad(file, where, "what JSON can hold, with strings as keys", value)


def parse_json(data: bytes, file: str) -> Any:
    """Bytes that ``readable_json`` wrote -> plain values.

    Raises Truncated, NotFinite (NaN, Infinity, 1e999), UnknownField (a key twice) and BadValue (not JSON, not UTF-8).
    """

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise NotFinite("a number is not finite", file=file, expected="finite numbers", found=text)
        return value

    def refuse(text: str) -> NoReturn:
        raise NotFinite("a number is not finite", file=file, expected="finite numbers", found=text)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UnknownField("the key stands there twice", file=file, field=key)
            seen[key] = value
        return seen

    try:
        return json.loads(data.decode(), parse_float=number, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        last = data.rstrip(b"\n").rpartition(b"\n")[2]
        if last[-1:] not in (b"}", b"]") or last.startswith(b" "):  # an indented last line is the middle of a record
            end = f"{len(data)} bytes that end in {data[-8:]!r}"
            raise Truncated("the end is missing", file=file, expected="a closing bracket", found=end) from error
        raise BadValue("not JSON", file=file, expected="UTF-8 JSON", found=error) from error


def read_record(kind: type[Record], value: Any, file: str, where: str = "") -> Record:
    """A JSON object -> ``kind``, field by field.  Raises UnknownField, MissingField, NotFinite and BadValue."""
    if type(value) is not dict:
        raise _bad(file, where or "the whole file", "an object", value)
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in value:
        if name not in names:
            raise UnknownField("this format has no such field", file=file, field=_join(where, name))
    for name in names:
        if name not in value:
            raise MissingField("the field is missing", file=file, field=_join(where, name))
    return kind(**{name: _read(hints[name], value[name], file, _join(where, name)) for name in names})


def _read(hint: Any, value: Any, file: str, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return read_record(hint, value, file, where)  # type: ignore[arg-type]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in args):
            raise _bad(file, where, " or ".join(map(repr, args)), value)
        return value
    if origin is UnionType:  # X | None
        return None if value is None else _read(args[0], value, file, where)
    if origin is tuple:
        if type(value) is not list:
            raise _bad(file, where, "a list", value)
        return tuple(_read(args[0], item, file, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if type(value) is not dict:
            raise _bad(file, where, "an object", value)
        return {
            _read(str, key, file, where): _read(args[1], item, file, _join(where, key)) for key, item in value.items()
        }
    return _read_scalar(hint, value, file, where)


def _read_scalar(hint: type, value: Any, file: str, where: str) -> Any:
    if type(value) is not hint:
        names = {float: "a number with a decimal point", int: "an integer", str: "a string", bool: "true or false"}
        raise _bad(file, where, names[hint], value)
    if type(value) is float and not math.isfinite(value):
        raise NotFinite("not finite", file=file, field=where, expected="a finite number", found=value)
    if type(value) is int and abs(value) > MAX_INT:
        raise _bad(file, where, "an integer below 2^53", value)
    if type(value) is str and any(0xD800 <= ord(letter) <= 0xDFFF for letter in value):
        raise _bad(file, where, "text that UTF-8 can encode", ascii(value))
    return value


def _bad(file: str, where: str, expected: str, value: object) -> BadValue:
    found = ascii(value) if isinstance(value, str) else repr(value)
    return BadValue("bad value", file=file, field=where, expected=expected, found=found)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
