"""Bundle references: NAME, NAME@ALIAS, NAME:VERSION, each with or without @sha256:DIGEST."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from probes_store.errors import BundleConflict, InvalidReference
from probes_store.manifest import NAME

HUB = "hf://"  # what an address on the Hugging Face hub begins with
VERSION = re.compile(r"[1-9][0-9]{0,8}")
_LAST = 999_999_999
PIN = "@sha256:"
EXPECTED = "NAME, NAME@ALIAS or NAME:VERSION, and @sha256:DIGEST behind it where the content is pinned"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference; at most one of alias and version is set."""

    name: str
    alias: str | None = None
    version: int | None = None
    digest: str | None = None  # what the bundle must have: a pin checks, it does not search


def parse_reference(text: str) -> Reference:
    """Parse a reference; no part of the result can lead out of a store.  Raises InvalidReference."""
    if text.startswith(HUB):
        raise InvalidReference(
            "a bundle on the hub, which is not in the store yet",
            expected=EXPECTED,
            found=ascii(text),
            cure="Run 'hallutracer bundle pull' with that address first, and name the bundle as it prints it",
        )
    pinned, pin, digest = text.partition(PIN)
    name, mark, rest = pinned, "", ""
    for separator in "@:":
        if separator in pinned:
            name, mark, rest = pinned.partition(separator)
            break
    fine = (
        NAME.fullmatch(name)
        and (not mark or (mark == "@" and NAME.fullmatch(rest)) or (mark == ":" and VERSION.fullmatch(rest)))
        and (not pin or _HEX.fullmatch(digest))
    )
    if not fine:
        raise InvalidReference(
            "not a bundle reference",
            expected=EXPECTED,
            found=ascii(text),
            cure="Names are up to 64 of a-z 0-9 . _ -, begin with a letter or digit and have no ..; a digest has 64 "
            "hex digits",
        )
    return Reference(
        name,
        alias=rest if mark == "@" else None,
        version=int(rest) if mark == ":" else None,
        digest=f"sha256:{digest}" if pin else None,
    )


def next_number(taken: Collection[int], what: str) -> int:
    """The number after the highest one.  Raises BundleConflict where it would be none that ``VERSION`` knows."""
    highest = max(taken, default=0)
    if highest >= _LAST:
        raise BundleConflict(
            f"{what} has the highest number that there is, {highest}, so that nothing can follow",
            cure="Ask who took that number, and remove it or go on in another store",
        )
    return highest + 1


def check_name(text: str, what: str) -> str:
    """Return the name of a bundle or an alias unchanged.  Raises InvalidReference."""
    if not NAME.fullmatch(text):
        raise InvalidReference(
            f"not a name for {what}",
            expected="[a-z0-9][a-z0-9._-]{0,63} without ..",
            found=ascii(text),
            cure="Choose another name",
        )
    return text
