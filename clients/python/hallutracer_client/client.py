"""The blocking and the asyncio client; what neither waits for lives in ``wire`` and ``stream``."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import httpx

from hallutracer_client import wire
from hallutracer_client.errors import ClientError, NotReady
from hallutracer_client.request import ScoreOptions, request_body
from hallutracer_client.results import BundleList, ModelList, Readiness, ReadyBody, ScoreResult
from hallutracer_client.stream import BaseAnswer, EventReader

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # comes with pydantic; typing has them from 3.11 on


class Answer(BaseAnswer):
    """A streamed answer: check ``gated``, then iterate over pieces of text."""

    def __init__(self, response: httpx.Response, timeout_message: str) -> None:
        super().__init__(response, timeout_message)
        reader = EventReader()
        self._events = (data for piece in response.iter_bytes() for data in reader.feed(piece))

    def __iter__(self) -> Iterator[str]:
        """Yield non-empty pieces of text.  Raises Withheld, APIError, TransportError, UnexpectedAnswer."""
        self._require_open()
        while not self._ended:
            if piece := self._accept(self._next()):
                yield piece
                self._require_open()

    def _next(self) -> bytes | None:
        with wire.transport_errors(self._response.url, self._timeout_message):
            return next(self._events, None)


class AsyncAnswer(BaseAnswer):
    """A streamed answer: check ``gated``, then iterate over pieces of text."""

    def __init__(self, response: httpx.Response, timeout_message: str) -> None:
        super().__init__(response, timeout_message)
        reader = EventReader()
        self._events = (data async for piece in response.aiter_bytes() for data in reader.feed(piece))

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield non-empty pieces of text.  Raises Withheld, APIError, TransportError, UnexpectedAnswer."""
        self._require_open()
        while not self._ended:
            if piece := self._accept(await self._next()):
                yield piece
                self._require_open()

    async def _next(self) -> bytes | None:
        with wire.transport_errors(self._response.url, self._timeout_message):
            return await anext(self._events, None)


class Client(wire.BaseClient):
    """A connection pool to one service.  Close it, or use it in a ``with``.

    ``timeout`` (seconds) limits a whole call, retries included: each attempt gets what is left of it to connect, send
    and read.  For a stream it limits the time to the first event (the risk), then each gap between events.
    ``max_retries`` applies to 429, 503 and broken connections (see ``wire``).  The environment is not read, neither
    for the key nor for proxies or certificates: pass ``transport`` for those.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8765",
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        max_retries: int = 2,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(base_url, timeout, max_retries, clock, draw)
        self._sleep = sleep
        self._http = httpx.Client(transport=transport, trust_env=False, headers=wire.headers(api_key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def score(self, **options: Unpack[ScoreOptions]) -> ScoreResult:
        """Return the risk of each prompt's answer, and with ``generate`` the answers that the gate does not withhold.

        Raises ValueError, TypeError, APIError, TransportError, UnexpectedAnswer.
        """
        return wire.parsed(self._call(wire.SCORE, request_body(options)), ScoreResult)

    @contextmanager
    def stream(self, **options: Unpack[ScoreOptions]) -> Iterator[Answer]:
        """Give one prompt's risk, then its answer piece by piece.  Leaving the ``with`` early stops the decoding.

        Raises ValueError, TypeError, APIError, TransportError, UnexpectedAnswer.
        """
        response = self._call(wire.SCORE, request_body(options, stream=True), stream=True)
        answer = Answer(response, self._silence_message)
        try:
            self._check_stream(response)
            answer._begin(answer._next())
            yield answer
        finally:
            answer._closed = True
            response.close()

    def ready(self) -> Readiness:
        """Return whether scores can be served now; never retried.  Raises as ``score`` does."""
        try:
            body = wire.parsed(self._attempt(wire.READY, None, self._attempts()), ReadyBody)
        except NotReady as error:
            return Readiness(False, reason=error.message)
        return Readiness(True, body.model, body.bundles)

    def models(self) -> ModelList:
        """Return the loaded model.  Raises as ``score`` does."""
        return wire.parsed(self._call(wire.MODELS), ModelList)

    def bundles(self) -> BundleList:
        """Return the loaded bundles.  Raises as ``score`` does."""
        return wire.parsed(self._call(wire.BUNDLES), BundleList)

    def _call(self, path: str, content: bytes | None = None, *, stream: bool = False) -> httpx.Response:
        """Return the response with status 200, after retries; with ``stream`` its body is unread."""
        attempts = self._attempts()
        while True:
            try:
                return self._attempt(path, content, attempts, stream=stream)
            except ClientError as error:
                self._sleep(attempts.pause(error))

    def _attempt(
        self, path: str, content: bytes | None, attempts: wire.Attempts, *, stream: bool = False
    ) -> httpx.Response:
        request = self._request(self._http, path, content, attempts.remaining())
        with wire.transport_errors(request.url, attempts.timeout_message):
            response = self._http.send(request, stream=stream)
            if response.status_code == 200:
                return response
            try:
                response.read()
            finally:
                response.close()
        raise wire.refusal(response)


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
        """Do as ``Client.score``."""
        return wire.parsed(await self._call(wire.SCORE, request_body(options)), ScoreResult)

    @asynccontextmanager
    async def stream(self, **options: Unpack[ScoreOptions]) -> AsyncIterator[AsyncAnswer]:
        """Do as ``Client.stream``."""
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
        """Do as ``Client.ready``."""
        try:
            body = wire.parsed(await self._attempt(wire.READY, None, self._attempts()), ReadyBody)
        except NotReady as error:
            return Readiness(False, reason=error.message)
        return Readiness(True, body.model, body.bundles)

    async def models(self) -> ModelList:
        """Do as ``Client.models``."""
        return wire.parsed(await self._call(wire.MODELS), ModelList)

    async def bundles(self) -> BundleList:
        """Do as ``Client.bundles``."""
        return wire.parsed(await self._call(wire.BUNDLES), BundleList)

    async def _call(self, path: str, content: bytes | None = None, *, stream: bool = False) -> httpx.Response:
        attempts = self._attempts()
        while True:
            try:
                return await self._attempt(path, content, attempts, stream=stream)
            except ClientError as error:
                await self._sleep(attempts.pause(error))

    async def _attempt(
        self, path: str, content: bytes | None, attempts: wire.Attempts, *, stream: bool = False
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
