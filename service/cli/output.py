"""What commands print: results on standard output; progress, by ``service.progress``, on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from service.progress import Report, note, progress

__all__ = ["Report", "note", "print_json", "print_line", "progress"]


def print_line(text: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_json(document: Any) -> None:
    """A document on standard output."""
    print_line(json.dumps(document, indent=2, ensure_ascii=False))
