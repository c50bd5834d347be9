"""Who may ask, and what happens to what is flagged: keys and policies from options and files."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from service.errors import HalluTracerError
from service.guard import Policy
from service.policies import built_in, read_policies
from service.settings import env


def load_policies(path: Path | None, message: str, default: str) -> dict[str, Policy]:
    """The known policies; ``default`` must be one of them."""
    if not message.strip():
        raise typer.BadParameter("must not be empty", param_hint="--abstain-message")
    known = built_in(message) if path is None else read_policies(path, message)
    if default not in known:
        raise typer.BadParameter(f"{default!r} is none of {', '.join(sorted(known))}", param_hint="--policy")
    return known


def load_keys(given: list[str], path: Path | None) -> tuple[str, ...]:
    """Keys from the options and the file.  What is set but holds no key is an error: it must not open the service."""
    for flag in ("api-key", "api-key-file"):
        if os.environ.get(env(flag)) == "":
            raise typer.BadParameter(f"{env(flag)} is set but empty; unset it or give a key", param_hint=f"--{flag}")
    keys = list(given)
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise HalluTracerError(f"cannot read the keys file {path}: {error}") from None
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise HalluTracerError(f"the keys file {path} holds no key; put one on each line")
        keys += found
    if any(not key or not key.isprintable() or key.split() != [key] for key in keys):
        raise typer.BadParameter("a key is one word without spaces", param_hint="--api-key")
    return tuple(keys)
