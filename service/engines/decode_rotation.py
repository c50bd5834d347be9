"""Answers being decoded: one token each in rotation, and the KV cache they may come to hold.

Used on the engine's thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from service.engines.base import Continuation, Update
from service.engines.request_queue import EngineRequest


@dataclass(eq=False, slots=True)
class _Answer:
    request: EngineRequest
    continuation: Continuation
    pieces: Iterator[str]


class DecodeRotation:
    """``after_step`` is called when a step is over and its updates may be delivered."""

    def __init__(self, after_step: Callable[[], None]) -> None:
        self._after_step = after_step
        self._running: deque[_Answer] = deque()
        self.kv_held = 0

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: EngineRequest, continuation: Continuation) -> None:
        """Decode an answer; from here on its continuation is closed here."""
        assert request.sampling is not None
        pieces = continuation.decode(request.sampling, lambda: request.cancelled)
        self._running.append(_Answer(request, continuation, pieces))
        self.kv_held += request.kv_tokens

    def turn(self, share_s: float) -> None:
        """One step at least, and as many as fit into ``share_s`` seconds."""
        until = time.monotonic() + share_s
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
        """End all answers with ``error``."""
        while self._running:
            answer = self._running.popleft()
            self._close(answer)
            answer.request.finish(error)

    def _close(self, answer: _Answer) -> None:
        answer.continuation.close()
        self.kv_held -= answer.request.kv_tokens

    def _step(self, answer: _Answer) -> bool:
        """One token of one answer; False once it has ended."""
        request = answer.request
        if request.cancelled:
            return False
        try:
            piece = next(answer.pieces, None)
        except Exception as error:
            request.finish(error)
            return False
        if piece is not None:
            request.send(Update(piece=piece, tokens=1))
            return True
        request.send(Update(completion=answer.continuation.completion))
        request.finish()
        return False
