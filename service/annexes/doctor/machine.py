"""Findings, and the checks of this machine and installation.  They ask the operating system and
import no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from ctypes.util import find_library
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPConnection, HTTPException
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from probes_store.errors import BundleError
from service import __version__
from service.errors import HalluTracerError
from service.progress import size_text
from service.settings import LEAST_CONNECTIONS, SPARE_FILES

Status = Literal["ok", "warn", "fail"]
GIB = 1 << 30
TEMPORARY = "temporary files"
# free bytes; else a GiB, for the next model.  A tenth of it is next to nothing
ENOUGH = {TEMPORARY: GIB // 16}
UNSYNCHRONISED = 5  # adjtimex's TIME_ERROR
TIMEX_BYTES = 512  # struct timex has some 200
AHEAD_S = 300.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.  ``fail``: `serve` would not serve; ``warn``: it would, and something is not as it
    should be."""

    status: Status
    check: str
    found: str
    cure: str = ""

    def line(self) -> str:
        """Format it as one line."""
        text = f"{self.status:<5} {self.check:<9} {self.found}"
        return f"{text} -> {self.cure}" if self.cure else text


ok, warn, fail = (partial(Finding, status) for status in ("ok", "warn", "fail"))


def run(checks: Iterable[tuple[str, Callable[[], Iterable[Finding]]]]) -> Iterator[Finding]:
    """Yield the findings of all checks; one that cannot be made is a finding, and the next are made
    all the same."""
    for name, check in checks:
        try:
            yield from check()
        except (HalluTracerError, BundleError) as error:  # whose messages name the cure
            yield fail(name, " ".join(str(error).split()))
        except Exception as error:
            yield fail(
                name,
                f"the check itself failed: {type(error).__name__}: {error}",
                "please report this",
            )


def worst(findings: Iterable[Finding]) -> Status:
    """Return the gravest status; "ok" of none."""
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max((finding.status for finding in findings), key=order.index, default="ok")


def summary(findings: Sequence[Finding]) -> Finding:
    """Return the last line, for people: whether it would serve."""
    statuses = [finding.status for finding in findings]
    failed, warned = statuses.count("fail"), statuses.count("warn")
    if failed:
        counts = f"serve would not serve: {failed} failed, {warned} warned"
        return fail("result", counts, "mend what failed, from the top")
    counts = f"serve would serve; not all is as it should be: {warned} warned"
    return warn("result", counts) if warned else ok("result", "serve would serve")


def check_packages() -> Iterator[Finding]:
    """Compare Python's packages with the requirements of the installed distribution, extras
    aside."""
    from packaging.requirements import Requirement

    yield ok("python", f"{sys.version.split()[0]}, {sys.executable}")
    try:
        wanted = [Requirement(text) for text in requires("hallutracer") or ()]
        installed = version("hallutracer")
    except PackageNotFoundError:
        yield warn(
            "packages",
            "hallutracer runs from a checkout that is not installed",
            "pip install --editable .",
        )
        return
    if installed != __version__:
        yield warn(
            "packages",
            f"hallutracer {installed} is installed, and {__version__} runs",
            "pip install . again",
        )
    needed = [wish for wish in wanted if wish.marker is None or wish.marker.evaluate({"extra": ""})]
    wrong = {}
    for requirement in needed:
        try:
            if not requirement.specifier.contains(
                actual := version(requirement.name), prereleases=True
            ):
                wrong[requirement] = f"{actual}, wanted {requirement.specifier}"
        except PackageNotFoundError:
            wrong[requirement] = "is missing"
    for requirement, problem in wrong.items():
        yield fail("packages", f"{requirement.name} {problem}", f"pip install '{requirement}'")
    if not wrong:
        yield ok(
            "packages", f"hallutracer {__version__} and the {len(needed)} packages that it needs"
        )


def check_engine(engine: str, ranks: int) -> Iterator[Finding]:
    """Look for the engine that was asked for, and what vLLM loads by name."""
    if engine == "transformers":
        yield ok("engine", f"transformers {version('transformers')}, torch {version('torch')}")
        return
    from service.engines.vllm.launch import RANGE, check_installed

    yield ok("engine", f"vLLM {check_installed()} (tested: {RANGE}), torch {version('torch')}")
    if "+cpu" in version("torch") and find_library("numa") is None:
        yield fail(
            "engine",
            "vLLM on a CPU loads libnuma.so.1, which is not here",
            "apt-get install libnuma1",
        )
    if not any(map(shutil.which, ("g++", "gcc", "clang", "cc"))):
        yield fail(
            "engine",
            "vLLM compiles at its first start, and there is no C++ compiler",
            "apt-get install g++",
        )
    if ranks > 1 and (free := shutil.disk_usage("/dev/shm").free) < GIB:
        yield warn(
            "engine",
            f"/dev/shm has {free / 2**20:.0f} MiB, and {ranks} processes meet there",
            "docker run --shm-size 8g, or an emptyDir of medium Memory",
        )


def check_extras(postgres: bool) -> Iterator[Finding]:
    """Look for packages that one option alone needs."""
    if postgres and importlib.util.find_spec("psycopg") is None:
        yield fail("feedback", "PostgreSQL needs psycopg", "pip install 'hallutracer[postgres]'")


