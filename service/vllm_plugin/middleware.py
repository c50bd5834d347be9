"""Writes the note into the response: ``hallutracer`` beside ``choices``, in JSON and in streams.  Plain ASGI.

A withheld answer's choice has no text and the finish reason ``content_filter``, which OpenAI's clients know.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import NotReady
from service.vllm_plugin.note import CURRENT, Note

PATHS = ("/v1/completions", "/v1/chat/completions")
WITHHELD = "content_filter"
RETRY_S = 1


class RiskNotes:
    """Gives each completion request a note and writes its content into the response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self.app(scope, receive, send)
            return
        note = Note()
        token = CURRENT.set(note)
        try:
            await self.app(scope, _BodyReader(note, receive).receive, _ResponseWriter(note, send).send)
        finally:
            CURRENT.reset(token)


class _BodyReader:
    """Keeps the ``vllm_xargs`` of a beam search: vLLM makes other requests of it, without the caller's arguments."""

    def __init__(self, note: Note, receive: Receive) -> None:
        self._note, self._receive = note, receive
        self._body = b""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body += message.get("body", b"")
            if not message.get("more_body") and b"use_beam_search" in self._body:
                xargs = (_parsed(self._body) or {}).get("vllm_xargs")
                self._note.xargs = xargs if isinstance(xargs, dict) else {}
        return message


class _ResponseWriter:
    """Sends the response's start with its first body, because only then are the headers known."""

    def __init__(self, note: Note, send: Send) -> None:
        self._note, self._send = note, send
        self._start: Message | None = None
        self._streams = False
        self._held = b""
        self._annotated: set[int] = set()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            kind = MutableHeaders(scope=message).get("content-type", "")
            self._streams = kind.startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            await (self._stream(message) if self._streams else self._whole(message))
        else:
            await self._send(message)

    async def _whole(self, message: Message) -> None:
        self._held += message.get("body", b"")
        if message.get("more_body"):
            return
        body = self._held
        content = _parsed(body)
        if content is not None and "choices" in content:
            self._annotate(content)
            body = json.dumps(content, ensure_ascii=False).encode()
        await self._begin(len(body))
        await self._send({**message, "body": body, "more_body": False})

    async def _stream(self, message: Message) -> None:
        self._held += message.get("body", b"")
        *events, self._held = self._held.split(b"\n\n")
        out = b"".join(self._event(event) + b"\n\n" for event in events)
        more = bool(message.get("more_body"))
        if not more:
            out, self._held = out + self._held, b""
        if out or not more:
            await self._begin(None)
            await self._send({**message, "body": out, "more_body": more})

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: "):
            return event
        content = _parsed(event[6:])
        if content is None or not content.get("choices"):
            return event
        self._annotate(content)
        return b"data: " + json.dumps(content, ensure_ascii=False).encode()

    def _annotate(self, content: dict[str, Any]) -> None:
        """Add each prompt's item once: in the only body, or in the first chunk after its prefill."""
        note = self._note
        for choice in content["choices"]:
            if note.gated(int(choice.get("index", 0)) // note.choices) and choice.get("finish_reason") is not None:
                choice["finish_reason"] = WITHHELD
        body = note.body()
        if body is None:
            return
        if "data" in body:
            fresh = [item for item in body["data"] if item["index"] not in self._annotated]
            self._annotated |= {item["index"] for item in fresh}
            if not fresh:
                return
            body["data"] = fresh
        content["hallutracer"] = body

    async def _begin(self, length: int | None) -> None:
        if self._start is None:
            return
        start, self._start = self._start, None
        headers = MutableHeaders(scope=start)
        if length is not None:
            headers["content-length"] = str(length)
        for name, value in self._note.headers().items():
            headers[name] = value
        if start["status"] == NotReady.status:
            headers.setdefault("retry-after", str(RETRY_S))  # vLLM's error handlers drop headers
        await self._send(start)


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(body)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
