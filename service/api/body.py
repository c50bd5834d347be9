"""A request's body as JSON: UTF-8, no key twice, and only so many lists and objects as a request can have.

Python's parser holds the event loop, and makes garbage collection walk all that it has made: without a bound, four
megabytes of empty lists stop the service for seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

MAX_CONTAINERS = 8192  # lists and objects of one body; more than the prompts and messages of any request
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # also one that does not end: linear in any body


class JsonRoute(APIRoute):
    """A route whose body is read by ``parse``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own way to another request class."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """Raises json.JSONDecodeError, and HTTPException for what a parser would take and nobody can have meant."""
    if too_many_containers(body):
        raise HTTPException(413, f"the body has more than {MAX_CONTAINERS} lists and objects")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"not UTF-8, at byte {error.start}", "", 0) from None
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def too_many_containers(body: bytes) -> bool:
    """Whether its lists and objects are more than ``MAX_CONTAINERS``; brackets in texts are not counted."""
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:  # cheap, and mostly so
        return False
    bare = _STRINGS.sub(b"", body)
    return bare.count(b"[") + bare.count(b"{") > MAX_CONTAINERS


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers of a body with a key twice may each see another value: what was checked may not be what is used."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise json.JSONDecodeError("an object has the same key twice", "", 0)
    return content
