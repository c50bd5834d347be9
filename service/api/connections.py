"""uvicorn's connections with bounds: on each state's time without progress, on a request's head,
and on their number.

uvicorn bounds none of them with its fast parser: a client without a key could take all memory or
all sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.access.callers import address_in, on_loopback
from service.access.routes import is_health_check
from service.api.error_bodies import error_body
from service.errors import (
    BodyTooLarge,
    BodyTooSlow,
    HalluTracerError,
    HeadersTooLarge,
    HeadersTooSlow,
    NotHttp,
    Overloaded,
)
from service.settings import LEAST_CONNECTIONS, SPARE_FILES

if TYPE_CHECKING:
    from service.serving.service import Lifecycle


class OneWrite:
    """``transport``, whose writes are joined until the turn ends.

    uvicorn writes an answer's head and its body one after the other: a process that dies between
    the two leaves half an answer, which a balancer cannot ask of another replica."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes | bytearray | memoryview[Any]] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Buffer ``data``, and send it once at the end of this event-loop iteration; at once where
        that is much.

        Else a page that is written piece by piece would be held whole, however little of it its
        reader takes."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)
        self._size += len(data)
        if self._size > SEND_BUFFER_BYTES:
            self._send()

    def close(self) -> None:
        """Send what is written, and close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts = self._parts
        self._parts = []
        self._size = 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))


log = logging.getLogger("hallutracer")
HEAD_BYTES = 64 * 1024  # of a request line with its headers; of trailers, too
HEAD_LINES = 100
# from the connection, or the first byte after an answer, to the end of the request's head
HEAD_SECONDS = 10.0
# A body, and an answer that waits for its reader, advance by so many bytes in so many seconds.
BODY_BYTES, BODY_SECONDS = 1024, 10.0
SEND_BYTES, SEND_SECONDS = 1024, 10.0
# Each part of a body, a chunk or a packet, costs as much as many bytes do. Beyond so many parts
# their average counts.
SMALL_PARTS, PART_BYTES = 2048, 64
GIVEN_BYTES = 16 * 1024  # of a body, which the app gets together: each time a task is woken
# of an answer that the kernel holds and has not sent: else it may be megabytes
SEND_BUFFER_BYTES = 64 * 1024
HEALTH_PLACES = 32  # connections beyond the limit, for health checks alone
MOST_ASKED = 8  # connections that are asked for their progress where one has to give way
LEFT_TO_OTHERS = 8  # an address leaves one in so many places to other addresses
LOG_SECONDS = 10.0  # between two lines about too many connections


class Places:
    """The connections of one server: ``most``, and ``HEALTH_PLACES`` more that may ask for nothing
    but its health.

    A further one takes the place of the one that has made no progress for longest: that sends no
    request, or waits for one or for its reader.  Those whose answer is being made keep their
    places.  Of an address beyond its share one of its own gives way; this machine's addresses, from
    which a proxy may pass on everybody, have no share."""

    def __init__(self, most: int) -> None:
        self.most = most
        # for their client, by the time of their last progress
        self.waiting: dict[Connection, None] = {}
        self._waiting_of: dict[str, dict[Connection, None]] = {}  # the same of each address
        # beyond the limit, in the order in which they came
        self.health: dict[Connection, None] = {}
        self._held: Counter[str] = Counter()  # address -> places
        self._taken = 0
        self._logged = -LOG_SECONDS

    def take(self, newcomer: Connection) -> bool:
        """Make room for it; False where it may ask for nothing but the server's health."""
        share = self.share(newcomer.address)
        beyond_share = share < self.most and self._held[newcomer.address] >= share
        if beyond_share or self._taken >= self.most:
            if (victim := self._victim(newcomer.address if beyond_share else None)) is None:
                self._log(
                    "and all wait for an answer: health checks alone are answered beside them",
                    beyond_share,
                )
                self._take_health(newcomer)
                return False
            self._log("the one without progress for longest is closed", beyond_share)
            victim.give_way()
        self._taken += 1
        self._held[newcomer.address] += 1
        return True

    def leave(self, connection: Connection) -> None:
        """Free the place of a connection that has ended."""
        self.busy(connection)
        if connection in self.health:
            del self.health[connection]
            return
        self._taken -= 1
        self._held[connection.address] -= 1
        if not self._held[connection.address]:
            del self._held[connection.address]

    def progressed(self, connection: Connection) -> None:
        """Put a connection that waits for its client behind the others that do."""
        self.busy(connection)
        if not connection.ended and connection not in self.health:
            self.waiting[connection] = None
            self._waiting_of.setdefault(connection.address, {})[connection] = None

    def busy(self, connection: Connection) -> None:
        """Note that a connection does not wait for its client."""
        if connection in self.waiting:
            del self.waiting[connection]
            of_address = self._waiting_of[connection.address]
            del of_address[connection]
            if not of_address:
                del self._waiting_of[connection.address]

    def share(self, address: str) -> int:
        """Return how many of the places an address may have."""
        return self.most if on_loopback(address) else self.most - self.most // LEFT_TO_OTHERS

    def _victim(self, address: str | None) -> Connection | None:
        """Return the one without progress for longest, of an address or of all; of few, since each
        newcomer asks."""
        for _ in range(MOST_ASKED):
            waiting = self.waiting if address is None else self._waiting_of.get(address, {})
            oldest = next(iter(waiting), None)
            if oldest is None or not oldest.has_sent_more():
                return oldest
            self.progressed(oldest)
        return next(iter(waiting), oldest)

    def _take_health(self, newcomer: Connection) -> None:
        if len(self.health) >= HEALTH_PLACES:
            next(iter(self.health)).give_way()
        self.health[newcomer] = None

    def _log(self, what: str, beyond_share: bool) -> None:
        if time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            where = (
                "one address has its share of --max-connections"
                if beyond_share
                else f"{self.most} connections are open"
            )
            log.warning("%s: %s", where, what)


