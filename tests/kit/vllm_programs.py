"""Programs on vLLM, as forks of a process that has imported it (tests/kit/forks.py)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.kit import forks
from tests.kit.forks import Program
from tests.serve_process import PATHS

# Of programs whose model is not compiled: vLLM compiles a few functions all the same, for sampled
# answers, log probabilities and ranks, which keeps g++ busy for many seconds.
EAGER = {"TORCH_COMPILE_DISABLE": "1"}
# This process's variables are taken before its tests: vLLM sets some for the processes of an engine
# that a test has here.
VARIABLES = {
    **os.environ,
    **EAGER,
    "PYTHONPATH": PATHS,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


def start(
    program: Program, arguments: Sequence[str], folder: Path, log: Path, **environment: str
) -> forks.Forked:
    """Run a program in a folder, whose both outputs are a log; ``environment``: beside
    ``VARIABLES``."""
    with log.open("wb") as output:
        return forks.start_on_vllm(
            program, arguments, folder, VARIABLES | environment, output.fileno(), output.fileno()
        )


def run(
    program: Program, arguments: Sequence[str], folder: Path, limit_s: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, to its end.  Raises TimeoutExpired."""
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = forks.start_on_vllm(
            program, arguments, folder, VARIABLES | environment, stdout.fileno(), stderr.fileno()
        )
        try:
            status = process.wait(limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(
        [program.name, *arguments],
        status,
        (folder / "stdout").read_text(),
        (folder / "stderr").read_text(),
    )
