"""Processes that take turns on one machine, and intervals of their paired times.

vLLM's worker spins for a second after a request, and its sampling threads poll, which would disturb the next
measurement on two cores.  So a process without the turn is stopped (SIGSTOP to its whole process group).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from tests.serve_process import ROOT, inherited

RESAMPLES = 4_000
READY_WITHIN_S = 400.0


@dataclass(frozen=True)
class Interval:
    """A median, and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"


def interval(values: ArrayLike) -> Interval:
    """Median of ``values`` and the middle 95 % of the medians of resampled ones."""
    found = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).choice(found, (RESAMPLES, found.size))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return Interval(float(np.median(found)), float(low), float(high), int(found.size))


class Group:
    """A process and all that it starts, in a process group of its own; stopped between turns.  A context manager."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, env=inherited() | (environment or {}),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._until_ready()
        except BaseException:
            self._end()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _until_ready(self) -> None:
        """Wait until it can take a turn.  Raises RuntimeError where it ends instead."""

    def _ended(self) -> RuntimeError:
        words = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return RuntimeError(f"{self._process.args!r} ended or took too long:\n{words}")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _end(self) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._signal(signal.SIGKILL)  # workers of vLLM's that outlived it
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


class Talker(Group):
    """Prints a JSON line when ready, then answers JSON lines; only the process that has the turn may ``ask``."""

    def ask(self, **job: Any) -> dict[str, Any]:
        """One job and its answer.  Raises RuntimeError where the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def _until_ready(self) -> None:
        self.hello = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer


class Listener(Group):
    """An HTTP server on a port of this machine; ready when ``health`` answers 200."""

    def __init__(self, command: Sequence[str], log: Path, health: str, environment: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address: tuple[str, int] = free.getsockname()[:2]
        self._health = health
        super().__init__([*command, "--port", str(self.address[1])], log, environment)

    def _until_ready(self) -> None:
        threading.Thread(target=self._drain, daemon=True).start()
        limit = time.monotonic() + READY_WITHIN_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise self._ended()
            time.sleep(0.5)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(*self.address, timeout=5)
        try:
            connection.request("GET", self._health)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _drain(self) -> None:
        """Read what it prints, so that it never waits for a reader."""
        assert self._process.stdout is not None
        with suppress(ValueError):
            for _ in self._process.stdout:
                pass


def group_memory_gib(group: int) -> float:
    """Private memory of a group's processes (without mapped files), in GiB."""
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.getpgid(int(folder.name)) == group:
                found = [
                    line for line in (folder / "smaps_rollup").read_text().splitlines() if line.startswith("Pss_Anon:")
                ]
                total += int(found[0].split()[1]) * 1024
        except OSError:
            continue
    return total / 2**30
