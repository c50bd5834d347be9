"""The machine: port, GPU, CPU, memory, disk, open files, clock.  Asks the operating system, imports no torch."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from importlib.metadata import version
from pathlib import Path

from service.doctor.findings import Finding, fail, ok, warn
from service.settings import LEAST_CONNECTIONS, SPARE_FILES

GIB = 1 << 30
TEMPORARY = "temporary files"
ENOUGH = {TEMPORARY: GIB // 16}  # free bytes; else a GiB, for the next model.  A tenth of it is next to nothing
UNSYNCHRONISED = 5  # adjtimex's TIME_ERROR
TIMEX_BYTES = 512  # struct timex has some 200
AHEAD_S = 300.0


def shown(size: float) -> str:
    """Bytes, for people."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 4 else f"{size / 2**20:.1f} MiB"


def answers_as_ours(host: str, port: int) -> bool:
    """Whether a HalluTracer service answers there."""
    try:
        with closing(HTTPConnection(host, port, timeout=1)) as connection:
            connection.request("GET", "/health/live", headers={"Host": "localhost"})
            return b'"live"' in connection.getresponse().read(1000)
    except (OSError, HTTPException):
        return False


def check_gpu(device: str, ranks: int) -> Iterator[Finding]:
    """What nvidia-smi says, against the device that was asked for and torch's build."""
    found = _gpus()
    cpu_build = "+cpu" in version("torch")
    if not found:
        if device == "cuda" or ranks > 1 and not cpu_build:
            yield fail("gpu", "no NVIDIA GPU is seen here (nvidia-smi)", "check the driver and the container's GPUs, "
                       "or --device cpu")  # fmt: skip
        else:
            yield ok("gpu", "none; the model runs on the CPU")
        return
    if cpu_build and device != "cpu":
        status = fail if device == "cuda" else warn
        yield status("gpu", f"{found[0]}, and torch {version('torch')} knows no GPU", "install torch's CUDA build "
                     "(docs/install.md), or --device cpu")  # fmt: skip
    elif ranks > len(found) and not cpu_build:
        yield fail("gpu", f"{len(found)} GPUs for {ranks} ranks", "lower --tensor-parallel-size, or add GPUs")
    else:
        yield ok("gpu", "; ".join(found))


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.free,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()] if not done.returncode else []


def check_cpu(threads: int | None) -> Iterator[Finding]:
    """More threads than CPUs wait for each other, and spin for the cores that they lack."""
    from joblib import cpu_count

    most = cpu_count()  # by the affinity mask and the control group's quota
    named = os.environ.get("OMP_NUM_THREADS", "") if threads is None else str(threads)
    if named.isdigit() and int(named) > most:
        cure = f"--threads {most}" if threads is not None else f"OMP_NUM_THREADS={most}, or leave it out"
        yield warn("cpu", f"{named} threads on {most} CPUs: they would wait for each other", cure)
    else:
        yield ok("cpu", f"{most} CPUs, {named or f'1 to {most}'} threads")


def memory_free() -> int | None:
    """Bytes that a new process could take, by the machine and by the control group; None where nobody can tell."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, KeyError):
        pass
    return min(found, default=None)


def check_disk(folders: dict[str, Path]) -> Iterator[Finding]:
    """Free space where something is written: what for -> folder; each file system is named once."""
    seen: set[int] = set()
    for what, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        device = there.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(there).free
        found = f"{shown(free)} free for {what} in {folder}"
        enough = ENOUGH.get(what, GIB)
        if free < enough // 10:
            yield fail("disk", found, "make room, or choose another place")
        elif free < enough:
            yield warn("disk", found, "make room before more comes")
        else:
            yield ok("disk", found)


def check_files(connections: int) -> Iterator[Finding]:
    """A connection is an open file; ``serve`` raises the soft limit by itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, least = connections + SPARE_FILES, LEAST_CONNECTIONS + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < least:
        yield fail("files", f"{hard} open files (ulimit -Hn), and a service needs at least {least}",
                   f"ulimit -n {wanted} as root, or LimitNOFILE={wanted}, or --ulimit nofile={wanted}")  # fmt: skip
    elif hard != resource.RLIM_INFINITY and hard < wanted:
        cure = f"ulimit -Hn {wanted}, or --max-connections {hard - SPARE_FILES}"
        yield warn("files", f"{hard} open files for {connections} connections", cure)
    else:
        yield ok("files", f"enough for {connections} connections")


def check_clock(newest: str | None, now: float | None = None) -> Iterator[Finding]:
    """Is it behind the ``newest`` bundle's time (ISO 8601), and does the kernel know it to be synchronised?"""
    moment = time.time() if now is None else now
    shown = datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if newest is not None and datetime.fromisoformat(newest).timestamp() > moment + AHEAD_S:
        yield fail("clock", f"{shown}, and a bundle was made at {newest}", "set the clock: certificates, expiry and "
                   "the log's times depend on it")  # fmt: skip
    elif _unsynchronised():
        yield warn("clock", f"{shown}, not synchronised", "run chrony or systemd-timesyncd on the host")
    else:
        yield ok("clock", shown)


def _unsynchronised() -> bool:
    """What the kernel says; False where it cannot be asked."""
    try:
        found: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return False
    return found == UNSYNCHRONISED
