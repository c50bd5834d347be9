"""Which families vLLM is compared on, and how it is run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.parity import models

# vLLM's Gemma 3 imports its image processor, which wants torchvision; the CPU install leaves that out.
NOT_HERE = {"gemma3": "vLLM's Gemma3ForConditionalGeneration needs torchvision, which its CPU install leaves out"}
SERVED = [family for family in models.CONFIGS if family not in NOT_HERE]
# vLLM frees blocks behind a window: little is preempted, and less of a prefix is kept.
WINDOWED = {"mistral", "gemma2", "gemma2_capped", "gemma3_text"}
TOLERANCE = 1e-5  # absolute, float32


@dataclass(frozen=True)
class Run:
    """One start of vLLM."""

    family: str
    eager: bool
    parallel: dict[str, int] = field(default_factory=dict)
    runner: str = "V1"  # vLLM's model runner; V2 is its default on CUDA

    def __str__(self) -> str:
        parts = [self.family, "eager" if self.eager else "compiled", *(["V2"] if self.runner == "V2" else [])]
        return "-".join([*parts, *(f"{name.split('_')[0]}{size}" for name, size in self.parallel.items())])

    @property
    def environment(self) -> dict[str, str]:
        """What the process gets besides: for V2, Triton's interpreter in place of a GPU."""
        if self.runner == "V1":
            return {}
        interpreter = str(Path(__file__).parent / "interpreter")
        path = os.pathsep.join([interpreter, *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": path}

    @property
    def arguments(self) -> dict[str, str]:
        """vLLM's: few blocks of key-value cache, so that running requests have to give way."""
        blocks = 24 if self.family.startswith("gemma") else 14  # windows and whole contexts in layers by turns
        given = {
            "max_num_seqs": 40,
            "max_model_len": models.CONTEXT,
            "block_size": 32,
            "num_gpu_blocks_override": blocks,
        }
        return {name: str(value) for name, value in (given | self.parallel).items()} | {
            "enforce_eager": str(self.eager).lower()
        }


TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
RUNS = [
    *(Run(family, eager) for family in SERVED for eager in (False, True)),
    Run("llama", True, TENSOR),
    Run("llama", True, runner="V2"),
    Run("gemma3_text", True, runner="V2"),
    Run("qwen3", False, TENSOR),
    Run("gpt2", False, PIPELINE),
]
