"""The log's queue: lines in order, none waited for, those that are lost counted and told of."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from service.serving import log_queue
from service.serving.log_queue import LineQueue, QueuedLog, descriptor_of
from service.serving.metrics import Metrics
from tests.running import until

MISSING = "{} missing".format
SMALL = 4096  # bytes, the least that a pipe can hold
SENT = 5000  # lines: several times what pipe, queue and the writing thread hold together


class Pipe:
    """A pipe that is read when a test wants it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, SMALL)
        self.counts: Counter[str] = Counter()

    def count(self, fate: str, number: int) -> None:
        self.counts[fate] += number

    def read(self) -> list[str]:
        """The lines up to the end: all writers have to be closed."""
        with open(self.reader, "rb", closefd=False) as file:
            return file.read().decode().splitlines()

    def reading(self) -> tuple[threading.Thread, list[str]]:
        """A thread that reads to the end, and what it has read."""
        lines: list[str] = []
        thread = threading.Thread(target=lambda: lines.extend(self.read()))
        thread.start()
        return thread, lines


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    yield (made := Pipe())
    for descriptor in (made.reader, made.writer):
        with suppress(OSError):
            os.close(descriptor)


def test_a_reader_that_stops_is_not_waited_for_and_hears_later_how_much_it_missed(
    pipe: Pipe,
) -> None:
    lines = LineQueue(
        pipe.writer, count=pipe.count, missing=MISSING, most_bytes=2 * SMALL, closing_s=20
    )
    for n in range(SENT):
        lines.send(f"line {n:04}")  # on this thread, which would hang here
    dropped = pipe.counts["dropped"]
    assert 0 < dropped < SENT
    reader, read = pipe.reading()
    until(lambda: pipe.counts["written"] == SENT - dropped)
    lines.send("after it")
    lines.send("and the next")
    lines.close()
    os.close(pipe.writer)
    reader.join(20)
    assert read[-2:] == ["after it", "and the next"]
    lost = [line for line in read if line.endswith(" missing")]
    assert sum(int(line.split()[0]) for line in lost) == dropped
    written = [line for line in read[:-2] if line not in lost]
    assert len(written) == SENT - dropped
    numbers = [int(line.split()[1]) for line in written]
    gaps = [later - earlier - 1 for earlier, later in pairwise([-1, *numbers, SENT])]
    assert lost == [f"{gap} missing" for gap in gaps if gap], "and each gap is told of where it is"
    assert pipe.counts == {"written": SENT + 2 - dropped, "dropped": dropped}


def test_the_end_waits_for_no_reader_and_neither_does_what_comes_after_it(pipe: Pipe) -> None:
    lines = LineQueue(pipe.writer, count=pipe.count, missing=MISSING, closing_s=0.01)
    for n in range(1000):
        lines.send(f"line {n}")
    lines.close()
    os.write(
        pipe.writer, b"x" * 10 * SMALL
    )  # as a library does that prints at the exit: it would hang here
    lines.send("too late")
    lines.close()
    assert pipe.counts["dropped"] > 0


@pytest.mark.parametrize("further", [["there is room"], []], ids=["a line follows", "none does"])
def test_what_cannot_be_written_is_counted_and_told_of_once_there_is_room(
    pipe: Pipe, tmp_path: Path, further: list[str]
) -> None:
    with open("/dev/full", "wb", buffering=0) as full, (tmp_path / "log").open("wb") as file:
        lines = LineQueue(full.fileno(), count=pipe.count, missing=MISSING)
        for n in range(3):
            lines.send(f"line {n}")
            until(lambda n=n: pipe.counts["dropped"] == n + 1)  # type: ignore[misc]
        os.dup2(file.fileno(), full.fileno())
        for line in further:
            lines.send(line)
        lines.close()
        lines.send("after the end")
    written = (tmp_path / "log").read_text().splitlines()
    assert written == ["3 missing", *further, "after the end"]
    assert pipe.counts == {"dropped": 3, "written": len(further) + 1}


def test_a_line_that_was_cut_short_does_not_spoil_the_next(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = os.write, threading.Event()
    full.set()

    def half(descriptor: int, data: Any) -> int:
        if not full.is_set():
            return write(descriptor, data)
        if len(data) < 9:
            raise OSError(28, "No space left on device")
        return write(descriptor, bytes(data)[:4])

    monkeypatch.setattr(log_queue.os, "write", half)
    with (tmp_path / "log").open("wb") as file:
        lines = LineQueue(file.fileno(), count=pipe.count, missing=MISSING)
        lines.send("0123456789")
        until(lambda: pipe.counts["dropped"] == 1)
        full.clear()
        lines.send("whole")
        lines.close()
    assert (tmp_path / "log").read_text().splitlines() == ["0123", "1 missing", "whole"]


@pytest.mark.parametrize("gone", [True, False])
def test_a_reader_that_has_gone_and_a_pipe_that_must_not_block(pipe: Pipe, gone: bool) -> None:
    os.set_blocking(pipe.writer, False)
    if gone:
        os.close(pipe.reader)
    lines = LineQueue(pipe.writer, count=pipe.count, closing_s=20)
    for n in range(1000):
        lines.send(f"line {n}")
    if gone:
        lines.close()
        assert pipe.counts == {"dropped": 1000}
        return
    reader, read = pipe.reading()
    lines.close()
    os.close(pipe.writer)
    reader.join(20)
    assert len(read) == pipe.counts["written"] == 1000


def test_log_records_are_lines_of_json_and_one_that_cannot_be_made_says_where(pipe: Pipe) -> None:
    metrics = Metrics()
    handler = QueuedLog(metrics.log_lines, pipe.writer)
    logger = logging.Logger("tests")
    logger.addHandler(handler)
    logger.info("a number: %d", 3)
    logger.info("a number: %d", "three")
    handler.close()
    os.close(pipe.writer)
    first, second = map(json.loads, pipe.read())
    assert (first["message"], first["level"]) == ("a number: 3", "info")
    assert second["level"] == "error"
    assert "test_log_queue.py" in second["message"]
    assert "three" not in second["message"]
    assert 'hallutracer_log_lines_total{fate="written"} 2.0' in metrics.render()[0].decode()
    assert "5 log lines are missing" in json.loads(handler._missing(5))["message"]


def test_a_stream_that_was_closed_at_the_start_is_none() -> None:
    assert descriptor_of(object(), 2) == 2
    null = descriptor_of(None, 2)
    assert null != 2
    assert os.path.sameopenfile(null, os.open(os.devnull, os.O_WRONLY))
