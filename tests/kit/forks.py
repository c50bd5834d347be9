"""Processes of ``python -m service.cli``, and programs on vLLM, that begin with their modules
imported: forks of one process, which imports them once for each worker of the tests.

Importing torch and transformers takes five seconds of a core, more than most services need for
their test; importing vLLM takes fifteen.  A fork differs from a fresh process in nothing but that:
environment, arguments, folder, standard streams, session and exit are its own."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
# What a service on the demo model imports until it is ready, but for the engine and what these
# import.
MODULES = (
    "service.api.app",
    "service.api.connections",
    "service.cli.serve",
    "service.library.engine",
    "service.engines.scheduler",
    "service.engines.transformers.threads",
    "probes_store.store",
    "probes_store.bucket",
    "probes_store.trust",
    "transformers.models.llama.modeling_llama",
    "uvicorn",
    "uvloop",
    "httptools",
    "watchfiles",
)
# What programs on vLLM import, in any of their processes.
VLLM_MODULES = (
    "service.engines.transformers.engine",
    "service.engines.vllm.worker",
    "service.vllm_plugin.plugin",
    "transformers.models.llama",
    "uvloop",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.run_batch",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
)
MODULES_OF = {"service": MODULES, "vllm": VLLM_MODULES}
# Beginnings of the names of variables that are read by commands, and not by an import.
READ_LATER = ("HALLUTRACER_", "OTEL_", "AWS_")
VLLM_READS_LATER = ("VLLM_ALLOW_", "VLLM_CPU_", "VLLM_ENABLE_V1_", "VLLM_WORKER_")
JEMALLOC = "jemalloc_bg_thd"  # a thread of an allocator, which starts it anew in a fork
# Of each kind: for a worker's environment, and for that which a test has changed for good.
MOST_PARENTS = 2


class Forked:
    """A fork, with what tests use of ``subprocess.Popen``.  Its status comes through a pipe, from
    the process that waits for it."""

    def __init__(self, pid: int, status: int, stdout: IO[str] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self._status = status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if (status := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return status

    def _ended(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            status = select.poll()
            status.register(self._status, select.POLLIN)
            if status.poll(None if seconds is None else 1000 * seconds):
                self.returncode = int(os.read(self._status, 16))
                os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # ended, and its status is on its way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Program:
    """A program on vLLM: a module, or a file whose name ends with ``.py``."""

    name: str
    # Whether its other processes are forks of it, as on CUDA.  vLLM's CPU build starts Python anew
    # for each, whatever it is told.
    forks: bool = True


def plain(environment: dict[str, str], read_later: Sequence[str] = ()) -> dict[str, str]:
    """The variables that a library may read as it is imported."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith((*READ_LATER, "PYTEST_", *read_later))
    }


class Parent:
    """The process that has imported everything, and forks."""

    def __init__(self, environment: dict[str, str], kind: str, plain: dict[str, str]) -> None:
        """``kind``: of ``MODULES_OF``; ``plain``: of the environment."""
        self.kind = kind
        self.plain = plain
        self._ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.forks", str(theirs.fileno()), kind],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], stdout: int, stderr: int) -> tuple[int, int]:
        """The process id of a fork, and the descriptor that its status comes through."""
        status, child_status = os.pipe()
        data = json.dumps(request).encode()
        socket.send_fds(self._ours, [len(data).to_bytes(4, "big")], [stdout, stderr, child_status])
        self._ours.sendall(data)
        os.close(child_status)
        return int.from_bytes(_exactly(self._ours, 4), "big"), status

    def close(self) -> None:
        self._ours.close()
        self.process.wait(60)


_parents: list[Parent] = []


def start(
    arguments: list[str], folder: Path, environment: dict[str, str], stderr: int
) -> Forked | None:
    """Run ``python -m service.cli``; None where forks are not safe, and in a third environment: a
    library could read something else there than in that of the process that imported it, and each
    such process holds its imports."""
    if sys.platform != "linux" or (parent := _parent("service", environment)) is None:
        return None
    out, child_out = os.pipe()
    request = {"arguments": arguments, "folder": str(folder), "environment": environment}
    try:
        pid, status = parent.fork(request, child_out, stderr)
    finally:
        os.close(child_out)
    stdout = open(out, encoding="utf-8")  # noqa: SIM115  (the caller reads it)
    return Forked(pid, status, stdout)


def start_on_vllm(
    program: Program,
    arguments: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    stdout: int,
    stderr: int,
) -> Forked:
    """Run a program that has imported vLLM.  Raises RuntimeError in a third environment, as
    ``start`` returns None there."""
    parent = _parent("vllm", environment, VLLM_READS_LATER)
    if parent is None:
        raise RuntimeError(f"more than {MOST_PARENTS} environments of programs on vLLM")
    request = {"arguments": [*arguments], "folder": str(folder), "environment": environment}
    pid, status = parent.fork(request | {"program": asdict(program)}, stdout, stderr)
    return Forked(pid, status, None)


def _parent(
    kind: str, environment: dict[str, str], read_later: Sequence[str] = ()
) -> Parent | None:
    own = plain(environment, read_later)
    alike = [parent for parent in _parents if parent.kind == kind]
    if (parent := next((parent for parent in alike if parent.plain == own), None)) is not None:
        return parent
    if len(alike) == MOST_PARENTS:
        return None
    _parents.append(parent := Parent(environment, kind, own))
    return parent


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _next_child(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request, until the tests end; return in the fork that is to run a command."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        with suppress(ChildProcessError):  # the processes that waited for earlier forks
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not head:
            os._exit(0)
        request: dict[str, Any] = json.loads(_exactly(connection, int.from_bytes(head, "big")))
        stdout, stderr, status = descriptors
        if os.fork() == 0:
            if (pid := os.fork()) == 0:
                connection.close()
                os.close(status)
                os.setsid()
                os.dup2(stdout, 1)
                os.dup2(stderr, 2)
                os.close(stdout)
                os.close(stderr)
                return request
            connection.sendall(pid.to_bytes(4, "big"))
            connection.close()
            for descriptor in (0, 1, 2, stdout, stderr):
                os.close(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(status, b"%d" % code)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _import_all(kind: str) -> None:
    if kind == "service":
        from service.cli.loading import _import_engine

        _import_engine()
    for name in MODULES_OF[kind]:
        importlib.import_module(name)


def start_vllms_processes_by_fork() -> None:
    """Have vLLM start its processes by fork, which its CPU build does not, whatever it is told.

    Each would import everything again, most of a start."""
    from vllm.model_executor.models import registry

    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context(  # type: ignore[assignment]
        "fork" if method == "spawn" else method
    )
    # It starts Python anew to look at a model's class.
    registry._run_in_subprocess = lambda look: look()


def _run(arguments: list[str], name: str = "service.cli", *, forks: bool = False) -> None:
    if forks:
        start_vllms_processes_by_fork()
    sys.argv = [name, *arguments]
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def main(connection: socket.socket, kind: str) -> None:
    gc.disable()
    _import_all(kind)
    gc.collect()
    gc.freeze()
    gc.enable()
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    others = [name for name in threads if name != JEMALLOC]
    assert len(others) == 1, f"a process with the threads {threads} cannot be forked"
    request = _next_child(connection)
    gc.unfreeze()  # libraries written in C++ tell of what is never freed
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    _run(request["arguments"], **request.get("program", {}))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
