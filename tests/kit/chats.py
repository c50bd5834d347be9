"""Conversations."""

from __future__ import annotations

from typing import Any


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return a conversation whose user begins; ``system`` stands before it."""
    conversation = [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(texts)
    ]
    return [*([{"role": "system", "content": system}] if system else []), *conversation]
