"""Cases as lines of text, one a line: sentences, and cells between bars."""

from __future__ import annotations

import json
from typing import Any


def lines(text: str) -> list[str]:
    r"""The lines of a block that are not blank; a line's own ``\n`` stands for the end of one."""
    return [line.strip().replace(r"\n", "\n") for line in text.splitlines() if line.strip()]


def cells(text: str) -> list[list[str]]:
    """The cells of each line of a block, which stand between `` | ``."""
    return [[cell.strip() for cell in line.split(" | ")] for line in lines(text)]


def values(text: str) -> list[list[Any]]:
    """As ``cells``, of which each is JSON."""
    return [[json.loads(cell) for cell in row] for row in cells(text)]
