"""A connection that sends in one piece what is written in one turn of the event loop.

uvicorn writes an answer's head and its body one after the other.  A process that dies between the two leaves half an
answer, which a balancer cannot ask of another replica: it has passed the head on.  It is one system call less, too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Base = asyncio.Transport
else:
    _Base = object  # a transport's own methods would hide those of the one behind it


class OneWrite(_Base):
    """``transport``, whose writes are joined until the turn ends; everything else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes | bytearray | memoryview[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send ``data`` when this turn ends, with what else it brings."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Send what is written, and close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))
