"""The thread that writes feedback: answers in batches, labels as soon as it can; nobody is told before it is on disk.

The event loop only puts rows into a bounded queue.  Where that is full answers are not kept, and counted; labels are
refused.  While the database cannot be reached, answers wait in the queue and labels fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

from service.batch_writer import BatchWriter, Queued
from service.errors import FeedbackUnavailable, Overloaded, RequestError
from service.feedback.databases import Database, Location, Refused
from service.feedback.rows import Answer, Given, Stored, believed_time, delete_before, write_answers, write_label

log = logging.getLogger("hallutracer")
MOST_BYTES = 64 * 2**20  # waiting; some 64,000 rows without prompts
ROW_BYTES = 1_000  # of a waiting row without its text, roughly
BATCH = 500  # rows in one transaction
GATHER_S = 0.05  # that answers wait for others, where no label waits
AGAIN_S = 1.0  # after a failure
CLOSING_S = 10.0  # that the last rows may take
DELETE_EVERY_S = 600.0
DAY_S = 86_400.0
CATCH_UP = 24.0  # days that the age of answers grows in a day, at most, after a stop or under a clock that is wrong
Fate = Literal["stored", "dropped"]
_Batch = list[Queued[Answer | Given]]


class Writer(BatchWriter[Answer | Given]):
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
        self._where, self._days, self._count = where, days, count
        self._database: Database | None = where.open()
        self._failed, self._clock_doubted = False, False
        self._next_delete, self._deleted = 0.0, time.monotonic()
        super().__init__("feedback", most=most_bytes, batch=BATCH, closing_s=CLOSING_S, gather_s=GATHER_S)

    def record(self, answers: Sequence[Answer]) -> None:
        """Keep what was answered, if there is room; never waits."""
        if dropped := sum(not self.put(one, ROW_BYTES + len(one.prompt or "")) for one in answers):
            self._count("dropped", dropped)

    def label(self, given: Given) -> Future[Stored | None]:
        """Return what is done once the label is on disk; None: no such answer.

        Raises Overloaded and FeedbackUnavailable, as what is returned does and as ``write_label`` does."""
        done: Future[Stored | None] = Future()
        if not self.put(given, ROW_BYTES + len(given.comment or ""), done):
            if self.closing:
                raise FeedbackUnavailable("the service is shutting down")
            raise Overloaded("too much feedback waits to be written; try again in 1 s")
        return done

    def close(self) -> None:
        """Write what waits, then end."""
        left = self.finish()
        for one in left:
            if one.done is not None and one.listens():
                one.done.set_exception(FeedbackUnavailable("the service is shutting down"))
        if dropped := sum(one.done is None for one in left):
            self._count("dropped", dropped)

    def write(self, batch: _Batch) -> _Batch:
        """Store a batch in one transaction, and delete what has become too old."""
        answers, labels = [one for one in batch if one.done is None], [one for one in batch if one.listens()]
        try:
            self._database = self._database or self._where.open()
            if batch:
                self._store(self._database, answers, labels)
            if self._days is not None and self.wake_s() == 0:
                self._delete(self._database, self._days)
        except Exception as error:  # whatever it is, the thread goes on
            return self._after_failure(error, answers, labels)
        self._failed = False
        return []

    def wake_s(self) -> float | None:
        """Return when answers are deleted next."""
        return None if self._days is None else max(0.0, self._next_delete - time.monotonic())

    def release(self) -> None:
        """Close the database, which may be opened again."""
        if self._database is not None:
            self._database.close()
        self._database = None

    def _store(self, database: Database, answers: _Batch, labels: _Batch) -> None:
        found: list[Stored | RequestError | None] = []
        with database.transaction():
            write_answers(database, [one.item for one in answers if isinstance(one.item, Answer)])
            for given in (one.item for one in labels if isinstance(one.item, Given)):
                try:
                    found.append(write_label(database, given))
                except RequestError as error:
                    found.append(error)
        if answers:
            self._count("stored", len(answers))
            answers.clear()  # whatever fails now, they are there
        for one, result in zip(labels, found, strict=True):
            if one.done is not None:
                one.done.set_exception(result) if isinstance(result, RequestError) else one.done.set_result(result)

    def _delete(self, database: Database, days: float) -> None:
        clock, now = time.time(), time.monotonic()
        believed = believed_time(database, clock, CATCH_UP * (now - self._deleted))
        self._deleted = now
        if (doubted := clock - believed > DAY_S) and not self._clock_doubted:
            log.warning(
                "feedback: the clock is %.1f days ahead of the time that was seen to pass (a long stop, or it "
                "is wrong); answers age by at most a day an hour",
                (clock - believed) / DAY_S,
            )
        self._clock_doubted = doubted
        if not delete_before(database, believed - days * DAY_S):
            self._next_delete = time.monotonic() + DELETE_EVERY_S

    def _after_failure(self, error: Exception, answers: _Batch, labels: _Batch) -> _Batch:
        """Fail the labels; return the answers for the next attempt, or drop those that the database refuses."""
        expected = isinstance(error, FeedbackUnavailable)
        if not self._failed:
            log.error("feedback is not being written: %s", error, exc_info=None if expected else error)
        self._failed = True
        for one in labels:
            if one.done is not None and not one.done.done():
                one.done.set_exception(FeedbackUnavailable("feedback cannot be written now; see the service's log"))
        if not expected or isinstance(error, Refused) or self.closing:
            if answers:
                self._count("dropped", len(answers))
            answers = []
        self._next_delete = time.monotonic() + AGAIN_S
        self.release()
        self.pause(AGAIN_S)
        return answers
