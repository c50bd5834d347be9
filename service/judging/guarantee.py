"""Determines the shape of a conversation, and whether a bundle's guarantee holds for a request, and
if not, why.

A passage is guessed from the form of the last user message, by at most ``LONG`` characters, so that
it is cheap enough for every request.  Examples before the question, the options of a multiple
choice, or much junk on separate lines look the same and count, too.  A passage in a system prompt
does not count; ``system`` shows that there is such a prompt.

The manifest's statement names more conditions than a service can check: only the operator knows
whether the questions are drawn like those of the calibration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, get_args

from probes_store.manifest import Manifest
from probes_store.records import GREEDY, Decoding
from service.engines.base import Sampling
from service.judging.asking import Asks, asks_of
from service.judging.passages import has_passage, text_of
from service.judging.scripts import Shares, scripts_of, unlike_scripts
from service.policies.guard import Policy
from service.tool_calls import Tools

Turns = Literal["0", "1", "2-4", "5+"]
_UNTRAINED: dict[Asks, str] = {
    "several": "several questions",
    "earlier": "an earlier question that is still open",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one conversation, for ``/metrics`` and guarantees."""

    turns: Turns  # number of earlier messages of the assistant
    passage: bool  # the last user message contains a passage
    system: bool  # a system prompt stands above it
    asks: Asks = "plain"  # what the last user message asks for
    scripts: Shares = field(default=(), compare=False)  # of that message's letters

    def __str__(self) -> str:
        """Return the name of the shape in guarantees."""
        untrained = f", {_UNTRAINED[self.asks]}" if self.untrained else ""
        return f"{self.around}{untrained}"

    @property
    def around(self) -> str:
        """Return the name of the shape in a bundle's record of its training rows."""
        passage, system = ("a" if there else "no" for there in (self.passage, self.system))
        turns = "1 earlier turn" if self.turns == "1" else f"{self.turns} earlier turns"
        return f"{turns}, {passage} passage, {system} system prompt"

    @property
    def untrained(self) -> bool:
        """Return whether no bundle is trained on messages that ask in this way."""
        return self.asks in _UNTRAINED


@dataclass(frozen=True, slots=True)
class Standing:
    """The knowledge about a prompt besides its token ids and its readings."""

    shape: Shape | None = None  # None: its conversation is unknown
    other_rendering: bool = False  # the chat template renders its messages differently

    @property
    def passage(self) -> bool | None:
        """Return whether text to answer from stands beside the question; None if that is
        unknown."""
        return None if self.shape is None or self.other_rendering else self.shape.passage

    def no_fact_below(self, manifest: Manifest) -> float:
        """Return the P(asks) below which this prompt asks for no fact under a bundle; 0 if the
        probe must not decide.

        If the words of a lone request are not clear, only a bundle that was trained on lone
        questions in other words decides.  Where words may contain a question, or a conversation
        came before, its probability has to be lower.  A question that stands elsewhere, or an
        earlier one that is still open, would look like small talk to the probe."""
        limit = None if manifest.context is None else manifest.context.applicability
        if limit is None or self.shape is None or self.other_rendering:
            return 0.0
        reworded, asks = manifest.training.reworded is not None, self.shape.asks
        alone = reworded and self.shape.turns == "0"
        if asks in ("small_talk", "task") or (asks == "plain" and alone):
            return limit.threshold
        if reworded:
            return min(limit.threshold, SURE_REWORDED.get(asks, 0.0))
        return min(limit.threshold, SURE) if asks == "plain" else 0.0


UNKNOWN = Standing()


def unlike_training(manifest: Manifest, standing: Standing) -> str | None:
    """Return why the bundle's training had no prompt like this one, for any readings; None if it
    may have."""
    if standing.other_rendering:
        return OTHER_RENDERING
    return None if standing.shape is None else shape_unlike_training(manifest, standing.shape)


def shape_unlike_training(manifest: Manifest, shape: Shape) -> str | None:
    """Return why the bundle's training had no conversation of this shape; None if it had, or does
    not record it."""
    trained = manifest.training.shapes
    if shape.untrained:
        return f"conversation: {_UNTRAINED[shape.asks]}, on which no bundle is trained"
    if trained is not None and shape.around not in trained:
        return f"conversation: {shape.around}; training had none like it"
    if (script := _other_script(manifest, shape)) is not None:
        return f"prompt: most of its letters are {script}; training had none like it"
    return None


