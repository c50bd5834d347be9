"""Progress of long steps, in whole lines on standard error: a log shows as much as a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_S, EVERY_S, LOOK_S = 3.0, 15.0, 0.3
Report = Callable[[str], None]


def note(text: str) -> None:
    """Print a line on standard error, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def size_text(size: float) -> str:
    """Return bytes for people, in a unit in which they are not 0.0."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power / 4:
            return f"{size / 2**power:.1f} {unit}"
    return f"{size:.0f} bytes"


@contextmanager
def progress(
    what: str, report: Report = note, stage: Callable[[], str] | None = None
) -> Iterator[None]:
    """Report a step that takes longer than 3 s: then, every 15 s, and at its end.

    ``stage`` says what the step is doing, "" where it does not know; a new stage is reported when
    it begins."""
    start, done = time.monotonic(), threading.Event()
    reported = threading.Event()

    def watch() -> None:
        due, shown = start + FIRST_S, ""
        while not done.wait(LOOK_S if stage else max(due - time.monotonic(), 0.0)):
            now = stage() if stage else ""
            if now == shown and time.monotonic() < due:
                continue
            shown, due = now, time.monotonic() + EVERY_S
            reported.set()
            report(f"{what}{': ' if now else ''}{now} ({time.monotonic() - start:.0f} s)")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if reported.is_set():
        report(f"{what}: done in {time.monotonic() - start:.0f} s")
