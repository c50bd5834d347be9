"""Whether a bundle's guarantee holds for one request, and if not, why.

The manifest's statement names more reasons than a service can see: whether the questions are drawn as those of the
calibration were is the operator's to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probes_store.manifest import Manifest
from service.engines.base import Sampling
from service.judging.conversation import Shape
from service.policies.guard import Policy

TOKEN_IDS = "rendering: the prompt came as token ids"
NO_TEMPLATE = "rendering: this route applies no chat template"
OTHER_ENDING = "rendering: the prompt does not end as the chat template ends a question"
ANSWERED = "rendering: the last message is the assistant's"


@dataclass(frozen=True, slots=True)
class GuaranteeStatus:
    """A guarantee as it stands for one request; ``violations`` of what its calibration assumed."""

    alpha: float
    delta: float
    violations: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Return whether no violation is known."""
        return not self.violations


def guarantee_status(
    manifest: Manifest, policy: Policy, dtype: str, violations: tuple[str, ...] = ()
) -> GuaranteeStatus | None:
    """Return None where the bundle has no guarantee; ``dtype`` is the engine's, ``violations`` are further ones."""
    guarantee = manifest.guarantee
    if guarantee is None:
        return None
    found = []
    if not policy.action.withholds:
        found.append(f"policy: {policy.name!r} withholds nothing")
    if not outside_as_calibrated(manifest, policy):
        does, did = ("also withholds", "did not") if policy.withhold_outside else ("does not withhold", "did")
        found.append(f"policy: {policy.name!r} {does} prompts outside training, the calibration {did}")
    if policy.threshold is not None and policy.threshold != guarantee.threshold:
        found.append(f"threshold: {policy.threshold:g} applies, {guarantee.threshold:g} is guaranteed")
    if dtype != guarantee.dtype:
        found.append(f"dtype: the engine computes in {dtype}, the calibration did in {guarantee.dtype}")
    return GuaranteeStatus(guarantee.alpha, guarantee.delta, (*found, *violations))


def outside_as_calibrated(manifest: Manifest, policy: Policy) -> bool:
    """Whether ``policy`` treats prompts outside training as the bundle's calibration did.

    It withheld them exactly where a policy that says nothing does (``Scorer.withholds_outside``).
    """
    return policy.withhold_outside in (None, manifest.tells_outside)


def chat_violations(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """How a conversation departs from a question: an answer's beginning moves the risk of what follows it."""
    return (ANSWERED,) if messages and messages[-1].get("role") == "assistant" else ()


def shape_violations(manifest: Manifest, shapes: Sequence[Shape | None]) -> tuple[str, ...]:
    """Shapes of conversation that no row of the calibration had; of one that is not known, that it is not.

    Nothing of a bundle that does not name its own.
    """
    known = manifest.guarantee_shapes
    if known is None:
        return ()
    others = dict.fromkeys("not known" if shape is None else str(shape) for shape in shapes)
    return tuple(f"conversation: {shape}; the calibration had none like it" for shape in others if shape not in known)


def decoding_violations(sampling: Sampling | None) -> tuple[str, ...]:
    """How an answer that is decoded here departs from a greedy one; nothing to say where none is."""
    if sampling is None:
        return ()
    found = []
    if sampling.temperature != 0:
        found.append(f"decoding: temperature {sampling.temperature:g}, not greedy")
    if sampling.stop:
        found.append("decoding: ends at texts of the request's own")
    return tuple(found)
