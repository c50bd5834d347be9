"""The asyncio client.  Its twin is ``synchronous``; everything but the waiting is shared."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self, Unpack

import httpx
from httpx_sse import EventSource

from service.client import wire
from service.client.errors import ClientError, NotReady
from service.client.question import ScoreOptions, body_of
from service.client.results import BundleList, ModelList, Readiness, ReadyBody, ScoreResult
from service.client.retry import Attempts
from service.client.stream import AnswerBase, check_stream


class AsyncAnswer(AnswerBase):
    """A streamed answer: look at ``gated``, then iterate over pieces of text."""

    def __init__(self, response: httpx.Response, silence: str) -> None:
        super().__init__(response, silence)
        self._events = EventSource(response).aiter_sse()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text, none of them empty.  Raises Withheld, APIError, TransportError, UnexpectedAnswer."""
        self._require_open()
        while not self._ended and (piece := self._take(await self._next())) is not None:
            if piece:
                yield piece
                self._require_open()

    async def _next(self) -> str | None:
        with wire.transport_errors(self._response.url, self._silence):
            async for event in self._events:
                if event.data:
                    return event.data
        return None


class AsyncClient:
    """A connection pool to one service; close it, or use it in an ``async with``.

    ``timeout`` (seconds) is for a whole call: each attempt may connect, send and wait for bytes no longer than what is
    left of it, and no retry starts after it.  Of a stream, it is the time until the answer's head is there (which comes
    with the risk), and then, anew, each silence between two pieces.  ``max_retries`` is for 429, 503 and broken
    connections, see ``retry``.  Neither the key nor anything else is read from the environment (no proxy, no
    certificates either): give ``transport`` for those.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8765",
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        max_retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._shared = wire.Shared.checked(base_url, timeout, max_retries, clock, draw)
        self._sleep = sleep
        self._http = httpx.AsyncClient(transport=transport, trust_env=False, headers=wire.headers(api_key))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._shared.base_url)!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def score(self, **options: Unpack[ScoreOptions]) -> ScoreResult:
        """The risk of each prompt's answer, and with ``generate`` the answers that the gate lets through.

        Raises ValueError, TypeError, APIError, TransportError, UnexpectedAnswer.
        """
        return wire.answer(await self._call(wire.SCORE, body_of(options)), ScoreResult)

    @asynccontextmanager
    async def stream(self, **options: Unpack[ScoreOptions]) -> AsyncIterator[AsyncAnswer]:
        """One prompt's risk, then its answer piece by piece; leaving the ``async with`` early stops the decoding.

        Raises ValueError, TypeError, APIError, TransportError, UnexpectedAnswer.
        """
        response = await self._call(wire.SCORE, body_of(options, stream=True), stream=True)
        answer = AsyncAnswer(response, self._shared.silence)
        try:
            check_stream(response)
            self._shared.allow_silence(response)
            answer._begin(await answer._next())
            yield answer
        finally:
            answer._left = True
            await response.aclose()

    async def ready(self) -> Readiness:
        """Whether scores can be served now; asked once.  Raises APIError, TransportError, UnexpectedAnswer."""
        attempts = self._shared.attempts()
        try:
            body = wire.answer(await self._attempt(wire.READY, None, attempts), ReadyBody)
        except NotReady as error:
            return Readiness(False, reason=error.message)
        return Readiness(True, body.model, body.bundles)

    async def models(self) -> ModelList:
        """The loaded model.  Raises APIError, TransportError, UnexpectedAnswer."""
        return wire.answer(await self._call(wire.MODELS), ModelList)

    async def bundles(self) -> BundleList:
        """The loaded bundles.  Raises APIError, TransportError, UnexpectedAnswer."""
        return wire.answer(await self._call(wire.BUNDLES), BundleList)

    async def _call(self, path: str, content: bytes | None = None, *, stream: bool = False) -> httpx.Response:
        """A 200, after as many attempts as it takes and the policy grants; with ``stream``, its body is unread."""
        attempts = self._shared.attempts()
        while True:
            try:
                return await self._attempt(path, content, attempts, stream=stream)
            except ClientError as error:
                await self._sleep(attempts.pause(error))

    async def _attempt(
        self, path: str, content: bytes | None, attempts: Attempts, *, stream: bool = False
    ) -> httpx.Response:
        request = self._shared.request(self._http, path, content, attempts.remaining())
        with wire.transport_errors(request.url, attempts.late):
            response = await self._http.send(request, stream=stream)
            if response.status_code != 200:
                try:
                    await response.aread()
                finally:
                    await response.aclose()
        if response.status_code != 200:
            raise wire.refusal(response)
        return response
