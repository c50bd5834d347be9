"""Text to token ids off the event loop and the engine, in two lanes: short texts never wait for a long one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
LONG = 16_384  # characters or ids from which a request takes the slow lane


class Tokenizing:
    """One thread a lane, so that each request's prompts are rendered in order and off the loop."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-long")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """``work()`` in the lane for ``size`` characters or ids; raises what it raises."""
        lane = self._long if size >= LONG else self._short
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        """Forget what has not begun."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=True, cancel_futures=True)
