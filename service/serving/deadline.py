"""How long a request may take, from its arrival to its last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.errors import DeadlineExceeded

SPARE = 0.05  # of the time, to end an answer and to send it


class Deadline:
    """``seconds`` from now, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def nearly(self) -> float:
        """On the monotonic clock: when an answer without a length of its own has to end, so as to be told in time."""
        return self._at - SPARE * self.seconds

    @property
    def left(self) -> float:
        """Seconds that remain; negative once it has passed."""
        return self._at - time.monotonic()

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Raise DeadlineExceeded inside the block when the time is up."""
        try:
            async with asyncio.timeout(self.left):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer within the deadline of {self.seconds:g} s; try again, or give it more time with "
                "'deadline_ms'"
            ) from None
