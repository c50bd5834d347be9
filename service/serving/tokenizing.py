"""Text to token ids off the event loop and the engine, in two lanes: short texts never wait for a long one.

Bounded, like the queue behind it: what waits here holds its text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.errors import Overloaded

T = TypeVar("T")
LONG = 16_384  # characters or ids from which a request takes the slow lane
MOST_LONG = 16  # requests in the slow lane


class _Lane:
    """One thread, and how many requests it has yet to finish."""

    def __init__(self, name: str, most: int) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.most = most
        self.pending = 0


class Tokenizing:
    """Renders requests off the loop.  Used on the event loop only."""

    def __init__(self, most: int) -> None:
        """``most`` requests may wait for the fast lane."""
        self._short = _Lane("tokenize", most)
        self._long = _Lane("tokenize-long", MOST_LONG)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """``work()`` in the lane for ``size`` characters or ids; raises what it raises, or Overloaded."""
        lane = self._long if size >= LONG else self._short
        if lane.pending >= lane.most:
            raise Overloaded(f"{lane.pending} requests are waiting to be tokenized; try again in 1 s")
        lane.pending += 1
        done = lane.thread.submit(work)
        done.add_done_callback(self._leave(lane))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Forget what has not begun."""
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
