"""Decoding: one token of many answers at a time, callers in turn, and the KV cache that the answers can fill.

To be used on the engine's thread only.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from service.engines.base import Continuation, Update
from service.engines.request_queue import EngineRequest

MAX_TOGETHER = 32  # answers in a step


@dataclass(eq=False, slots=True)
class _RunningAnswer:
    request: EngineRequest
    continuation: Continuation
    pieces: Iterator[str]


class DecodeRotation:
    """The answers being decoded, and ``kv_held``, the tokens that their KV caches can hold, by caller.

    Where not all fit into a step, callers take turns, and the answers of each: two hundred answers of one leave another
    a token in every step.
    """

    def __init__(self, step_together: Callable[[Sequence[Continuation]], None], after_step: Callable[[], None]) -> None:
        """``after_step`` is called after each step, when its updates can be delivered."""
        self._step_together, self._after_step = step_together, after_step
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
        while answers := self._next_answers():
            self._step(answers)
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

    def _next_answers(self) -> list[_RunningAnswer]:
        """Those whose turn it is, one of each caller, then a second of each, and so on; they go to the end."""
        chosen: list[_RunningAnswer] = []
        left = {caller: len(answers) for caller, answers in self._answers.items()}
        while left and len(chosen) < MAX_TOGETHER:
            caller = self._callers[0]
            self._callers.rotate(-1)
            if not left.get(caller):
                left.pop(caller, None)
                continue
            left[caller] -= 1
            chosen.append(self._answers[caller][0])
            self._answers[caller].rotate(-1)
        return chosen

    def _step(self, answers: Sequence[_RunningAnswer]) -> None:
        """Decode one token of each answer, and remove those that have ended."""
        running = [answer for answer in answers if not answer.request.cancelled]
        try:
            self._step_together([answer.continuation for answer in running])
        except Exception as error:  # their caches may hold half a step
            for answer in running:
                answer.request.finish(error)
                self._remove(answer)
            running = []
        for answer in answers:
            if answer.request.cancelled or (answer in running and not self._send(answer)):
                self._remove(answer)

    def _send(self, answer: _RunningAnswer) -> bool:
        """Send the next token's piece; False once the answer has ended."""
        request = answer.request
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
