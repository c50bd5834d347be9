"""One thread that writes: answers in batches, labels as soon as it can, and nobody is told before it is on disk.

The event loop only puts rows into a bounded queue.  Where that is full answers are not kept, and counted; labels are
refused.  While the database cannot be reached, answers wait in the queue and labels fail.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from service.errors import FeedbackUnavailable, Overloaded, RequestError
from service.feedback.databases import Database, Location, Refused
from service.feedback.rows import Answer, Given, Stored
from service.feedback.statements import believed_time, delete_before, write_answers, write_label

log = logging.getLogger("hallutracer")
MOST_BYTES = 64 * 2**20  # waiting; some 64,000 rows without prompts
BATCH = 500  # rows in one transaction
GATHER_S = 0.05  # that answers wait for others, where no label waits
AGAIN_S = 1.0  # after a failure
CLOSING_S = 10.0  # that the last rows may take
DELETE_EVERY_S = 600.0
DAY_S = 86_400.0
CATCH_UP = 24.0  # days that the age of answers grows in a day, at most, after a stop or under a clock that is wrong
Fate = Literal["stored", "dropped"]


@dataclass(frozen=True, eq=False)
class _Waiting:
    given: Given
    done: Future[Stored | None] = field(default_factory=Future)

    @property
    def size(self) -> int:
        return self.given.size


class Writer:
    """``count`` is told how many answers were stored or dropped, on any thread."""

    def __init__(
        self,
        where: Location,
        *,
        days: float | None = None,
        count: Callable[[Fate, int], None] = lambda fate, number: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Open the database; ``days`` after which answers are deleted.  Raises FeedbackUnavailable."""
        self._where, self._days, self._count, self._most = where, days, count, most_bytes
        self._database: Database | None = where.open()
        self._queue: deque[Answer | _Waiting] = deque()
        self._bytes, self._labels, self._closing, self._failed = 0, 0, False, False
        self._next_delete, self._deleted, self._clock_doubted = 0.0, time.monotonic(), False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="feedback", daemon=True)
        self._thread.start()

    def record(self, answers: Sequence[Answer]) -> None:
        """Keep what was answered, if there is room; never waits."""
        dropped = 0
        with self._changed:
            for answer in answers:
                if not self._put(answer):
                    dropped += 1
        if dropped:
            self._count("dropped", dropped)

    def label(self, given: Given) -> Future[Stored | None]:
        """Done once the label is on disk; None: no such answer.  Raises Overloaded, and FeedbackUnavailable at the end.

        It fails with FeedbackUnavailable where the database cannot be written, and as ``write_label`` does.
        """
        waiting = _Waiting(given)
        with self._changed:
            if self._closing:
                raise FeedbackUnavailable("the service is shutting down")
            if not self._put(waiting):
                raise Overloaded("too much feedback waits to be written; try again in 1 s")
        return waiting.done

    def close(self) -> None:
        """Write what waits, then end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSING_S)
        with self._changed:
            self._give_up(FeedbackUnavailable("the service is shutting down"))

    def _put(self, item: Answer | _Waiting) -> bool:
        if self._closing or self._bytes + item.size > self._most:
            return False
        self._queue.append(item)
        self._bytes += item.size
        self._labels += isinstance(item, _Waiting)
        self._changed.notify()
        return True

    def _take(self) -> list[Answer | _Waiting] | None:
        """The next batch, perhaps empty; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing, self._until_delete())
            if self._queue and not self._labels:
                self._changed.wait_for(lambda: self._labels or self._closing or len(self._queue) >= BATCH, GATHER_S)
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            self._labels -= sum(isinstance(item, _Waiting) for item in batch)
            return None if self._closing and not batch else batch

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            answers = [item for item in batch if isinstance(item, Answer)]
            # Whoever no longer waits has not been told anything; from here on nobody can leave.
            labels = [item for item in batch if isinstance(item, _Waiting) and item.done.set_running_or_notify_cancel()]
            try:
                if batch:
                    self._write(answers, labels)
                if self._until_delete() == 0:
                    self._delete()
            except Exception as error:  # whatever it is, the thread goes on
                self._after_failure(error, answers, labels)
            else:
                with self._changed:
                    self._bytes -= sum(item.size for item in batch)
                self._failed = False
        if self._database is not None:
            self._database.close()

    def _write(self, answers: list[Answer], labels: list[_Waiting]) -> None:
        database, found = self._connected(), list[Stored | RequestError | None]()
        with database.transaction():
            write_answers(database, answers)
            for waiting in labels:
                try:
                    found.append(write_label(database, waiting.given))
                except RequestError as error:
                    found.append(error)
        if answers:
            self._count("stored", len(answers))
            answers.clear()  # whatever fails now, they are there
        for waiting, result in zip(labels, found, strict=True):
            if isinstance(result, RequestError):
                waiting.done.set_exception(result)
            else:
                waiting.done.set_result(result)

    def _connected(self) -> Database:
        if self._database is None:
            self._database = self._where.open()
        return self._database

    def _delete(self) -> None:
        assert self._days is not None
        clock, now = time.time(), time.monotonic()
        believed = believed_time(self._connected(), clock, CATCH_UP * (now - self._deleted))
        self._deleted = now
        if (doubted := clock - believed > DAY_S) and not self._clock_doubted:
            log.warning("feedback: the clock is %.1f days ahead of the time that was seen to pass; answers age by at "
                        "most a day an hour until it agrees (after a long stop; otherwise the clock is wrong)",
                        (clock - believed) / DAY_S)  # fmt: skip
        self._clock_doubted = doubted
        if not delete_before(self._connected(), believed - self._days * DAY_S):
            self._next_delete = time.monotonic() + DELETE_EVERY_S

    def _until_delete(self) -> float | None:
        return None if self._days is None else max(0.0, self._next_delete - time.monotonic())

    def _after_failure(self, error: Exception, answers: list[Answer], labels: list[_Waiting]) -> None:
        """Labels fail, answers wait for the next attempt; those that the database refuses are dropped."""
        if not self._failed:
            log.error("feedback is not being written: %s", error, exc_info=None if _expected(error) else error)
        self._failed = True
        refusal = FeedbackUnavailable("feedback cannot be written just now; the service's log says why")
        for waiting in labels:
            if not waiting.done.done():
                waiting.done.set_exception(refusal)
        kept = answers if _expected(error) and not isinstance(error, Refused) and not self._closing else []
        with self._changed:
            self._queue.extendleft(reversed(kept))
            self._bytes = sum(item.size for item in self._queue)
        if len(answers) > len(kept):
            self._count("dropped", len(answers) - len(kept))
        self._next_delete = time.monotonic() + AGAIN_S
        if self._database is not None:
            self._database.close()
        self._database = None
        with self._changed:
            self._changed.wait_for(lambda: self._closing, AGAIN_S)

    def _give_up(self, error: FeedbackUnavailable) -> None:
        dropped = 0
        for item in self._queue:
            if isinstance(item, Answer):
                dropped += 1
            elif item.done.set_running_or_notify_cancel():
                item.done.set_exception(error)
        self._queue.clear()
        if dropped:
            self._count("dropped", dropped)


def _expected(error: Exception) -> bool:
    return isinstance(error, FeedbackUnavailable)
