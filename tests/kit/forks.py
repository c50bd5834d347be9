"""Processes of ``python -m service.cli`` that begin with its modules imported: forks of one
process, which imports them once for each worker of the tests.

Importing torch and transformers takes five seconds of a core, more than most services need for
their test.  A fork differs from a fresh process in nothing but that: environment, arguments,
folder, standard streams, session and exit are its own."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
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
# Beginnings of the names of variables that are read by commands, and not by an import.
READ_LATER = ("HALLUTRACER_", "OTEL_", "AWS_")
MOST_PARENTS = 2  # a worker's environment, and that which a test has changed for good


class Forked:
    """A fork, with what tests use of ``subprocess.Popen``.  Its status comes through a pipe, from
    the process that waits for it."""

    def __init__(self, pid: int, status: int, stdout: IO[str]) -> None:
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


def plain(environment: dict[str, str]) -> dict[str, str]:
    """The variables that a library may read as it is imported."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith((*READ_LATER, "PYTEST_"))
    }


class Parent:
    """The process that has imported everything, and forks."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.plain = plain(environment)
        self._ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.forks", str(theirs.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        atexit.register(self.close)

    def fork(
        self, arguments: list[str], folder: Path, environment: dict[str, str], stderr: int
    ) -> Forked:
        (out, child_out), (status, child_status) = os.pipe(), os.pipe()
        request = {"arguments": arguments, "folder": str(folder), "environment": environment}
        data = json.dumps(request).encode()
        socket.send_fds(
            self._ours, [len(data).to_bytes(4, "big")], [child_out, stderr, child_status]
        )
        self._ours.sendall(data)
        os.close(child_out)
        os.close(child_status)
        pid = int.from_bytes(_exactly(self._ours, 4), "big")
        stdout = open(out, encoding="utf-8")  # noqa: SIM115  (the caller reads it)
        return Forked(pid, status, stdout)

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
    if sys.platform != "linux":
        return None
    own = plain(environment)
    parent = next((parent for parent in _parents if parent.plain == own), None)
    if parent is None:
        if len(_parents) == MOST_PARENTS:
            return None
        _parents.append(parent := Parent(environment))
    return parent.fork(arguments, folder, environment, stderr)


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


def main(connection: socket.socket) -> None:
    gc.disable()
    from service.cli.loading import _import_engine

    _import_engine()
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process of {len(threads)} threads cannot be forked"
    request = _next_child(connection)
    gc.unfreeze()  # libraries written in C++ tell of what is never freed
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    sys.argv = [str(ROOT / "service" / "cli" / "__main__.py"), *request["arguments"]]
    from service.cli.main import main as command

    command()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
