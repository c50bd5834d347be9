"""Requests to an app in its own event loop, for tests that send thousands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import httpx
from fastapi.testclient import TestClient

Message = MutableMapping[str, Any]


async def _at_once(_: Message) -> None:
    pass


class InLoop:
    """Posts to the app of a started ``TestClient``.  That one crosses to the loop's thread and back
    for every part of an answer, which takes longer than most answers; this one once."""

    def __init__(self, client: TestClient) -> None:
        assert client.portal is not None, "the client is not started"
        self._portal = client.portal
        self._app: Any = client.app
        self._state = client.app_state

    def post(
        self,
        path: str,
        *,
        content: bytes,
        headers: Mapping[str, str],
        taken: Callable[[Message], Awaitable[None]] = _at_once,
    ) -> httpx.Response:
        """A whole response, each of whose messages is ``taken`` first.  Raises what the app raises
        before it has begun one."""
        all_headers = {"host": "testserver", "content-length": str(len(content)), **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
            "client": ("testclient", 50000),
            "server": ("testserver", 80),
            "state": self._state.copy(),
        }
        response: httpx.Response = self._portal.call(self._exchange, scope, content, taken)
        return response

    async def _exchange(
        self, scope: dict[str, Any], content: bytes, taken: Callable[[Message], Awaitable[None]]
    ) -> httpx.Response:
        ended = asyncio.Event()
        requests: list[Message] = [{"type": "http.request", "body": content}]
        start: Message = {}
        parts: list[bytes] = []

        async def receive() -> Message:
            if not requests:
                await ended.wait()
                return {"type": "http.disconnect"}
            return requests.pop()

        async def send(message: Message) -> None:
            await taken(message)
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    ended.set()

        try:
            await self._app(scope, receive, send)
        except Exception:  # a server has told of it in its log, once a response has begun
            if not start:
                raise
        return httpx.Response(start["status"], headers=start["headers"], content=b"".join(parts))
