"""``hallutracer serve --engine vllm`` on the demo model, for all files that ask it: a start is most
of a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet import two_versions
from probes_store.store import Store
from tests.kit import vllm_programs
from tests.serve_process import MAY_CHOOSE, ServeProcess, serve

EAGER = ("--engine", "vllm", "--engine-arg", "enforce_eager=true")
PATIENT = ("--max-queue", "4096", "--deadline-s", "120")  # with thousands of requests


@dataclass(frozen=True)
class VllmService:
    served: ServeProcess
    store: Store  # has two versions of ``mine``: what demo and demo-fused are


@contextmanager
def started(folder: Path) -> Iterator[VllmService]:
    store, _ = two_versions(folder / "store")
    # HALLUTRACER_BUNDLE is the variable that has vLLM end where nothing gates.
    variables = {
        **MAY_CHOOSE,
        **vllm_programs.EAGER,
        "HALLUTRACER_BUNDLE": "demo demo-fused mine@production",
        "HALLUTRACER_STORE": str(folder / "store"),
    }
    with serve(*EAGER, *PATIENT, "--shadow=demo-fused", **variables) as served:
        yield VllmService(served, store)
    assert served.process.returncode == 0  # a service that drained has not failed
