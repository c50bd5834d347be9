"""Named keys: their TOML file, how a new one is made, and which are in force while the service
runs."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import stat
import tomllib
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from service.access.callers import Key, Right, Scope, digest_of, is_placeholder
from service.errors import HalluTracerError, first_problem

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
PREFIX = "ht-"  # by which scanners for leaked secrets can tell them


class KeyTable(BaseModel):
    """A key's table in the file; docs/security.md shows one with every field."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    scopes: Annotated[
        frozenset[Annotated[Scope, Field(strict=False)]], Field(strict=False, min_length=1)
    ]
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    may: Annotated[frozenset[Right], Field(strict=False, min_length=1)] = frozenset()
    policies: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None


def new_key(name: str, fields: Mapping[str, Sequence[str] | datetime | None]) -> tuple[str, str]:
    """Return a new secret, and the table that lets it in; ``fields`` as in the file, None left out.

    Raises HalluTracerError for a name or a field that the file would not be read with."""
    secret = PREFIX + secrets.token_urlsafe(32)
    lines = [f"[{name}]", f'sha256 = "{digest_of(secret)}"']
    for field, value in ({"created": datetime.now(UTC)} | dict(fields)).items():
        if isinstance(value, datetime):
            lines.append(f"{field} = {value.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}")
        elif value is not None:
            lines.append(f"{field} = {json.dumps(list(value))}")
    text = "\n".join(lines) + "\n"
    parse_keys(text, "a new key")
    return secret, text


def read_keys(path: Path, policies: Collection[str] | None = None) -> tuple[Key, ...]:
    """Return all keys, revoked and expired ones too; ``policies``: those that a key may name.

    Raises HalluTracerError naming file, key and field at fault: what is not understood opens
    nothing."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise OSError("it is not a file")  # which could only be read once, or without an end
        # "-sig": editors on Windows begin a file with a byte order mark
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise HalluTracerError(f"cannot read the keys file {path}: {error}", param="keys") from None
    if mode & stat.S_IWOTH:
        raise HalluTracerError(
            f"anyone on this machine can write to the keys file {path}; run: chmod o-w {path}"
        )
    return parse_keys(text, str(path), policies)


def parse_keys(text: str, where: str, policies: Collection[str] | None = None) -> tuple[Key, ...]:
    """Parse the text of a keys file; ``where``: what errors call it.  Returns and raises what
    ``read_keys`` does."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the second: nested too deep
        raise HalluTracerError(f"{where} is not TOML: {error}") from None
    if not tables:
        raise HalluTracerError(
            f"{where} holds no key; append one with: hallutracer keys make NAME >> {where}"
        )
    keys = []
    for name, table in tables.items():
        key = f"{where}, key [{name}]"
        if not isinstance(table, dict):
            raise HalluTracerError(f"{where}: {name!r} is outside a table; write [NAME] above it")
        if not NAME.fullmatch(name):
            raise HalluTracerError(
                f"{key}: a name has lower-case letters, digits, '_' and '-', at most 64"
            )
        try:
            entry = KeyTable.model_validate(table)
        except ValidationError as error:
            problem = first_problem(error, KeyTable)
            raise HalluTracerError(
                f"{key}: {problem}; 'hallutracer keys make' writes a table"
            ) from None
        for policy in entry.policies or ():
            if policies is not None and policy not in policies:
                known = ", ".join(sorted(policies))
                raise HalluTracerError(
                    f"{key}: policies: no policy {policy!r} is known here; known: {known}"
                )
        keys.append(
            Key(name=name, digest=entry.sha256, **entry.model_dump(exclude={"sha256", "created"}))
        )
    digests = [key.digest for key in keys]
    if twice := [key.name for key in keys if digests.count(key.digest) > 1]:
        raise HalluTracerError(f"{where}: {' and '.join(twice)} are the same key")
    return tuple(keys)


class Changes(NamedTuple):
    """Names of keys that a new file adds, takes away, or treats otherwise."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


class KeyRing:
    """The keys in force: those of the options, and those of a file that may change while the
    service runs.

    Looked into for each request, on the event loop; ``read`` may be called on any thread."""

    def __init__(
        self,
        fixed: Sequence[Key] = (),
        path: Path | None = None,
        policies: Collection[str] | None = None,
    ) -> None:
        """Read the file: ``fixed`` are always in force; ``policies`` are those that keys of the
        file may name.

        Raises HalluTracerError: a file that cannot be read must not open the service."""
        self._fixed = tuple(fixed)
        self._path = path
        self._policies = policies
        self._read_at = self._signature()
        self._keys = self._by_digest()
        self.problem: str | None = None  # why the file as it is now is not in force
        # held from ``read`` to ``use``: an older file must not follow a newer one
        self.reading = asyncio.Lock()

    @property
    def closed(self) -> bool:
        """Return whether a key is asked for; without any, the service is open to whoever reaches
        it."""
        return bool(self._fixed) or self._path is not None

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all keys."""
        return frozenset(key.name for key in self._keys.values())

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret, which may be expired or revoked.

        Digests are looked up, not secrets: the time that a lookup takes tells nothing that helps to
        find a secret. An example's placeholder opens nothing, whoever put its digest into the
        file."""
        return None if is_placeholder(secret) else self._keys.get(digest_of(secret))

    def changed_on_disk(self) -> bool:
        """Return whether the file is another one than at the last look; a look by itself."""
        before, self._read_at = self._read_at, self._signature()
        return before != self._read_at

    def read(self) -> tuple[dict[str, Key], Changes]:
        """Return what the file says now, by digest, and what that would change.  Raises
        HalluTracerError."""
        self._read_at = self._signature()
        latest = self._by_digest()
        old = {key.name: key for key in self._keys.values()}
        new = {key.name: key for key in latest.values()}
        changed = (name for name in old.keys() & new.keys() if old[name] != new[name])
        every = (new.keys() - old.keys(), old.keys() - new.keys(), changed)
        return latest, Changes(*(tuple(sorted(names)) for names in every))

    def use(self, keys: dict[str, Key]) -> None:
        """Put ``keys`` in force from the next request on."""
        self._keys = keys

    def keep_common(self, keys: dict[str, Key]) -> None:
        """Keep those in force that ``keys`` have, too: what is taken away is gone in any case."""
        self._keys = {digest: key for digest, key in self._keys.items() if keys.get(digest) == key}

    def _by_digest(self) -> dict[str, Key]:
        every = [
            *self._fixed,
            *(() if self._path is None else read_keys(self._path, self._policies)),
        ]
        by_digest, names = {key.digest: key for key in every}, [key.name for key in every]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise HalluTracerError(
                f"two keys are named {twice!r}; in the log they could not be told apart"
            )
        if len(by_digest) < len(every):
            raise HalluTracerError(
                f"{self._path} holds a key that is given by --api-key or --api-key-file, too"
            )
        return by_digest

    def _signature(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        # ctime: a mode that changed, too
        return status and (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
