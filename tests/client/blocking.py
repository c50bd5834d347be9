"""Either client behind one blocking interface, so that every test runs against both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from hallutracer_client import AsyncClient, Client
from hallutracer_client.stream import BaseAnswer

Handler = Callable[[httpx.Request], httpx.Response]


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)


class BlockingClient:
    """One client, sync or async; ``time`` is its scripted clock."""

    def __init__(self, kind: str, base_url: str, handler: Handler | None = None, **options: Any) -> None:
        self.time = Time()
        self.kind = kind
        scripted: dict[str, Any] = {}
        if handler is not None:
            sleep = self.time.sleep if kind == "sync" else self.time.asleep
            scripted = {"transport": httpx.MockTransport(handler), "clock": self.time.clock, "sleep": sleep}
            scripted["draw"] = lambda: 0.5
        self.client: Any = (Client if kind == "sync" else AsyncClient)(base_url, **scripted | options)
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``score``, ``ready``, ``models``, ``bundles``."""
        method = getattr(self.client, name)
        if self.kind == "sync":
            return method  # type: ignore[no-any-return]
        return lambda **options: self._loop.run_until_complete(method(**options))

    def stream(
        self, *, take: int | None = None, look: Callable[[BaseAnswer], Any] = lambda _: None, **options: Any
    ) -> tuple[BaseAnswer, list[str]]:
        """Read a stream: call ``look`` once the risk is there, then take all pieces, or the first ``take``."""
        if self.kind == "sync":
            with self.client.stream(**options) as answer:
                look(answer)
                return answer, list(_first(answer, take))
        return self._loop.run_until_complete(self._stream(take, look, options))

    async def _stream(
        self, take: int | None, look: Callable[[BaseAnswer], Any], options: dict[str, Any]
    ) -> tuple[BaseAnswer, list[str]]:
        pieces: list[str] = []
        async with self.client.stream(**options) as answer:
            look(answer)
            if take == 0:
                return answer, pieces
            async for piece in answer:
                pieces.append(piece)
                if len(pieces) == take:
                    break
        return answer, pieces

    def rest(self, answer: Any) -> list[str]:
        """Read on, outside the stream's block."""
        if self.kind == "sync":
            return list(answer)

        async def read() -> list[str]:
            return [piece async for piece in answer]

        return self._loop.run_until_complete(read())

    def close(self) -> None:
        if self.kind == "sync":
            self.client.close()
        else:
            self._loop.run_until_complete(self.client.aclose())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _first(pieces: Iterable[str], take: int | None) -> Iterable[str]:
    if take == 0:
        return
    for number, piece in enumerate(pieces, 1):
        yield piece
        if number == take:
            return
