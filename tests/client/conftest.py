"""``make_client`` makes a client of either kind against a scripted transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.client.blocking import BlockingClient, Handler

MakeClient = Callable[..., BlockingClient]


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_client(kind: str) -> Iterator[MakeClient]:
    made: list[BlockingClient] = []

    def make(handler: Handler | None = None, base_url: str = "http://guard.test", **options: Any) -> BlockingClient:
        made.append(BlockingClient(kind, base_url, handler, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
