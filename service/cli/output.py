"""What commands print: results on standard output, progress on standard error."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FIRST_S, EVERY_S = 3.0, 15.0
Report = Callable[[str], None]


def print_line(text: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_json(document: Any) -> None:
    """A document on standard output."""
    print_line(json.dumps(document, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """A line on standard error, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextmanager
def progress(what: str, report: Report = note) -> Iterator[None]:
    """Report a step that takes longer than 3 s: then, every 15 s, and at its end.

    By the clock and in whole lines, so that a log shows as much as a terminal.
    """
    start, done = time.monotonic(), threading.Event()
    reported = threading.Event()

    def watch() -> None:
        wait = FIRST_S
        while not done.wait(wait):
            reported.set()
            report(f"{what} ({time.monotonic() - start:.0f} s)")
            wait = EVERY_S

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if reported.is_set():
        report(f"{what}: done in {time.monotonic() - start:.0f} s")
