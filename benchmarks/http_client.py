"""A small HTTP/1.1 keep-alive client on asyncio streams, cheap enough to load a server from the machine it runs on.

One request per connection at a time, no redirects, no compression, no retries.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

IDLE_LIMIT_S = 2.0  # below any server's keep-alive timeout, so that no request meets the server's close
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response.  ``sent``: when its request was; ``pieces``: the body's chunks, each with its arrival."""

    status: int
    head: bytes
    pieces: list[tuple[float, bytes]]
    sent: float

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)

    def header(self, name: str) -> str | None:
        """A header's value, or None."""
        found = re.search(rb"\r\n" + re.escape(name.encode()) + rb":[ \t]*([^\r]*)", self.head, re.IGNORECASE)
        return found and found[1].decode("latin-1").strip()


def post(path: str, body: bytes, host: str = "localhost") -> bytes:
    """The bytes of a JSON POST."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Pool:
    """Keep-alive connections: the most recently used idle one first, else a new one."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.opened = 0
        self._idle: list[tuple[float, Streams]] = []

    async def exchange(self, request: bytes, timeout_s: float) -> Reply:
        """One request.  Raises OSError (ConnectionError, TimeoutError)."""
        reader, writer = await self._take()
        try:
            async with asyncio.timeout(timeout_s):
                sent = time.perf_counter()
                writer.write(request)
                reply = await _read(reader, sent)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, EOFError | ValueError | asyncio.LimitOverrunError):
                raise ConnectionResetError(f"no whole HTTP/1.1 answer: {error}") from error
            raise
        if b"connection: close" in reply.head.lower():
            writer.close()
        else:
            self._idle.append((time.perf_counter(), (reader, writer)))
        return reply

    async def _take(self) -> Streams:
        while self._idle:
            last_used, (reader, writer) = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing() and time.perf_counter() - last_used < IDLE_LIMIT_S:
                return reader, writer
            writer.close()
        self.opened += 1
        return await asyncio.open_connection(self.host, self.port)

    def close(self) -> None:
        """Close the idle connections."""
        for _, (_, writer) in self._idle:
            writer.close()
        self._idle.clear()


async def _read(reader: asyncio.StreamReader, sent: float) -> Reply:
    head = await reader.readuntil(b"\r\n\r\n")
    reply = Reply(int(head[9:12]), head, [], sent)
    if length := reply.header("content-length"):
        body = await reader.readexactly(int(length))
        reply.pieces.append((time.perf_counter(), body))
        return reply
    if reply.header("transfer-encoding") != "chunked":
        raise ValueError("neither Content-Length nor chunked")
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        piece = (await reader.readexactly(size + 2))[:-2]
        reply.pieces.append((time.perf_counter(), piece))
    await reader.readexactly(2)
    return reply
