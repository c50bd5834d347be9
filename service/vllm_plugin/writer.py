"""Writes a request's note into vLLM's response, whole or streamed.

The response starts with its first body, because only then are the headers known."""

from __future__ import annotations

import json

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from service.access.routes import MESSAGES_ROUTE, RESPONSES_ROUTE
from service.api.error_bodies import error_body
from service.errors import NotReady
from service.vllm_plugin.note import Note, parsed
from service.vllm_plugin.words import ChatWords, MessagesWords, ResponsesWords, Words

RETRY_S = 1
_WORDS: dict[str, type[Words]] = {RESPONSES_ROUTE: ResponsesWords, MESSAGES_ROUTE: MessagesWords}


class ResponseWriter:
    """Sends what the route's words make of each body."""

    def __init__(self, note: Note, send: Send, message_in_content: bool) -> None:
        """``message_in_content`` also puts the policy's message where the answer's text would
        be."""
        self._note, self._send = note, send
        self._words = _WORDS.get(note.route, ChatWords)(note, message_in_content)
        self._start: Message | None = None
        self._begun = self._streams = False
        self._held = b""

    async def send(self, message: Message) -> None:
        """Send a message of the app, or keep it until there is something to send."""
        if message["type"] == "http.response.start":
            self._start = message
            kind = MutableHeaders(scope=message).get("content-type", "")
            self._streams = kind.startswith("text/event-stream")
        elif message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._held += message.get("body", b"")
            more = bool(message.get("more_body"))
            body: bytes | None = None
            if self._words.complete:
                body, self._held = self._held, b""
            elif self._streams:
                *events, self._held = self._held.split(b"\n\n")
                body = b"".join(map(self._rewritten, events)) + (
                    b"" if more else self._words.rest() + self._held
                )
            elif not more:
                body = self._whole(self._held)
            if body or not more:
                await self._begin(None if self._streams else len(body or b""))
                await self._send({**message, "body": body, "more_body": more})

    async def failed(self, status: int, reason: str) -> bool:
        """Send why the request failed, where its stream has not begun; return whether it was
        sent."""
        if self._begun:
            return False
        body = json.dumps(
            error_body(status, reason, "invalid_request" if status < 500 else "server_error")
        ).encode()
        headers = [(b"content-type", b"application/json")]
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        self._streams = False
        await self._begin(len(body))
        await self._send({"type": "http.response.body", "body": body})
        return True

    def _whole(self, body: bytes) -> bytes:
        content = parsed(body)
        rewritten = None if content is None else self._words.whole(content)
        return body if rewritten is None else json.dumps(rewritten, ensure_ascii=False).encode()

    def _rewritten(self, event: bytes) -> bytes:
        """Return what is sent instead of an event."""
        last = event.rpartition(b"\n")[2]
        content = parsed(last.removeprefix(b"data: "))
        if content is None or not last.startswith(b"data: "):
            return event + b"\n\n"
        return self._words.events(content)

    async def _begin(self, length: int | None) -> None:
        if self._start is None:
            return
        start = self._start
        self._start = None
        self._begun = True
        headers = MutableHeaders(scope=start)
        headers.update(self._note.headers())
        if length is not None:
            headers["content-length"] = str(length)
        if start["status"] == NotReady.status:
            headers.setdefault("retry-after", str(RETRY_S))  # vLLM's error handlers drop headers
        await self._send(start)
