"""What a request passes on its way to the engine: deadline, tokenizing, a fair share of the queue,
admission."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from service.engines.bridge import fulfil
from service.errors import DeadlineExceeded, NotReady, Overloaded

T = TypeVar("T")
# of a deadline's time, and seconds at least, to end an answer and to send it
SPARE = 0.05
SPARE_S = 0.5
INLINE = 512  # characters or ids up to which a thread costs more than the work, about 0.2 ms
LONG = 16_384  # characters or ids from which a request takes the slow lane
MAX_LONG = 16  # requests of a caller in the slow lane
# requests whose formats are being compiled, of a caller one at a time
MAX_FORMATS = 64
MAX_FORMATS_OF_CALLER = 16
MAX_COMPILING = 8  # callers whose formats are being compiled at once
RESERVE = 8  # one caller leaves one of this many free places to those who wait for nothing yet
MAX_REMEMBERED = 4096  # callers whose account is kept although they wait for nothing
MAX_RETRY_S = 60
# share of its deadline that a request may be expected to wait: work that ends too late is wasted
HEADROOM = 0.75
NEW_SPEED = 0.2  # weight of the newest measurement in the running speed
# the first one has the engine's warm-up in it: alone it would refuse what fits easily
LEAST_MEASUREMENTS = 4


class Deadline:
    """How long a request may take, from its arrival to its last token: ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._at = seconds, time.monotonic() + seconds

    @property
    def nearly(self) -> float:
        """Return when an answer has to end, finished or not, so as to be sent in time; on the
        monotonic clock."""
        return self._at - min(max(SPARE * self.seconds, SPARE_S), self.seconds / 2)

    @property
    def left(self) -> float:
        """Return the seconds that remain; negative once it has passed."""
        return self._at - time.monotonic()

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Raise DeadlineExceeded inside the block when the time is up."""
        try:
            async with asyncio.timeout(self.left):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer within the deadline of {self.seconds:g} s; try again, or give it more"
                " time with 'deadline_ms'"
            ) from None


class Lane:
    """A thread whose callers take turns.  Each leaves half of the places that the others leave
    free."""

    def __init__(self, name: str, most: int) -> None:
        """``most`` requests of a caller that is alone may wait or run."""
        self._places = 2 * most
        self._pending: Counter[str] = Counter()  # by caller, those that wait and the one that runs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        # by caller, whose turn it is first
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """Return ``work()`` from the thread; raises what it raises, Overloaded, or NotReady after
        ``close``."""
        loop = asyncio.get_running_loop()
        own, total = self._pending[caller], self._pending.total()
        free = self._places - (total - own)
        if own >= (free // 2 if own else free):
            raise Overloaded(
                f"{own} requests of this caller, {total} in all, are waiting to be tokenized; try"
                " again in 1 s"
            )
        done: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(caller, deque()).append((done, work))
        try:
            self._thread.submit(self._next)
        except RuntimeError:
            raise NotReady("the service is shutting down") from None
        self._pending[caller] += 1
        done.add_done_callback(
            lambda _: (
                None
                if loop.is_closed()
                else loop.call_soon_threadsafe(_add, self._pending, caller, -1)
            )
        )
        return await asyncio.wrap_future(done)

    def _next(self) -> None:
        """Run the first request of the caller whose turn it is.  On the thread, once for each
        request."""
        with self._lock:
            caller = next(iter(self._waiting))
            own = self._waiting.pop(caller)
            done, work = own.popleft()
            if own:
                self._waiting[caller] = own  # behind all others
        if done.set_running_or_notify_cancel():
            fulfil(done, work)

    def close(self) -> None:
        """Drop requests that have not begun, and wait for the one that has."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [done for own in self._waiting.values() for done, _ in own]
        for done in left:
            done.cancel()
        self._thread.shutdown(wait=True)


