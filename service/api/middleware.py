"""Request ids, total time, the body limit, unforeseen errors, the log line: plain ASGI, no response is buffered."""

from __future__ import annotations

import asyncio
import random
import re
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.metrics import Metrics
from service.api.problems import respond
from service.api.request_log import RequestRecord, log
from service.errors import BodyTooLarge, ClientGone, HalluTracerError

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
SCORING = frozenset({"/score", "/v1/risk/score"})


class RequestFrame:
    """Echoes or makes X-Request-Id, measures x-total-time (ms), refuses bodies over the limit with 413.

    Writes one log line a request and tells ``metrics`` of those to the scoring routes.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, metrics: Metrics) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record = RequestRecord(
            request_id=given if _ID.fullmatch(given) else f"{random.getrandbits(128):032x}",
            method=scope["method"],
            path=scope["path"][:256],
        )
        scope.setdefault("state", {})["record"] = record
        received = 0
        whole = gone = False  # the request's body; its client, before that

        async def bounded() -> Message:
            nonlocal received, whole, gone
            message = await receive()
            gone = gone or (message["type"] == "http.disconnect" and not whole)
            whole = whole or (message["type"] == "http.request" and not message.get("more_body", False))
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                # FastAPI passes only this class on while it reads a body; any other becomes a plain 400.
                raise HTTPException(BodyTooLarge.status, self._too_large().message)
            return message

        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                out = MutableHeaders(scope=message)
                out["x-request-id"] = record.request_id
                out["x-total-time"] = f"{(time.perf_counter() - started) * 1e3:.3f}"
            await send(message)

        scoring = record.path in SCORING
        if scoring:
            self.metrics.request_started()
        try:
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > self.max_body_bytes:
                await respond(self._too_large(), scope, receive, framed)
            else:
                await self.app(scope, bounded, framed)
        except asyncio.CancelledError:
            record.code = ClientGone.code
            raise
        except Exception as error:
            log.error("request %s: unhandled error on %s", record.request_id, record.path, exc_info=error)
            answering = record.status is not None
            message = "an internal error; the server's log has the details under this request id"
            if answering:
                record.code = HalluTracerError.code
                raise
            await respond(HalluTracerError(message), scope, receive, framed)
        finally:
            seconds = time.perf_counter() - started
            if record.status is None or gone:  # nobody was there to be answered, whatever was said
                record.status, record.code = ClientGone.status, ClientGone.code
            record.total_ms = seconds * 1e3
            record.write()
            if scoring:
                self.metrics.request_ended(record.status, record.code, seconds)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is larger than {self.max_body_bytes} bytes; split the list of prompts over several requests"
        )
