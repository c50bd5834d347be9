"""Changes the file of named keys as an operator does."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from service.access.keys import new_key


def add_key(path: Path, name: str, fields: dict[str, Any]) -> str:
    """Append a new key and return its secret."""
    secret, table = new_key(name, fields)
    _replace(path, (path.read_text() if path.exists() else "") + table)
    return secret


def revoke_key(path: Path, name: str) -> None:
    _replace(
        path,
        path.read_text().replace(
            f"[{name}]", f"[{name}]\nrevoked = {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        ),
    )


def _replace(path: Path, text: str) -> None:
    """At once: a service that looks meanwhile sees the one or the other."""
    (new := path.with_suffix(".new")).write_text(text)
    os.replace(new, path.resolve())
