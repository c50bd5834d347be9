"""The plugin looks at a request's body without keeping a copy of it."""

from __future__ import annotations

import asyncio
import tracemalloc

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service.vllm_plugin.middleware import RiskNotes
from service.vllm_plugin.note import CURRENT

PART = 64 * 1024
PARTS = 128
SIZE = PART * PARTS
ASKS = b'{"vllm_xargs": {"hallutracer_policy": "gate"}, "use_beam_search": true}'


def test_a_body_is_kept_once() -> None:
    sent, held = 0, []

    async def receive() -> Message:
        nonlocal sent
        sent += 1
        if sent == PARTS:
            held.append(tracemalloc.get_traced_memory()[0])  # before the last part
        part = (ASKS if sent == 1 else b"").ljust(PART)
        return {"type": "http.request", "body": part, "more_body": sent < PARTS}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        held.append(tracemalloc.get_traced_memory()[0])
        assert len(body) == SIZE
        assert CURRENT.get().xargs == {"hallutracer_policy": "gate"}
        await Response()(scope, receive, send)

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    tracemalloc.start()
    try:
        asyncio.run(RiskNotes(app, refuses=lambda: True)(scope, receive, send))
    finally:
        tracemalloc.stop()
    assert max(held) < 1.5 * SIZE, held
