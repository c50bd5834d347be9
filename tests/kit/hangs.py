"""Ends what would go on for too long: a hang, whatever the machine's speed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_hang(seconds: float) -> Iterator[None]:
    """Raise AssertionError where the block takes so many seconds of this process's own processor
    time: give a hundred times of what it takes."""

    def ended(*_: object) -> None:
        raise AssertionError(f"this took {seconds:g} s of the processor")

    before = signal.signal(signal.SIGVTALRM, ended)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
