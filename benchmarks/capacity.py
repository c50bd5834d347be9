"""How many GPUs a load needs, on paper: prints the table of docs/replicas.md.

    python -m benchmarks.capacity [--prompt 500] [--answer 100] [--passed 0.7]

Prefill is bound by arithmetic: two operations per parameter and token.  Decoding is bound by
memory: a step reads all weights once for all answers of the batch, and each answer's cache.  Shares
of the data sheets' figures that are reached are assumptions.  Nothing of it was run on a GPU."""

from __future__ import annotations

import argparse
import math
import sys
from typing import NamedTuple

RATES = (1, 10, 1000)
REACHED_FLOPS, REACHED_BANDWIDTH = 0.4, 0.6  # shares of the data sheet's
BUSY = 0.6  # of a replica's time at most: above it the queue grows fast
MOST_GPUS = 4  # of a replica: beyond that the links between GPUs decide, which this does not know
MEMORY = 0.9  # of a GPU's, for weights and cache (vLLM's default)
# time with the readout and the service over bare vLLM: the worst paired median (benchmarks/LOG.md)
READOUT = 1.03
# answers a second of one service process; 465 measured where the model costs next to nothing
FRONT_END = 400.0


class Gpu(NamedTuple):
    """From the maker's data sheet; dense bfloat16, no sparsity."""

    name: str
    tflops: float
    gb_per_s: float
    gb: float


class Model(NamedTuple):
    """Weights in bfloat16; ``cache``: bytes of keys and values per token."""

    name: str
    parameters: float
    cache: float

    @property
    def bytes(self) -> float:
        return 2 * self.parameters


GPUS = (Gpu("L4", 121, 300, 24), Gpu("A100 80 GB", 312, 2039, 80), Gpu("H100 SXM", 989, 3350, 80))
# Llama 3.1: 2 (keys, values) x layers x 8 heads x 128 x 2 bytes.
MODELS = (Model("8B", 8.03e9, 2 * 32 * 8 * 128 * 2), Model("70B", 70.6e9, 2 * 80 * 8 * 128 * 2))


class Load(NamedTuple):
    """One request: tokens of its prompt, tokens of an answer, and the share of prompts that are
    answered here."""

    prompt: int
    answer: int
    passed: float


def gpus_of_a_replica(gpu: Gpu, model: Model) -> int:
    """Return the fewest, a power of two, whose memory holds the weights and a tenth of that in
    cache."""
    count = 1
    while count * gpu.gb * 1e9 * MEMORY < 1.1 * model.bytes:
        count *= 2
    return count


def seconds(gpu: Gpu, model: Model, load: Load) -> tuple[float, float]:
    """Return one replica's time for a prompt, and for an answer's share of its steps in a full
    batch of at most 64."""
    count = gpus_of_a_replica(gpu, model)
    prefill = (
        2 * model.parameters * load.prompt / (count * gpu.tflops * 1e12 * REACHED_FLOPS) * READOUT
    )
    room = count * gpu.gb * 1e9 * MEMORY - model.bytes
    tokens = load.prompt + load.answer
    batch = max(1.0, min(64.0, room // (model.cache * tokens)))
    step = (model.bytes + batch * model.cache * tokens) / (
        count * gpu.gb_per_s * 1e9 * REACHED_BANDWIDTH
    )
    return prefill, load.answer * step / batch * READOUT


def replicas(rate: float, cost: float) -> int:
    """Return how many ``rate`` requests a second of ``cost`` seconds each need, and one more, which
    may be away."""
    return math.ceil(max(rate * cost / BUSY, rate / FRONT_END)) + 1


def rows(load: Load) -> list[str]:
    lines = [
        (
            "| model, GPU | GPUs of a replica | a score | 1/s | 10/s | 1,000/s | the same with"
            " answers |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in MODELS:
        for gpu in GPUS:
            prefill, decode = seconds(gpu, model, load)
            each = gpus_of_a_replica(gpu, model)
            if each > MOST_GPUS:
                continue
            scores = [each * replicas(rate, prefill) for rate in RATES]
            answers = [each * replicas(rate, prefill + load.passed * decode) for rate in RATES]
            lines.append(
                f"| {model.name}, {gpu.name} | {each} | {prefill * 1e3:.0f} ms | "
                + " | ".join(f"{count:,}" for count in scores)
                + f" | {', '.join(f'{count:,}' for count in answers)} |"
            )
    return lines


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--prompt", type=int, default=500, help="tokens")
    arguments.add_argument("--answer", type=int, default=100, help="tokens")
    arguments.add_argument(
        "--passed", type=float, default=0.7, help="share of the prompts that are answered"
    )
    given = arguments.parse_args()
    print("\n".join(rows(Load(given.prompt, given.answer, given.passed))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
