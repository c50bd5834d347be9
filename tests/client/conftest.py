"""``face`` makes a client of either kind against a scripted transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.client.faces import Face, Handler

MakeFace = Callable[..., Face]


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def face(kind: str) -> Iterator[MakeFace]:
    made: list[Face] = []

    def make(handler: Handler | None = None, base_url: str = "http://guard.test", **options: Any) -> Face:
        made.append(Face(kind, base_url, handler, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
