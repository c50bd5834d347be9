"""What a score costs, in prefills of the same prompt.

A prefill is the pass over the n prompt tokens through all blocks, without the language-model head.  Costs are
multiply-adds with weights: n x (weights of the blocks) for a prefill, the head's weights (vocabulary x hidden size) for
each token whose distribution is wanted, both for each token of an answer.  With N the blocks' weights, H the head's, T
the answer's tokens:

    none    no model                      0
    A       prefill only                  1
    B       and one lm_head               1 + H / (n N)
    C       and one greedy answer         1 + T (N + H) / (n N)

Left out are attention between tokens and embeddings (small for prompts of common length), the probes themselves (a few
thousand multiply-adds), and HalluGuard's gradients.  n is the mean over the set's rows, and T the longest answer
allowed, so that C is a cost that answers stay below.  All experts of a mixture count as weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from service.engines.base import LoadedModel

CostClass = Literal["none", "A", "B", "C"]

CLASSES: Mapping[CostClass, str] = MappingProxyType(
    {"none": "no model", "A": "prefill only", "B": "one lm_head", "C": "one answer"}
)
"""Class -> what it takes, cheapest first."""

_NOT_A: Mapping[str, CostClass] = MappingProxyType(
    {
        "prompt-length": "none",
        "text-ngrams": "none",
        "kind-prior": "none",
        "first-token-max-prob": "B",
        "first-token-entropy": "B",
        "halluguard": "C",
    }
)


@dataclass(frozen=True)
class Cost:
    """One method on one set."""

    cls: CostClass
    prefills: float | None  # None where the model's weights cannot be counted


@dataclass(frozen=True)
class Weights:
    """How many weights a token passes through."""

    blocks: int
    head: int


def cost_class(method: str) -> CostClass:
    """The class of a method by its name on the command line."""
    return _NOT_A.get(method, "A")


def count_weights(engine: LoadedModel) -> Weights | None:
    """None where the model's modules are in another process."""
    modules = engine.torch_model
    if modules is None:
        return None
    blocks = sum(weight.numel() for block in modules.blocks for weight in block.parameters())
    return Weights(blocks, sum(weight.numel() for weight in modules.head.parameters()))


def cost(method: str, weights: Weights | None, prompt_tokens: float, answer_tokens: int) -> Cost:
    """The method's cost on prompts of ``prompt_tokens`` tokens in the mean and answers of ``answer_tokens``."""
    cls = cost_class(method)
    if cls == "none":
        return Cost(cls, 0.0)
    if cls == "A":
        return Cost(cls, 1.0)
    if weights is None:
        return Cost(cls, None)
    prefill = prompt_tokens * weights.blocks
    more = weights.head if cls == "B" else answer_tokens * (weights.blocks + weights.head)
    return Cost(cls, 1.0 + more / prefill)
