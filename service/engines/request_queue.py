"""The requests of a scheduler: which of them the engine works for next, by caller, order and space
in the cache.

Whoever was given the fewest seconds of the engine goes first (``shares``), then by place; prompts
of similar length join a batch.  A step of decoding takes one answer of each caller, then a second
of each."""

from __future__ import annotations

import asyncio
import time
from bisect import insort_right
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from service.engines import base
from service.engines.base import (
    FIRST_COME,
    EngineGate,
    PrefillResult,
    Sampling,
    TokenIds,
    Turn,
    Update,
)
from service.engines.bridge import Outbox
from service.engines.shares import Kind, Shares
from service.readout import Probes

MAX_PADDING = 1.25  # padded over real tokens in one forward pass
FREE_PADDING = 128  # padded tokens up to which the share of padding does not matter
MAX_CANDIDATES = 256  # waiting prompts among which a batch is chosen
KV_RESERVE = 8  # one of this many parts of the cache is for callers that hold nothing of it
MAX_TOGETHER = 32  # answers in a step of decoding


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One prompt inside a scheduler, from its arrival to its last token.  ``sampling`` None scores
    only."""

    prompt: TokenIds
    probes: Sequence[Probes]
    first_token: bool
    sampling: Sampling | None  # not None: its prefill keeps a KV cache
    gate: EngineGate | None
    outbox: Outbox
    turn: Turn = FIRST_COME
    answer_probes: Probes | None = None
    # None: the end
    inbox: asyncio.Queue[Update | BaseException | None] = field(default_factory=asyncio.Queue)
    queued: float = field(default_factory=time.monotonic)
    cancelled: bool = False  # written by the consumer's loop, read by the engine's thread
    finished: bool = False  # written by the engine's thread
    continuation: base.Continuation | None = None  # while it is being decoded
    pieces: Iterator[str] = iter(())
    served: int = 0  # number of its latest step, over all answers
    long: bool = False  # it takes several forward passes
    # of a long one, once it has begun
    passes: Generator[PrefillResult | base.Continuation | None, None, None] | None = None
    costs: Iterator[float] = iter(())  # of these passes, as ``BatchEngine.pass_costs``
    begun: float = 0.0  # when

    def send(self, update: Update) -> None:
        """Put an update into the outbox.  On the engine's thread."""
        self.outbox.put(self.inbox, update)

    def finish(self, error: BaseException | None = None) -> None:
        """Free the cache; put the end of the updates, or the error that ended them, into the
        outbox."""
        self.finished = True
        if self.passes is not None:
            self.passes.close()
        if self.continuation is not None:
            self.continuation.close()
        self.outbox.put(self.inbox, error)


class RequestQueue:
    """Waiting requests by place, then arrival, under the owner's lock; what has begun, on its
    thread."""

    def __init__(self, max_batch_tokens: int, max_kv_tokens: int) -> None:
        self._max_batch_tokens, self._max_kv_tokens = max_batch_tokens, max_kv_tokens
        self._steps = count(1)
        self._shares = Shares()
        self.waiting: list[EngineRequest] = []
        self.reading: list[EngineRequest] = []  # long prompts, between two of their passes
        self.answering: list[EngineRequest] = []  # least recently served first

    def add(self, request: EngineRequest) -> None:
        """Add a request that waits."""
        request.long = len(request.prompt) > self._max_batch_tokens
        insort_right(self.waiting, request, key=lambda waiting: waiting.turn.place)

    def next_batch(self) -> list[EngineRequest]:
        """Remove and return the next batch; empty if no request can start, or if it is an answer's
        turn.

        Requests that may be decoded form batches of their own, a long one runs alone and stays in
        ``reading``.  Who has left is removed."""
        for request in self.reading:
            if request.cancelled:
                request.finish()
        self.reading = [request for request in self.reading if not request.finished]
        self.waiting = [request for request in self.waiting if not request.cancelled]
        candidates = list(islice(self._startable(), MAX_CANDIDATES))
        first = min([*self.reading, *candidates], key=self._order, default=None)
        if first is None:
            return []
        answer = min(self.answering, key=self._order, default=None)
        if answer is not None and self._order(answer)[0] < self._order(first)[0]:
            return []
        self._shares.begin(first.turn.caller, _kind(first))
        if first.long:
            if first not in self.reading:
                self.waiting.remove(first)
                self.reading.append(first)
            return [first]
        batch = [first]
        longest = total = len(first.prompt)
        similar = [
            other
            for other in candidates
            if other is not first
            and not other.long
            and (other.sampling is None) == (first.sampling is None)
        ]
        similar.sort(key=lambda request: abs(len(request.prompt) - len(first.prompt)))  # stable
        for request in similar:
            longest, total = max(longest, len(request.prompt)), total + len(request.prompt)
            padded = longest * (len(batch) + 1)
            if padded > self._max_batch_tokens or padded > max(FREE_PADDING, MAX_PADDING * total):
                break
            batch.append(request)
        taken = set(batch)
        self.waiting = [request for request in self.waiting if request not in taken]
        return batch

    def _startable(self) -> Iterator[EngineRequest]:
        blocked, held = False, Counter[str]()
        for begun in (*self.answering, *self.reading):
            held[begun.turn.caller] += self._kv_tokens(begun)
        total = held.total()
        for request in sorted(self.waiting, key=self._order):
            if tokens := self._kv_tokens(request):
                caller = request.turn.caller
                limit = self._max_kv_tokens - (
                    self._max_kv_tokens // KV_RESERVE if held[caller] else 0
                )
                # None overtakes a request that waits for space: a large one would starve.
                blocked = blocked or (total > 0 and total + tokens > limit)
                if blocked:
                    continue
                held[caller] += tokens
                total += tokens
            yield request

    def _kv_tokens(self, request: EngineRequest) -> int:
        """Return what it holds of the cache, scores from their first to their last pass; they leave
        half of it."""
        if request.sampling is not None:
            return len(request.prompt) + request.sampling.max_tokens
        return min(len(request.prompt), self._max_kv_tokens // 2) if request.long else 0

    def _order(self, request: EngineRequest) -> tuple[tuple[float, float], int]:
        return self._shares.given(request.turn.caller, _kind(request)), request.turn.place

    def give(self, requests: Sequence[EngineRequest], seconds: float) -> None:
        """Note that the engine worked so long for these, for prompts by their lengths."""
        sizes = [
            1 if request.continuation is not None else len(request.prompt) for request in requests
        ]
        for request, size in zip(requests, sizes, strict=True):
            self._shares.give(request.turn.caller, _kind(request), seconds * size / sum(sizes))

    def next_step(self) -> list[EngineRequest]:
        """Return the answers whose turn it is, one of each caller, then a second of each; they go
        to the end."""
        if self.answering:
            first = min(self.answering, key=self._order)
            self._shares.begin(first.turn.caller, _kind(first))
        latest = {answer.turn.caller: answer.served for answer in self.answering}
        before = Counter[str]()
        order: dict[EngineRequest, tuple[int, int]] = {}
        for answer in self.answering:
            order[answer] = before[answer.turn.caller], latest[answer.turn.caller]
            before[answer.turn.caller] += 1
        chosen = sorted(order, key=order.__getitem__)[:MAX_TOGETHER]
        for answer in chosen:
            answer.served = next(self._steps)
        self.answering.sort(key=lambda answer: answer.served)
        return chosen


def _kind(request: EngineRequest) -> Kind:
    return (
        Kind.ANSWER
        if request.continuation is not None
        else Kind.LONG
        if request.long
        else Kind.PROMPT
    )
