"""Round-robin decoding: one token per caller and answer in turn, and the KV cache that the answers can fill.

To be used on the engine's thread only.
"""

from __future__ import annotations

import time
from collections import Counter, deque
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
    """The answers being decoded, and ``kv_held``, the tokens that their KV caches can hold, by caller.

    Callers take turns, and the answers of each: two hundred answers of one leave another every second token.
    """

    def __init__(self, after_step: Callable[[], None]) -> None:
        """``after_step`` is called after each step, when its updates can be delivered."""
        self._after_step = after_step
        self._callers: deque[str] = deque()
        self._answers: dict[str, deque[_RunningAnswer]] = {}
        self.kv_held: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def add(self, request: EngineRequest, continuation: Continuation) -> None:
        """Add an answer; the rotation closes its continuation."""
        assert request.sampling is not None
        pieces = continuation.decode(request.sampling, lambda: request.cancelled)
        caller = request.turn.caller
        if caller not in self._answers:
            self._answers[caller] = deque()
            self._callers.append(caller)
        self._answers[caller].append(_RunningAnswer(request, continuation, pieces))
        self.kv_held[caller] += request.kv_tokens

    def turn(self, share_s: float) -> None:
        """Run steps for ``share_s`` seconds, and at least one."""
        until = time.monotonic() + share_s
        while self._callers:
            answers = self._answers[self._callers[0]]
            answer = answers[0]
            if self._step(answer):
                answers.rotate(-1)
                self._callers.rotate(-1)
            else:
                self._remove(answer)
            self._after_step()
            if time.monotonic() >= until:
                return

    def abandon(self, error: BaseException) -> None:
        """End all answers with ``error``."""
        for answer in [answer for answers in self._answers.values() for answer in answers]:
            self._remove(answer)
            answer.request.finish(error)

    def _remove(self, answer: _RunningAnswer) -> None:
        caller = answer.request.turn.caller
        self._answers[caller].remove(answer)
        if not self._answers[caller]:
            del self._answers[caller]
            self._callers.remove(caller)
        answer.continuation.close()
        self.kv_held[caller] -= answer.request.kv_tokens
        if not self.kv_held[caller]:
            del self.kv_held[caller]

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
