"""API keys, from options and a file.

A line of the file is a key, then what it is called in the log and what its owner may loosen:

    Zm9vYmFyYmF6cXV4  name=search-team  may=policy,threshold
"""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from typing import get_args

from service.access.callers import ApiKey, Right, is_placeholder
from service.cli.options import UsageError
from service.errors import HalluTracerError

log = logging.getLogger("hallutracer")
LEAST_CHARACTERS = 16
CURE = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
ATTRIBUTES = ("name", "may")


def load_keys(given: tuple[str, ...], path: Path | None) -> tuple[ApiKey, ...]:
    """Keys from the options and the file.  A file without a key is an error: it must not open the service."""
    keys = [ApiKey(_secret(secret, "--api-key"), f"key-{number}") for number, secret in enumerate(given, 1)]
    if path is not None:
        keys += _read(path, len(keys))
    if len({key.secret for key in keys}) < len(keys):
        raise HalluTracerError("the same key is given twice")
    names = [key.name for key in keys]
    if twice := [name for name in names if names.count(name) > 1]:
        raise HalluTracerError(f"two keys are named {twice[0]!r}; in the log they could not be told apart")
    return tuple(keys)


def _read(path: Path, before: int) -> list[ApiKey]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise HalluTracerError(f"cannot read the keys file {path}: {error}") from None
    if mode & stat.S_IWOTH:
        raise HalluTracerError(f"anyone on this machine can write to the keys file {path}; run: chmod o-w {path}")
    if mode & stat.S_IROTH:
        log.warning("anyone on this machine can read the keys file %s; run: chmod o-r %s", path, path)
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not numbered:
        raise HalluTracerError(f"the keys file {path} holds no key; put one on each line")
    return [
        _key(line, f"line {number} of {path}", f"key-{place}")
        for place, (number, line) in enumerate(numbered, before + 1)
    ]


def _key(line: str, where: str, default_name: str) -> ApiKey:
    secret, *words = line.split()
    attributes: dict[str, str] = {}
    for word in words:
        attribute, _, value = word.partition("=")
        if attribute not in ATTRIBUTES or attribute in attributes:
            found = repr(word) if "=" in word else "a word without '='"  # which may be another key
            raise HalluTracerError(f"{where}: after the key may stand name=NAME and may=FIELD,..; found {found}")
        attributes[attribute] = value
    rights = tuple(filter(None, attributes.get("may", "").split(",")))
    if unknown := [right for right in rights if right not in get_args(Right)]:
        raise HalluTracerError(f"{where}: may= takes {', '.join(get_args(Right))}; found {unknown[0]!r}")
    name = attributes.get("name", default_name)
    if not name or not name.isprintable() or len(name) > 64:
        raise HalluTracerError(f"{where}: a name has 1 to 64 printable characters")
    return ApiKey(_secret(secret, where), name, frozenset(rights))  # type: ignore[arg-type]


def _secret(secret: str, where: str) -> str:
    """The key itself is never part of a message."""
    if secret.split() != [secret] or not secret.isprintable() or not secret.isascii():
        raise UsageError(where, "a key is one word of ASCII characters, since headers carry no others")
    if is_placeholder(secret):
        raise UsageError(where, f"this is an example's placeholder, which everybody knows, and not a key: {CURE}")
    if len(secret) < LEAST_CHARACTERS:
        raise UsageError(where, f"a key has at least {LEAST_CHARACTERS} characters: {CURE}")
    return secret
