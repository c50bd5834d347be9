"""What a score costs, in prefills of the same prompt.

A prefill is the pass over the n prompt tokens through all blocks, without the language-model head.  Costs are
multiply-adds with weights: n x (weights of the blocks) for a prefill, the head's weights (vocabulary x hidden size) for
each token whose distribution is wanted, both for each token of an answer.  With N the blocks' weights, H the head's, T
the answer's tokens:

    none    no model                      0
    A       prefill only                  1
    B       and one lm_head               1 + H / (n N)
    C       and one greedy answer         1 + T (N + H) / (n N)
    D       and K sampled answers         1 + K T (N + H) / (n N), from one prefill

P(True) is C and a second prompt, of question and answer, of q tokens: (q N + H) / (n N) more.  What a method needs to
learn is not counted: a semantic-entropy probe samples for its training rows only.

Left out are attention between tokens and embeddings (small for prompts of common length), the probes themselves (a few
thousand multiply-adds), and HalluGuard's gradients.  n and q are means over the set's rows, and T the longest
answer allowed, so that C and D are costs that answers stay below.  All experts of a mixture count as weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from service.engines.base import LoadedModel

CostClass = Literal["none", "A", "B", "C", "D"]

CLASSES: Mapping[CostClass, str] = MappingProxyType(
    {"none": "no model", "A": "prefill only", "B": "one lm_head", "C": "one answer", "D": "sampled answers"}
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
        "perplexity": "C",
        "p-true": "C",
        "mind": "C",
        "semantic-entropy": "D",
        "semantic-entropy-discrete": "D",
        "eigenscore": "D",
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


@dataclass(frozen=True)
class Lengths:
    """Of one set, in tokens."""

    prompt: float  # mean
    answer: int  # longest
    samples: int = 0  # answers of class D
    asked: float = 0.0  # mean of the prompts that ask for P(True)


def cost(method: str, weights: Weights | None, lengths: Lengths) -> Cost:
    """The method's cost on prompts and answers of these lengths."""
    cls = cost_class(method)
    if cls == "none":
        return Cost(cls, 0.0)
    if cls == "A":
        return Cost(cls, 1.0)
    if weights is None:
        return Cost(cls, None)
    answer = lengths.answer * (weights.blocks + weights.head)
    more: float = {"B": weights.head, "C": answer, "D": lengths.samples * answer}[cls]
    if method == "p-true":
        more += lengths.asked * weights.blocks + weights.head
    return Cost(cls, 1.0 + more / (lengths.prompt * weights.blocks))
