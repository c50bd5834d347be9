"""Lines to standard output and error that only a thread of their own ever waits for.

Whoever reads a pipe may stop reading: from 64 KiB on a write to it blocks, and with it whichever
thread writes.  Here lines wait in a bounded queue; what finds no room there, or cannot be written,
is lost and counted, and the next line that can be written is preceded by one that says how many are
missing."""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from service.batch_writer import BatchWriter, Queued
from service.serving.request_log import JsonLines

MOST_BYTES = 4 * 2**20  # that wait: some 8,000 lines
BATCH = 64  # lines taken from the queue at once
CLOSING_S = 1.0  # that the last lines may take, with a reader that does not keep up
LostLine = Callable[[int], str]  # how many lines are missing -> the line that says so
Fate = Literal["written", "dropped"]


class Line(NamedTuple):
    """A line with its end, and how many lines found no room in the queue before it."""

    text: bytes
    lost: int


class LineQueue(BatchWriter[Line]):
    """The lines of one file descriptor, in order."""

    def __init__(
        self,
        descriptor: int,
        *,
        count: Callable[[Fate, int], None] = lambda fate, number: None,
        missing: LostLine = lambda lost: "",
        most_bytes: int = MOST_BYTES,
        closing_s: float = CLOSING_S,
    ) -> None:
        """``count`` is told of written and dropped lines, on any thread."""
        self._descriptor = descriptor
        self._count = count
        self._missing = missing
        self._lost = 0  # lines that found no room since the last one that did
        # lines that could not be written since the last one that could; the thread's own
        self._failed = 0
        self._torn = False  # a line was cut short
        super().__init__(f"lines-{descriptor}", most=most_bytes, batch=BATCH, closing_s=closing_s)

    def send(self, line: str) -> None:
        """Have a line written, or count it as lost, without waiting for whoever reads; after
        ``close`` write it."""
        text = f"{line}\n".encode(errors="backslashreplace")
        with self.changed:
            lost, self._lost = self._lost, 0
            if self.put(Line(text, lost), len(text)):
                return
            if not self.closing or self._thread.is_alive():
                self._lost = lost + 1
                self._count("dropped", 1)
                return
        self._write([Line(text, lost)])

    def close(self) -> None:
        """Write what waits, for at most ``closing_s`` seconds; then nothing in this process waits
        for the reader."""
        if self.closing:
            return
        if left := self.finish():
            self._count("dropped", len(left))
        if self._thread.is_alive():
            # the reader has stopped: what ends the process must not wait for it either
            self.silence()
        elif self._failed or self._lost:
            self._write([Line(b"", self._lost)])

    def silence(self) -> None:
        """Have whatever else this process writes there go nowhere."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._descriptor)
        os.close(null)

    def write(self, batch: list[Queued[Line]]) -> list[Queued[Line]]:
        """Write lines together as long as they cannot be mixed with those of other processes."""
        together, size = list[Line](), 0
        for line in batch:
            if together and (line.item.lost or size + line.size > select.PIPE_BUF):
                self._write(together)
                together, size = [], 0
            together.append(line.item)
            size += line.size
        if together:
            self._write(together)
        return []

    def release(self) -> None:
        """Hold nothing."""

    def _write(self, lines: Sequence[Line]) -> None:
        """Write lines of which only the first may follow on lost ones."""
        lost, number = lines[0].lost + self._failed, sum(bool(line.text) for line in lines)
        told = self._missing(lost) if lost else ""
        text = (
            b"\n" * self._torn
            + (f"{told}\n".encode() if told else b"")
            + b"".join(line.text for line in lines)
        )
        rest = memoryview(text)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                    self._torn = bool(rest)
                except BlockingIOError:  # whoever started the process may have made the pipe so
                    select.select([], [self._descriptor], [])
        except (OSError, ValueError):  # a full disk, a reader that has gone
            self._failed = lost + number
            if number:
                self._count("dropped", number)
            return
        self._failed = 0
        if number:
            self._count("written", number)


class QueuedLog(logging.Handler):
    """Every log record as a line of JSON on standard error, through a ``LineQueue``."""

    def __init__(self, count: Callable[[Fate, int], None], descriptor: int | None = None) -> None:
        """``count``: as ``LineQueue`` takes it."""
        super().__init__()
        self.setFormatter(JsonLines())
        own = descriptor_of(sys.stderr, 2) if descriptor is None else descriptor
        self.lines = LineQueue(own, count=count, missing=self._missing)

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written; one that cannot be formatted is told of by its place in the
        source."""
        try:
            line = self.format(record)
        except Exception as error:
            # logging's own handling of it writes to standard error, and may wait there
            where, kind = f"{record.pathname}:{record.lineno}", type(error).__name__
            line = self._line(logging.ERROR, f"a log line from {where} could not be made: {kind}")
        self.lines.send(line)

    def close(self) -> None:
        """Write what waits, within a bound."""
        self.lines.close()
        super().close()

    def _missing(self, lost: int) -> str:
        return self._line(
            logging.WARNING,
            f"{lost} log lines are missing before this one: they could not be written, or were not"
            " read fast enough",
        )

    def _line(self, level: int, text: str) -> str:
        return self.format(logging.LogRecord("hallutracer", level, "", 0, text, None, None))


def descriptor_of(stream: object, number: int) -> int:
    """Return the descriptor of a standard stream; /dev/null's where it was closed at the start, as
    sys.stderr is None.

    A socket of the process may have its number."""
    return number if stream is not None else os.open(os.devnull, os.O_WRONLY)
