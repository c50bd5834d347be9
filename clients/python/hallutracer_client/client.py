"""The blocking and the asyncio client, around one core that is written with ``await``."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import httpx

from hallutracer_client import wire
from hallutracer_client.errors import ClientError, NotReady
from hallutracer_client.request import Prompt, ScoreOptions, request_body, with_prompt
from hallutracer_client.results import BundleList, ModelList, Readiness, ReadyBody, ScoreResult
from hallutracer_client.stream import (
    Answer,
    AsyncAnswer,
    AsyncStream,
    BaseAnswer,
    Stream,
    done,
    now,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # comes with pydantic; typing has them from 3.11 on

T = TypeVar("T")
Transport = TypeVar("Transport", httpx.BaseTransport, httpx.AsyncBaseTransport)
StreamedAnswer = TypeVar("StreamedAnswer", bound=BaseAnswer)


class Ways(NamedTuple):
    """The steps of a client that may wait; ``stream.done`` takes what they give, awaitable or
    not."""

    pool: Callable[..., Any]
    sleep: Callable[[float], Any]
    read: Callable[[httpx.Response], Any]
    close: Callable[[httpx.Response], Any]


class BaseClient(Generic[Transport]):
    """The core: a call, its attempts, and what their responses mean."""

    _ways: Ways

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8765",
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        max_retries: int = 2,
        transport: Transport | None = None,
        sleep: Callable[[float], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout is a positive number of seconds, not {timeout}")
        if max_retries < 0:
            raise ValueError(f"max_retries must be 0 or more, not {max_retries}")
        self._base_url = wire.checked_base_url(base_url)
        self._max_retries = max_retries
        self._timeout_s = timeout
        self._clock = clock
        self._draw = draw
        self._sleep = sleep or self._ways.sleep
        self._http = self._ways.pool(
            transport=transport, trust_env=False, headers=wire.headers(api_key)
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._base_url)!r})"

    async def _call(
        self,
        path: str,
        content: bytes | None = None,
        *,
        stream: bool = False,
        retries: int | None = None,
    ) -> httpx.Response:
        """Return the response with status 200, after retries; with ``stream`` its body is
        unread."""
        most = self._max_retries if retries is None else retries
        attempts = wire.Attempts(most, self._timeout_s, self._clock, self._draw)
        while True:
            request = wire.request(
                self._http, f"{self._base_url}{path}", content, attempts.remaining()
            )
            try:
                with wire.transport_errors(request.url, attempts.timeout_message):
                    response: httpx.Response = await done(self._http.send(request, stream=stream))
                    if response.status_code == 200:
                        return response
                    try:
                        await done(self._ways.read(response))
                    finally:
                        await done(self._ways.close(response))
                raise wire.refusal(response)
            except ClientError as error:
                await done(self._sleep(attempts.pause(error)))

    async def _get(
        self, path: str, shape: type[T], content: bytes | None = None, retries: int | None = None
    ) -> T:
        return wire.parsed(await self._call(path, content, retries=retries), shape)

    async def _ready(self) -> Readiness:
        try:
            body = await self._get(wire.READY, ReadyBody, retries=0)
        except NotReady as error:
            return Readiness(False, reason=error.message)
        return Readiness(True, body.model, body.bundles)

    async def _stream(self, kind: type[StreamedAnswer], body: bytes) -> StreamedAnswer:
        response = await self._call(wire.SCORE, body, stream=True)
        answer = kind(response, self._timeout_s)
        try:
            await answer._begin()
        except BaseException:
            await self._end(answer)
            raise
        return answer

    async def _end(self, answer: BaseAnswer) -> None:
        answer._closed = True
        await done(self._ways.close(answer._response))


class Client(BaseClient[httpx.BaseTransport]):
    """A connection pool to one service.  Close it, or use it in a ``with``.

    ``timeout`` (seconds) limits a whole call, retries included: each attempt gets what is left of
    it to connect, send and read.  For a stream it limits the time to the first event (the risk),
    then each gap between events. ``max_retries`` applies to 429, 503 and broken connections (see
    ``wire``).  The environment is not read, neither for the key nor for proxies or certificates:
    pass ``transport`` for those.  Calls raise ValueError and TypeError before anything is sent,
    APIError, TransportError and UnexpectedAnswer."""

    _ways = Ways(httpx.Client, time.sleep, httpx.Response.read, httpx.Response.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def score(
        self, prompt: Prompt | None = None, /, **options: Unpack[ScoreOptions]
    ) -> ScoreResult:
        """Return the risk of each prompt's answer, and with ``generate`` the answers that are not
        withheld."""
        return now(self._get(wire.SCORE, ScoreResult, request_body(with_prompt(prompt, options))))

    def stream(self, prompt: Prompt | None = None, /, **options: Unpack[ScoreOptions]) -> Stream:
        """Give one prompt's risk, then its answer piece by piece: in a ``with``, or to be iterated
        over as it is.

        Leaving the ``with`` early stops the decoding.  The request is sent where either begins."""
        body = request_body(with_prompt(prompt, options), stream=True)
        return Stream(lambda: self._streamed(body))

    @contextmanager
    def _streamed(self, body: bytes) -> Iterator[Answer]:
        answer = now(self._stream(Answer, body))
        try:
            yield answer
        finally:
            now(self._end(answer))

    def ready(self) -> Readiness:
        """Return whether scores can be served now; never retried."""
        return now(self._ready())

    def models(self) -> ModelList:
        """Return the loaded model."""
        return now(self._get(wire.MODELS, ModelList))

    def bundles(self) -> BundleList:
        """Return the loaded bundles."""
        return now(self._get(wire.BUNDLES, BundleList))


class AsyncClient(BaseClient[httpx.AsyncBaseTransport]):
    """``Client`` for asyncio: the same arguments, results and errors.  Close it, or use it in an
    ``async with``."""

    _ways = Ways(httpx.AsyncClient, asyncio.sleep, httpx.Response.aread, httpx.Response.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def score(
        self, prompt: Prompt | None = None, /, **options: Unpack[ScoreOptions]
    ) -> ScoreResult:
        """Do as ``Client.score``."""
        return await self._get(wire.SCORE, ScoreResult, request_body(with_prompt(prompt, options)))

    def stream(
        self, prompt: Prompt | None = None, /, **options: Unpack[ScoreOptions]
    ) -> AsyncStream:
        """Do as ``Client.stream``, with ``async with`` or ``async for``."""
        body = request_body(with_prompt(prompt, options), stream=True)
        return AsyncStream(lambda: self._streamed(body))

    @asynccontextmanager
    async def _streamed(self, body: bytes) -> AsyncIterator[AsyncAnswer]:
        answer = await self._stream(AsyncAnswer, body)
        try:
            yield answer
        finally:
            await self._end(answer)

    async def ready(self) -> Readiness:
        """Do as ``Client.ready``."""
        return await self._ready()

    async def models(self) -> ModelList:
        """Do as ``Client.models``."""
        return await self._get(wire.MODELS, ModelList)

    async def bundles(self) -> BundleList:
        """Do as ``Client.bundles``."""
        return await self._get(wire.BUNDLES, BundleList)
