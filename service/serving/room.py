"""The engine room: the one thread that uses the engine, turn by turn.

A turn: gather a batch from the waiting room, run its forward pass for every bundle in it at once, judge each risk,
close what is gated, then give running answers as long as the forward pass took, one token each in rotation.  So
neither a flood of scores nor a few long answers can starve the other.  Knows no HTTP and no metrics library.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from service.engines.base import Continuation, Onset, SteppingEngine
from service.errors import Overloaded
from service.guard import Decision
from service.scoring import Scorer
from service.serving.admission import Speed
from service.serving.answers import Answers
from service.serving.deadline import Deadline
from service.serving.job import Event, Job, Ticket
from service.serving.protocol import MOST_FAILURES, Failures, Observer, shutting_down
from service.serving.waiting import WaitingRoom

log = logging.getLogger("hallutracer")
T = TypeVar("T")


class EngineRoom:
    """Takes tickets from the event loop, works on them in its own thread, and tells the loop what became of them."""

    def __init__(
        self,
        scorers: Sequence[Scorer],
        observer: Observer,
        *,
        max_queue: int,
        max_batch_tokens: int,
        max_kv_tokens: int,
        max_wait_s: float,
        on_broken: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """All ``scorers`` share one engine, a SteppingEngine.  Call on the event loop that will submit.

        ``on_broken`` is called there if the thread ends by itself: a bug, or an engine that fails whatever it is given.
        """
        self._scorers = tuple(scorers)
        self._engine = cast(SteppingEngine, scorers[0].engine)
        self._observer = observer
        self._max_wait_s = max_wait_s
        self._on_broken = on_broken
        self._failures = Failures()
        self._waiting = WaitingRoom(max_queue, max_batch_tokens, max_kv_tokens)
        self._changed = threading.Condition()
        self._closing = False
        self._abandoned = False  # whether a waiting job may have been cancelled
        self._answers = Answers(self._tell, self._after_step)
        self._last_batch = 0
        self._speed = Speed()
        self._outbox: list[tuple[Job, Event, str | BaseException | None]] = []
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether work is still being done."""
        return self._thread.is_alive() and not self._closing

    def check_space(self, prompts: int, deadline: Deadline, *, continues: bool = False) -> None:
        """Raise Overloaded, or NotReady after ``close``: call it before a request's prompts are tokenized."""
        with self._changed:
            self._check_space(prompts, deadline, continues)

    def check_not_full(self) -> None:
        """Raise Overloaded where not even one more prompt may wait: cheap enough to ask before a body is read."""
        with self._changed:
            if self._waiting.full and not self._drop_abandoned():
                self._waiting.check_space(1, math.inf, self._speed.value)

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket's jobs, all or none.  Raises as ``check_space`` does."""
        with self._changed:
            self._check_space(len(ticket.jobs), ticket.deadline, ticket.jobs[0].continues)
            ticket.on_cancel = self._note_abandoned
            self._waiting.add(ticket.jobs)
            self._report_queue()
            self._changed.notify()

    def close(self) -> None:
        """Finish the running forward pass, refuse everything else with NotReady, end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _check_space(self, prompts: int, deadline: Deadline, continues: bool) -> None:
        if not self.alive:
            raise shutting_down()
        try:
            self._waiting.check_space(prompts, deadline.left, self._speed.value, continues=continues)
        except Overloaded:
            if not self._drop_abandoned():
                raise
            self._waiting.check_space(prompts, deadline.left, self._speed.value, continues=continues)

    def _drop_abandoned(self) -> bool:
        """Take out jobs that nobody waits for any more, late ones among them: their tickets know."""
        if not self._abandoned:  # looking through a long queue at each turn would cost more than a small model's turn
            return False
        self._abandoned = False
        return bool(self._waiting.remove(lambda job: job.cancelled))

    def _note_abandoned(self) -> None:
        self._abandoned = True

    def _run(self) -> None:
        batch: list[Job] | None = []
        try:
            while (batch := self._next_batch()) is not None:
                started = time.monotonic()
                if batch:
                    self._prefill(batch)
                    self._deliver()
                self._answers.turn(time.monotonic() - started)
        except BaseException as error:
            log.critical("the engine's thread broke; nothing can be scored any more", exc_info=True)
            self._tell_loop(self._on_broken, error)
        finally:
            self._abandon(batch or [])

    def _next_batch(self) -> list[Job] | None:
        """The jobs to prefill now, none where only answers are under way; None once the room closes."""
        with self._changed:
            while not (self._closing or len(self._answers) or len(self._waiting)):
                self._changed.wait()
            self._wait_for_company()
            if self._closing:
                return None
            self._drop_abandoned()
            batch = self._waiting.gather(self._answers.kv_held)
            self._report_queue()
            return batch

    def _wait_for_company(self) -> None:
        """A moment for as many as came last time; a lone client never waits."""
        if len(self._answers) or self._last_batch < 2:
            return
        until = time.monotonic() + self._max_wait_s
        while len(self._waiting) < self._last_batch and not self._closing:
            if (left := until - time.monotonic()) <= 0:
                return
            self._changed.wait(left)

    def _prefill(self, batch: Sequence[Job]) -> None:
        started = time.monotonic()
        several = any(job.scorer is not batch[0].scorer for job in batch)
        scorers = self._scorers if several else (batch[0].scorer,)
        probes = [scorer.probes for scorer in scorers]
        prompts = [job.token_ids for job in batch]
        continuations: Sequence[Continuation | None] = [None] * len(batch)
        onsets: Sequence[Onset]
        try:
            if batch[0].continues:
                continuations = self._engine.begin(prompts, probes)
                onsets = [continuation.onset for continuation in continuations if continuation is not None]
            else:
                first_token = any(scorer.needs_first_token for scorer in scorers)
                onsets = self._engine.score(prompts, probes, first_token=first_token)
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0], error)
                self._failures.count(error, MOST_FAILURES)
                return
            for job in batch:  # one prompt's fault must not be its neighbours': each on its own
                if not job.cancelled:
                    self._prefill([job])
            return
        self._failures.reset()
        ended = time.monotonic()
        tokens = sum(len(prompt) for prompt in prompts)
        self._observer.batch(len(batch), tokens)
        with self._changed:
            crowded = self._waiting.startable(self._answers.kv_held)
        self._speed.note(tokens, ended, crowded)
        self._last_batch = len(batch)
        for job, onset, continuation in zip(batch, onsets, continuations, strict=True):
            job.timings.queue = started - job.queued
            job.timings.prefill = ended - started
            self._judge(job, onset, scorers.index(job.scorer), continuation)
        self._report_queue()

    def _judge(self, job: Job, onset: Onset, place: int, continuation: Continuation | None) -> None:
        started = time.monotonic()
        try:
            job.report = job.scorer.report(onset, onset.trajectories[place], job.policy)
            job.timings.probe = time.monotonic() - started
            if continuation is not None and job.report.decision is Decision.CONTINUE and not job.cancelled:
                self._answers.add(job, continuation)
                self._tell(job, Event.SCORED, None)
                return
            self._tell(job, Event.DONE, None)
        except Exception as error:
            self._fail(job, error)
        if continuation is not None:
            continuation.close()

    def _tell(self, job: Job, event: Event, value: str | BaseException | None) -> None:
        self._outbox.append((job, event, value))

    def _fail(self, job: Job, error: BaseException) -> None:
        self._tell(job, Event.FAILED, error)

    def _after_step(self) -> None:
        self._report_queue()
        self._deliver()

    def _deliver(self) -> None:
        if not self._outbox:
            return
        events, self._outbox = self._outbox, []
        self._tell_loop(_hand_over, events)

    def _tell_loop(self, call: Callable[[T], None], value: T) -> None:
        try:
            self._loop.call_soon_threadsafe(call, value)
        except RuntimeError:  # the loop is gone, and with it everyone who waited
            log.warning("the engine's thread had something to tell after the event loop had closed")

    def _report_queue(self) -> None:
        self._observer.queue(len(self._waiting), len(self._answers))

    def _abandon(self, unfinished: Sequence[Job]) -> None:
        """Nothing is left behind, whether the room was closed or its thread broke during a batch."""
        with self._changed:
            self._closing = True
            left = self._waiting.remove(lambda _: True)
        for job in (*unfinished, *left):
            self._fail(job, shutting_down())
        self._answers.abandon(shutting_down())
        self._deliver()
        self._report_queue()


def _hand_over(events: Sequence[tuple[Job, Event, str | BaseException | None]]) -> None:
    for job, event, value in events:
        job.ticket.take(job, event, value)
