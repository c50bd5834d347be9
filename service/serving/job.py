"""One prompt's way through the engine room, and the ticket of a request that is waiting for some of them.

A job's fields are written on the engine's side; what the event loop may see of it arrives there as an event, so
neither side needs a lock.  Knows neither the queue nor the engine's loop nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from service.engines.base import Sampling, TokenIds
from service.errors import DeadlineExceeded
from service.guard import Policy
from service.scoring import RiskReport, Scorer
from service.serving.deadline import Deadline


class Event(Enum):
    """What happened to a job; each but FAILED comes at most once, PIECE any number of times between the others."""

    SCORED = auto()  # the risk is known and the answer goes on
    PIECE = auto()  # text, where the job streams
    DONE = auto()  # nothing more will come
    FAILED = auto()


@dataclass(slots=True)
class Timings:
    """Where one prompt's time went, in seconds.  ``decode`` None where nothing was decoded."""

    queue: float = 0.0  # from submission to the start of its forward pass
    prefill: float = 0.0  # of its batch's forward pass, readouts and truth logits included
    probe: float = 0.0  # from truth logits to a verdict
    decode: float | None = None  # from the verdict to the last token, other requests' turns included


@dataclass(eq=False, slots=True)
class Job:
    """One prompt.  ``sampling`` None scores only."""

    token_ids: TokenIds
    scorer: Scorer
    policy: Policy
    sampling: Sampling | None
    streams: bool
    ticket: Ticket
    queued: float = field(default_factory=time.monotonic)
    cancelled: bool = False  # set by the event loop, read by the engine's thread
    report: RiskReport | None = None
    tokens: int = 0  # decoded so far
    timings: Timings = field(default_factory=Timings)

    @property
    def continues(self) -> bool:
        """Whether it may go on decoding, so that its prefill has to keep a KV cache."""
        return self.sampling is not None

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values it may come to hold."""
        return len(self.token_ids) + (self.sampling.max_tokens if self.sampling is not None else 0)

    def outcome(self) -> RiskReport:
        """The report of a job that was scored."""
        assert self.report is not None
        return self.report


class Ticket:
    """What a request holds while its prompts are worked on.  Used on the event loop only."""

    def __init__(
        self,
        prompts: Sequence[TokenIds],
        scorer: Scorer,
        policy: Policy,
        *,
        sampling: Sampling | None = None,
        deadline: Deadline,
        streams: bool = False,
    ) -> None:
        """``sampling`` None scores only; with ``streams`` the answers' text comes piece by piece."""
        self.deadline = deadline
        self.jobs = [Job(ids, scorer, policy, sampling, streams, self) for ids in prompts]
        self.on_cancel: Callable[[], None] = lambda: None  # whoever queues the jobs may want to know
        self._unscored = self._unfinished = len(self.jobs)
        self._scored, self._done = asyncio.Event(), asyncio.Event()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._error: BaseException | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self._done.is_set()

    async def risks(self) -> list[RiskReport]:
        """Every prompt's report without its answer, as soon as all are scored.

        Raises what went wrong, DeadlineExceeded among it.
        """
        await self._until(self._scored)
        # A short answer may be whole by now, but a stream tells the risk before any of it.
        return [replace(job.outcome(), completion=None) for job in self.jobs]

    async def answers(self) -> list[RiskReport]:
        """Every prompt's report with its completion, once nothing more will come.  Raises as ``risks`` does."""
        await self._until(self._done)
        return [job.outcome() for job in self.jobs]

    async def pieces(self) -> AsyncIterator[str]:
        """The text of a streaming job, as it is decoded.  Raises as ``risks`` does."""
        while (piece := await self._next_piece()) is not None:
            yield piece
        if self._error is not None:
            raise self._error

    def cancel(self, reason: BaseException | None = None) -> None:
        """Give up: the engine's thread drops the jobs at its next look; whoever waits gets ``reason``."""
        for job in self.jobs:
            job.cancelled = True
        self.on_cancel()
        if reason is not None:
            self._fail(reason)

    def take(self, job: Job, event: Event, value: str | BaseException | None) -> None:
        """An event from the engine's thread, delivered on the loop."""
        if event is Event.PIECE:
            assert isinstance(value, str)
            self._pieces.put_nowait(value)
        elif event is Event.FAILED:
            assert isinstance(value, BaseException)
            if not self.finished:
                self.cancel(value)
        else:
            # A job that does not go on decoding is scored and done at once.
            self._unscored -= event is Event.SCORED or job.timings.decode is None
            self._unfinished -= event is Event.DONE
            if not self._unscored:
                self._scored.set()
            if not self._unfinished:
                self._done.set()
                self._pieces.put_nowait(None)

    async def _next_piece(self) -> str | None:
        # The deadline guards the waiting alone: around a ``yield`` it would fire in whatever the reader is doing.
        try:
            async with self.deadline.enforced():
                return await self._pieces.get()
        except DeadlineExceeded as late:
            self.cancel(late)
            return None

    async def _until(self, event: asyncio.Event) -> None:
        if not event.is_set():
            try:
                async with self.deadline.enforced():
                    await event.wait()
            except DeadlineExceeded as late:
                self.cancel(late)
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._scored.set()
        self._done.set()
        self._pieces.put_nowait(None)
