"""``hallutracer serve`` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from tests.kit import forks

ROOT = Path(__file__).parent.parent
CLIENT = ROOT / "clients" / "python"
PACKAGES = os.environ.get(
    "TESTED_PACKAGES"
)  # a folder of other versions, which tests/parity/test_transformers.py sets
VLLM_WAITS = ROOT / "tests" / "kit" / "vllm_waits"  # a plugin of vLLM's
PATHS = os.pathsep.join(
    [*filter(None, [PACKAGES]), str(ROOT), str(CLIENT), str(VLLM_WAITS)]
)  # of a process that sees this checkout
MAY_CHOOSE = {
    "HALLUTRACER_CALLERS_MAY": "policy threshold bundle"
}  # for tests that choose what a caller may not


def inherited() -> dict[str, str]:
    """The environment without variables of ours, but for the model, the demo's, and the policy,
    which gates."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HALLUTRACER_", "RAG_"))
    }
    return kept | {"HALLUTRACER_MODEL": "demo", "HALLUTRACER_POLICY": "gate"}


class ServeProcess:
    """``hallutracer serve`` as a user starts it, on a free port unless ``--port`` is given; a
    context manager: ready on entry, ended on exit.

    No variable of ours is inherited.  ``process.returncode`` is, after exit, its status after
    SIGTERM; -SIGKILL where it did not stop."""

    def __init__(
        self,
        *arguments: str,
        on_listening: Callable[[int], None] = lambda pid: None,
        program: Sequence[str | Path] = (),
        folder: Path = ROOT,
        stderr: int | None = None,
        **variables: str,
    ) -> None:
        """``on_listening`` is called with the process id while the model loads; ``folder`` is where
        it is started.

        ``program``: what is started, by default ``python -m service.cli``, as a fork that
        has imported what the demo model needs (tests/kit/forks.py).
        ``stderr``: a descriptor, instead of the file that ``log`` reads."""
        self._on_listening = on_listening
        port = () if "--port" in arguments else ("--port", "0")
        self._stderr = tempfile.NamedTemporaryFile("w")  # noqa: SIM115  (closed on exit)
        environment = inherited() | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": PATHS} | variables
        command = ["serve", *port, *arguments]
        errors = self._stderr.fileno() if stderr is None else stderr
        self.process: subprocess.Popen[str] | forks.Forked
        if (
            program
            or PACKAGES
            or "vllm" in arguments
            or not all(name.startswith(forks.READ_LATER) for name in variables)
            or (fork := forks.start(command, folder, environment, errors)) is None
        ):
            self.process = subprocess.Popen(
                [*(program or (sys.executable, "-m", "service.cli")), *command],
                cwd=folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=environment,
            )
        else:
            self.process = fork
        self.url = self.said = ""  # its address; what it printed until it was ready

    def log(self) -> str:
        """What it has written to stderr."""
        return Path(self._stderr.name).read_text(errors="replace")

    def __enter__(self) -> Self:
        """Wait until it can score.  Raises RuntimeError with the end of its log if it ends or takes
        five minutes."""
        assert self.process.stdout is not None
        limit = threading.Timer(300, self.process.kill)
        limit.start()
        lines = ""
        for line in self.process.stdout:
            lines += line
            if line.startswith("listening"):
                self._on_listening(self.process.pid)
            if line.startswith("API reference"):
                break
        limit.cancel()
        address = re.search(r"listening on (http://[^\s,]+)", lines)
        if address is None or "API reference" not in lines:
            words = lines + self.log()[-3000:]
            self.__exit__()
            raise RuntimeError(
                f"the server did not become ready (exit status {self.process.returncode}):\n{words}"
            )
        self.url, self.said = address[1], lines
        threading.Thread(
            target=self.process.stdout.read, daemon=True
        ).start()  # a full pipe would stop the service
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it, with what it has started, vLLM's processes among them."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._stderr.close()


@contextmanager
def serve(*arguments: str, **variables: str) -> Iterator[ServeProcess]:
    """A ready service on one thread, which must stop when asked to."""
    with ServeProcess(*arguments, **{"HALLUTRACER_THREADS": "1"} | variables) as service:
        yield service
    assert service.process.returncode != -signal.SIGKILL, "it did not stop within a minute"
