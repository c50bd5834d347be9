"""The asyncio client, the counterpart of ``synchronous``."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx

from hallutracer_client import wire
from hallutracer_client.errors import ClientError, NotReady
from hallutracer_client.events import EventReader
from hallutracer_client.request import ScoreOptions, request_body
from hallutracer_client.results import BundleList, ModelList, Readiness, ReadyBody, ScoreResult
from hallutracer_client.retry import Attempts
from hallutracer_client.stream import BaseAnswer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # comes with pydantic; typing has them from 3.11 on


class AsyncAnswer(BaseAnswer):
    """A streamed answer: check ``gated``, then iterate over pieces of text."""

    def __init__(self, response: httpx.Response, timeout_message: str) -> None:
        super().__init__(response, timeout_message)
        self._events = _events(response)

    async def __aiter__(self) -> AsyncIterator[str]:
        """Non-empty pieces of text.  Raises Withheld, APIError, TransportError, UnexpectedAnswer."""
        self._require_open()
        while not self._ended and (piece := self._accept(await self._next())) is not None:
            if piece:
                yield piece
                self._require_open()

    async def _next(self) -> bytes | None:
        with wire.transport_errors(self._response.url, self._timeout_message):
            return await anext(self._events, None)


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    reader = EventReader()
    async for piece in response.aiter_bytes():
        for data in reader.feed(piece):
            yield data


class AsyncClient(wire.BaseClient):
    """``Client`` for asyncio: the same arguments, results and errors.  Close it, or use it in an ``async with``."""

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
        super().__init__(base_url, timeout, max_retries, clock, draw)
        self._sleep = sleep
        self._http = httpx.AsyncClient(transport=transport, trust_env=False, headers=wire.headers(api_key))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def score(self, **options: Unpack[ScoreOptions]) -> ScoreResult:
        """As ``Client.score``."""
        return wire.parsed(await self._call(wire.SCORE, request_body(options)), ScoreResult)

    @asynccontextmanager
    async def stream(self, **options: Unpack[ScoreOptions]) -> AsyncIterator[AsyncAnswer]:
        """As ``Client.stream``."""
        response = await self._call(wire.SCORE, request_body(options, stream=True), stream=True)
        answer = AsyncAnswer(response, self._silence_message)
        try:
            self._check_stream(response)
            answer._begin(await answer._next())
            yield answer
        finally:
            answer._closed = True
            await response.aclose()

    async def ready(self) -> Readiness:
        """Whether scores can be served now; never retried.  Raises APIError, TransportError, UnexpectedAnswer."""
        try:
            body = wire.parsed(await self._attempt(wire.READY, None, self._attempts()), ReadyBody)
        except NotReady as error:
            return Readiness(False, reason=error.message)
        return Readiness(True, body.model, body.bundles)

    async def models(self) -> ModelList:
        """The loaded model.  Raises APIError, TransportError, UnexpectedAnswer."""
        return wire.parsed(await self._call(wire.MODELS), ModelList)

    async def bundles(self) -> BundleList:
        """The loaded bundles.  Raises APIError, TransportError, UnexpectedAnswer."""
        return wire.parsed(await self._call(wire.BUNDLES), BundleList)

    async def _call(self, path: str, content: bytes | None = None, *, stream: bool = False) -> httpx.Response:
        """The response with status 200, after retries; with ``stream`` its body is unread."""
        attempts = self._attempts()
        while True:
            try:
                return await self._attempt(path, content, attempts, stream=stream)
            except ClientError as error:
                await self._sleep(attempts.pause(error))

    async def _attempt(
        self, path: str, content: bytes | None, attempts: Attempts, *, stream: bool = False
    ) -> httpx.Response:
        request = self._request(self._http, path, content, attempts.remaining())
        with wire.transport_errors(request.url, attempts.timeout_message):
            response = await self._http.send(request, stream=stream)
            if response.status_code == 200:
                return response
            try:
                await response.aread()
            finally:
                await response.aclose()
        raise wire.refusal(response)
