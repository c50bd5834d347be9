"""A thread that writes, in batches, what others put into its bounded queue, as feedback and the
audit log do."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False, slots=True)
class Queued(Generic[Item]):
    """What waits to be written, and who waits for that."""

    item: Item
    size: int
    done: Future[Any] | None

    def listens(self) -> bool:
        """Return whether somebody still waits; from then on nobody can leave."""
        return self.done is not None and self.done.set_running_or_notify_cancel()


class BatchWriter(ABC, Generic[Item]):
    """A bounded queue and its thread, which calls the subclass's ``write``, ``wake_s`` and, at the
    end, ``release``."""

    def __init__(
        self, name: str, *, most: int, batch: int, closing_s: float, gather_s: float = 0.0
    ) -> None:
        """Start the thread, last of all.  ``most``: the sum of sizes that may wait or are being
        written.

        ``batch`` items are written at once; where nobody waits for any, others are waited for
        ``gather_s``. ``closing_s`` is how long the last ones may take."""
        self._most = most
        self._batch = batch
        self._closing_s = closing_s
        self._gather_s = gather_s
        self._queue: deque[Queued[Item]] = deque()
        self._size = self._heard = (
            0  # of the queue and what is being written; items that somebody waits for
        )
        self.closing = False
        self.changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def write(self, batch: list[Queued[Item]]) -> Sequence[Queued[Item]]:
        """Write a batch and tell who waits; return those that are to be tried again, first.  It
        must not raise."""

    def wake_s(self) -> float | None:
        """Return after how many seconds ``write`` is called at the latest, with an empty batch;
        None: never."""
        return None

    @abstractmethod
    def release(self) -> None:
        """Give back what the thread holds, after the last batch."""

    def put(self, item: Item, size: int = 1, done: Future[Any] | None = None) -> bool:
        """Return whether there was room for it; never waits."""
        with self.changed:
            if self.closing or self._size + size > self._most:
                return False
            self._queue.append(Queued(item, size, done))
            self._size += size
            self._heard += done is not None
            self.changed.notify()
            return True

    def pause(self, seconds: float) -> None:
        """Wait so long, or until the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing, seconds)

    def finish(self) -> list[Queued[Item]]:
        """Write what waits, then end; return what could not be written in time and will not be."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self._thread.join(self._closing_s)
        with self.changed:
            left = list(self._queue)
            self._queue.clear()
        return left

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._queue or self.closing, self.wake_s())
                if self._queue and not self._heard:
                    self.changed.wait_for(
                        lambda: self._heard or self.closing or len(self._queue) >= self._batch,
                        self._gather_s,
                    )
                batch = [self._queue.popleft() for _ in range(min(self._batch, len(self._queue)))]
                self._heard -= sum(queued.done is not None for queued in batch)
            if self.closing and not batch:
                break
            again = self.write(batch)
            with self.changed:
                self._size += sum(queued.size for queued in again) - sum(
                    queued.size for queued in batch
                )
                self._queue.extendleft(reversed(again))
        self.release()
