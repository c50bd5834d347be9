"""Text to token ids: short texts on the event loop, others in two lanes, so that none waits for a long one.

Both lanes are bounded, because waiting requests hold their text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.errors import Overloaded

T = TypeVar("T")
INLINE = 512  # characters or ids up to which a thread costs more than the work, about 0.2 ms
LONG = 16_384  # characters or ids from which a request takes the slow lane
MAX_LONG = 16  # requests in the slow lane


class _Lane:
    """One thread and the number of its pending requests."""

    def __init__(self, name: str, max_pending: int) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.max_pending = max_pending
        self.pending = 0


class Tokenizing:
    """Renders requests.  Used on the event loop only."""

    def __init__(self, max_pending: int) -> None:
        """``max_pending`` requests may wait for the fast lane."""
        self._short = _Lane("tokenize", max_pending)
        self._long = _Lane("tokenize-long", MAX_LONG)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """``work()`` in the lane for ``size`` characters or ids; raises what it raises, or Overloaded."""
        if size <= INLINE:
            return work()
        lane = self._long if size >= LONG else self._short
        if lane.pending >= lane.max_pending:
            raise Overloaded(f"{lane.pending} requests are waiting to be tokenized; try again in 1 s")
        lane.pending += 1
        done = lane.thread.submit(work)
        done.add_done_callback(self._leave(lane))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Drop requests that have not begun."""
        for lane in (self._short, self._long):
            lane.thread.shutdown(wait=True, cancel_futures=True)

    def _leave(self, lane: _Lane) -> Callable[[object], None]:
        loop = asyncio.get_running_loop()

        def left() -> None:
            lane.pending -= 1

        def leave(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(left)

        return leave
