"""The context record of a bundle: probes that tell what a prompt is, not whether its answer will be right.

Each has one head and direction a layer, as the bundle's own probes have, in the ``context_`` tensors of
probes.safetensors.  From the depth mean of its logits comes P(name) = sigmoid(weight . depth mean + intercept):

``asks``     the prompt asks the model for a fact, so that its answer can be a hallucination at all
``passage``  text to answer from stands beside the question
``stated``   that text states the answer; meaningful only together with ``passage``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

ContextName = Literal["asks", "passage", "stated"]
ContextSignal = Literal["passage", "stated", "stated_length"]
# What a classifier may read: P(passage), P(passage) P(stated), and that times ln(tokens of the prompt).
CONTEXT_SIGNALS: Final[tuple[ContextSignal, ...]] = ("passage", "stated", "stated_length")
_NEEDS: Final[Mapping[ContextSignal, set[ContextName]]] = {
    "passage": {"passage"},
    "stated": {"passage", "stated"},
    "stated_length": {"passage", "stated"},
}


@dataclass(frozen=True, slots=True)
class ContextProbe:
    """One of them.  Its tensors are at its place in ``Context.probes``."""

    name: ContextName
    weight: float
    intercept: float
    rows: int  # that it was fitted on
    positive: int  # of them, those of which it is true
    auroc: float  # out of fold


@dataclass(frozen=True, slots=True)
class Applicability:
    """Where P(asks) is below ``threshold``, the prompt asks for no fact, and the risk does not apply to it."""

    threshold: float
    questions_below: float  # share of the training questions, out of fold: taken for prompts that ask for no fact
    others_above: float  # share of the other training prompts, out of fold: taken for questions
    statement: str  # what it means, and what not


@dataclass(frozen=True, slots=True)
class Context:
    """What a bundle tells of a prompt besides its risk."""

    probes: tuple[ContextProbe, ...]  # A of them, each name at most once
    applicability: Applicability | None  # exactly where there is a probe ``asks``

    def place(self, name: ContextName) -> int | None:
        """Of the probe of this name among ``probes``; None where there is none."""
        return next((place for place, probe in enumerate(self.probes) if probe.name == name), None)


def check_context(
    context: Context, signals: tuple[str, ...], require: Callable[[bool, str, object, object], None]
) -> None:
    """Check ranges and names; ``require`` raises where a check fails."""
    names = [probe.name for probe in context.probes]
    require(0 < len(names) == len(set(names)), "context.probes", "one or more, each name once", names)
    for place, probe in enumerate(context.probes):
        where = f"context.probes[{place}]"
        require(probe.weight > 0.0, f"{where}.weight", "a positive number", probe.weight)
        require(0 < probe.positive < probe.rows, f"{where}.positive", f"1 to {probe.rows - 1}", probe.positive)
        require(0.0 <= probe.auroc <= 1.0, f"{where}.auroc", "a number from 0 to 1", probe.auroc)
    for name in CONTEXT_SIGNALS:
        needed = _NEEDS[name] if name in signals else set()
        require(needed <= set(names), "context.probes", f"the probes {sorted(needed)} of the signal {name}", names)
    applicability = context.applicability
    require(
        (applicability is None) == ("asks" not in names),
        "context.applicability",
        "null exactly where there is no probe 'asks'",
        applicability,
    )
    if applicability is None:
        return
    where = "context.applicability"
    require(0.0 < applicability.threshold < 1.0, f"{where}.threshold", "a number between 0 and 1", applicability)
    for field in ("questions_below", "others_above"):
        value = getattr(applicability, field)
        require(0.0 <= value <= 1.0, f"{where}.{field}", "a number from 0 to 1", value)
    require(applicability.statement != "", f"{where}.statement", "a non-empty string", "")
