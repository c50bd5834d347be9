"""The alias table of a bundle: one JSON object, alias -> version."""

from __future__ import annotations

from collections.abc import Mapping

from probes_store.errors import BadValue
from probes_store.manifest import NAME
from probes_store.strict import parse_json

ALIASES = "aliases.json"
PRODUCTION = "production"  # the alias that a bare name resolves to, where it is set
PREVIOUS = "previous"  # what production meant before the last promotion


def parse_aliases(data: bytes, shown: str) -> dict[str, int]:
    """The table; ``shown`` names the file in errors.  Raises a subclass of BundleDamaged."""
    aliases = parse_json(data, shown)
    cure = "Repair it by hand or remove it, and set the aliases again"
    if not isinstance(aliases, dict):
        raise BadValue("bad value", file=shown, expected="an object", found=type(aliases).__name__, cure=cure)
    for alias, version in aliases.items():
        if not NAME.fullmatch(alias) or type(version) is not int or version < 1:
            raise BadValue(
                "bad value",
                file=shown,
                field=ascii(alias),
                expected="an alias and a version of 1 or more",
                found=repr(version),
                cure=cure,
            )
    return aliases


def moved(table: Mapping[str, int], alias: str, version: int, keep_as: str | None = None) -> dict[str, int]:
    """The table after a move; the alias ``keep_as`` gets what ``alias`` meant before, if it meant something."""
    kept = {} if keep_as is None or alias not in table else {keep_as: table[alias]}
    return {**table, **kept, alias: version}
