"""Bodies that a client has compressed, as their Content-Encoding says: decoded as they arrive,
within the body's limit.

Whatever stands behind reads a plain body.  Only what is read is decoded, in pieces, so that a few
bytes that stand for gigabytes cost no more than the largest body does."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.error_handlers import Refused, respond
from service.errors import BodyTooLarge, UnknownEncoding, WrongEncoding
from service.serving.service import Service

PIECE = 65_536  # bytes that are decoded at once
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's ``wbits``
_MOST_MEMBERS = 1000  # of one body; each costs a decoder, and may be of nothing
# Python's own from 3.14 on, and the same for older ones
_ZSTD_MODULES = ("compression.zstd", "backports.zstd")


class Decoder(Protocol):
    """Decodes what arrives in pieces."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what ``data`` decodes to, in pieces of at most ``PIECE`` bytes.  Raises ValueError
        if it is wrong."""

    @property
    def complete(self) -> bool:
        """Return whether what has arrived may be the end."""


class _Zlib:
    """Of gzip, whose members may follow each other, and of deflate, which is zlib's format or, as
    some send it, raw."""

    def __init__(self, *windows: int, members: int = 1) -> None:
        self._windows = windows
        self._members = members
        self._begun = b""
        self._decoder: Any = None

    @property
    def complete(self) -> bool:
        return self._decoder is None and not self._begun

    def feed(self, data: bytes) -> Iterator[bytes]:
        full = False  # then zlib may hold more than it has given
        while data or full:
            if self._decoder is None:
                data, self._begun = self._begun + data, b""
                if len(data) < 2:  # the first two bytes tell the formats apart
                    self._begun = data
                    return
                windows = [wbits for wbits in self._windows if _begins(wbits, data)]
                wbits = windows[0] if windows else None
                if wbits is None or self._members == 0:
                    raise ValueError
                self._members -= 1
                self._decoder = zlib.decompressobj(wbits)
            try:
                piece = self._decoder.decompress(data, PIECE)
            except zlib.error:
                raise ValueError from None
            data, full = self._decoder.unconsumed_tail, len(piece) == PIECE
            if self._decoder.eof:
                data = self._decoder.unused_data
                full = False
                self._decoder = None
            if piece:
                yield piece


def _begins(wbits: int, data: bytes) -> bool:
    """Return whether data may begin a stream of the format."""
    if wbits == _GZIP:
        return data.startswith(b"\x1f\x8b")
    return wbits == _RAW or (data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0)


class _Zstd:
    def __init__(self, module: Any) -> None:
        self._module, self._frames = module, _MOST_MEMBERS
        self._decoder: Any = None

    @property
    def complete(self) -> bool:
        return self._decoder is None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or (self._decoder is not None and not self._decoder.needs_input):
            if self._decoder is None:
                if self._frames == 0:
                    raise ValueError
                self._frames -= 1
                self._decoder = self._module.ZstdDecompressor()
            try:
                piece = self._decoder.decompress(data, PIECE)
            except self._module.ZstdError:
                raise ValueError from None
            data = b""
            if self._decoder.eof:
                data, self._decoder = self._decoder.unused_data, None
            if piece:
                yield piece


def decoders() -> Mapping[str, Callable[[], Decoder]]:
    """Return Content-Encoding -> what makes its decoder; zstd where a module for it is
    installed."""
    known: dict[str, Callable[[], Decoder]] = {
        "gzip": partial(_Zlib, _GZIP, members=_MOST_MEMBERS),
        "x-gzip": partial(_Zlib, _GZIP, members=_MOST_MEMBERS),
        "deflate": partial(_Zlib, _ZLIB, _RAW),
    }
    for name in _ZSTD_MODULES:
        with suppress(ImportError):
            return MappingProxyType(known | {"zstd": partial(_Zstd, import_module(name))})
    return MappingProxyType(known)


class EncodedBodies:
    """Decodes a body, or answers 415 where its Content-Encoding is not taken, 400 where the body is
    not what that says, and 413 where it decodes to more than the service's limit."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._most = service.settings.max_body_bytes
        self._decoders = decoders()
        self._accepted = ", ".join(name for name in self._decoders if not name.startswith("x-"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        named = ", ".join(headers.getlist("content-encoding")).strip().lower()
        has_body = (
            "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""
        )
        coding = ", ".join(headers.getlist("transfer-encoding")).strip().lower()
        if coding not in (
            "",
            "chunked",
        ):  # the server takes chunks apart, and nothing else that they may be in
            message = (
                f"Transfer-Encoding {coding[:80]!r} is not taken, only chunked: Content-Encoding is"
                " for packed bodies"
            )
            await respond(UnknownEncoding(message, accepted=self._accepted), scope, receive, send)
            return
        if named in ("", "identity") or not has_body:
            await self.app(scope, receive, send)
            return
        if named not in self._decoders:
            message = (
                f"Content-Encoding {named[:80]!r} is not taken; send the body plain, or as one of"
                f" {self._accepted}"
            )
            await respond(UnknownEncoding(message, accepted=self._accepted), scope, receive, send)
            return
        body = self._decoded(self._decoders[named](), named, receive)
        whole = False

        async def decoded() -> Message:
            nonlocal whole
            if whole:  # whoever waits for the client to leave is cancelled, and comes again
                return await receive()
            message = await anext(body)
            whole = not message.get("more_body", False)
            return message

        # How long it is will be seen as it comes.
        plain = [pair for pair in scope["headers"] if pair[0] not in _OF_ENCODED]
        scope["headers"] = [*plain, (b"transfer-encoding", b"chunked")]
        await self.app(scope, decoded, send)

    async def _decoded(
        self, decoder: Decoder, name: str, receive: Receive
    ) -> AsyncIterator[Message]:
        """Yield the body's messages, decoded; only the last, or that the client has left, is
        without ``more_body``."""
        length, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                yield message
                return
            more = message.get("more_body", False)
            try:
                for piece in decoder.feed(message.get("body", b"")):
                    length += len(piece)
                    if length > self._most:
                        reason = (
                            f"the body is larger than {self._most} bytes once it is decoded"
                            f" ({name}); split the prompts over several requests"
                        )
                        raise Refused(BodyTooLarge(reason))
                    yield {"type": "http.request", "body": piece, "more_body": True}
                    # a piece takes the event loop for a fraction of a millisecond
                    await asyncio.sleep(0)
            except ValueError:
                reason = (
                    f"the body is not what Content-Encoding: {name} says; compress it, or leave the"
                    " header out"
                )
                raise Refused(WrongEncoding(reason)) from None
        if not decoder.complete:
            raise Refused(
                WrongEncoding(f"the body ends before its end, as Content-Encoding: {name} has it")
            )
        yield {"type": "http.request", "body": b"", "more_body": False}


_OF_ENCODED = (b"content-encoding", b"content-length", b"transfer-encoding")
