"""Request ids, total time, the body limit and unforeseen errors, as plain ASGI: no response is buffered."""

from __future__ import annotations

import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import envelope, log
from service.errors import BodyTooLarge

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestFrame:
    """Echoes or makes X-Request-Id, measures x-total-time (ms), refuses bodies over the limit with 413."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        received = 0
        answering = False

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                # FastAPI passes only this class on while it reads a body; any other becomes a plain 400.
                raise HTTPException(BodyTooLarge.status, self._limit())
            return message

        async def framed(message: Message) -> None:
            nonlocal answering
            if message["type"] == "http.response.start":
                answering = True
                out = MutableHeaders(scope=message)
                out["x-request-id"] = request_id
                out["x-total-time"] = f"{(time.perf_counter() - started) * 1e3:.3f}"
            await send(message)

        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_body_bytes:
            await envelope(413, self._limit(), BodyTooLarge.code)(scope, receive, framed)
            return
        try:
            await self.app(scope, bounded, framed)
        except Exception as error:
            log.error("request %s: unhandled error on %s", request_id, scope["path"], exc_info=error)
            if answering:
                raise
            message = "an internal error; the server's log has the details under this request id"
            await envelope(500, message, "internal_error")(scope, receive, framed)

    def _limit(self) -> str:
        return f"the body is larger than {self.max_body_bytes} bytes; split the list of prompts over several requests"
