"""The audit log of a service: what it holds, and how it breaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def audit_lines(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of an event, or all."""
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if event in (None, line["event"])]


@contextmanager
def broken_log(path: Path) -> Iterator[None]:
    """Meanwhile a folder is where the file should be."""
    path.rename(path.with_suffix(".kept"))
    path.mkdir()
    yield
    path.rmdir()
    path.with_suffix(".kept").rename(path)
