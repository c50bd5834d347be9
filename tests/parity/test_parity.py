"""Every number that vLLM gives equals the reference engine's, to 1e-5 in float32, however vLLM is
run.

``make test`` runs one start of vLLM, ``make test-long`` three families compiled, others eager,
tensor and pipeline parallel, ``make test-matrix`` all the others.  ``HALLUTRACER_PARITY_TABLE``
names a file to write the largest differences to; tests/engines/vllm/touch_points.md then gets its
rows of versions, too."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.engines.checkpoint import folder_fingerprint
from service.readout import Site
from tests.engines.vllm.installed import vllm_or_skip
from tests.parity import models, quantized, versions
from tests.parity.models import FEW_PROMPTS
from tests.serve_process import PATHS

vllm_or_skip()
ROOT = Path(__file__).parents[2]
matrix = pytest.mark.matrix
MINUTES = 10
NUMBERS = (
    "truth logits",
    "depth mean",
    "later bundles",
    "first token",
    "activations",
    "answers' own tokens",
)
TOLERANCE = 1e-5  # absolute, float32
Array = NDArray[Any]
SERVED = [family for family in models.CONFIGS if family not in models.NOT_IN_VLLM]
# vLLM frees blocks behind a window: little is preempted, and less of a prefix is kept.
WINDOWED = {"mistral", "gemma2", "gemma2_capped", "gemma3_text"}


@dataclass(frozen=True)
class Run:
    """One start of vLLM."""

    family: str
    eager: bool
    parallel: dict[str, int] = field(default_factory=dict)
    runner: str = "V1"  # vLLM's model runner; V2 is its default on CUDA
    drafts: str | None = None  # vLLM's method of speculative decoding
    packages: Path | None = None  # of another version of vLLM than the installed one

    def __str__(self) -> str:
        parts = [
            self.family,
            "eager" if self.eager else "compiled",
            *(["V2"] if self.runner == "V2" else []),
        ]
        parts += [self.drafts] if self.drafts is not None else []
        return "-".join(
            [*parts, *(f"{name.split('_')[0]}{size}" for name, size in self.parallel.items())]
        )

    @property
    def prompts(self) -> int:
        """How many prompts are compared."""
        return models.MANY_PROMPTS if str(self) == "llama-compiled" else models.PROMPTS

    @property
    def reads_answers(self) -> bool:
        """Whether answers' own tokens are read: not with drafts, and so that graphs without it are
        compared, too."""
        return self.drafts is None and (
            self.eager or bool(self.parallel) or self.family in ("llama", "gemma3_text")
        )

    @property
    def is_of_matrix(self) -> bool:
        """Whether it is left to ``make test-matrix``: most families compiled, whose kernels other
        runs have."""
        plain = not (self.eager or self.parallel or self.drafts) and self.runner == "V1"
        return plain and self.family not in ("llama", "qwen3", "gemma3_text")

    @property
    def environment(self) -> dict[str, str]:
        """What the process gets besides: for V2, Triton's interpreter in place of a GPU."""
        own = [str(self.packages)] if self.packages else []
        given = (
            {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
            if self.runner == "V2"
            else {}
        )
        own += [str(Path(__file__).parent / "interpreter")] if given else []
        path = os.pathsep.join([*own, PATHS])
        return given | ({"PYTHONPATH": path} if own else {})

    @property
    def arguments(self) -> list[str]:
        """vLLM's: few blocks of key-value cache, so that running requests have to give way."""
        by_turns = self.family.startswith(
            ("gemma", "gpt_oss")
        )  # windows and whole contexts in layers
        blocks = 24 if by_turns else 12
        given: dict[str, object] = {
            "max_num_seqs": 40,
            "max_model_len": models.CONTEXT,
            "block_size": 32,
        }
        given |= {
            "num_gpu_blocks_override": blocks,
            "enforce_eager": str(self.eager).lower(),
            **self.parallel,
        }
        if self.drafts is not None:
            drafts = {"method": self.drafts, "num_speculative_tokens": 3, "prompt_lookup_min": 1}
            given["speculative_config"] = json.dumps({**drafts, "prompt_lookup_max": 3})
        reads = ["--reads-answers"] if self.reads_answers else []
        return [
            *("--prompts", str(self.prompts)),
            *reads,
            *(part for name, value in given.items() for part in ("--argument", f"{name}={value}")),
        ]


TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
# Without the compiler vLLM's own kernels run, which families share: norms, windows, experts,
# learned positions; Llama's run with drafts.
EAGER = ("gemma2_capped", "gemma3_text", "qwen3", "qwen2_moe", "gpt2")
RUNS = [
    *(Run(family, False) for family in SERVED),
    *(Run(family, True) for family in EAGER),
    Run("llama", True, TENSOR),
    Run("llama", True, drafts="ngram"),
    Run("qwen3", True, runner="V2"),
    Run("gemma3_text", True, runner="V2", drafts="ngram_gpu"),
    Run("qwen3", False, TENSOR),
    Run("gpt2", False, PIPELINE),
]


def load(path: Path) -> dict[str, Array]:
    with np.load(path) as arrays:
        return dict(arrays)


def differences(reference: dict[str, Array], measured: dict[str, Array]) -> dict[str, float]:
    """The largest absolute difference of each kind of number, over both sites, all prompts and all
    bundles."""
    expected, actual = reference["trajectories"], measured["trajectories"]
    assert np.array_equal(np.isnan(expected), np.isnan(actual)), (
        "numbers of a bundle that does not read the prompt"
    )
    pairs = {
        "truth logits": [(expected, actual)],
        "depth mean": [(expected.mean(-1), actual.mean(-1))],
        "later bundles": [(reference["later"], measured["later"])],
        "first token": [(reference[name], measured[name]) for name in ("log_max_prob", "entropy")],
        "answers' own tokens": [
            (reference[name], measured[name]) for name in ("read_of_answers",) if name in measured
        ],
        "activations": [
            (reference[name], measured[name])
            for name in map("rows_{}".format, Site)
            if name in measured
        ],
    }
    return {name: largest_difference(arrays) for name, arrays in pairs.items()}


def largest_difference(pairs: list[tuple[Array, Array]]) -> float:
    return max((float(np.nanmax(np.abs(a - b))) for a, b in pairs), default=0.0)


def row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def table() -> list[str]:
    return []


class Measurer:
    """``measure serve``: one process that has imported everything, for all measurements that need
    no other."""

    def __init__(self, folder: Path, more: Mapping[str, str] = MappingProxyType({})) -> None:
        environment = os.environ | {
            "PYTHONPATH": PATHS,
            "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        environment.pop("VLLM_CPU_OMP_THREADS_BIND", None)  # ranks have cores, as a user's
        environment |= more
        self._environment = environment
        self._process = self._start(["serve"], environment)

    def __call__(
        self,
        backend: str,
        model: Path,
        out: Path,
        *extra: str,
        more: Mapping[str, str] = MappingProxyType({}),
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
        return load(out)

    def close(self) -> None:
        self._process.communicate()

    def _start(self, arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.parity.measure", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if arguments == ["serve"] else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def measure(folder: Path) -> Iterator[Measurer]:
    measurer = Measurer(folder)
    yield measurer
    measurer.close()


def model_of(folder: Path, family: str) -> Path:
    model = folder / family
    return model if model.exists() else models.save(family, model)


def reference(
    measure: Measurer, folder: Path, family: str, prompts: int
) -> tuple[Path, dict[str, Array]]:
    model, out = model_of(folder, family), folder / f"{family}-{prompts}.npz"
    if not out.exists():
        measure("transformers", model, out, "--prompts", str(prompts))
    return model, load(out)


def check(run: Run, expected: dict[str, Array], measured: dict[str, Array]) -> dict[str, float]:
    """Return ``differences`` of a run that says and does what it is to."""
    apart = differences(expected, measured)
    assert max(apart.values()) <= TOLERANCE, apart
    assert apart["truth logits"] > 0.0, (
        "two implementations that agree to the last bit are one implementation"
    )
    assert ("read_of_answers" in measured) is run.reads_answers
    if run.reads_answers:
        unread = [np.isnan(each["read_of_answers"]).any(-1) for each in (expected, measured)]
        assert np.array_equal(*unread)
        assert (~unread[0]).sum() > 5
    assert ("rows_attention_head" in measured) is ("pipeline_parallel_size" not in run.parallel)
    for name in ("token", "generated", "answers"):
        assert np.array_equal(expected[name], measured[name]), f"{name} differ"
    # What was to be provoked did happen.
    assert measured["preemptions"] > 0 or run.family in WINDOWED
    assert (measured["cached_again"] > 0).all()
    assert (measured["cancelled_after"] <= 3).all()
    assert len(measured["cancelled_after"]) > 5
    assert measured["open"] == 0
    assert measured["runner"] == run.runner
    assert bool(measured["accepted"] > 0) is (run.drafts is not None)
    # The last token of the first of them is alone in its step: vLLM lets drafts that it does not
    # have follow it.
    assert measured["cached_again"][0] == models.ALONE - 1 or run.family in WINDOWED
    return apart


@pytest.mark.long
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=matrix if run.is_of_matrix else ()) for run in RUNS], ids=str
)
def test_vllm_reads_and_says_what_transformers_does(
    run: Run, measure: Measurer, folder: Path, table: list[str]
) -> None:
    model, expected = reference(measure, folder, run.family, run.prompts)
    measured = measure("vllm", model, folder / f"{run}.npz", *run.arguments, more=run.environment)
    apart = check(run, expected, measured)
    if run.family in versions.FAMILIES and not run.parallel and run.eager is (run.runner == "V2"):
        versions.note(versions.INSTALLED, run.runner, run.family, max(apart.values()))
    table.append(
        row(str(run), [f"{apart[number]:.1e}" if apart[number] else "-" for number in NUMBERS])
    )
    if path := os.environ.get("HALLUTRACER_PARITY_TABLE"):
        Path(path).write_text(
            "\n".join([row("model", [*NUMBERS]), "|---" * 7 + "|", *table]) + "\n"
        )


def apart(measured: dict[str, Array], what: str) -> float:
    """The largest difference of what both engines say, over all sites, relative to the largest
    number."""
    expected = {
        name.removeprefix("expected_"): array
        for name, array in measured.items()
        if name.startswith(f"expected_{what}")
    }
    assert expected
    return max(
        float(np.abs(array - measured[f"found_{name}"]).max() / np.abs(array).max())
        for name, array in expected.items()
    )


@pytest.mark.long
@matrix
@pytest.mark.parametrize("family", models.COMPARED)
def test_more_families_are_read_as_transformers_reads_them(
    family: str, measure: Measurer, folder: Path
) -> None:
    model = models.save(family, folder / family)
    measured = measure("both", model, folder / f"{family}.npz", *Run(family, True).arguments)
    for what in ("logits", "rows"):
        assert apart(measured, what) <= models.BOUNDS.get(family, TOLERANCE), what
    assert np.array_equal(measured["expected_answers"], measured["found_answers"])


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name == "int8" else matrix) for name in quantized.METHODS],
)
def test_a_quantized_checkpoint_is_read_as_what_its_weights_stand_for(
    method: str, measure: Measurer, folder: Path
) -> None:
    plain = model_of(folder, "llama")
    packed, meant = quantized.quantize(plain, method, folder)
    bound, dtype = quantized.BOUNDS[method]
    arguments = [
        *Run("llama", True).arguments,
        "--reference",
        str(meant),
        "--dtype",
        dtype,
        "--method",
        method,
    ]
    try:
        measured = measure("both", packed, folder / f"{method}.npz", *arguments)
    except AssertionError:
        if quantized.KERNELS.get(method, "none") not in (folder / f"{method}.log").read_text():
            raise
        pytest.skip(
            f"vLLM's build for this CPU has no {quantized.KERNELS[method]}, which its start said"
        )
    for what in ("logits", "rows"):
        assert 0.0 < apart(measured, what) <= bound, what
    assert (
        len(
            {
                str(measured["expected_fingerprint"]),
                str(measured["found_fingerprint"]),
                folder_fingerprint(plain),
            }
        )
        == 3
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("worker", "words"),
    [
        ("RowTooEarly", "other prompts|row too early"),
        ("Swapped", "other prompts"),
        ("Deaf", "change of its probe"),
        ("Bare", "NonFiniteReadout.*does not keep"),
        ("AnswersTooEarly", "answers' own tokens"),
    ],
)
def test_a_fault_is_found_at_the_start_and_by_the_comparison(
    worker: str, words: str, measure: Measurer, folder: Path
) -> None:
    model, expected = reference(measure, folder, "llama", FEW_PROMPTS)
    faulty = ["--prompts", str(FEW_PROMPTS), "--faulty", f"tests.parity.faulty.{worker}"]
    arguments = [*Run("llama", True).arguments, *faulty]
    measured = measure("vllm", model, folder / f"{worker}.npz", *arguments)
    assert measured["self_test"].size == 1, "the self-test let it pass"
    assert re.search(words, str(measured["self_test"][0]))
    if "failed" in measured:
        assert measured["failed"] == "NonFiniteReadout"
        return
    apart = np.abs(measured["bundles"] - expected["bundles"]).max(axis=(1, 2, 3))
    if worker == "AnswersTooEarly":  # whose prompts are read as they should be
        return
    assert apart.shape == (models.BUNDLES,)
    assert apart.max() > 1e-2, "the comparison let it pass"
