"""Server-sent events: the risk first, then the answer as it is decoded, then [DONE]."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.error_handlers import error_body
from service.api.reply import Reply, completion_out, usage
from service.api.response_schema import CompletionChunk, Delta
from service.errors import ClientGone, DeadlineExceeded, HalluTracerError
from service.policies.guard import Decision

DONE = b"data: [DONE]\n\n"
SLOW_READER_S = 5.0  # beyond the deadline, for a reader that is slow rather than gone


class EventStream(StreamingResponse):
    """Starts once the risks are known; whatever ends it also ends the work behind it."""

    def __init__(self, reply: Reply, content: AsyncIterator[bytes]) -> None:
        """``content`` begins with the risks, and ends the stream with DONE."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **reply.headers()}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that goes away stops the decoding."""
        handle, record = self._reply.handle, self._reply.record
        try:
            # A reader that takes nothing blocks a send for ever, which no deadline of ours would see.
            async with asyncio.timeout(max(0.0, handle.deadline.left) + SLOW_READER_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            record.code = DeadlineExceeded.code  # the server closes the connection of an unfinished response
        finally:
            if record.code is None and not handle.finished:
                record.code = ClientGone.code
            handle.cancel()
            self._reply.end()


async def events(reply: Reply) -> AsyncIterator[bytes]:
    """The stream of a scoring request."""
    yield _event(reply.body())
    if reply.judgement.reports[0].decision is Decision.CONTINUE:
        try:
            async for pieces in reply.handle.pieces():
                yield b"".join(_chunk(CompletionChunk(id=reply.id, delta=Delta(text=piece))) for piece in pieces)
                await asyncio.sleep(0)  # neither a full queue nor a free socket suspends: let other requests run
            answers = await reply.handle.answers()
        except Exception as error:
            yield failure(reply, error)
        else:
            completion = completion_out(answers[0].completion)
            assert completion is not None
            yield _chunk(
                CompletionChunk(
                    id=reply.id,
                    delta=Delta(text=""),
                    finish_reason=completion.finish_reason,
                    usage=usage(answers),
                )
            )
    yield DONE


def _event(content: BaseModel) -> bytes:
    return b"data: " + content.model_dump_json(exclude_none=True).encode() + b"\n\n"


def _chunk(content: CompletionChunk) -> bytes:
    """As ``_event``, but with the ``"finish_reason": null`` that readers of OpenAI's streams look for."""
    left_out = {"usage"} if content.usage is None else None
    return b"data: " + content.model_dump_json(exclude=left_out).encode() + b"\n\n"


def failure(reply: Reply, error: Exception) -> bytes:
    """An error after the status line has been sent; one that is not ours keeps its details to itself."""
    known = error if isinstance(error, HalluTracerError) else HalluTracerError("an internal error under way")
    reply.record.code = known.code
    content: dict[str, Any] = error_body(known.status, known.message, known.code, known.param)
    return b"data: " + json.dumps(content).encode() + b"\n\n"
