"""The queue of prompts that wait for a forward pass, and the choice of the next batch.

A batch starts with the first prompt: of one caller's the one that has waited longest, of several callers' in turn
(``serving/fair_share``).  Prompts of similar length join it while they fit and the padding stays small, so no prompt
starves and no forward pass is mostly padding.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from service.engines.base import FIRST_COME, Gate, Sampling, TokenIds, Turn, Update
from service.engines.bridge import Outbox
from service.readout import Probes

MAX_PADDING = 1.25  # padded over real tokens in one forward pass
FREE_PADDING = 128  # padded tokens up to which the share of padding does not matter
MAX_CANDIDATES = 256  # waiting prompts among which a batch is chosen
KV_RESERVE = 8  # one of this many parts of the cache is for callers that hold nothing of it


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One prompt inside a scheduler.  ``sampling`` None scores only."""

    prompt: TokenIds
    probes: Sequence[Probes]
    first_token: bool
    sampling: Sampling | None
    gate: Gate | None
    outbox: Outbox
    turn: Turn = FIRST_COME
    inbox: asyncio.Queue[Update | BaseException | None] = field(default_factory=asyncio.Queue)  # None: the end
    queued: float = field(default_factory=time.monotonic)
    cancelled: bool = False  # written by the consumer's loop, read by the engine's thread
    finished: bool = False  # written by the engine's thread

    @property
    def kv_tokens(self) -> int:
        """Maximum number of tokens in its KV cache."""
        return len(self.prompt) + (self.sampling.max_tokens if self.sampling is not None else 0)

    @property
    def continues(self) -> bool:
        """Whether it may be decoded, so that its prefill must keep a KV cache."""
        return self.sampling is not None

    def send(self, update: Update) -> None:
        """Put an update into the outbox.  On the engine's thread."""
        self.outbox.put(self.inbox, update)

    def finish(self, error: BaseException | None = None) -> None:
        """Put the end of the updates, or the error that ended them, into the outbox.  On the engine's thread."""
        self.finished = True
        self.outbox.put(self.inbox, error)


class RequestQueue:
    """Requests in order of their places, then of arrival.  Not thread-safe; the owner locks."""

    def __init__(self, max_batch_tokens: int, max_kv_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_kv_tokens = max_kv_tokens
        self._requests: list[EngineRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EngineRequest) -> None:
        """Add a request."""
        insort_right(self._requests, request, key=_place)

    def remove(self, condition: Callable[[EngineRequest], bool]) -> list[EngineRequest]:
        """Remove and return the requests that meet ``condition``."""
        removed = [request for request in self._requests if condition(request)]
        self._discard(removed)
        return removed

    def next_batch(self, kv_held: Counter[str]) -> list[EngineRequest]:
        """Remove and return the next batch; empty if no request can start.

        Requests that may be decoded form batches of their own, whose KV caches together with ``kv_held``, tokens by
        caller, stay within the limit.  A request larger than the limit runs alone, when no cache is held.
        """
        waiting = list(islice(self._startable(kv_held), MAX_CANDIDATES))
        if not waiting:
            return []
        first = waiting[0]
        first_length = len(first.prompt)
        candidates = [request for request in waiting[1:] if request.continues == first.continues]
        # Stable: equal lengths stay in order.
        candidates.sort(key=lambda request: abs(len(request.prompt) - first_length))
        batch, longest, total = [first], first_length, first_length
        for request in candidates:
            length = len(request.prompt)
            padded = max(longest, length) * (len(batch) + 1)
            if padded > self._max_batch_tokens or padded > max(FREE_PADDING, MAX_PADDING * (total + length)):
                break
            batch.append(request)
            longest, total = max(longest, length), total + length
        self._discard(batch)
        return batch

    def _startable(self, kv_held: Counter[str]) -> Iterator[EngineRequest]:
        """Requests in order, without those whose KV cache does not fit now."""
        blocked, held, total = False, kv_held.copy(), kv_held.total()
        for request in self._requests:
            if request.continues:
                caller = request.turn.caller
                limit = self._max_kv_tokens - (self._max_kv_tokens // KV_RESERVE if held[caller] else 0)
                # None overtakes a request that waits for space: a large one would starve.
                blocked = blocked or (total > 0 and total + request.kv_tokens > limit)
                if blocked:
                    continue
                held[caller] += request.kv_tokens
                total += request.kv_tokens
            yield request

    def _discard(self, requests: Sequence[EngineRequest]) -> None:
        if requests:
            discarded = set(requests)
            self._requests = [request for request in self._requests if request not in discarded]


def _place(request: EngineRequest) -> int:
    return request.turn.place
