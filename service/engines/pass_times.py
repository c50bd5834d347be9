"""How long forward passes over prompts took of late, and so how long a prompt will take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

LASTS_S = 60.0  # after that a time is of a machine as it was, and nobody is refused by it
KEPT = 8  # of the newest passes of about one size
# The machine's delays are a large part of a small pass: its time counts once so many were measured.
LEAST_SMALL = 4


class PassTime(NamedTuple):
    """A pass that has run."""

    ended: float  # on the engine's clock
    cost: float  # in tokens that have none before them to attend to
    seconds: float


class PassTimes:
    """The newest passes, by size.  One thread notes them, and any may ask."""

    def __init__(self, full: float, clock: Callable[[], float]) -> None:
        """``full``: the cost of a pass as large as they get."""
        self._full, self._clock = full, clock
        # By the bits of the cost.  Replaced as a whole, because other threads read it.
        self._newest: dict[int, tuple[PassTime, ...]] = {}

    def note(self, cost: float, started: float) -> None:
        """Note a pass that has just ended."""
        now = self._clock()
        if cost > 0 and now > started:
            size = int(cost).bit_length()
            passes = (*self._newest.get(size, ())[1 - KEPT :], PassTime(now, cost, now - started))
            self._newest = {**self._newest, size: passes}

    def expected_s(self, costs: Sequence[float]) -> float | None:
        """Return how many seconds passes of these costs take, each at the fastest of late.

        A pass takes its share of a large one's time, and as long as a smaller one at least.  None
        where too little was measured."""
        after = self._clock() - LASTS_S
        rate, fastest_small = 0.0, list[PassTime]()
        for passes in self._newest.values():
            late = [taken for taken in passes if taken.ended >= after]
            large = [taken for taken in late if 2 * taken.cost >= self._full]
            if large:
                fastest = min(taken.seconds / taken.cost for taken in large)
                rate = min(rate, fastest) if rate else fastest
            elif len(late) >= LEAST_SMALL:
                fastest_small.append(min(late, key=lambda taken: taken.seconds))
        if not rate and not fastest_small:
            return None
        seconds = 0.0
        for cost in costs:
            bounds = [taken.seconds * min(1.0, cost / taken.cost) for taken in fastest_small]
            seconds += max(cost * rate, *bounds) if bounds else cost * rate
        return seconds
