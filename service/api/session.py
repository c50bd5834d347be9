"""Which requests belong together, so that one conversation meets one version of a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from fastapi import Request

from service.serving.feedback import Content

HEADER = "x-session-id"


def session_of(request: Request, contents: Callable[[], Sequence[Content]]) -> Callable[[], str]:
    """The header ``x-session-id``; without it, what the first prompt begins with, up to its first user message."""

    def session() -> str:
        named = request.headers.get(HEADER)
        if named:
            return named
        found = contents()
        return _beginning(found[0]) if found else ""

    return session


def _beginning(content: Content) -> str:
    messages: list[dict[str, Any]] | None = content.get("messages")
    if messages is None:
        return json.dumps(dict(content))
    before = list(takewhile(lambda message: message.get("role") != "user", messages))
    return json.dumps([*before, *messages[len(before) : len(before) + 1]])
