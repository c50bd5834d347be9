"""OpenAI's server-sent events: the risk with the first chunk, then the answer as it is decoded, then [DONE]."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from service.api.openai_response import (
    WITHHELD,
    Kind,
    annotation,
    counted,
    finish_reason,
    head,
    note,
    refusal,
    withheld,
)
from service.api.reply import Reply
from service.api.stream import DONE, failure


async def chunks(
    kind: Kind,
    reply: Reply,
    with_usage: bool,
    message_in_content: bool,
    foreign: AsyncGenerator[dict[str, Any], None] | None = None,
) -> AsyncIterator[bytes]:
    """The stream of one prompt; ``foreign`` are the chunks of the server that answers instead."""
    same = head(kind, reply.judgement, chunk=True) | ({"usage": None} if with_usage else {})
    reports = reply.judgement.reports
    report = reports[0]
    first: dict[str, Any] = {"role": "assistant", "content": annotation(report)}
    end = None
    if foreign is None and withheld(report):
        first, end = {"role": "assistant", **refusal(report, message_in_content)}, WITHHELD
    yield _event(same | {"choices": [_delta(kind, first, end)], "hallutracer": note(reply.judgement)})
    if foreign is not None:
        try:
            async with aclosing(foreign), aclosing(_in_time(reply, foreign)) as timely:
                async for chunk in timely:
                    yield _event(same | chunk)
        except Exception as error:
            yield failure(reply, error)
        yield DONE
        return
    if end is None:
        try:
            async for pieces in reply.handle.pieces():
                for piece in pieces:
                    yield _event(same | {"choices": [_delta(kind, {"content": piece})]})
                await asyncio.sleep(0)  # neither a full queue nor a free socket suspends: let other requests run
            reports = await reply.handle.answers()
        except Exception as error:
            yield failure(reply, error)
            yield DONE
            return
        yield _event(same | {"choices": [_delta(kind, {}, finish_reason(reports[0]))]})
    if with_usage:
        yield _event(same | {"choices": [], "usage": counted(reports)})
    yield DONE


async def _in_time(reply: Reply, foreign: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """Each chunk before the request's deadline.  Raises DeadlineExceeded."""
    while True:
        try:
            async with reply.handle.deadline.enforced():
                chunk = await anext(foreign)
        except StopAsyncIteration:
            return
        yield chunk


def _delta(kind: Kind, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    end = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
    return end | ({"delta": delta} if kind == "chat" else {"text": delta.get("content") or ""})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
