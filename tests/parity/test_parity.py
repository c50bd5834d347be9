"""Every number that vLLM gives equals the reference engine's, to 1e-5 in float32, however vLLM is run.

``make test`` runs one start of vLLM, ``make test-long`` all families, compiled and eager, tensor and pipeline
parallel.  ``HALLUTRACER_PARITY_TABLE`` names a file to write the largest differences to.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
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


class Measurer:
    """``measure serve``: one process that has imported everything, for all measurements that need no other."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"VLLM_CACHE_ROOT": str(folder / "vllm-cache"), "VLLM_LOGGING_LEVEL": "WARNING"}
        self._environment = environment
        self._process = self._start(["serve"], environment)

    def __call__(
        self, backend: str, model: Path, out: Path, *extra: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Array]:
        """Arrays of one measurement; its last words where it fails."""
        arguments, log = [backend, str(model), str(out), *extra], out.with_suffix(".log")
        if more:
            process = self._start(arguments, self._environment | more)
        else:
            process = self._process
            assert process.stdin is not None
            process.stdin.write(json.dumps([arguments, str(log)]) + "\n")
            process.stdin.flush()
        limit = threading.Timer(60 * MINUTES, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        assert process.stdout is not None
        if more:
            log.write_text(process.communicate()[0])
            status = process.returncode
        else:
            status = int(process.stdout.readline() or -9)
        limit.cancel()
        assert status == 0, "\n".join(log.read_text().splitlines()[-60:])
        return compare.load(out)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _start(self, arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.parity.measure", *arguments],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=None if arguments == ["serve"] else subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def measure(folder: Path) -> Iterator[Measurer]:
    measurer = Measurer(folder)
    yield measurer
    measurer.close()


def reference(measure: Measurer, folder: Path, family: str) -> tuple[Path, dict[str, Array]]:
    """The model and what transformers says of it, made once."""
    model, out = folder / family, folder / f"{family}.npz"
    if not out.exists():
        models.save(family, model)
        measure("transformers", model, out)
    return model, compare.load(out)


def engine_arguments(run: matrix.Run) -> list[str]:
    return [part for name, value in run.arguments.items() for part in ("--argument", f"{name}={value}")]


@pytest.mark.long
@pytest.mark.parametrize("run", matrix.RUNS, ids=str)
def test_vllm_reads_and_says_what_transformers_does(
    run: matrix.Run, measure: Measurer, folder: Path, table: list[str]
) -> None:
    model, expected = reference(measure, folder, run.family)
    found = measure("vllm", model, folder / f"{run}.npz", *engine_arguments(run), more=run.environment)
    apart = compare.differences(expected, found)
    table.append(compare.line(str(run), apart))
    if path := os.environ.get("HALLUTRACER_PARITY_TABLE"):
        Path(path).write_text("\n".join([compare.heading(), *table]) + "\n")
    assert max(apart.values()) <= matrix.TOLERANCE, apart
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
def test_a_fault_is_found_at_the_start_and_by_the_comparison(
    worker: str, said: str, measure: Measurer, folder: Path
) -> None:
    model, expected = reference(measure, folder, "llama")
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
