"""Parses and writes the texts of a store: JSON, references, alias tables, addresses."""

from __future__ import annotations

import difflib
import json
import math
import numbers
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes_store.errors import (
    BadValue,
    BundleConflict,
    InvalidReference,
    NotFinite,
    Truncated,
    UnknownField,
)

HEX = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[a-z0-9](?!.*\.\.)[a-z0-9._-]{0,63}")  # the name of a bundle or an alias
NAMES = "[a-z0-9][a-z0-9._-]{0,63} without .."
VERSION = re.compile(r"[1-9][0-9]{0,8}")
VERSIONS = "1 to 999999999"
PIN = "@sha256:"
HUB = "hf://"  # the prefix of an address on the Hugging Face hub
ALIASES = "aliases.json"
PRODUCTION = "production"  # the alias that a bare name resolves to, if it is set
PREVIOUS = "previous"  # the alias for the production version before the last promotion
# scheme of a store's URL -> the extra that it needs
EXTRAS = {"s3": "s3", "gs": "gs", "az": "az", "memory": ""}
_URL = re.compile(r"([a-z0-9]+)://((?!.*(?://|/\.))[A-Za-z0-9][A-Za-z0-9._/-]*)")
_REFERENCE = re.compile(
    rf"({NAME.pattern})(?:@({NAME.pattern})|:({VERSION.pattern}))?(?:@(sha256:{HEX.pattern}))?",
    re.ASCII,
)
_PART = r"(?![A-Za-z0-9._-]*(?:--|\.\.))[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
# A revision becomes a file's name in huggingface_hub's cache, so it must not lead out of it.
_ADDRESS = re.compile(
    rf"{HUB}({_PART}/{_PART})(?:@((?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?"
)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return "Did you mean NAME?  " for the known name that is nearest to a wrong one; "" if none
    is near."""
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?  " if near else ""


def expanded(path: Path | str, variable: str) -> Path:
    """Return the path with ~ replaced by the home folder.

    Raises InvalidReference that names ``variable`` if there is none, as for some users in a
    container."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InvalidReference(
            f"{path} cannot be found: this process has no home folder",
            cure=f"Set {variable}, or HOME",
        ) from None


def canonical_json(value: object) -> bytes:
    """Return JSON for digests: sorted keys, compact separators, UTF-8, no NaN."""
    return _json(value, separators=(",", ":"))


def readable_json(value: object) -> bytes:
    """Return JSON for files: sorted keys, two spaces, a final newline, UTF-8, no NaN."""
    return _json(value, indent=2) + b"\n"


def _json(value: object, **style: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, **style)
    return text.encode()


def plain(value: object, where: str = "") -> Any:
    """Convert Python and numpy values to JSON types, for writing; ``where`` is the field in errors.
    Raises NotFinite and BadValue."""
    match value:
        case None | bool():
            return value
        case numbers.Integral():
            return int(value)
        case numbers.Real() if math.isfinite(value):
            return float(value)
        case numbers.Real():
            raise NotFinite(field=where, expected="a finite number", found=value)
        case str() if not re.search("[\ud800-\udfff]", value):
            return value
        case list() | tuple():
            return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case dict() if all(isinstance(key, str) for key in value):
            return {
                plain(key, where): plain(item, f"{where}.{key}".removeprefix("."))
                for key, item in value.items()
            }
    raise BadValue(
        field=where,
        expected="what JSON can hold, with strings as keys, in text that UTF-8 can encode",
        found=ascii(value),
    )


def parse_json(data: bytes) -> Any:
    """Return the plain values of bytes that ``readable_json`` wrote.

    Raises Truncated, NotFinite (NaN, Infinity, 1e999), UnknownField (a key twice) and BadValue (not
    JSON, not UTF-8).
    """

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise NotFinite(expected="finite numbers", found=text)
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UnknownField("the key stands there twice", field=key)
            seen[key] = value
        return seen

    try:
        return json.loads(
            data.decode(), parse_float=finite, parse_constant=finite, object_pairs_hook=unique
        )
    except (ValueError, RecursionError) as error:  # ValueError: also of UTF-8 and of JSON
        last = data.rstrip(b"\n").rpartition(b"\n")[2]
        # An indented last line is inside a record.
        if not last.endswith((b"}", b"]")) or last.startswith(b" "):
            raise Truncated(
                expected="a closing bracket", found=f"{len(data)} bytes that end in {data[-8:]!r}"
            ) from error
        raise BadValue("not JSON", expected="UTF-8 JSON", found=error) from error