def _other_script(manifest: Manifest, shape: Shape) -> str | None:
    """Return the script of most letters where training's questions were in others; None if they
    were in this one, or the bundle does not record them."""
    trained = manifest.training.scripts
    return None if trained is None else unlike_scripts(shape.scripts, trained)


SURE = 1e-4
"""The P(asks) below which a prompt asks for no fact even if its words are not clear: of held-out
key words ("capital of x") at most 0.6 % lie below it on two real models (benchmarks/LOG.md)."""
SURE_REWORDED: Mapping[Asks, float] = MappingProxyType(
    {"plain": 0.01, "inside": 0.01, "beside": 0.003}
)
"""The same, by what the words show, under a bundle that was trained on questions in other words and
inside tasks: of held-out questions inside tasks at most 0.3 % lie below it on two real models
(benchmarks/LOG.md)."""


SHAPES = tuple(Shape(*values) for values in product(get_args(Turns), (False, True), (False, True)))
"""The shapes that ``/metrics`` distinguishes."""


def shape_of(messages: Sequence[object], refusals: Collection[str] = ()) -> Shape:
    """Return the shape of any messages; a value that is not a message, or has no text, counts as
    empty.

    ``refusals`` are the texts that replace withheld answers, as for ``asks_of``."""
    known = [message for message in messages if isinstance(message, Mapping)]
    return replace(shape_around(known), asks=asks_of(known, refusals))


def shape_around(messages: Sequence[object]) -> Shape:
    """Return the shape without ``asks``, which takes longest."""
    known = [message for message in messages if isinstance(message, Mapping)]
    roles = [message.get("role") for message in known]
    answers = roles[:-1].count(
        "assistant"
    )  # a last message of the assistant is the beginning of the answer
    content = next(
        (message.get("content") for message in reversed(known) if message.get("role") == "user"), ""
    )
    text = text_of(content)
    return Shape(
        turns="0" if answers == 0 else "1" if answers == 1 else "2-4" if answers < 5 else "5+",
        passage=has_passage(text),
        system="system" in roles or "developer" in roles,
        scripts=scripts_of(text),
    )


TOKEN_IDS = "rendering: the prompt came as token ids"
NO_TEMPLATE = "rendering: this route applies no chat template"
MEDIA = "prompt: an image, audio or video, where training had text"
OTHER_RENDERING = "rendering: the prompt is not what the chat template makes of its messages"
NO_FACT = "prompt: it asks for no fact, as far as the bundle can tell, so no threshold judged it"
NO_ANSWER = "answer: none is decoded here, and the calibration read the answers again"
TOOLS = "prompt: tools or their results, where the calibration had none"
ANSWERED = "rendering: the last message is the assistant's"
LEAST_TOKENS = (
    12  # answers with this limit count as complete; no manifest records the calibration's limit
)
SECOND_VERDICT = (
    "canary: the default bundle's verdict withholds too, the calibration knew this bundle's alone"
)


@dataclass(frozen=True, slots=True)
class GuaranteeStatus:
    """A guarantee for one request, and the ``violations`` of its calibration's assumptions."""

    alpha: float
    delta: float
    violations: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Return whether no violation is known."""
        return not self.violations


def guarantee_status(
    manifest: Manifest,
    policy: Policy,
    dtype: str,
    violations: tuple[str, ...] = (),
    shapes: Sequence[Shape | None] = (),
) -> GuaranteeStatus | None:
    """Return the status of the bundle's guarantee for a request; None if the bundle has none.

    ``dtype`` is the engine's.  ``violations`` are further ones.  The ``shapes`` of the request's
    prompts determine the stratum of the guarantee."""
    guarantee = manifest.guarantee
    if guarantee is None:
        return None
    departures = []
    if not policy.action.withholds:
        departures.append(f"policy: {policy.name!r} withholds nothing")
    if not outside_as_calibrated(manifest, policy):
        does, did = (
            ("also withholds", "did not")
            if policy.withhold_outside
            else ("does not withhold", "did")
        )
        departures.append(
            f"policy: {policy.name!r} {does} prompts outside training, the calibration {did}"
        )
    passages = {None if shape is None else shape.passage for shape in shapes} or {None}
    if policy.threshold is not None:
        guaranteed = sorted({manifest.threshold_for(passage) for passage in passages})
        departures += [
            f"threshold: {policy.threshold:g} applies, {threshold:g} is guaranteed"
            for threshold in guaranteed
            if threshold != policy.threshold
        ]
    if policy.passage_truth < 1.0:
        departures.append(
            f"policy: {policy.name!r} takes {policy.passage_truth:g} of passages for true, the"
            " calibration all"
        )
    if policy.stop_at is not None:
        departures.append(
            f"policy: {policy.name!r} ends answers under way, the calibration did not"
        )
    if policy.recheck != bool(manifest.guarantee_reads_answers):
        does, did = ("reads", "did not") if policy.recheck else ("does not read", "did")
        departures.append(f"policy: {policy.name!r} {does} answers again, the calibration {did}")
    if dtype != guarantee.dtype:
        departures.append(
            f"dtype: the engine computes in {dtype}, the calibration did in {guarantee.dtype}"
        )
    stratum = manifest.stratum(next(iter(passages))) if len(passages) == 1 else None
    delta = guarantee.delta if stratum is None else stratum.delta
    return GuaranteeStatus(guarantee.alpha, delta, (*departures, *violations))


def outside_as_calibrated(manifest: Manifest, policy: Policy) -> bool:
    """Return whether ``policy`` treats prompts outside training as the bundle's calibration did.

    The calibration withheld them by the same rule as a policy without the setting
    (``Scorer.withholds_outside``)."""
    return policy.withhold_outside in (None, manifest.tells_outside)


def chat_violations(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return a violation if a conversation ends with the beginning of an answer, which changes the
    risk."""
    return (ANSWERED,) if messages and messages[-1].get("role") == "assistant" else ()


