"""What may be None, and is not."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """The value; it is an error if there is none."""
    assert value is not None
    return value
