"""Every number that vLLM gives equals the reference engine's, to 1e-5 in float32, however vLLM is run.

``make test`` runs one start of vLLM, ``make test-long`` all families, compiled and eager, tensor and pipeline
parallel.  ``HALLUTRACER_PARITY_TABLE`` names a file to write the largest differences to.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.installed import vllm_or_skip
from tests.parity import compare, matrix, models
from tests.parity import questions as q
from tests.parity.compare import Array

vllm_or_skip()
ROOT = Path(__file__).parents[2]
MINUTES = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def table() -> list[str]:
    return []


def measure(
    backend: str, model: Path, out: Path, *extra: str, more: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Array]:
    """A process of its own; its last words where it fails."""
    command = [sys.executable, "-m", "tests.parity.measure", backend, str(model), str(out), *extra]
    environment = os.environ | {
        "VLLM_CACHE_ROOT": str(out.parent / "vllm-cache"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        # vLLM's processes begin with what this one has imported, which saves each of them 12 s.
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        **more,
    }
    with out.with_suffix(".log").open("w+") as log:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=60 * MINUTES, check=False
        )
        log.seek(0)
        assert done.returncode == 0, "\n".join(log.read().splitlines()[-60:])
    return compare.load(out)


def reference(folder: Path, family: str) -> tuple[Path, dict[str, Array]]:
    """The model and what transformers says of it, made once."""
    model, out = folder / family, folder / f"{family}.npz"
    if not out.exists():
        models.save(family, model)
        measure("transformers", model, out)
    return model, compare.load(out)


def engine_arguments(run: matrix.Run) -> list[str]:
    return [part for name, value in run.arguments.items() for part in ("--argument", f"{name}={value}")]


def marked(run: matrix.Run) -> Any:
    return pytest.param(run, id=str(run), marks=() if run in matrix.SHORT else pytest.mark.long)


@pytest.mark.parametrize("run", [marked(run) for run in matrix.RUNS])
def test_vllm_reads_and_says_what_transformers_does(run: matrix.Run, folder: Path, table: list[str]) -> None:
    model, expected = reference(folder, run.family)
    found = measure("vllm", model, folder / f"{run}.npz", *engine_arguments(run), more=run.environment)
    apart = compare.differences(expected, found)
    table.append(compare.line(str(run), apart))
    if path := os.environ.get("HALLUTRACER_PARITY_TABLE"):
        Path(path).write_text("\n".join([compare.heading(), *table]) + "\n")
    assert max(apart.values()) <= matrix.TOLERANCE[run.family], apart
    assert apart["truth logits"] > 0.0, "two implementations that agree to the last bit are one implementation"
    assert ("rows_attention_head" in found) is ("pipeline_parallel_size" not in run.parallel)
    assert compare.unequal(expected, found) == []
    # What was to be provoked did happen.
    assert found["preemptions"] > 0 or run.family in matrix.WINDOWED
    assert (found["cached_again"] > 0).all()
    assert (found["cancelled_after"] <= 3).all()
    assert len(found["cancelled_after"]) > 5
    assert found["open"] == 0
    assert found["runner"] == run.runner


@pytest.mark.long
@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("RowTooEarly", "other prompts|row too early"),
        ("Swapped", "other prompts"),
        ("Deaf", "change of its probe"),
        ("Bare", "NonFiniteReadout.*does not keep"),
    ],
)
def test_a_fault_is_found_at_the_start_and_by_the_comparison(worker: str, said: str, folder: Path) -> None:
    model, expected = reference(folder, "llama")
    arguments = [*engine_arguments(matrix.Run("llama", True)), "--faulty", f"tests.parity.faulty.{worker}"]
    found = measure("vllm", model, folder / f"{worker}.npz", *arguments)
    assert found["self_test"].size == 1, "the self-test let it pass"
    assert re.search(said, str(found["self_test"][0]))
    if "failed" in found:
        assert found["failed"] == "NonFiniteReadout"
        return
    apart = np.abs(found["bundles"] - expected["bundles"]).max(axis=(1, 2, 3))
    assert apart.shape == (q.BUNDLES,)
    assert apart.max() > 1e-2, "the comparison let it pass"