def tool_violations(messages: Sequence[Mapping[str, Any]], tools: Tools | None) -> tuple[str, ...]:
    """Return a violation if a conversation has tools, or their calls or results, which no
    calibration had."""
    used = tools is not None or any(
        "tool_calls" in message or message.get("role") == "tool" for message in messages
    )
    return (TOOLS,) if used else ()


def shape_violations(manifest: Manifest, shapes: Sequence[Shape | None]) -> tuple[str, ...]:
    """Return a violation for each shape that the calibration did not have, that is unknown, or that
    training lacks.

    If the bundle's calibration records no shapes, only the last counts."""
    known = manifest.guarantee_shapes
    unlike = [
        shape
        for shape in shapes
        if shape is not None and shape_unlike_training(manifest, shape) is not None
    ]
    scripts = [_other_script(manifest, shape) for shape in unlike]
    untrained = dict.fromkeys(
        f"{shape}, letters mostly {script}" if script else str(shape)
        for shape, script in zip(unlike, scripts, strict=True)
    )
    requested = (
        []
        if known is None
        else dict.fromkeys("not known" if shape is None else str(shape) for shape in shapes)
    )
    names = dict.fromkeys([*untrained, *(name for name in requested if name not in (known or ()))])
    return tuple(f"conversation: {name}; the calibration had none like it" for name in names)


def decoding_violations(manifest: Manifest, sampling: Sampling | None) -> tuple[str, ...]:
    """Return how the decoding of an answer differs from the calibration's; without an answer,
    whether one is needed."""
    if sampling is None:
        return (NO_ANSWER,) if manifest.guarantee_reads_answers else ()
    decoding = Decoding(sampling.temperature, sampling.top_p)
    of_tokens = sampling_violations(manifest, decoding)
    held = (
        ()
        if sampling.format is None
        else ("decoding: held to a format, where the calibration's answers were free",)
    )
    stops = ("decoding: ends at texts of the request's own",) if sampling.stop else ()
    return (*of_tokens, *stops, *held, *length_violations(sampling.max_tokens))


def sampling_violations(manifest: Manifest, decoding: Decoding) -> tuple[str, ...]:
    """Return a violation if tokens are sampled differently than in the answers of the
    calibration."""
    calibrated = manifest.calibrated_decoding
    if decoding.same(calibrated):
        return ()
    if calibrated.same(GREEDY):
        return (f"decoding: temperature {decoding.temperature:g}, not greedy",)
    return (f"decoding: {decoding}, where the calibration's answers were {calibrated}",)


def length_violations(max_tokens: int | None) -> tuple[str, ...]:
    """Return a violation if an answer may be shorter than the calibration's answers; None means no
    limit."""
    if max_tokens is None or max_tokens >= LEAST_TOKENS:
        return ()
    return (
        (
            f"decoding: at most {max_tokens} tokens, where the calibration's answers had"
            f" {LEAST_TOKENS} or more"
        ),
    )
