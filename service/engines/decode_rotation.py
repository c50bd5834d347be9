"""Round-robin decoding: one token per answer in turn, and the KV cache that the answers can fill.

To be used on the engine's thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from service.engines.base import Continuation, Update
from service.engines.request_queue import EngineRequest


@dataclass(eq=False, slots=True)
class _RunningAnswer:
    request: EngineRequest
    continuation: Continuation
    pieces: Iterator[str]


class DecodeRotation:
    """The answers being decoded, and ``kv_held``, the tokens that their KV caches can hold."""

    def __init__(self, after_step: Callable[[], None]) -> None:
        """``after_step`` is called after each step, when its updates can be delivered."""
        self._after_step = after_step
        self._running: deque[_RunningAnswer] = deque()
        self.kv_held = 0

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: EngineRequest, continuation: Continuation) -> None:
        """Add an answer; the rotation closes its continuation."""
        assert request.sampling is not None
        pieces = continuation.decode(request.sampling, lambda: request.cancelled)
        self._running.append(_RunningAnswer(request, continuation, pieces))
        self.kv_held += request.kv_tokens

    def turn(self, share_s: float) -> None:
        """Run steps for ``share_s`` seconds, and at least one."""
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

    def _close(self, answer: _RunningAnswer) -> None:
        answer.continuation.close()
        self.kv_held -= answer.request.kv_tokens

    def _step(self, answer: _RunningAnswer) -> bool:
        """Decode one token of one answer; False once the answer has ended."""
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
