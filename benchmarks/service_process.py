"""A served model as a process of its own: started, watched through /proc and /metrics, stopped.  Linux only."""

from __future__ import annotations

import math
import os
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load_stats import Check
from tests.serve_process import MAY_CHOOSE, ServeProcess

GAUGES = ("hallutracer_queue_depth", "hallutracer_running_decodes", "hallutracer_requests_in_flight")
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


class ServiceProcess(ServeProcess):
    """``hallutracer serve`` with ``arguments``, watched; its clients may choose what they like."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        super().__init__(*arguments, **MAY_CHOOSE | variables)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self.process.pid

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def metrics(self) -> Metrics:
        """Scrape /metrics.  Raises RuntimeError where it does not answer 200."""
        with closing(HTTPConnection(*self.address, timeout=30)) as connection:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"GET /metrics answered {response.status}")
            return Metrics(response.read().decode())

    def rss_mib(self) -> float:
        """Resident memory in MiB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE / 2**20

    def open_files(self) -> int:
        """Open file descriptors, sockets among them."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def end(self) -> Check:
        """After exit: whether it stopped as it should."""
        status = self.process.returncode
        return Check("exit status after SIGTERM", str(status), "0", status == 0)


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
