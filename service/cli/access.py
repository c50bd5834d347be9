"""API keys, from options and a file."""

from __future__ import annotations

from pathlib import Path

from service.cli.options import UsageError
from service.errors import HalluTracerError


def load_keys(given: tuple[str, ...], path: Path | None) -> tuple[str, ...]:
    """Keys from the options and the file.  A file without a key is an error: it must not open the service."""
    keys = list(given)
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise HalluTracerError(f"cannot read the keys file {path}: {error}") from None
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise HalluTracerError(f"the keys file {path} holds no key; put one on each line")
        keys += in_file
    if any(not key or not key.isprintable() or key.split() != [key] for key in keys):
        raise UsageError("--api-key", "a key is one word without spaces")
    return tuple(keys)
