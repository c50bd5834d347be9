"""Either client behind one blocking interface, so that a test runs against both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import httpx
import pytest

from hallutracer_client import AsyncClient, Client
from hallutracer_client.stream import BaseAnswer
from tests.kit import bodies
from tests.serve_process import ServeProcess, serve

Handler = Callable[[httpx.Request], httpx.Response]
MakeClient = Callable[..., "BlockingClient"]


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


class Script:
    """Answers one by one; counts the requests."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.seen: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        step = self.steps[min(len(self.seen), len(self.steps)) - 1]
        if isinstance(step, Exception):
            raise step
        return step() if callable(step) else step  # type: ignore[no-any-return]


def failing(text: str, message: str = "because") -> Any:
    """A step from a text: ``429 overloaded``, ``502`` of somebody's page, httpx's ``ReadError``."""
    name, _, code = text.partition(" ")
    if not name.isdigit():
        return getattr(httpx, name)("broken")
    if code:
        return lambda: bodies.error(int(name), code, message)
    return lambda: httpx.Response(int(name), html="<h1>busy</h1>")


class BlockingClient:
    """One client, sync or async; ``time`` is its scripted clock."""

    def __init__(
        self,
        kind: str,
        handler: Handler | None = None,
        base_url: str = "http://guard.test",
        **more: Any,
    ):
        self.time = Time()
        self.kind = kind
        scripted = dict[str, Any]()
        if handler is not None:
            scripted = {
                "transport": httpx.MockTransport(handler),
                "clock": self.time.clock,
                "sleep": self.time.sleep,
                "draw": lambda: 0.5,
            }
        self.client: Any = (Client if kind == "sync" else AsyncClient)(base_url, **scripted | more)
        self._loop: Any = None if kind == "sync" else asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``score``, ``ready``, ``models``, ``bundles``."""
        method = getattr(self.client, name)
        if self.kind == "sync":
            return method  # type: ignore[no-any-return]
        return lambda *given, **more: self._loop.run_until_complete(method(*given, **more))

    def stream(
        self,
        *,
        take: int | None = None,
        look: Callable[[BaseAnswer], Any] = lambda _: None,
        **options: Any,
    ) -> tuple[Any, list[str]]:
        """Read a stream: call ``look`` once the risk is there, then take all pieces, or the first
        ``take``."""
        if self.kind == "sync":
            with self.client.stream(**options) as answer:
                look(answer)
                return answer, list(islice(answer, take))

        async def read() -> tuple[Any, list[str]]:
            pieces: list[str] = []
            async with self.client.stream(**options) as answer:
                look(answer)
                own = aiter(answer)
                while len(pieces) != take and (piece := await anext(own, None)) is not None:
                    pieces.append(piece)
            return answer, pieces

        return self._loop.run_until_complete(read())

    def close(self) -> None:
        if self.kind == "sync":
            self.client.close()
        else:
            self._loop.run_until_complete(self.client.aclose())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


@pytest.fixture(scope="module")
def demo_service() -> Iterator[ServeProcess]:
    """A service on the demo model, in a process of its own."""
    with serve() as service:
        yield service


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_client(kind: str) -> Iterator[MakeClient]:
    made: list[BlockingClient] = []

    def make(handler: Handler | None = None, **options: Any) -> BlockingClient:
        made.append(BlockingClient(kind, handler, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