class OneAtATime:
    """Threads of which a caller has one at a time; its further work waits in its order.  On the
    event loop only."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self.pending: Counter[str] = Counter()  # by caller, what waits and what runs
        self._turns: dict[str, asyncio.Lock] = {}

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """Return ``work()`` from a thread; raises what it raises, or NotReady after ``close``.

        Whoever is cancelled leaves the turn only when work that has begun has ended."""
        loop = asyncio.get_running_loop()
        self.pending[caller] += 1
        turn = self._turns.setdefault(caller, asyncio.Lock())

        def leave() -> None:
            turn.release()
            self._leave(caller)

        try:
            await turn.acquire()
        except BaseException:
            self._leave(caller)
            raise
        try:
            done = self._threads.submit(work)
        except RuntimeError:
            leave()
            raise NotReady("the service is shutting down") from None
        done.add_done_callback(
            lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(leave)
        )
        return await asyncio.wrap_future(done)

    def _leave(self, caller: str) -> None:
        self.pending[caller] -= 1
        if not self.pending[caller]:
            del self.pending[caller], self._turns[caller]

    def close(self) -> None:
        """Drop work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Tokenizing:
    """Text to token ids: short texts on the event loop, others in two bounded lanes: none waits for
    a long one.

    Formats have a lane for each caller: none waits for another's."""

    def __init__(self, max_pending: int) -> None:
        """``max_pending`` requests of a caller may wait for the fast lane."""
        self._fast, self._slow = Lane("tokenize", max_pending), Lane("tokenize-long", MAX_LONG)
        self._formats = OneAtATime("format", MAX_COMPILING)

    async def run(self, caller: str, size: int, work: Callable[[], T]) -> T:
        """Return ``work()`` from the lane for ``size`` characters or ids; raises what it raises, or
        Overloaded."""
        if size <= INLINE:
            return work()
        return await (self._slow if size >= LONG else self._fast).run(caller, work)

    async def compile(self, caller: str, work: Callable[[], T]) -> T:
        """Return ``work()`` from the caller's lane for formats; raises what it raises, or
        Overloaded."""
        own, total = self._formats.pending[caller], self._formats.pending.total()
        if own >= MAX_FORMATS_OF_CALLER or total >= MAX_FORMATS:
            raise Overloaded(
                f"{own} requests of this caller, {total} in all, are waiting for their formats; try"
                " again in 1 s"
            )
        return await self._formats.run(caller, work)

    def close(self) -> None:
        """Drop requests that have not begun, and wait for the others, but for formats: these end
        with the engine."""
        self._formats.close()
        for lane in (self._fast, self._slow):
            lane.close()


