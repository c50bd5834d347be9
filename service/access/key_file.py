"""The file of named keys: TOML, a table for each key, no secrets.

[search-team]
sha256 = "9f86d0.."               # of the secret, which only its owner has
scopes = ["score"]                # score, observe, admin
created = 2026-11-23T08:30:00Z
expires = 2027-02-21T00:00:00Z    # optional, as is all that follows
may = ["threshold"]               # what its requests may loosen: policy, threshold, bundle, feedback
policies = ["gate", "support"]    # the only ones that its requests may be judged by
requests_per_minute = 600
prompt_tokens_per_day = 2000000
revoked = 2026-12-01T09:00:00Z    # it opens nothing any more, and its name stays taken
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from service.access.callers import Key, Right, Scope
from service.errors import HalluTracerError

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
TIMES = ("created", "expires", "revoked")
NUMBERS = ("requests_per_minute", "prompt_tokens_per_day")
MOST = 10**15
LISTS: Mapping[str, Collection[str] | None] = {"scopes": list(Scope), "may": get_args(Right), "policies": None}
FIELDS = ("sha256", *LISTS, *TIMES, *NUMBERS)


def read_keys(path: Path, policies: Collection[str] | None = None) -> tuple[Key, ...]:
    """All keys, revoked and expired ones too; ``policies``: those that a key may name.

    Raises HalluTracerError naming the file, the key and the field at fault: what is not understood opens nothing.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise OSError("it is not a file")  # which could only be read once, or without an end
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HalluTracerError(f"cannot read the keys file {path}: {error}", param="keys") from None
    if mode & stat.S_IWOTH:
        raise HalluTracerError(f"anyone on this machine can write to the keys file {path}; run: chmod o-w {path}")
    return parse_keys(text, str(path), policies)


def parse_keys(text: str, where: str, policies: Collection[str] | None = None) -> tuple[Key, ...]:
    """As ``read_keys``, of a text."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the second: nested too deep
        raise HalluTracerError(f"{where} is not TOML: {error}") from None
    if not tables:
        raise HalluTracerError(f"{where} holds no key; make one with: hallutracer keys make NAME >> {where}")
    keys = tuple(_key(where, name, table, policies) for name, table in tables.items())
    digests = [key.digest for key in keys]
    if twice := [key.name for key in keys if digests.count(key.digest) > 1]:
        raise HalluTracerError(f"{where}: {' and '.join(twice)} are the same key")
    return keys


def _key(where: str, name: str, table: Any, policies: Collection[str] | None) -> Key:
    if not isinstance(table, Mapping):
        raise HalluTracerError(f"{where}: {name!r} is outside a table; write [NAME] above it")
    where = f"{where}, key [{name}]"
    if not NAME.fullmatch(name):
        raise HalluTracerError(f"{where}: a name has lower-case letters, digits, '_' and '-', at most 64")
    if unknown := sorted(set(table) - set(FIELDS)):
        raise HalluTracerError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}")
    digest = table.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise HalluTracerError(f"{where}: sha256 must be 64 hexadecimal digits; 'hallutracer keys make' prints them")
    lists = {field: _list(where, field, table[field], known) for field, known in LISTS.items() if field in table}
    if not lists.get("scopes"):
        raise HalluTracerError(f"{where}: scopes must name one or more of {', '.join(Scope)}")
    if unknown := [one for one in lists.get("policies", ()) if policies is not None and one not in policies]:
        known = ", ".join(sorted(policies or ()))
        raise HalluTracerError(f"{where}: no policy {unknown[0]!r} is known here; known: {known}")
    for field in TIMES:
        if field in table and not (isinstance(table[field], datetime) and table[field].tzinfo):
            raise HalluTracerError(f"{where}: {field} must be a time with its zone, such as 2027-02-21T00:00:00Z")
    for field in NUMBERS:
        value = table.get(field, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise HalluTracerError(f"{where}: {field} must be a whole number from 1 to {MOST}, not {value!r}")
    return Key(
        name=name,
        digest=digest,
        scopes=frozenset(map(Scope, lists["scopes"])),
        may=frozenset(lists.get("may", ())),  # type: ignore[arg-type]
        policies=lists.get("policies"),
        **{field: table.get(field) for field in ("expires", "revoked", *NUMBERS)},
    )


def _list(where: str, field: str, value: Any, known: Collection[str] | None) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise HalluTracerError(f"{where}: {field} must be a list of one or more texts")
    if unknown := [one for one in value if known is not None and one not in known]:
        raise HalluTracerError(f"{where}: {field} takes {', '.join(known or ())}; found {unknown[0]!r}")
    return tuple(value)
