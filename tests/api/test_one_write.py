"""An answer leaves in one piece: of a process that dies it leaves none or all, so that another can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from service.api.connections import connections


class Recorder(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


async def answered(recorder: Recorder, app: Starlette, head: bytes, end: bytes) -> None:
    config = uvicorn.Config(app, http=connections(16), ws="none", log_config=None)
    config.load()
    made: Callable[..., Any] = config.http_protocol_class
    protocol = made(config=config, server_state=ServerState(), app_state={})
    protocol.connection_made(recorder)
    protocol.data_received(head + b"\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(30):
        while not b"".join(recorder.writes).endswith(end):
            await asyncio.sleep(0.001)
    protocol.connection_lost(None)


def get(endpoint: Callable[[Request], Any], end: bytes, head: bytes = b"GET / HTTP/1.1") -> Recorder:
    """What was written when it ended so; TimeoutError where it never does."""
    recorder = Recorder()
    asyncio.run(answered(recorder, Starlette(routes=[Route("/", endpoint)]), head, end))
    return recorder


async def plain(request: Request) -> Response:
    return JSONResponse({"risk": 0.5})


def test_a_head_does_not_leave_without_its_body() -> None:
    [written] = get(plain, b'\r\n\r\n{"risk":0.5}').writes
    assert written.startswith(b"HTTP/1.1 200 OK\r\n")


def test_nor_where_the_connection_ends_with_it() -> None:
    recorder = get(plain, b'{"risk":0.5}', b"GET / HTTP/1.1\r\nConnection: close")
    assert len(recorder.writes) == 1
    assert recorder.closed


def test_a_piece_of_a_stream_waits_for_no_other() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(60)
        yield b"second"

    async def stream(request: Request) -> Response:
        return StreamingResponse(endless())

    assert get(stream, b"5\r\nfirst\r\n").writes