def _in_words(error: httptools.HttpParserError) -> str:
    """Return what the parser says of a head or a body, without what the client sent."""
    if isinstance(error, httptools.HttpParserCallbackError):
        return "a request before the last one was answered"
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return "it begins with no method; for HTTPS there is a proxy in front"
    if isinstance(error, httptools.HttpParserError) and "PRI" in str(error):
        return "it begins as HTTP/2 does, which a proxy in front may speak"
    return str(error)[:100]


class Connection(HttpToolsProtocol):
    """One connection, with a clock for each of its states: a head, a body, an answer being read,
    and none of these."""

    places: ClassVar[Places]
    leaving: ClassVar[bool] = False  # the server stops: each connection ends with its answer

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.address = ""
        self._timer: asyncio.TimerHandle | None = None  # of a head or a body
        self._send_timer: asyncio.TimerHandle | None = None
        # header lines of this request; bytes that were neither a whole head nor a body
        self._lines = self._unread = 0
        # bytes of a body since its last progress; of answers when they last advanced
        self._body = self._unsent = 0
        self._parts = self._received = 0  # of this body, and its bytes
        self._kept = bytearray()  # of this body, not given to the app yet
        self._advanced = False
        # the answer under way is the connection's last: what else arrives is dropped
        self._last = False
        self._health_only = self.ended = False
        # why the parser is ended; None: by what the client sent
        self._reason: HalluTracerError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Find a place for it; where there is none, it may ask for the server's health alone."""
        # the clock runs while anything waits for the reader
        transport.set_write_buffer_limits(high=0)
        _bound_send_buffer(transport)
        super().connection_made(OneWrite(transport, self.loop))  # type: ignore[arg-type]
        self.address = _subscriber(self.client[0]) if self.client else ""
        self._health_only = not self.places.take(self)
        self.places.progressed(self)
        self._start(HEAD_SECONDS, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        self._end()

    def give_way(self) -> None:
        """End at once, for another connection."""
        self.transport.abort()
        # Its place is free now: asyncio tells of its end in a later turn.
        self.connections.discard(self)
        self._end()

    def data_received(self, data: bytes) -> None:
        """Parse, in parts that end where the bound of a head is reached, however it was cut into
        packets."""
        self._unset_keepalive_if_required()
        if self._timer is None and not self._answers():
            self._start(HEAD_SECONDS, self._head_is_late)  # the next request begins
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
                # a WebSocket's handshake is answered as the GET that it is
                self._end_after_answer()
            except httptools.HttpParserError as error:
                if self._answers() and not self.cycle.more_body:
                    # an answer under way is not to be written into
                    self._end_after_answer()
                else:
                    self._refuse(
                        self._reason or NotHttp(f"this is not HTTP/1.1: {_in_words(error)}")
                    )
            self._unread = 0 if self._advanced else self._unread + len(part)

    def on_message_begin(self) -> None:
        """Begin a request; a second one before the first is answered ends the connection after that
        answer."""
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
        if self._health_only and not is_health_check(
            self.parser.get_method().decode("ascii"), self._path()
        ):
            count = self.places.most
            self._reason = Overloaded(
                f"all {count} connections wait for an answer; the operator can raise the limit: "
                "--max-connections"
            )
            raise ValueError
        self._body = self._parts = self._received = 0
        self._kept.clear()
        self._start(BODY_SECONDS, self._body_is_late)
        super().on_headers_complete()
        if (self.leaving or self._health_only) and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._advanced = True
        self._parts += 1
        self._received += len(body)
        if self._parts > SMALL_PARTS + self._received // PART_BYTES:
            self._reason = BodyTooLarge(
                f"the body arrived in {self._parts} parts of {self._received} bytes:"
                f" {SMALL_PARTS} parts, chunks or packets, may be smaller than {PART_BYTES} bytes"
                " on average; write larger ones"
            )
            raise ValueError
        self._body += len(body)
        if self._body >= BODY_BYTES:
            self.places.progressed(self)
        self._kept += body
        if len(self._kept) >= GIVEN_BYTES:
            self._give()

    def _give(self) -> None:
        if self._kept:
            super().on_body(bytes(self._kept))
            self._kept.clear()

    def on_message_complete(self) -> None:
        """Wait for the answer, whose clock is the request's deadline."""
        self._give()
        super().on_message_complete()
        if self._answers():
            self._stop()
            if not self.flow.write_paused:
                self.places.busy(self)

    def on_response_complete(self) -> None:
        """Wait for the next request, as long as uvicorn's ``timeout_keep_alive``."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self.places.progressed(self)
        if self.cycle.more_body:  # the rest of its body is dropped, and has as long as a head
            self._start(HEAD_SECONDS, self._head_is_late)

    def pause_writing(self) -> None:
        """Start the clock of an answer that waits for its reader."""
        super().pause_writing()
        if not self.ended:
            self.places.progressed(self)
            self._unsent = self.transport.get_write_buffer_size()
            self._send_timer = self.loop.call_later(SEND_SECONDS, self._answer_is_late)

    def resume_writing(self) -> None:
        """Stop it: all is sent."""
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        self.places.progressed(self)
        if self._answers() and not self.cycle.more_body:
            self.places.busy(self)

    def has_sent_more(self) -> bool:
        """Return whether its reader took more of the answer since this was asked, or since it began
        to wait."""
        if self._send_timer is None:
            return False
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        return before - self._unsent >= SEND_BYTES

    def _path(self) -> str:
        return self.url.partition(b"?")[0].decode("latin-1")

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_after_answer(self) -> None:
        self._last = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _start(self, seconds: float, late: Callable[[], None]) -> None:
        self._stop()
        self._timer = self.loop.call_later(seconds, late)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        """Free its place, once, and stop its clocks."""
        self._stop()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        if not self.ended:
            self.ended = True
            self.places.leave(self)

    def _head_is_late(self) -> None:
        self._timer = None
        if self._unread and not self._answers():
            self._refuse(
                HeadersTooSlow(
                    f"the request's line and headers did not arrive within {HEAD_SECONDS:g} s"
                )
            )
        else:
            self.transport.close()

    def _body_is_late(self) -> None:
        if self._body < BODY_BYTES and not self.flow.read_paused:
            # paused: the service reads no more for now
            self._refuse(
                BodyTooSlow(
                    f"the body arrived more slowly than {BODY_BYTES} bytes in {BODY_SECONDS:g} s"
                )
            )
            return
        self._body = 0
        self._start(BODY_SECONDS, self._body_is_late)

    def _answer_is_late(self) -> None:
        if not self.has_sent_more():
            self.transport.abort()
            return
        self.places.progressed(self)
        self._send_timer = self.loop.call_later(SEND_SECONDS, self._answer_is_late)

    def _refuse(self, error: HalluTracerError) -> None:
        self._stop()
        if self._answers() and self.cycle.response_started:
            self.transport.abort()
            return
        body = json.dumps(error_body(error.status, error.message, error.code))
        head = (
            f"HTTP/1.1 {error.status} {error.code}\r\ncontent-type: application/json\r\nconnection:"
            " close\r\n"
        )
        if error.retry_after_s is not None:
            head += f"retry-after: {error.retry_after_s}\r\n"
        self._last = True
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        self.transport.close()


def _subscriber(host: str) -> str:
    """Return what one client has of addresses: one of IPv4, and as a rule 64 bits of IPv6."""
    address = address_in(host)
    if not isinstance(address, IPv6Address) or address.is_loopback:
        return host
    return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))


def _bound_send_buffer(transport: asyncio.Transport) -> None:
    """Have the kernel hold little that it has not sent, where it can: by itself it takes megabytes
    for each reader."""
    listening = transport.get_extra_info("socket")
    if listening is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with suppress(OSError):  # a Unix socket's
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SEND_BUFFER_BYTES)


def connections(most: int) -> type[Connection]:
    """Return the protocol for one server with ``most`` connections, or as many as ``places``, and
    raise as that."""
    if (possible := places(most)) < most:
        files = possible + SPARE_FILES
        log.warning(
            "at most %d connections: this process may open %d files (ulimit -Hn)", possible, files
        )

    class Bounded(Connection):
        places: ClassVar[Places] = Places(possible)

    return Bounded


def places(most: int) -> int:
    """Return how many connections there can be, at most ``most``; raises this process' soft limit
    of open files.

    Raises HalluTracerError where the hard limit leaves too few to serve with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, least = most + SPARE_FILES, LEAST_CONNECTIONS + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < least:
        raise HalluTracerError(
            f"this process may open {hard} files (ulimit -Hn), and a service needs at least"
            f" {least}; raise the limit: ulimit -n {wanted}, LimitNOFILE={wanted} in a systemd"
            f" unit, --ulimit nofile={wanted} for a container"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else min(most, soft - SPARE_FILES)


# without a request: longer than what was sent before a refusal was read takes, on a busy machine
# too
LEAVING_S = 1.0
# With requests: nginx.conf lets a replica rest for 5 s that has come back, and asks this one until
# then.
MOST_S = 7.0


class LeavingServer(uvicorn.Server):
    """Where it has clients it refuses new work until none has come for ``LEAVING_S``, and then
    stops.

    uvicorn closes its socket at once, and a request on its way would meet a reset.  After ``leave``
    the app answers 503, which a balancer takes elsewhere.  What still runs ``drain_s`` seconds
    later is ended by ``cut``: a stream with an event that says so, which uvicorn, a little later,
    would only break off."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse, then close; a second Ctrl-C ends the refusing."""
        self._lifecycle.leave()
        if self.server_state.connections:
            setattr(self.config.http_protocol_class, "leaving", True)  # noqa: B010  (a Connection)
            await self._refuse()
        cutting = asyncio.get_running_loop().call_later(
            self._lifecycle.settings.drain_s, self._lifecycle.cut
        )
        await super().shutdown(sockets)
        cutting.cancel()

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
