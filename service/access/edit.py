"""Adds keys to their file and revokes them.

The file's text is edited, so that comments and order stay; the outcome is read before it replaces the file at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from service.access.callers import Key, digest_of
from service.access.key_file import parse_keys, read_keys
from service.errors import HalluTracerError

PREFIX = "ht-"  # by which scanners for leaked secrets can tell them
HEAD = "# Keys of hallutracer: digests, no secrets.  A running service reads this file again when it changes.\n"
Value = str | int | datetime | Sequence[str]


def add_key(
    path: Path, name: str, fields: Mapping[str, Value | None], before: Callable[[], None] = lambda: None
) -> str:
    """Write a new key and return its secret, which is nowhere else; ``fields`` as in the file, None left out.

    ``before`` is called once nothing but the writing is left to do, and may refuse.  Raises HalluTracerError.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    with _locked(path):
        text = path.read_text(encoding="utf-8") if path.exists() else HEAD
        known = read_keys(path) if path.exists() else ()
        if name in {key.name for key in known}:
            raise HalluTracerError(
                f"{path}: there is a key {name!r}, or was; an audit log could not tell the two apart"
            )
        given = {"sha256": digest_of(secret), "created": _now(), **fields}
        lines = [f"{field} = {_toml(value)}\n" for field, value in given.items() if value is not None]
        text = f"{text.rstrip()}\n\n[{name}]\n{''.join(lines)}"
        found = parse_keys(text, str(path))
        if [key.name for key in found] != [*(key.name for key in known), name]:
            raise HalluTracerError(f"{path}: {name!r} could not be added")
        before()
        _write(path, text)
    return secret


def revoke_key(path: Path, name: str, before: Callable[[], None] = lambda: None) -> Key:
    """Mark a key as revoked; as ``add_key``."""
    with _locked(path):
        keys, now = read_keys(path), _now()
        key = next((key for key in keys if key.name == name), None)
        if key is None:
            names = ", ".join(one.name for one in keys)
            raise HalluTracerError(f"{path}: there is no key {name!r}; there are {names}")
        if key.revoked is not None:
            raise HalluTracerError(f"{path}: {name!r} was revoked on {key.revoked:%Y-%m-%d}")
        header = re.compile(rf"^[ \t]*\[[ \t]*[\"']?{re.escape(name)}[\"']?[ \t]*\][ \t]*(#.*)?$", re.MULTILINE)
        text = header.sub(
            lambda found: f"{found[0]}\nrevoked = {_toml(now)}", path.read_text(encoding="utf-8"), count=1
        )
        wanted = tuple(replace(one, revoked=now) if one is key else one for one in keys)
        if parse_keys(text, str(path)) != wanted:
            raise HalluTracerError(f"{path}: add 'revoked = {_toml(now)}' to {name!r} by hand; its table is unusual")
        before()
        _write(path, text)
    return key


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _toml(value: Value) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return json.dumps(value if isinstance(value, str | int) else list(value), ensure_ascii=False)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two commands at once edit one after the other.  The folder is locked: the file itself is replaced."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise HalluTracerError(f"{path}: cannot write there: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    """At once, on disk, with the mode and the owner that it had: the service may run as somebody else."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if path.exists():
                before = path.stat()
                os.fchmod(handle, before.st_mode & 0o777)
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(handle, before.st_uid, before.st_gid)
            file.write(text)
            file.flush()
            os.fsync(handle)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise HalluTracerError(f"{path} was not changed: {error.strerror}") from None
