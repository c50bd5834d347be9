"""The live room: tickets in front of an engine with a scheduler of its own, one task for each prompt.

What to run next, how many together and in what order is the engine's matter; here a prompt is let in, judged at its
onset, closed where it is gated, and its news handed on.  Tasks run on the engine's loop, everything else on the loop
that submits; these may be one.  Knows no HTTP and no metrics library.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from service.engines.bridge import unfinished
from service.engines.online import OnlineEngine
from service.errors import EngineError
from service.scoring import Scorer
from service.serving import admission
from service.serving.deadline import Deadline
from service.serving.job import Event, Job, Ticket
from service.serving.protocol import MOST_FAILURES, Failures, Observer, shutting_down
from service.serving.run_job import follow

log = logging.getLogger("hallutracer")
SPEED_SPAN_S = 0.25  # prompts come out of the engine in bursts: a measurement spans several
LOOK_S = 1.0  # how often an idle room looks whether its engine is still there
CLOSING_S = 10.0  # how long closing waits for an engine to let go of its requests


class LiveRoom:
    """Takes tickets from an event loop and tells it there what became of them, as ``EngineRoom`` does."""

    def __init__(
        self,
        scorers: Sequence[Scorer],
        observer: Observer,
        *,
        max_queue: int,
        on_broken: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """All ``scorers`` share one engine, an OnlineEngine.  Call on the event loop that will submit.

        ``max_queue`` prompts may be in the engine without a risk.  ``on_broken`` is called on the loop if the room
        ends by itself: a bug, or an engine that is gone or fails whatever it is given.
        """
        engine = scorers[0].engine
        assert isinstance(engine, OnlineEngine)
        self._engine = engine
        self._observer = observer
        self._max_queue = max_queue
        self._on_broken = on_broken
        self._home = asyncio.get_running_loop()
        self._closing = False
        self._waiting: set[Job] = set()
        self._decoding: set[Job] = set()
        self._ahead = 0  # prompt tokens of those who wait
        self._speed = admission.Speed(SPEED_SPAN_S)
        self._failures = Failures()
        self._open = 0  # tasks that have not ended
        self._idle = asyncio.Event()
        self._outbox: deque[tuple[Job, Event | None, str | BaseException | None]] = deque()  # None: its task ended
        self._delivery_due = False
        self._tasks: dict[Job, asyncio.Task[None]] = {}  # touched on the engine's loop only
        self._watch = self._home.create_task(self._look())

    @property
    def alive(self) -> bool:
        """Whether work is still being done."""
        return not self._closing

    def check_space(self, prompts: int, deadline: Deadline, *, continues: bool = False) -> None:
        """Raise Overloaded, or NotReady after ``close``: call it before a request's prompts are tokenized.

        Whether they go on makes no difference: such an engine takes scores and answers in the order they come.
        """
        if self._closing:
            raise shutting_down()
        self._check_space(prompts, deadline.left)

    def check_not_full(self) -> None:
        """Raise Overloaded where not even one more prompt may wait."""
        self._check_space(1, math.inf)

    def submit(self, ticket: Ticket) -> None:
        """Hand a ticket's jobs to the engine, all or none.  Raises as ``check_space`` does."""
        self.check_space(len(ticket.jobs), ticket.deadline)
        ticket.on_cancel = lambda: self._drop(ticket.jobs)
        self._waiting.update(ticket.jobs)
        self._ahead += sum(len(job.token_ids) for job in ticket.jobs)
        self._open += len(ticket.jobs)
        self._report_queue()
        self._on_engine(self._start, ticket.jobs)

    def close(self) -> None:
        """Refuse everything with NotReady, wait until the engine has let go.  Not on the thread of the loop."""
        if self._home.is_running():
            asyncio.run_coroutine_threadsafe(self._close(), self._home).result()

    async def _close(self) -> None:
        self._deliver()
        self._give_up()
        try:
            async with asyncio.timeout(CLOSING_S):
                while self._open and self._engine.loop.is_running():
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.warning("the engine still held %d requests %g s after they were ended", self._open, CLOSING_S)

    def _check_space(self, prompts: int, seconds: float) -> None:
        admission.check_space(
            prompts,
            held=len(self._waiting),
            most=self._max_queue,
            ahead=self._ahead,
            seconds=seconds,
            tokens_per_second=self._speed.value,
        )

    async def _look(self) -> None:
        """An engine that ends while nobody asks it anything is noticed too."""
        while self._engine.alive:
            await asyncio.sleep(LOOK_S)
        self._break(EngineError("the engine has ended by itself; restart the service"))

    # On the engine's loop.

    def _start(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._tasks[job] = task = self._engine.loop.create_task(follow(self._engine, job, self._tell))
            task.add_done_callback(partial(self._ended, job))

    def _stop(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if task := self._tasks.get(job):
                task.cancel()  # closes the generator, and with it the request in the engine

    def _ended(self, job: Job, _: object) -> None:
        del self._tasks[job]
        self._tell(job, None, None)

    def _tell(self, job: Job, event: Event | None, value: str | BaseException | None) -> None:
        self._outbox.append((job, event, value))
        if self._delivery_due:
            return
        self._delivery_due = True
        try:
            self._home.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is gone, and with it everyone who waited
            log.warning("the engine had something to tell after the event loop had closed")

    # On the loop that submits.

    def _on_engine(self, call: Callable[[Iterable[Job]], None], jobs: Iterable[Job]) -> None:
        if self._engine.loop is self._home:
            call(jobs)
            return
        try:
            self._engine.loop.call_soon_threadsafe(call, jobs)
        except RuntimeError:
            self._break(EngineError("the engine's event loop has closed; restart the service"))

    def _deliver(self) -> None:
        self._delivery_due = False  # before looking: what is told from now on is delivered later
        while self._outbox:
            job, event, value = self._outbox.popleft()
            try:
                self._take(job, event, value)
            except Exception as error:
                self._break(error)

    def _take(self, job: Job, event: Event | None, value: str | BaseException | None) -> None:
        known = job in self._waiting or job in self._decoding
        if event is None:
            self._open -= 1
            self._idle.set()
            if known:  # its task was cancelled, and not by us
                self._fail(job, unfinished())
        elif known and event is Event.FAILED:
            assert isinstance(value, BaseException)
            self._fail(job, value)
        elif known:
            if job in self._waiting:
                self._note_scored(job)
            if event is Event.SCORED:
                self._decoding.add(job)
            elif event is Event.DONE:
                self._decoding.discard(job)
            if event is not Event.PIECE:
                self._report_queue()
            job.ticket.take(job, event, value)

    def _note_scored(self, job: Job) -> None:
        tokens = len(job.token_ids)
        self._observer.batch(1, tokens)
        self._failures.reset()
        # A newcomer to an engine with capacity to spare waits for the step under way at most.
        self._speed.note(tokens, time.monotonic(), crowded=job.timings.queue > job.timings.prefill)
        self._leave_queue(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        self._forget([job])
        job.ticket.take(job, Event.FAILED, error)
        self._failures.count(error, MOST_FAILURES)
        if not self._engine.alive:
            raise EngineError(f"the engine is gone: {error}") from error

    def _drop(self, jobs: Iterable[Job]) -> None:
        """Nobody waits for these any more."""
        if known := self._forget(jobs):
            self._on_engine(self._stop, known)

    def _forget(self, jobs: Iterable[Job]) -> list[Job]:
        known = [job for job in jobs if job in self._waiting or job in self._decoding]
        for job in known:
            self._leave_queue(job)
            self._decoding.discard(job)
        if known:
            self._report_queue()
        return known

    def _leave_queue(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            self._ahead -= len(job.token_ids)

    def _break(self, error: BaseException) -> None:
        if self._closing:
            return
        log.critical("the engine broke; nothing can be scored any more", exc_info=error)
        self._give_up()
        self._on_broken(error)

    def _give_up(self) -> None:
        """Nothing is left behind, whether the room was closed or broke."""
        self._closing = True
        self._watch.cancel()
        left = [*self._waiting, *self._decoding]
        self._drop(left)
        for job in left:
            job.ticket.take(job, Event.FAILED, shutting_down())

    def _report_queue(self) -> None:
        self._observer.queue(len(self._waiting), len(self._decoding))
