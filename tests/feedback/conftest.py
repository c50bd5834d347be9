"""Both databases, a new one for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.feedback.databases import Location, location
from tests.kit.postgres import Postgres, postgres


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    with postgres() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "sqlite":
        return location(str(tmp_path / "feedback.db"))
    return location(request.getfixturevalue("server").schema(f"t{uuid.uuid4().hex}"))
