"""Answers under way: one token each in rotation, and how many keys and values they may come to hold.

Used on the engine's thread only.  Knows no queue and no forward pass of a prompt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from service.engines.base import Continuation
from service.serving.job import Event, Job

Tell = Callable[[Job, Event, "str | BaseException | None"], None]


@dataclass(eq=False, slots=True)
class _Answer:
    job: Job
    continuation: Continuation
    pieces: Iterator[str]
    started: float


class Answers:
    """``tell`` takes every event; ``after_step`` is called when a step is over and its events may go out."""

    def __init__(self, tell: Tell, after_step: Callable[[], None]) -> None:
        self._tell = tell
        self._after_step = after_step
        self._running: deque[_Answer] = deque()
        self.kv_held = 0

    def __len__(self) -> int:
        return len(self._running)

    def add(self, job: Job, continuation: Continuation) -> None:
        """Go on with a prompt that may; from here on its continuation is closed here."""
        assert job.sampling is not None
        pieces = continuation.decode(job.sampling, lambda: job.cancelled)
        self._running.append(_Answer(job, continuation, pieces, time.monotonic()))
        self.kv_held += job.kv_tokens

    def turn(self, share: float) -> None:
        """One step at least, and as many as fit into ``share`` seconds."""
        until = time.monotonic() + share
        while self._running:
            answer = self._running[0]
            if self._step(answer):
                self._running.rotate(-1)
            else:
                self._running.popleft()
                self._close(answer)
            self._after_step()
            if time.monotonic() >= until:
                return

    def abandon(self, error: BaseException) -> None:
        """End them all with ``error``."""
        while self._running:
            answer = self._running.popleft()
            self._close(answer)
            self._tell(answer.job, Event.FAILED, error)

    def _close(self, answer: _Answer) -> None:
        answer.continuation.close()
        self.kv_held -= answer.job.kv_tokens

    def _step(self, answer: _Answer) -> bool:
        """One token of one answer; False once nothing more comes of it."""
        job = answer.job
        if job.cancelled:
            return False
        try:
            piece = next(answer.pieces, None)
        except Exception as error:
            self._tell(job, Event.FAILED, error)
            return False
        if piece is not None:
            job.tokens += 1
            if job.streams and piece:
                self._tell(job, Event.PIECE, piece)
            return True
        job.timings.decode = time.monotonic() - answer.started
        job.report = replace(job.outcome(), completion=answer.continuation.completion)
        self._tell(job, Event.DONE, None)
        return False
