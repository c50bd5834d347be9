"""Every number that vLLM gives equals the reference engine's, to 1e-5 in float32, however vLLM is run.

``HALLUTRACER_PARITY=full``: all families, compiled and eager, tensor and pipeline parallel.
``HALLUTRACER_PARITY_TABLE``: a file to write the largest differences to.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

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
    """Measure in a process; shows the end of its log if it fails."""
    command = [sys.executable, "-m", "tests.parity.measure", backend, str(model), str(out), *extra]
    environment = os.environ | {
        "VLLM_CACHE_ROOT": str(out.parent / "vllm-cache"),
        "VLLM_LOGGING_LEVEL": "WARNING",
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
    """The model and its reference measurement, made once."""
    model, out = folder / family, folder / f"{family}.npz"
    if not out.exists():
        models.save(family, model)
        measure("transformers", model, out)
    return model, compare.load(out)


def engine_arguments(run: matrix.Run) -> list[str]:
    return [part for name, value in run.arguments.items() for part in ("--argument", f"{name}={value}")]


@pytest.mark.parametrize("run", matrix.runs(), ids=str)
def test_vllm_reads_and_says_what_transformers_does(run: matrix.Run, folder: Path, table: list[str]) -> None:
    model, expected = reference(folder, run.family)
    measured = measure("vllm", model, folder / f"{run}.npz", *engine_arguments(run), more=run.environment)
    apart = compare.differences(expected, measured)
    table.append(compare.line(str(run), apart))
    if path := os.environ.get("HALLUTRACER_PARITY_TABLE"):
        Path(path).write_text("\n".join([compare.heading(), *table]) + "\n")
    assert max(apart.values()) <= matrix.TOLERANCE[run.family], apart
    assert apart["truth logits"] > 0.0, "two implementations that agree to the last bit are one implementation"
    assert ("rows_attention_head" in measured) is ("pipeline_parallel_size" not in run.parallel)
    assert compare.unequal(expected, measured) == []
    # The special cases did occur.
    assert measured["preemptions"] > 0 or run.family in matrix.WINDOWED
    assert (measured["cached_again"] > 0).all()
    assert (measured["cancelled_after"] <= 3).all()
    assert len(measured["cancelled_after"]) > 5
    assert measured["open"] == 0
    assert measured["runner"] == run.runner


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("RowTooEarly", "other prompts|too early"),
        ("Swapped", "other prompts"),
        ("Deaf", "change of its probe"),
        ("Bare", "NonFiniteReadout.*compiled graph"),
    ],
)
def test_a_fault_is_found_at_the_start_and_by_the_comparison(worker: str, message: str, folder: Path) -> None:
    model, expected = reference(folder, "llama")
    if worker in ("RowTooEarly", "Deaf") and os.environ.get("HALLUTRACER_PARITY") != "full":
        pytest.skip("HALLUTRACER_PARITY=full tries this fault too")
    arguments = [*engine_arguments(matrix.Run("llama", True)), "--faulty", f"tests.parity.faulty.{worker}"]
    measured = measure("vllm", model, folder / f"{worker}.npz", *arguments)
    assert measured["self_test"].size == 1, "the self-test let it pass"
    assert re.search(message, str(measured["self_test"][0]))
    if "failed" in measured:
        assert measured["failed"] == "NonFiniteReadout"
        return
    apart = np.abs(measured["bundles"] - expected["bundles"]).max(axis=(1, 2, 3))
    assert apart.shape == (q.BUNDLES,)
    assert apart.max() > 1e-2, "the comparison let it pass"
