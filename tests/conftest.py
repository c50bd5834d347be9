"""What all tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio, as the service does."""
    return "asyncio"
