"""A small HTTP/1.1 keep-alive client on asyncio, cheap enough to load a server from the machine it runs on.

One request per connection at a time, no redirects, no compression, no retries.
"""

from __future__ import annotations

import asyncio
import time

IDLE_LIMIT_S = 2.0  # below any server's keep-alive timeout, so that no request meets the server's close


class Reply:
    """A whole response."""

    __slots__ = ("body", "head", "status")

    def __init__(self, status: int, head: bytes, body: bytes) -> None:
        self.status, self.head, self.body = status, head, body

    def header(self, name: str) -> str | None:
        """A header's value, or None."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.decode("latin-1").lower() == name.lower():
                return value.strip().decode("latin-1")
        return None


def post(path: str, body: bytes, host: str = "bench") -> bytes:
    """The bytes of a JSON POST."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """One TCP connection."""

    def __init__(self) -> None:
        self.last_used = time.perf_counter()
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Reply] | None = None
        self._buffer = bytearray()
        self._head: bytes | None = None
        self._status = 0
        self._length: int | None = None  # None: chunked
        self._chunks: list[bytes] = []

    @property
    def open(self) -> bool:
        """Neither side has closed it."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._transport = None
        self._fail(exc or ConnectionResetError("the server closed the connection before a whole answer"))

    def send(self, request: bytes) -> asyncio.Future[Reply]:
        """Send one request; the future holds its reply.  Raises ConnectionError if the connection is closed."""
        if not self.open or self._waiting is not None:
            raise ConnectionError("the connection is closed or busy")
        assert self._transport is not None
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiting

    def close(self, *, reset: bool = False) -> None:
        """Close; ``reset`` sends an RST and drops what is unsent."""
        if self._transport is not None:
            if reset:
                self._transport.abort()
            else:
                self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._buffer += data
        try:
            while self._waiting is not None and self._step():
                pass
        except (ValueError, IndexError) as error:
            self._fail(ConnectionError(f"not HTTP/1.1: {error}"))
            self.close(reset=True)

    def _step(self) -> bool:
        """Parse one part; whether there may be another."""
        if self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return False
            self._head = bytes(self._buffer[:end])
            del self._buffer[: end + 4]
            self._status = int(self._head[9:12])
            self._length = _length(self._head)
            return True
        if self._length is not None:
            if len(self._buffer) < self._length:
                return False
            self._finish(bytes(self._buffer[: self._length]))
            return False
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        size = int(self._buffer[:end].split(b";")[0], 16)
        if len(self._buffer) < end + 2 + size + 2:
            return False
        self._chunks.append(bytes(self._buffer[end + 2 : end + 2 + size]))
        del self._buffer[: end + 2 + size + 2]
        if size == 0:
            self._finish(b"".join(self._chunks))
            return False
        return True

    def _finish(self, body: bytes) -> None:
        assert self._head is not None
        reply = Reply(self._status, self._head, body)
        closing = b"connection: close" in self._head.lower()
        waiting, self._waiting, self._head = self._waiting, None, None
        self._chunks = []
        self._buffer.clear()
        self.last_used = time.perf_counter()
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
        if closing:
            self.close()

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)


def _length(head: bytes) -> int | None:
    lowered = head.lower()
    if b"\r\ntransfer-encoding: chunked" in lowered:
        return None
    start = lowered.find(b"\r\ncontent-length:")
    if start < 0:
        raise ValueError("neither Content-Length nor chunked")
    return int(lowered[start + 17 :].split(b"\r\n", 1)[0])


async def connect(host: str, port: int) -> Connection:
    """Open a connection.  Raises OSError."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


class Pool:
    """Keep-alive connections: the most recently used idle one first, else a new one."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.opened = 0
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, timeout_s: float) -> Reply:
        """One request.  Raises OSError (ConnectionError, TimeoutError)."""
        connection = await self._take()
        try:
            reply = await asyncio.wait_for(connection.send(request), timeout_s)
        except BaseException:
            connection.close(reset=True)
            raise
        if connection.open:
            self._idle.append(connection)
        return reply

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open and time.perf_counter() - connection.last_used < IDLE_LIMIT_S:
                return connection
            connection.close()
        self.opened += 1
        return await connect(self.host, self.port)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