@dataclass(frozen=True, slots=True)
class BundleReference:
    """NAME, NAME@ALIAS or NAME:VERSION, each with or without @sha256:DIGEST."""

    name: str
    alias: str | None = None
    version: int | None = None
    digest: str | None = None  # a digest pin verifies; it never selects another version


def parse_reference(text: str) -> BundleReference:
    """Parse a reference; no part of the result can lead out of a store.  Raises
    InvalidReference."""
    if match := _REFERENCE.fullmatch(text):
        name, alias, version, digest = match.groups()
        return BundleReference(name, alias, int(version) if version else None, digest)
    expected = "NAME, NAME@ALIAS or NAME:VERSION, and @sha256:DIGEST behind it to pin the content"
    cure = f"A name is {NAMES}; a digest has 64 hex digits"
    if text.startswith(HUB):
        cure = "Run 'hallutracer bundle pull' with that address, and name the bundle as it prints"
    raise InvalidReference(
        "not a bundle reference", expected=expected, found=ascii(text), cure=cure
    )


def check_name(text: str, what: str) -> str:
    """Return the name of a bundle or an alias unchanged.  Raises InvalidReference."""
    if not NAME.fullmatch(text):
        raise InvalidReference(
            f"not a name for {what}", expected=NAMES, found=ascii(text), cure="Choose another name"
        )
    return text


def next_number(taken: Collection[int], what: str) -> int:
    """Return the number after the highest one.  Raises BundleConflict if ``VERSION`` does not allow
    it."""
    following = max(taken, default=0) + 1
    if not VERSION.fullmatch(str(following)):
        raise BundleConflict(
            f"{what} has the highest number that there is, {following - 1}",
            cure="Use another store",
        )
    return following


def parse_aliases(data: bytes) -> dict[str, int]:
    """Return a table, alias -> version.  Raises a subclass of BundleDamaged."""
    aliases = parse_json(data)
    if not isinstance(aliases, dict):
        raise BadValue(expected="an object", found=type(aliases).__name__)
    for alias, version in aliases.items():
        if not NAME.fullmatch(alias) or type(version) is not int or version < 1:
            raise BadValue(
                field=ascii(alias),
                expected="an alias and a version of 1 or more",
                found=repr(version),
                cure="Repair it, or remove it and set the aliases again",
            )
    return aliases


def moved(
    table: Mapping[str, int], alias: str, version: int, keep_as: str | None = None
) -> dict[str, int]:
    """Return the table with ``alias`` at ``version``; the alias ``keep_as`` gets the previous
    version, if any."""
    previous = {keep_as: table[alias]} if keep_as and alias in table else {}
    return {**table, **previous, alias: version}


def is_url(text: str) -> bool:
    """Return whether the location of a store is a URL and not a folder."""
    return "://" in text


def check_url(text: str) -> str:
    """Return a store's URL without a slash at its end.  Raises InvalidReference."""
    url = text.rstrip("/")
    match = _URL.fullmatch(url)
    if match is None or match[1] not in EXTRAS:
        raise InvalidReference(
            "not the URL of a store",
            expected="s3://BUCKET/PREFIX, gs:// and az:// likewise, or hf://OWNER/NAME to read",
            found=ascii(text),
            cure="Credentials come from the environment, not from the URL",
        )
    return url


@dataclass(frozen=True, slots=True)
class HubAddress:
    """hf://OWNER/NAME, with or without @REVISION: a tag, a branch or a commit."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{HUB}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def parse_address(text: str) -> HubAddress:
    """Parse an address on the hub.  Raises InvalidReference."""
    if match := _ADDRESS.fullmatch(text):
        return HubAddress(match[1], match[2])
    raise InvalidReference(
        "not an address on the hub",
        expected="hf://OWNER/NAME, or hf://OWNER/NAME@REVISION: a tag as v1, a branch or a commit",
        found=ascii(text),
    )
