"""What a bundle's context probes tell of one prompt: does it ask for a fact, is there text beside it to answer from?

After the trajectories and numpy only, so that every engine gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from probes_store.records import Context


@dataclass(frozen=True, slots=True)
class PromptContext:
    """The probabilities of one prompt; None where the bundle has no such probe."""

    asks: float | None = None  # that it asks for a fact
    passage: float | None = None  # that text to answer from stands beside the question
    stated: float | None = None  # P(passage) P(that text states the answer)
    stated_length: float | None = None  # the same times ln(tokens of the prompt): in longer ones it is found less often
    applies: bool = True  # False: it asks for no fact, so the risk does not apply; True where nothing tells

    @property
    def said(self) -> bool | None:
        """``applies``, None where the bundle cannot tell."""
        return None if self.asks is None else self.applies


UNKNOWN = PromptContext()


def prompt_context(context: Context | None, depth_means: Sequence[float], prompt_tokens: int) -> PromptContext:
    """Of the depth means of the context probes, in the record's order, of a prompt of one token or more."""
    if context is None:
        return UNKNOWN
    told = {
        probe.name: sigmoid(probe.weight * mean + probe.intercept)
        for probe, mean in zip(context.probes, depth_means, strict=True)
    }
    asks, passage, stated = (told.get(name) for name in ("asks", "passage", "stated"))
    stated = None if passage is None or stated is None else passage * stated
    applicability = context.applicability
    return PromptContext(
        asks,
        passage,
        stated,
        None if stated is None else stated * math.log(prompt_tokens),
        applies=applicability is None or asks is None or not asks < applicability.threshold,  # a NaN applies
    )


def sigmoid(z: float) -> float:
    """1 / (1 + exp(-z)), which never overflows."""
    tail = math.exp(-abs(z)) if z == z else z
    return (1.0 if z >= 0 else tail) / (1.0 + tail)
