"""The middleware that gives each request of vLLM's server a note and has it written into the
response.  Plain ASGI."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access.routes import RESPONSES_ROUTE
from service.audit.auditor import Who
from service.errors import ClientGone, HalluTracerError
from service.serving.metrics import Metrics
from service.vllm_plugin.note import CURRENT, IN_BACKGROUND, PATHS, Note, read
from service.vllm_plugin.writer import ResponseWriter


@dataclass(eq=False)
class RiskNotes:
    """Gives each request a note and, on ``PATHS``, counts it and writes the note's content into the
    response."""

    app: ASGIApp
    metrics: Metrics
    refuses: Callable[[], bool]  # tells whether an answer without a verdict must not be sent
    message_in_content: bool = (
        False  # whether the policy's message also stands as the answer's text
    )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in PATHS:
            return await self._serve(path, scope, receive, send)
        started, status = time.perf_counter(), ClientGone.status

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.metrics.request_started()
        try:
            await self._serve(path, scope, receive, counted)
        except Exception:
            status = HalluTracerError.status
            raise
        finally:
            self.metrics.request_ended(status, None, time.perf_counter() - started)

    async def _serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        address = scope["client"][0] if scope.get("client") else None
        note = Note(carries=path in PATHS, who=Who(address=address), route=path)
        token = CURRENT.set(note)
        # the objects that the app keeps as well, until the body is complete
        parts: list[bytes] = []

        async def reading() -> Message:
            message = await receive()
            if note.carries and message["type"] == "http.request":
                # of any other route nothing is asked
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    body = b"".join(parts)
                    parts.clear()
                    read(note, body)
            return message

        writer, held = ResponseWriter(note, send, self.message_in_content), deque[Message]()

        async def replayed() -> Message:
            return held.popleft() if held else await reading()

        try:
            # vLLM says before it generates that it will answer in the background: the body is read
            # before that.
            while (
                path == RESPONSES_ROUTE
                and self.refuses()
                and (not held or held[-1].get("more_body"))
            ):
                held.append(await reading())
            if note.background and held:
                await writer.failed(400, IN_BACKGROUND)
                return
            await self.app(scope, replayed, writer.send if note.carries else send)
        except Exception:
            # A stream that vLLM begins before it generates ends in an exception where its request
            # is refused.
            if not note.carries or note.error is None or not await writer.failed(*note.error):
                raise
        finally:
            CURRENT.reset(token)
