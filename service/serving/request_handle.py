"""The handle of one request: its prompts, what became of them, and its answer's text as it is decoded.

Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from service.engines.base import FIRST_COME, Sampling, TokenIds, Turn
from service.errors import DeadlineExceeded
from service.policies.guard import Policy
from service.scoring import RiskReport, Scorer
from service.serving.admission import Deadline
from service.serving.judgement import AnswerEnd, PromptTimings

MAX_PIECES = 64  # pieces of text handed on together


@dataclass(eq=False, slots=True)
class Job:
    """One prompt of a request."""

    token_ids: TokenIds
    report: RiskReport | None = None  # None until it is scored
    tokens: int = 0  # decoded so far
    timings: PromptTimings = PromptTimings()
    decode_s: float | None = None  # from the verdict to the last token, other requests' turns included
    task: asyncio.Task[None] | None = None
    turn: Turn = FIRST_COME
    submitted_ns: int = field(default_factory=time.time_ns)  # since 1970, for traces
    state: Literal["waiting", "decoding", "over"] = "waiting"

    def result(self) -> RiskReport:
        """Return the report of a prompt that was scored."""
        assert self.report is not None
        return self.report

    def end(self) -> AnswerEnd:
        """Return how its answer has ended, or how far it had come."""
        completion = None if self.report is None else self.report.completion
        return AnswerEnd(len(completion.token_ids) if completion else self.tokens, self.decode_s, completion)


@dataclass(eq=False)
class RequestHandle:
    """One admitted request.  ``Dispatcher.admit`` makes it; ``start`` begins the work."""

    prompts: int
    scorer: Scorer
    policy: Policy
    sampling: Sampling | None  # None: scores only
    deadline: Deadline
    streams: bool  # the answer's text comes piece by piece
    caller: str  # whom it counts for
    on_start: Callable[[RequestHandle], None]
    on_cancel: Callable[[RequestHandle], None]
    shadows: Sequence[Scorer] = ()  # read on the same forward; they decide nothing
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._unscored = self._unfinished = self.prompts
        self._scored, self._done = asyncio.Event(), asyncio.Event()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()  # None: no more
        self._error: BaseException | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self._done.is_set()

    def start(self, prompts: Sequence[TokenIds]) -> None:
        """Have the prompts scored, as many as were admitted; nothing happens once the request has ended."""
        assert len(prompts) == self.prompts
        if not self.finished:
            self.jobs = [Job(token_ids) for token_ids in prompts]
            self.on_start(self)

    async def risks(self) -> list[RiskReport]:
        """Every prompt's report without answer, once all are scored.  Raises the first error, or DeadlineExceeded."""
        await self._until(self._scored)
        # A short answer may be complete by now, but a stream sends the risk before any of it.
        return [replace(job.result(), completion=None) for job in self.jobs]

    async def answers(self) -> list[RiskReport]:
        """Every prompt's report with its completion, once nothing more will come.  Raises as ``risks`` does."""
        await self._until(self._done)
        return [job.result() for job in self.jobs]

    async def pieces(self) -> AsyncIterator[list[str]]:
        """The text of a streaming request as it is decoded, all pieces that are there.  Raises as ``risks`` does."""
        while batch := await self._next_pieces():
            yield batch
        if self._error is not None:
            raise self._error

    def cancel(self, reason: BaseException | None = None) -> None:
        """End the work; callers that wait get ``reason``.  Does nothing to a request that has ended."""
        if not self.finished:
            self._end(reason)
            self.on_cancel(self)

    # For the dispatcher.

    def note_scored(self) -> None:
        """One more job has its report."""
        self._unscored -= 1
        if not self._unscored:
            self._scored.set()

    def note_piece(self, piece: str) -> None:
        """More text of a streaming request."""
        self._pieces.put_nowait(piece)

    def note_finished(self) -> None:
        """Nothing more will come of one more job."""
        self._unfinished -= 1
        if not self._unfinished:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self._error is None:
            self._error = error
        self._scored.set()
        self._done.set()
        self._pieces.put_nowait(None)

    async def _next_pieces(self) -> list[str]:
        """Empty at the end."""
        try:
            if self._pieces.empty():
                # The deadline guards the waiting alone: around a ``yield`` it would fire in the reader's own code.
                async with self.deadline.enforced():
                    pieces = [await self._pieces.get()]
            else:
                pieces = [self._pieces.get_nowait()]
        except DeadlineExceeded as late:
            self.cancel(late)
            return []
        while pieces[-1] is not None and len(pieces) < MAX_PIECES and not self._pieces.empty():
            pieces.append(self._pieces.get_nowait())
        if pieces[-1] is None:
            self._pieces.put_nowait(None)  # found again by the next call
        return [piece for piece in pieces if piece is not None]

    async def _until(self, event: asyncio.Event) -> None:
        if not event.is_set():
            try:
                async with self.deadline.enforced():
                    await event.wait()
            except DeadlineExceeded as late:
                self.cancel(late)
        if self._error is not None:
            raise self._error