class FairShare:
    """Counts waiting prompts by caller and hands out their places: callers share queue and engine
    evenly.

    Start-time fair queueing (Goyal, Vin, Cheng, 1996): a prompt's place is the tokens that its
    caller had been given before it.  A caller that comes back starts where the others are.  On the
    event loop only."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._prompts: Counter[str] = Counter()
        # by whether they may be decoded
        self._tokens: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        self._given: dict[str, int] = {}  # caller -> the place after its newest prompt
        self._now = 0  # the place of the prompt that was served last

    @property
    def waiting(self) -> int:
        """Return the number of all callers' prompts."""
        return self._prompts.total()

    def most_waiting(self, caller: str) -> int:
        """Return how many prompts of all callers may wait; the last places are for those with
        nothing in the queue."""
        own = self._prompts[caller]
        left = self._max_waiting - (self.waiting - own)
        return self._max_waiting - (left // RESERVE if own else 0)

    def tokens_ahead(self, caller: str, *, answers: bool) -> int:
        """Return the tokens read before a new prompt of ``caller``; ``answers``: of prompts to be
        decoded, too."""
        waiting = self._tokens[False] + self._tokens[True] if answers else self._tokens[False]
        own = waiting[caller]
        return sum(min(tokens, own) for tokens in waiting.values())

    def waits(self, *, answers: bool) -> bool:
        """Return whether a prompt of that kind waits for the engine."""
        return bool(self._tokens[answers])

    def add(self, caller: str, prompts: int) -> None:
        """Count ``prompts`` more that wait; a negative number has left."""
        _add(self._prompts, caller, prompts)

    def add_tokens(self, caller: str, tokens: int, *, answers: bool) -> None:
        """Count so many tokens more of the waiting prompts; a negative number has left."""
        _add(self._tokens[answers], caller, tokens)

    def place(self, caller: str, cost: int) -> int:
        """Return the place of the caller's next prompt of about ``cost`` tokens; the lowest is
        served first."""
        place = max(self._now, self._given.get(caller, 0))
        self._given[caller] = place + cost
        return place

    def served(self, place: int) -> None:
        """Note that the prompt at ``place`` has been read."""
        self._now = max(self._now, place)
        if len(self._given) > MAX_REMEMBERED:
            self._given = {
                caller: next_ for caller, next_ in self._given.items() if next_ > self._now
            }


def _add(counter: Counter[str], caller: str, number: int) -> None:
    counter[caller] += number
    if not counter[caller]:
        del counter[caller]


def check_space(
    prompts: int,
    *,
    waiting: int,
    max_waiting: int,
    ahead: int,
    seconds: float,
    tokens_per_second: float | None,
) -> None:
    """Raise Overloaded where ``prompts`` more do not fit, or could not be answered within
    ``seconds``.

    ``waiting`` of at most ``max_waiting`` prompts wait; ``ahead`` tokens will be read before the
    new ones; ``tokens_per_second`` is the engine's recent speed under load, None where it has not
    been measured."""
    wait = ahead / tokens_per_second if tokens_per_second else 0.0
    retry = min(MAX_RETRY_S, max(1, math.ceil(wait)))
    why = None
    if waiting + prompts > max_waiting:
        why = f"the queue holds {waiting} of at most {max_waiting} prompts"
    elif wait > HEADROOM * seconds:
        why = (
            f"about {wait:.1f} s of work is waiting, too much for the {seconds:.1f} s that this"
            " request has left"
        )
    if why is not None:
        raise Overloaded(f"{why}; try again in {retry} s", retry_after_s=retry)


def check_time_to_read(tokens: int, deadline: Deadline, seconds: float) -> None:
    """Raise Overloaded where so many tokens, which take the engine ``seconds``, cannot be read
    before the deadline.

    ``seconds``: as measured lately, 0 where they were not."""
    left = deadline.left
    if seconds > max(0.0, left):
        raise Overloaded(
            f"reading {tokens} tokens takes about {seconds:.2g} s, at {tokens / seconds:.0f}"
            " tokens/s by the forward passes that were measured lately, and"
            f" {left:.2g} s are left of the deadline of {deadline.seconds:g} s; shorten the prompt,"
            " or give it more time with 'deadline_ms'",
            retry_after_s=MAX_RETRY_S,
        )


class Speed:
    """Prompt tokens a second while prompts wait, from one call of ``note`` to another; ``pause``
    where none does."""

    def __init__(self, min_span_s: float = 0.0) -> None:
        """A measurement spans at least ``min_span_s`` seconds, because prompts leave an engine in
        bursts."""
        self._mean = 0.0
        self._measurements = 0
        self._tokens = 0
        self._min_span_s = min_span_s
        self._since: float | None = None

    @property
    def value(self) -> float | None:
        """Return the running speed; None until it was measured ``LEAST_MEASUREMENTS`` times."""
        return self._mean if self._measurements >= LEAST_MEASUREMENTS else None

    def note(self, tokens: int, at: float, crowded: bool) -> None:
        """Note that ``tokens`` more were read by the time ``at``; ``crowded``: prompts had to wait
        meanwhile."""
        if self._since is not None:
            self._tokens += tokens
            span = at - self._since
            if span >= self._min_span_s:
                self._measurements += 1
                weight = max(NEW_SPEED, 1 / self._measurements)
                self._mean += weight * (self._tokens / max(span, 1e-6) - self._mean)
                self._since = None
        if not crowded:
            self._since = None
        elif self._since is None:
            self._since, self._tokens = at, 0

    def add(self, tokens: int) -> None:
        """Count prompts of another kind that were read in the meantime."""
        self._tokens += tokens

    def pause(self) -> None:
        """Note that no prompt waits: until the next one does, time that passes is no time that
        reading takes."""
        self._since = None
