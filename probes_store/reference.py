"""Bundle references: NAME, NAME@ALIAS, NAME:VERSION."""

from __future__ import annotations

import re
from dataclasses import dataclass

from probes_store.errors import InvalidReference
from probes_store.manifest import NAME

HUB = "hf://"  # what an address on the Hugging Face hub begins with
VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference; at most one of alias and version is set."""

    name: str
    alias: str | None = None
    version: int | None = None


def parse_reference(text: str) -> Reference:
    """Parse a reference; no part of the result can lead out of a store.  Raises InvalidReference."""
    if text.startswith(HUB):
        raise InvalidReference(
            "a bundle on the hub, which is not in the store yet",
            expected="NAME, NAME@ALIAS or NAME:VERSION",
            found=ascii(text),
            cure="Run 'hallutracer bundle pull' with that address first, and name the bundle as it prints it",
        )
    name, mark, rest = text, "", ""
    for separator in "@:":
        if separator in text:
            name, mark, rest = text.partition(separator)
            break
    fine = NAME.fullmatch(name) and (
        not mark or (mark == "@" and NAME.fullmatch(rest)) or (mark == ":" and VERSION.fullmatch(rest))
    )
    if not fine:
        raise InvalidReference(
            "not a bundle reference",
            expected="NAME, NAME@ALIAS or NAME:VERSION",
            found=ascii(text),
            cure="Names are up to 64 of a-z 0-9 . _ -, begin with a letter or digit and have no ..",
        )
    if mark == ":":
        return Reference(name, version=int(rest))
    return Reference(name, alias=rest or None)


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
