"""uvicorn's connections with bounds: on a request's head, on the time without a request, and on their number.

uvicorn bounds none of the three with its fast parser: a client without a key could take all memory or all sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.api.error_bodies import error_body
from service.errors import HalluTracerError, HeadersTooLarge, HeadersTooSlow, NotHttp
from service.settings import LEAST_CONNECTIONS, SPARE_FILES


class OneWrite:
    """``transport``, whose writes are joined until the turn ends.

    uvicorn writes an answer's head and its body one after the other: a process that dies between the two leaves half an
    answer, which a balancer cannot ask of another replica."""

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


log = logging.getLogger("hallutracer")
HEAD_BYTES = 64 * 1024  # of a request line with its headers; of trailers, too
HEAD_LINES = 100
HEAD_SECONDS = 10.0  # from the connection, or the answer before, to the end of the next request's head
LOG_SECONDS = 10.0  # between two lines about too many connections


class Connection(HttpToolsProtocol):
    """One connection.  ``most`` of them may be open; a further one takes the place of the one that idles longest."""

    most: ClassVar[int] = 1000
    idle: ClassVar[dict[Connection, None]] = {}  # in the order in which they became idle
    logged: ClassVar[float] = -LOG_SECONDS
    leaving: ClassVar[bool] = False  # the server stops: each connection ends with its answer

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._lines = self._unread = 0  # header lines of this request; bytes that were neither a whole head nor a body
        self._advanced = False
        self._last = False  # the answer under way is the connection's last: what else arrives is dropped
        self._reason: HalluTracerError = NotHttp("this is not HTTP/1.1")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for it, or end it."""
        super().connection_made(OneWrite(transport, self.loop))  # type: ignore[arg-type]
        self._wait()
        if len(self.connections) > self.most:
            oldest = next(iter(self.idle))
            if time.monotonic() - self.logged > LOG_SECONDS:
                type(self).logged = time.monotonic()
                log.warning("%d connections are open: the one that idles longest is closed", self.most)
            oldest.transport.abort()
            # Its place is free now: asyncio tells of its end in a later turn.
            self.connections.discard(oldest)
            oldest._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        self._stop_waiting()

    def data_received(self, data: bytes) -> None:
        """Parse, in parts that end where the bound of a head is reached, however it was cut into packets."""
        self._unset_keepalive_if_required()
        while data and not self._last and not self.transport.is_closing():
            if self._unread == HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"headers or trailers exceed {HEAD_BYTES} bytes"))
                return
            room = HEAD_BYTES - self._unread
            part, data = data[:room], data[room:]
            self._advanced = False
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade:
                self._end_after_answer()  # a WebSocket's handshake is answered as the GET that it is
            except httptools.HttpParserError:
                if self._answers() and not self.cycle.more_body:  # an answer under way is not to be written into
                    self._end_after_answer()
                else:
                    self._refuse(self._reason)
            self._unread = 0 if self._advanced else self._unread + len(part)

    def on_message_begin(self) -> None:
        """Begin a request; a second one before the first is answered ends the connection after that answer."""
        if self._answers():
            raise ValueError  # the parser ends; no client needs it
        super().on_message_begin()
        self._lines = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        self._lines += 1
        if self._lines > HEAD_LINES:
            self._reason = HeadersTooLarge(f"more than {HEAD_LINES} header lines")
            raise ValueError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer a request."""
        self._advanced = True
        self._stop_waiting()
        super().on_headers_complete()
        if self.leaving and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._advanced = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._wait()

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_after_answer(self) -> None:
        self._last = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _wait(self) -> None:
        self._stop_waiting()
        self.idle[self] = None
        self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        self.idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        self._stop_waiting()
        if self._unread and not self._answers():
            self._refuse(HeadersTooSlow(f"the request's line and headers did not arrive within {HEAD_SECONDS:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: HalluTracerError) -> None:
        if self._answers() and self.cycle.response_started:
            self.transport.abort()
            return
        body = json.dumps(error_body(error.status, error.message, error.code))
        head = f"HTTP/1.1 {error.status} {error.code}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self._last = True
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        self.transport.close()


def connections(most: int) -> type[Connection]:
    """Return the protocol for one server with ``most`` connections, or as many as ``places``, and raise as that."""
    if (possible := places(most)) < most:
        files = possible + SPARE_FILES
        log.warning("at most %d connections: this process may open %d files (ulimit -Hn)", possible, files)

    class Bounded(Connection):
        most: ClassVar[int] = possible
        idle: ClassVar[dict[Connection, None]] = {}

    return Bounded


def places(most: int) -> int:
    """Return how many connections there can be, at most ``most``; raises this process' soft limit of open files.

    Raises HalluTracerError where the hard limit leaves too few to serve with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, least = most + SPARE_FILES, LEAST_CONNECTIONS + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < least:
        raise HalluTracerError(
            f"this process may open {hard} files (ulimit -Hn), and a service needs at least {least}; raise the limit: "
            f"ulimit -n {wanted}, LimitNOFILE={wanted} in a systemd unit, --ulimit nofile={wanted} for a container"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else min(most, soft - SPARE_FILES)


LEAVING_S = 1.0  # without a request: longer than what was sent before a refusal was read takes, on a busy machine too
# With requests: nginx.conf lets a replica rest for 5 s that has come back, and asks this one until then.
MOST_S = 7.0


class LeavingServer(uvicorn.Server):
    """Where it has clients it refuses new work until none has come for ``LEAVING_S``, and then stops.

    uvicorn closes its socket at once, and a request on its way would meet a reset.  After ``leave`` the app answers
    503, which a balancer takes elsewhere."""

    def __init__(self, config: uvicorn.Config, leave: Callable[[], None]) -> None:
        super().__init__(config)
        self._leave = leave

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse, then close; a second Ctrl-C ends the refusing."""
        self._leave()
        if self.server_state.connections:
            setattr(self.config.http_protocol_class, "leaving", True)  # noqa: B010  (a Connection)
            await self._refuse()
        await super().shutdown(sockets)

    async def _refuse(self) -> None:
        """Until no request was answered for ``LEAVING_S``, at most ``MOST_S``."""
        clock, state = asyncio.get_running_loop().time, self.server_state
        start = last = now = clock()
        answered = state.total_requests
        while now - last < LEAVING_S and now - start < MOST_S and not self.force_exit:
            await asyncio.sleep(0.05)
            now = clock()
            if state.total_requests != answered:
                answered, last = state.total_requests, now