def check_gpu(device: str, ranks: int) -> Iterator[Finding]:
    """Compare what nvidia-smi says with the device that was asked for and torch's build."""
    gpus: list[str] = []
    if program := shutil.which("nvidia-smi"):
        command = [program, "--query-gpu=name,memory.free,driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        gpus = [
            " ".join(line.split())
            for line in done.stdout.splitlines()
            if line.strip() and not done.returncode
        ]
    cpu_build = "+cpu" in version("torch")
    if not gpus and (device == "cuda" or ranks > 1 and not cpu_build):
        yield fail(
            "gpu",
            "no NVIDIA GPU is seen here (nvidia-smi)",
            "check the driver and the container's GPUs, or --device cpu",
        )
    elif not gpus:
        yield ok("gpu", "none; the model runs on the CPU")
    elif cpu_build and device != "cpu":
        yield (fail if device == "cuda" else warn)(
            "gpu",
            f"{gpus[0]}, and torch {version('torch')} knows no GPU",
            "install torch's CUDA build (docs/install.md), or --device cpu",
        )
    elif ranks > len(gpus) and not cpu_build:
        yield fail(
            "gpu",
            f"{len(gpus)} GPUs for {ranks} ranks",
            "lower --tensor-parallel-size, or add GPUs",
        )
    else:
        yield ok("gpu", "; ".join(gpus))


def check_cpu(threads: int | None) -> Iterator[Finding]:
    """Compare threads with CPUs: more wait for each other, and spin for the cores that they
    lack."""
    from joblib import cpu_count

    most = cpu_count()  # by the affinity mask and the control group's quota
    named = os.environ.get("OMP_NUM_THREADS", "") if threads is None else str(threads)
    if named.isdigit() and int(named) > most:
        cure = (
            f"--threads {most}"
            if threads is not None
            else f"OMP_NUM_THREADS={most}, or leave it out"
        )
        yield warn("cpu", f"{named} threads on {most} CPUs: they would wait for each other", cure)
    else:
        yield ok("cpu", f"{most} CPUs, {named or f'1 to {most}'} threads")


def memory_free() -> int | None:
    """Return the bytes that a new process could take, by the machine and the control group; None:
    nobody can tell."""
    limits = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
        group = Path("/sys/fs/cgroup")
        limits.append(
            int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        )
    except (OSError, ValueError, KeyError):
        pass
    return min(limits, default=None)


def check_disk(folders: dict[str, Path]) -> Iterator[Finding]:
    """Measure free space where something is written: what for -> folder; each file system is named
    once."""
    seen: set[int] = set()
    for what, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if (device := there.stat().st_dev) in seen:
            continue
        seen.add(device)
        free, enough = shutil.disk_usage(there).free, ENOUGH.get(what, GIB)
        space = f"{size_text(free)} free for {what} in {folder}"
        if free < enough // 10:
            yield fail("disk", space, "make room, or choose another place")
        else:
            yield (
                warn("disk", space, "make room before more comes")
                if free < enough
                else ok("disk", space)
            )


def check_files(connections: int) -> Iterator[Finding]:
    """Compare connections with the open files that are allowed; ``serve`` raises the soft limit by
    itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, least = connections + SPARE_FILES, LEAST_CONNECTIONS + SPARE_FILES
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        yield ok("files", f"enough for {connections} connections")
    elif hard < least:
        yield fail(
            "files",
            f"{hard} open files (ulimit -Hn), and a service needs at least {least}",
            f"ulimit -n {wanted} as root, or LimitNOFILE={wanted}, or --ulimit nofile={wanted}",
        )
    else:
        cure = f"ulimit -Hn {wanted}, or --max-connections {hard - SPARE_FILES}"
        yield warn("files", f"{hard} open files for {connections} connections", cure)


def check_clock(newest: str | None, now: float | None = None) -> Iterator[Finding]:
    """Compare the clock with the ``newest`` bundle's time (ISO 8601), and ask whether it is
    synchronised."""
    moment = time.time() if now is None else now
    shown = datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if newest is not None and datetime.fromisoformat(newest).timestamp() > moment + AHEAD_S:
        yield fail(
            "clock",
            f"{shown}, and a bundle was made at {newest}",
            "set the clock: certificates, expiry and the log's times depend on it",
        )
    elif _unsynchronised():
        yield warn(
            "clock", f"{shown}, not synchronised", "run chrony or systemd-timesyncd on the host"
        )
    else:
        yield ok("clock", shown)


def _unsynchronised() -> bool:
    """Return what the kernel says; False where it cannot be asked."""
    try:
        return bool(
            ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)) == UNSYNCHRONISED
        )
    except (OSError, AttributeError):
        return False


def answers_as_ours(host: str, port: int) -> bool:
    """Whether a HalluTracer service answers there."""
    try:
        with closing(HTTPConnection(host, port, timeout=1)) as connection:
            connection.request("GET", "/health/live", headers={"Host": "localhost"})
            return b'"live"' in connection.getresponse().read(1000)
    except (OSError, HTTPException):
        return False
