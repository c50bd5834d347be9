"""The plugin looks at a request's body without keeping a copy of it."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service.judging.guarantee import Shape
from service.vllm_plugin.middleware import CURRENT, RiskNotes

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


ASKED = [{"role": "user", "content": "What is the capital of Nauru?"}]
AGAIN = [{"role": "system", "content": "Be brief."}, *ASKED, {"role": "assistant", "content": None}, *ASKED]
CHAT, BATCH, EITHER = "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations"
FIRST, SECOND = Shape("0", passage=False, system=False), Shape("1", passage=False, system=True)


@pytest.mark.parametrize(
    ("path", "body", "shapes"),
    [
        (CHAT, {"messages": ASKED}, [FIRST]),
        (CHAT, {"messages": AGAIN}, [SECOND]),
        (CHAT, {"messages": ASKED, "chat_template": "{{ messages }}"}, []),
        (CHAT, {"messages": ASKED, "kv_transfer_params": {"prompt_token_ids": [1]}}, []),
        (CHAT, {"messages": [3, None]}, [FIRST]),
        (CHAT, {"messages": []}, [FIRST]),
        (CHAT, {"messages": "x"}, []),
        (BATCH, {"messages": [AGAIN, ASKED, None]}, [SECOND, FIRST, FIRST]),
        (EITHER, {"messages": ASKED}, [FIRST]),
        (EITHER, {"messages": ASKED, "prompt": "x"}, []),
        ("/v1/completions", {"prompt": "x"}, []),
        ("/v1/completions", {"prompt": "x", "messages": ASKED}, []),
    ],
)
def test_a_chats_shape_is_noted_where_its_messages_are_what_is_read(
    path: str, body: dict[str, Any], shapes: list[Shape]
) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        noted.extend(CURRENT.get().shapes)  # type: ignore[union-attr]

    async def send(message: Message) -> None:
        pass

    noted: list[Shape] = []
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(RiskNotes(app, refuses=lambda: True)(scope, receive, send))
    assert noted == shapes
