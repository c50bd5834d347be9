"""vLLM's own server, whose other processes are forks of it, as on CUDA.

vLLM's CPU build spawns them, whatever it is told, and they import everything again, which is half
of its start."""

from __future__ import annotations

import multiprocessing
import runpy


def start_vllms_processes_by_fork() -> None:
    from vllm.model_executor.models import registry

    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context(
        "fork" if method == "spawn" else method
    )  # type: ignore
    registry._run_in_subprocess = lambda look: (
        look()
    )  # it starts Python anew to look at a model's class


if __name__ == "__main__":
    start_vllms_processes_by_fork()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
