"""A served model as a process of its own: started, watched through /proc and /metrics, stopped.  Linux only."""

from __future__ import annotations

import http.client
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
GAUGES = ("hallutracer_queue_depth", "hallutracer_running_decodes", "hallutracer_requests_in_flight")
_ADDRESS = re.compile(r"listening on http://([^\s,]+):(\d+)")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples = [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all series of ``name`` with ``labels``; 0 without any."""
        return sum(
            value
            for series, own, value in self.samples
            if series == name and all(own.get(key) == wanted for key, wanted in labels.items())
        )

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums per value of ``label``."""
        values = {
            own[label]
            for series, own, _ in self.samples
            if series == name and label in own and all(own.get(key) == wanted for key, wanted in labels.items())
        }
        return {value: self.total(name, **{label: value}, **labels) for value in sorted(values)}

    def has(self, name: str) -> bool:
        """Whether the scrape names the metric at all."""
        return any(series == name for series, _, _ in self.samples)


class ServiceProcess:
    """``python -m service.cli serve`` with ``arguments``, as a context manager: ready on entry, stopped on exit.

    ``log`` is the file its stderr goes to.  After exit, ``returncode`` is its exit status after SIGTERM.
    """

    def __init__(self, arguments: Sequence[str], *, ready_within_s: float = 300.0) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hallutracer-bench-"))
        self.log = self._folder / "stderr.log"
        self.returncode: int | None = None
        # Without the caller's own settings.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HALLUTRACER_")}
        with self.log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "serve", "--port", "0", *arguments],
                cwd=ROOT,
                env=environment | {"PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._address: tuple[str, int] | None = None
        self._is_ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        self._ready_within_s = ready_within_s

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        assert self._address is not None
        return self._address

    def __enter__(self) -> ServiceProcess:
        """Wait until it can score.  Raises RuntimeError with the end of its log if it exits or takes too long."""
        limit = time.monotonic() + self._ready_within_s
        while not self._is_ready.wait(0.1):
            if self._process.poll() is not None or time.monotonic() > limit:
                tail = self.log_tail()
                self._stop()
                raise RuntimeError(f"the server did not become ready (exit status {self.returncode}):\n{tail}")
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self._stop()

    def log_tail(self, lines: int = 15) -> str:
        """The end of its stderr."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def get(self, path: str) -> tuple[int, str]:
        """GET: status and body."""
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self) -> Metrics:
        """Scrape /metrics.  Raises RuntimeError where it does not answer 200."""
        status, body = self.get("/metrics")
        if status != 200:
            raise RuntimeError(f"GET /metrics answered {status}")
        return Metrics(body)

    def rss_mib(self) -> float:
        """Resident memory in MiB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE / 2**20

    def open_files(self) -> int:
        """Open file descriptors, sockets among them."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        return cpu_seconds(self.pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := _ADDRESS.search(line):
                self._address = (found[1].strip("[]"), int(found[2]))
            if line.startswith("API reference"):
                self._is_ready.set()

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.returncode = self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, user and system; NaN where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / _TICKS


def machine_busy_seconds() -> float:
    """CPU time that all processes of this machine have used, over all cores; stolen time included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


class CpuMeter:
    """CPU use in cores since the meter started: our processes and all others."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._start = (time.monotonic(), machine_busy_seconds(), {name: cpu_seconds(pid) for name, pid in pids.items()})

    def cores(self) -> dict[str, float]:
        """Mean cores in use, by name; ``others`` are all other processes."""
        since, busy, used = self._start
        seconds = time.monotonic() - since
        own = {name: (cpu_seconds(pid) - used[name]) / seconds for name, pid in self._pids.items()}
        return own | {"others": max(0.0, (machine_busy_seconds() - busy) / seconds - sum(own.values()))}
