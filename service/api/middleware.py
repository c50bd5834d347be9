"""Request ids, timing, body limits, unhandled errors and the log line.  Plain ASGI: no response is buffered."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access.routes import PROMPT_ROUTES
from service.api.error_handlers import respond
from service.errors import BodyTooLarge, BodyTooSlow, ClientGone, HalluTracerError, NotReady
from service.serving.request_log import RequestRecord
from service.serving.service import Service

log = logging.getLogger("hallutracer")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestFrame:
    """Sets x-request-id and x-total-time (ms), refuses bodies that are too large or too slow, answers unhandled errors.

    Writes one log line per request; requests to the scoring routes are counted.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, headers = time.perf_counter(), Headers(scope=scope)
        metrics, tracing, settings = self._service.metrics, self._service.tracing, self._service.settings
        given = headers.get("x-request-id", "")
        record = RequestRecord(
            request_id=given if _ID.fullmatch(given) else f"{random.getrandbits(128):032x}",
            method=scope["method"],
            path=scope["path"][:256],
        )
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

        scoring = record.path in PROMPT_ROUTES
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
            log.error("request %s: unhandled error on %s", record.request_id, record.path, exc_info=error)
            record.code = HalluTracerError.code
            if record.status is not None:
                raise
            message = "an internal error; the server's log has the details under this request id"
            await respond(HalluTracerError(message), scope, receive, framed)
        finally:
            seconds = time.perf_counter() - started
            if record.status is None or body.cut_off:  # the client left before an answer
                record.status, record.code = ClientGone.status, ClientGone.code
            record.total_ms = seconds * 1e3
            record.write()
            if scoring:
                metrics.request_ended(record.status, record.code, seconds)
            if record.trace is not None:
                route = getattr(scope.get("route"), "path", None)
                judgement, answers = record.judgement, record.answers
                record.trace.end(record.request_id, route, record.status, record.code, judgement, answers)


class _Body:
    """Limits the size and the arrival time of a request's body, and notices when the client disconnects."""

    def __init__(self, receive: Receive, max_bytes: int, seconds: float) -> None:
        self._receive, self._max_bytes, self._deadline = receive, max_bytes, time.monotonic() + seconds
        self._received, self._complete = 0, False
        self.gone = self.cut_off = False  # the second: gone before the body was complete

    async def receive(self) -> Message:
        """Return the next message.  Raises HTTPException: FastAPI turns any other exception here into a plain 400."""
        try:
            async with asyncio.timeout(None if self._complete else self._deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(BodyTooSlow.status, "the body did not arrive before the deadline") from None
        if message["type"] == "http.disconnect":
            self.gone = True
            self.cut_off = self.cut_off or not self._complete
        self._complete = self._complete or (message["type"] == "http.request" and not message.get("more_body", False))
        self._received += len(message.get("body", b""))
        if self._received > self._max_bytes:
            raise HTTPException(BodyTooLarge.status, self.too_large().message)
        return message

    def too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._max_bytes} bytes; split the prompts over several requests")
