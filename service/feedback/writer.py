"""Writes feedback in a thread: answers in batches, labels as soon as possible; a label is confirmed
once it is on disk.

The event loop only puts rows into a bounded queue.  If the queue is full, answers are dropped and
counted, and labels are refused.  While the database cannot be reached, answers wait in the queue
and labels fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

from service.batch_writer import BatchWriter, Queued
from service.errors import FeedbackUnavailable, Overloaded, RequestError
from service.feedback.databases import Database, Location, Refused
from service.feedback.rows import (
    Answer,
    Given,
    Stored,
    believed_time,
    delete_before,
    write_answers,
    write_label,
)

log = logging.getLogger("hallutracer")
MOST_BYTES = 64 * 2**20  # of the queue; some 64,000 rows without prompts
ROW_BYTES = 1_000  # rough size of a waiting row without its text
BATCH = 500  # rows in one transaction
GATHER_S = 0.05  # time to collect more answers, if no label waits
AGAIN_S = 1.0  # wait after a failure
CLOSING_S = 10.0  # time for the last rows
DELETE_EVERY_S = 600.0
DAY_S = 86_400.0
CATCH_UP = 24.0  # most days that answers age in a day, after a stop or with a wrong clock
Fate = Literal["stored", "dropped"]
_Batch = list[Queued[Answer | Given]]


class Writer(BatchWriter[Answer | Given]):
    """Writes feedback.  It calls ``count`` with numbers of stored and dropped answers, on any
    thread."""

    def __init__(
        self,
        where: Location,
        *,
        days: float | None = None,
        count: Callable[[Fate, int], None] = lambda fate, number: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Open the database; answers are deleted after ``days``.  Raises FeedbackUnavailable."""
        self._where = where
        self._days = days
        self._count = count
        self._database: Database | None = where.open()
        self._failed, self._clock_doubted = False, False
        self._next_delete, self._deleted = 0.0, time.monotonic()
        super().__init__(
            "feedback", most=most_bytes, batch=BATCH, closing_s=CLOSING_S, gather_s=GATHER_S
        )

    def record(self, answers: Sequence[Answer]) -> None:
        """Queue answers, if there is room; never waits."""
        if dropped := sum(
            not self.put(answer, ROW_BYTES + len(answer.prompt or "")) for answer in answers
        ):
            self._count("dropped", dropped)

    def label(self, submitted: Given) -> Future[Stored | None]:
        """Return a future that is done when the label is on disk; its result is None if there is no
        such answer.

        Both raise Overloaded and FeedbackUnavailable; the future also raises what ``write_label``
        raises."""
        done: Future[Stored | None] = Future()
        if not self.put(submitted, ROW_BYTES + len(submitted.comment or ""), done):
            if self.closing:
                raise FeedbackUnavailable("the service is shutting down")
            raise Overloaded("too much feedback waits to be written; try again in 1 s")
        return done

    def close(self) -> None:
        """Write the waiting rows, then end the thread."""
        left = self.finish()
        for queued in left:
            if queued.done is not None and queued.listens():
                queued.done.set_exception(FeedbackUnavailable("the service is shutting down"))
        if dropped := sum(queued.done is None for queued in left):
            self._count("dropped", dropped)

    def write(self, batch: _Batch) -> _Batch:
        """Store a batch in one transaction, and delete answers that are too old."""
        answers = [queued for queued in batch if queued.done is None]
        labels = [queued for queued in batch if queued.listens()]
        try:
            self._database = self._database or self._where.open()
            if batch:
                self._store(self._database, answers, labels)
            if self._days is not None and self.wake_s() == 0:
                self._delete(self._database, self._days)
        except Exception as error:  # keep the thread alive on any error
            return self._after_failure(error, answers, labels)
        self._failed = False
        return []

    def wake_s(self) -> float | None:
        """Return the seconds until answers are deleted next."""
        return None if self._days is None else max(0.0, self._next_delete - time.monotonic())

    def release(self) -> None:
        """Close the database; it may be opened again."""
        if self._database is not None:
            self._database.close()
        self._database = None

    def _store(self, database: Database, answers: _Batch, labels: _Batch) -> None:
        results: list[Stored | RequestError | None] = []
        with database.transaction():
            write_answers(
                database, [queued.item for queued in answers if isinstance(queued.item, Answer)]
            )
            for submitted in (queued.item for queued in labels if isinstance(queued.item, Given)):
                try:
                    results.append(write_label(database, submitted))
                except RequestError as error:
                    results.append(error)
        if answers:
            self._count("stored", len(answers))
            answers.clear()  # they are stored, even if a later step fails
        for queued, result in zip(labels, results, strict=True):
            if queued.done is not None:
                (
                    queued.done.set_exception(result)
                    if isinstance(result, RequestError)
                    else queued.done.set_result(result)
                )

    def _delete(self, database: Database, days: float) -> None:
        clock, now = time.time(), time.monotonic()
        believed = believed_time(database, clock, CATCH_UP * (now - self._deleted))
        self._deleted = now
        if (doubted := clock - believed > DAY_S) and not self._clock_doubted:
            log.warning(
                "feedback: the clock is %.1f days ahead of the time that was seen to pass (a long"
                " stop, or it is wrong); answers age by at most a day an hour",
                (clock - believed) / DAY_S,
            )
        self._clock_doubted = doubted
        if not delete_before(database, believed - days * DAY_S):
            self._next_delete = time.monotonic() + DELETE_EVERY_S

    def _after_failure(self, error: Exception, answers: _Batch, labels: _Batch) -> _Batch:
        """Fail the labels; return the answers for the next attempt, or drop those that the database
        refuses."""
        expected = isinstance(error, FeedbackUnavailable)
        if not self._failed:
            log.error(
                "feedback is not being written: %s", error, exc_info=None if expected else error
            )
        self._failed = True
        for queued in labels:
            if queued.done is not None and not queued.done.done():
                queued.done.set_exception(
                    FeedbackUnavailable("feedback cannot be written now; see the service's log")
                )
        if not expected or isinstance(error, Refused) or self.closing:
            if answers:
                self._count("dropped", len(answers))
            answers = []
        self._next_delete = time.monotonic() + AGAIN_S
        self.release()
        self.pause(AGAIN_S)
        return answers
