"""What stands around every request: its id, its time, its body's limits, unhandled errors, the log
line.

Plain ASGI: no response is buffered."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access.routes import has_engine_work
from service.api.auth import caller_of
from service.api.error_handlers import Refused, respond
from service.errors import (
    BodiesFull,
    BodyTooLarge,
    BodyTooSlow,
    ClientGone,
    HalluTracerError,
    NotReady,
    Overloaded,
)
from service.serving.request_log import RequestRecord, log_failure
from service.serving.service import Service

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(eq=False)
class RequestFrame:
    """Sets x-request-id and x-total-time (ms), refuses bodies that are too large or too slow,
    answers unhandled errors.

    Writes one log line per request; requests to the scoring routes are counted."""

    app: ASGIApp
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, headers = time.perf_counter(), Headers(scope=scope)
        metrics = self.service.metrics
        tracing = self.service.tracing
        settings = self.service.settings
        named = headers.get("x-request-id", "")
        id = named if _ID.fullmatch(named) else f"{random.getrandbits(128):032x}"
        record = RequestRecord(request_id=id, method=scope["method"], path=scope["path"][:256])
        if tracing is not None and not record.routine:
            record.trace = tracing.request(headers, record.method)
        scope.setdefault("state", {})["record"] = record
        body = _Body(receive, settings.max_body_bytes, settings.deadline_s)

        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                out = MutableHeaders(scope=message)
                out["x-request-id"] = record.request_id
                out["x-total-time"] = f"{(time.perf_counter() - started) * 1e3:.3f}"
            await send(message)

        scoring, arrived_late = has_engine_work(record.path), self.service.lifecycle.stopping
        if scoring:
            metrics.request_started()
        try:
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > settings.max_body_bytes:
                await respond(body.too_large(), scope, receive, framed)
            else:
                await self.app(scope, body.receive, framed)
        except asyncio.CancelledError:
            if body.gone:
                return
            if record.status is None:
                await respond(NotReady("the service is shutting down"), scope, receive, framed)
            raise
        except Exception as error:
            log_failure(record.request_id, record.path, error)
            record.code = HalluTracerError.code
            if record.status is not None:
                raise
            message = "an internal error; the server's log has the details under this request id"
            await respond(HalluTracerError(message), scope, receive, framed)
        finally:
            seconds = time.perf_counter() - started
            if record.status is None or body.cut_off:  # the client left before an answer
                record.status, record.code = ClientGone.status, ClientGone.code
            status, code = record.status, record.code
            record.total_ms = seconds * 1e3
            record.write()
            if scoring:
                metrics.request_ended(status, code, seconds)
                self.service.lifecycle.count_ended(code, arrived_late=arrived_late)
            if record.trace is not None:
                route = getattr(scope.get("route"), "path", None)
                record.trace.end(
                    record.request_id, route, status, code, record.judgement, record.answers
                )


class _Body:
    """Limits the size and the arrival time of a request's body, and notices when the client
    disconnects."""

    def __init__(self, receive: Receive, max_bytes: int, seconds: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._deadline = time.monotonic() + seconds
        self._received, self._complete = 0, False
        self.gone = self.cut_off = False  # the second: gone before the body was complete

    async def receive(self) -> Message:
        """Return the next message.  Raises Refused."""
        try:
            async with asyncio.timeout(
                None if self._complete else self._deadline - time.monotonic()
            ):
                message = await self._receive()
        except TimeoutError:
            raise Refused(BodyTooSlow("the body did not arrive before the deadline")) from None
        if message["type"] == "http.disconnect":
            self.gone = True
            self.cut_off = self.cut_off or not self._complete
        self._complete = self._complete or (
            message["type"] == "http.request" and not message.get("more_body", False)
        )
        self._received += len(message.get("body", b""))
        if self._received > self._max_bytes:
            raise Refused(self.too_large())
        return message

    def too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is larger than {self._max_bytes} bytes; split the prompts over several"
            " requests"
        )


# bytes of each body that are not counted: most have no more, and ``max_connections`` bounds them
FREE = 16 * 1024
LEAST = 128 * 2**20  # bytes of all bodies that are always allowed
LARGEST = 32  # so many of the largest bodies as well


class LoadShedder:
    """Answers 429 if ``Lifecycle.check_not_full`` raises Overloaded, 503 if ``BodyMemory`` raises
    BodiesFull."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self._service = app, service
        self._memory = BodyMemory(max(LEAST, LARGEST * service.settings.max_body_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        caller = caller_of(HTTPConnection(scope), self._service).name
        if has_engine_work(scope["path"]):
            try:
                self._service.lifecycle.check_not_full(caller)
            except Overloaded as full:
                await respond(full, scope, receive, send)
                return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        # Where the length is known, the server lets no more arrive.
        known = length.isdecimal() and "transfer-encoding" not in headers
        size = int(length) if known else 0
        if known and size <= FREE:
            await self.app(scope, receive, send)
            return
        memory = self._memory
        parts = bytearray()
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if (more := size - FREE - taken) > 0:
                try:
                    memory.take(caller, more)
                except BodiesFull as full:
                    raise Refused(full) from None
                taken += more

        async def whole() -> Message:
            """Take the body's memory before it is read, or as it comes; in one message, since
            Starlette joins parts."""
            nonlocal parts
            take(size)
            while (message := await receive())["type"] == "http.request":
                parts += message.get("body", b"")
                take(len(parts))
                if not message.get("more_body", False):
                    body, parts = bytes(parts), bytearray()
                    return {"type": "http.request", "body": body, "more_body": False}
            return message

        try:
            await self.app(scope, whole, send)
        finally:
            memory.give_back(caller, taken)


class BodyMemory:
    """The bytes of all requests' bodies, from their arrival to the end of the answer, shared by
    callers.

    A caller may hold as much as it leaves free (dynamic thresholds: Choudhury, Hahne, 1998): one
    alone a half, two a third each, and a newcomer finds something left.  On the event loop only."""

    def __init__(self, most: int) -> None:
        self.free = most  # bytes
        self._held: Counter[str] = Counter()

    def take(self, caller: str, size: int) -> None:
        """Take ``size`` bytes more.  Raises BodiesFull."""
        held = self._held[caller]
        if held + size > self.free - size:
            raise BodiesFull(
                f"the bodies of this caller's unfinished requests hold {held} bytes, and {size}"
                f" more do not fit now; try again in {BodiesFull.retry_after_s} s, or send fewer at"
                " once"
            )
        self._held[caller] += size
        self.free -= size

    def give_back(self, caller: str, size: int) -> None:
        """Give back ``size`` bytes that were taken."""
        self.free += size
        self._held[caller] -= size
        if not self._held[caller]:
            del self._held[caller]
