"""The number of CPU threads of a forward pass: as many as pay at this moment, found by timing the
passes.

OpenMP's threads spin while they wait for each other, which is fastest on cores of their own.
Beside another busy process a pass takes three to six times as long; on one thread, as much longer
as the core is shared."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

# A larger number of threads has to be this much faster, so that noise does not decide and cores
# stay free for others.
GRACE = 1.01
# A number of threads that is not in use is tried again after this many times of what its tries
# cost: 4 % at most.
PATIENCE = 25
# A try that takes this much longer than the best number of threads is not repeated: beside
# neighbours one is enough.
SLOWER = 1.2
RECENT = 3  # the median of so many passes counts, so one slow pass changes nothing
TRIAL_ROWS, TRIAL_WIDTH, TRIAL_PRODUCTS = 256, 1024, 40  # of the products of a trial
Clock = Callable[[], float]


class Timings:
    """Which number of threads is fastest for passes of one size.  ``counts`` ascend; ``start`` is
    an index into it."""

    def __init__(self, counts: tuple[int, ...], start: int) -> None:
        self._counts = counts
        self._seconds = [deque[float](maxlen=RECENT) for _ in counts]  # a token
        self._spent = 0.0  # since another number was tried
        self._up = False  # which neighbour was tried last
        self._trial: int | None = None
        self._tries = 0
        self._cost = [0.0 for _ in counts]  # of the latest try, seconds a token over all its passes
        self.best = start

    def next(self) -> int:
        """Return the index of the number of threads that the next pass is to use."""
        if self._trial is None and self._seconds[self.best]:
            index = self._neighbour()
            known = self._seconds[index]
            # What was never tried is tried at once: beside neighbours the first passes would all be
            # slow ones.
            wait = PATIENCE * max(self._cost[index], *known, 0.0)
            due = not known or (len(self._seconds[self.best]) == RECENT and self._spent > wait)
            if index != self.best and due:
                self._up = index > self.best
                self._spent = 0.0
                self._trial = index
                self._tries = 0
                self._cost[index] = 0.0
        return self.best if self._trial is None else self._trial

    def add(self, index: int, seconds: float) -> None:
        """Record that one pass took so many seconds a token."""
        self._seconds[index].append(seconds)
        if index == self._trial:
            # Otherwise it is tried again at once, so that noise does not decide and a median
            # follows who has left.
            self._tries += 1
            self._cost[index] += seconds
            if self._tries == RECENT or seconds > SLOWER * statistics.median(
                self._seconds[self.best]
            ):
                self._trial = None
        else:
            self._spent += seconds
        tried = {
            tried_index: statistics.median(known)
            for tried_index, known in enumerate(self._seconds)
            if known
        }
        least = min(tried.values())
        self.best = min(
            tried_index for tried_index, median in tried.items() if median <= GRACE * least
        )

    def _neighbour(self) -> int:
        """Return the next larger and the next smaller number, in turn; at an end the only one there
        is."""
        step, last = -1 if self._up else 1, len(self._counts) - 1
        index = self.best + step
        return index if 0 <= index <= last else max(0, min(last, self.best - step))


def threads_that_pay(most: int, clock: Clock = time.perf_counter) -> int:
    """Return the number of threads, one of 1, 2, 4 .. ``most``, at which products of matrices as a
    small model has them are fastest at this moment.  Torch's own number is not changed."""
    before, counts = torch.get_num_threads(), _counts(most)
    rows, weights = torch.ones(TRIAL_ROWS, TRIAL_WIDTH), torch.ones(TRIAL_WIDTH, TRIAL_WIDTH)

    def seconds(count: int) -> float:
        torch.set_num_threads(count)
        rows @ weights  # starts the threads
        began = clock()
        for _ in range(TRIAL_PRODUCTS):
            rows @ weights
        return clock() - began

    try:
        tries = [list(map(seconds, counts)) for _ in range(RECENT)]
    finally:
        torch.set_num_threads(before)
    medians = [statistics.median(column) for column in zip(*tries, strict=True)]
    fast = (median <= GRACE * min(medians) for median in medians)
    return next(count for count, pays in zip(counts, fast, strict=True) if pays)


def _counts(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 .. ``most``."""
    return tuple(
        sorted({1 << power for power in range(most.bit_length()) if 1 << power < most} | {most})
    )


class AdaptiveThreads:
    """Sets torch's number of threads for each forward pass of ``model``, to one of 1, 2, 4 ..
    ``most``."""

    def __init__(self, model: Any, most: int) -> None:
        self._counts = _counts(most)
        # a size that was not seen yet begins with what was best for another
        self._latest = len(self._counts) - 1
        self._sizes: dict[int, Timings] = {}
        self._before = most
        self._pass: tuple[Timings, int, int, float] | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        # a score ends its pass with an exception
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: Any, arguments: Any, named: dict[str, Any]) -> None:
        if "input_ids" not in named:  # a method of the evaluation that feeds embeddings
            return
        tokens = int(named["input_ids"].numel())
        size = tokens.bit_length()  # passes of up to twice the tokens count as one size
        timings = self._sizes.get(size)
        if timings is None:
            timings = self._sizes[size] = Timings(self._counts, self._latest)
        index = timings.next()
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._counts[index])
        self._pass = timings, index, tokens, time.perf_counter()

    def _end(self, model: Any, arguments: Any, output: Any) -> None:
        if self._pass is None:
            return
        timings, index, tokens, began = self._pass
        self._pass = None
        torch.set_num_threads(self._before)  # the process may have other work for torch
        timings.add(index, (time.perf_counter() - began) / tokens)
        self._latest = timings.best
