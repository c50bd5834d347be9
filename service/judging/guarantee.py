"""The shape of a conversation, and whether a bundle's guarantee holds for one request, and if not, why.

A passage is guessed from the form of the last user message, and never looked for in more than ``LONG`` characters, so
that it is cheap enough for every request.  Examples in front of the question, the options of a multiple choice, or much
junk on lines of its own look the same and count too; a passage in a system prompt does not, which ``system`` shows.

The manifest's statement names more reasons than a service can see: whether the questions are drawn as those of the
calibration were is the operator's to know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

from probes_store.manifest import Manifest
from service.engines.base import Sampling
from service.policies.guard import Policy
from service.tool_calls import Tools

Turns = Literal["0", "1", "2-4", "5+"]
LONG = 400  # characters, about 60 words: hardly any question alone is longer
BESIDE = 60  # characters, about ten words, on other lines than the question's: more than a greeting or "Answer:"
QUESTION = ("?", "\uff1f", "\u061f")  # as Chinese and Arabic write it, too
_MARKER = re.compile(
    r"^[ \t#*<]*(?:contexts?|documents?|passages?|background|sources?|search results?|references?|excerpts?)"
    r"[ \t]*\d*[ \t]*(?:[:*>]|$)",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one conversation, for ``/metrics`` and guarantees; ``turns`` are the assistant's earlier ones."""

    turns: Turns
    passage: bool  # the last user message brings text along
    system: bool  # a system prompt stands above it

    def __str__(self) -> str:
        """Return what a guarantee calls it."""
        passage, system = ("a" if there else "no" for there in (self.passage, self.system))
        turns = "1 earlier turn" if self.turns == "1" else f"{self.turns} earlier turns"
        return f"{turns}, {passage} passage, {system} system prompt"


SHAPES = tuple(Shape(*one) for one in product(get_args(Turns), (False, True), (False, True)))
"""All there are."""


def shape_of(messages: Sequence[object]) -> Shape:
    """Return the shape of messages as anybody may send them: what is no message, or has no text, is nothing said."""
    known = [one for one in messages if isinstance(one, Mapping)]
    roles = [one.get("role") for one in known]
    answers = roles[:-1].count("assistant")  # one at the end is the answer's beginning
    asked = next((one.get("content") for one in reversed(known) if one.get("role") == "user"), "")
    parts = asked if isinstance(asked, list) else [asked]
    texts = [part.get("text") if isinstance(part, Mapping) and isinstance(asked, list) else part for part in parts]
    return Shape(
        turns="0" if answers == 0 else "1" if answers == 1 else "2-4" if answers < 5 else "5+",
        passage=has_passage("\n".join(text for text in texts if isinstance(text, str))),
        system="system" in roles or "developer" in roles,
    )


def has_passage(text: str) -> bool:
    """Return whether it is long, names a passage ("Context:"), or has text on other lines than its question's.

    The question is the last line that ends in a question mark, else the last that does not end in a colon."""
    text = text.strip()
    if len(text) > LONG:
        return True
    lines = [line for part in text.splitlines() if (line := part.strip())]
    asks = [line for line in lines if line.endswith(QUESTION)] or [line for line in lines if not line.endswith(":")]
    beside = sum(map(len, lines)) - len((asks or lines or [""])[-1])
    return beside > BESIDE or _MARKER.search(text) is not None


TOKEN_IDS = "rendering: the prompt came as token ids"
NO_TEMPLATE = "rendering: this route applies no chat template"
MEDIA = "prompt: an image, audio or video, where training had text"
OTHER_ENDING = "rendering: the prompt does not end as the chat template ends a question"
NO_ANSWER = "answer: none is decoded here, and the calibration read the answers again"
TOOLS = "prompt: tools or their results, where the calibration had none"
ANSWERED = "rendering: the last message is the assistant's"
SECOND_VERDICT = "canary: the default bundle's verdict withholds too, the calibration knew this bundle's alone"


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
    if policy.stop_at is not None:
        found.append(f"policy: {policy.name!r} ends answers under way, the calibration did not")
    if policy.recheck != bool(manifest.guarantee_reads_answers):
        does, did = ("reads", "did not") if policy.recheck else ("does not read", "did")
        found.append(f"policy: {policy.name!r} {does} answers again, the calibration {did}")
    if dtype != guarantee.dtype:
        found.append(f"dtype: the engine computes in {dtype}, the calibration did in {guarantee.dtype}")
    return GuaranteeStatus(guarantee.alpha, guarantee.delta, (*found, *violations))


def outside_as_calibrated(manifest: Manifest, policy: Policy) -> bool:
    """Return whether ``policy`` treats prompts outside training as the bundle's calibration did.

    It withheld them exactly where a policy that says nothing does (``Scorer.withholds_outside``)."""
    return policy.withhold_outside in (None, manifest.tells_outside)


def chat_violations(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return how a conversation departs from a question: an answer's beginning moves the risk of what follows it."""
    return (ANSWERED,) if messages and messages[-1].get("role") == "assistant" else ()


def tool_violations(messages: Sequence[Mapping[str, Any]], tools: Tools | None) -> tuple[str, ...]:
    """Return whether a conversation has tools, their calls or results, which no calibration had."""
    used = tools is not None or any("tool_calls" in one or one.get("role") == "tool" for one in messages)
    return (TOOLS,) if used else ()


def shape_violations(manifest: Manifest, shapes: Sequence[Shape | None]) -> tuple[str, ...]:
    """Return which shapes no row of the calibration had, or are not known; nothing of a bundle that names none."""
    known = manifest.guarantee_shapes
    found = [] if known is None else dict.fromkeys("not known" if shape is None else str(shape) for shape in shapes)
    return tuple(f"conversation: {one}; the calibration had none like it" for one in found if one not in (known or ()))


def decoding_violations(manifest: Manifest, sampling: Sampling | None) -> tuple[str, ...]:
    """Return how an answer that is decoded here departs from a greedy one; where none is, whether one is needed."""
    if sampling is None:
        return (NO_ANSWER,) if manifest.guarantee_reads_answers else ()
    warm = () if sampling.temperature == 0 else (f"decoding: temperature {sampling.temperature:g}, not greedy",)
    held = () if sampling.format is None else ("decoding: held to a format, where the calibration's answers were free",)
    return (*warm, *(("decoding: ends at texts of the request's own",) if sampling.stop else ()), *held)
