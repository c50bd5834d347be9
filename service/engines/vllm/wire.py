"""The messages between the request side and the worker: ``Directive`` to the worker, ``Payload``
back.

A directive is a dictionary under ``KEY`` in ``SamplingParams.extra_args``.  A payload is one
float32 vector in ``RequestOutput.prompt_token_id_logprobs``, which vLLM provides for log
probabilities of chosen tokens at the prompt's
end: a risk and its first token arrive in one message and cannot be matched with another request's.

So do an answer's own tokens: with each token that it samples, a worker sends what it read of the
token before, which is what ``answer_read`` reads.  A worker keeps no sums: a token that is sampled
anew brings a new reading in the place of the one that vLLM has dropped with the old token, and what
is computed again after a preemption is not sampled again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from probes_store.manifest import SIGNALS
from probes_store.records import Context, ContextName
from service.engines.base import EngineGate, FirstToken
from service.engines.checks import first_token_of
from service.errors import EngineError, NonFiniteReadout, ProbeReplaced, WeightsChanged
from service.readout import Geometry, Site

KEY = "hallutracer"
GATED = (  # in an engine's ``additional_config``: requests reach it through our gate only
    f"{KEY}_gated"
)
MAX_TOKEN = 2**31 - 1
# log max probability, entropy, greedy token, and 1 where the gate closed, REPLACED or STALE
EXTRAS = 4
CONTEXT_NAMES: tuple[ContextName, ...] = get_args(ContextName)
CERTAIN = 50.0  # log odds of a probability that is 1 in float64
REPLACED = -1.0  # a slot holds another probe than the request side has written
STALE = -2.0  # the request side has tested other weights than the worker has
# The worker's methods after which its model may compute something else.
CHANGES = (
    "sleep",
    "wake_up",
    "discard",
    "reset_weights",
    "reload_weights",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "apply_model",
)


def probe_digest(site: str, head: Sequence[int], numbers: bytes) -> str:
    """Return the sha256, shortened, of a probe as it is written into a slot."""
    return hashlib.sha256(f"{site} {list(head)} ".encode() + numbers).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker reads: sites, probe slots per site, whether it sends activations (training) and
    reads answers."""

    geometry: Geometry
    sites: tuple[Site, ...]
    slots: int
    activations: bool
    # whether decoded tokens can be read; where not, a step of decoding does no work at all
    answers: bool = False

    @property
    def payload(self) -> int:
        """Number of floats in a payload without activations."""
        return len(self.sites) * self.slots * self.geometry.num_layers + EXTRAS

    def column(self, site: Site, slot: int) -> int:
        """A slot's place among those of all sites, as in a payload."""
        return self.sites.index(site) * self.slots + slot

    def activation_floats(self) -> int:
        """Number of floats in one prompt's activations."""
        return sum(self.geometry.num_layers * self.geometry.width(site) for site in self.sites)


# What a gate reads of the probes asks, passage, stated, where P = sigmoid(weight . depth mean of
# the slot + intercept): three slots, weights and intercepts, and from which P(asks) the gate may
# close. By default each P is 1, whatever its slot holds, because the bundle has no such probe, and
# the gate may close anywhere.
NO_CONTEXT: tuple[float, ...] = (0.0,) * 6 + (CERTAIN,) * 3 + (-1.0,)


def context_terms(context: Context | None, columns: Sequence[int]) -> tuple[float, ...]:
    """Return the ten terms of a record whose probes are in the first of ``columns``, in its
    order."""
    terms = [*NO_CONTEXT]
    for probe, column in zip(() if context is None else context.probes, columns, strict=False):
        index = CONTEXT_NAMES.index(probe.name)
        terms[index:9:3] = [float(column), probe.weight, probe.intercept]
    if context is not None and context.applicability is not None:
        terms[9] = context.applicability.threshold
    return tuple(terms)


@dataclass(frozen=True, slots=True)
class Directive:
    """What one request asks of the worker."""

    first_token: bool = False
    activations: bool = False
    slot: int = 0  # the gated probe's index in ``sites`` x ``slots``
    gate: EngineGate | None = None
    # the token that a closed gate samples instead of an answer's first token
    end_token: int | None = None
    context: tuple[float, ...] = NO_CONTEXT  # what the gate reads of the context probes
    # (column, ``probe_digest``) that the request side has written: where a worker finds another, it
    # reports no number.
    probes: tuple[tuple[int, str], ...] = ()
    # the same of the probe that reads the answer's own tokens
    answer: tuple[int, str] | None = None
    # how often they had changed (``CHANGES``) when the golden prompts were replayed
    weights: int = 0

    def encode(self) -> dict[str, Any]:
        """Return ``SamplingParams(extra_args=...)``: plain values only, because vLLM sends them to
        another process."""
        wire: dict[str, Any] = {
            "first_token": self.first_token,
            "rows": self.activations,
            "slot": self.slot,
            "probes": [list(probe) for probe in self.probes],
            "weights": self.weights,
        }
        if self.gate is not None:
            wire["gate"] = [*self.gate.weight, self.gate.intercept, self.gate.threshold]
            wire["context"] = [*self.context]
            wire["end_token"] = self.end_token
        if self.answer is not None:
            wire["answer"] = [*self.answer]
        return {KEY: wire}

    @classmethod
    def decode(cls, extra_args: Mapping[str, Any] | None, plan: Plan) -> Directive | None:
        """Return the request's directive; None unless ``encode`` wrote it for this plan.  Never
        raises."""
        try:
            wire = (extra_args or {})[KEY]
            gate = None
            end_token = None
            context = NO_CONTEXT
            answer = None
            if wire.get("gate") is not None:
                end_token = int(wire["end_token"])
                *weight, intercept, threshold = (float(value) for value in wire["gate"])
                gate = EngineGate(tuple(weight), intercept, threshold)
                context = tuple(float(value) for value in wire["context"])
                if len(weight) != len(SIGNALS) or len(context) != len(NO_CONTEXT):
                    return None
                if not all(map(math.isfinite, (*weight, intercept, threshold, *context))):
                    return None
            probes = tuple((int(column), str(digest)) for column, digest in wire["probes"])
            if wire.get("answer") is not None:
                column, digest = wire["answer"]
                answer = int(column), str(digest)
            first = bool(wire["first_token"])
            rows = bool(wire["rows"])
            slot = int(wire["slot"])
            directive = cls(
                first,
                rows,
                slot,
                gate,
                end_token,
                context,
                probes,
                answer,
                int(wire.get("weights", 0)),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            return None
        columns = len(plan.sites) * plan.slots
        named = [slot, *context[:3], *(() if answer is None else answer[:1])]
        fits = all(0 <= slot < columns for slot in named) and 0 <= (end_token or 0) <= MAX_TOKEN
        asks = plan.activations >= directive.activations and plan.answers >= (answer is not None)
        return directive if fits and asks else None

    @property
    def needs_first_token(self) -> bool:
        """Whether the first token's distribution must be summarised."""
        return (
            self.first_token
            or self.activations
            or (self.gate is not None and any(self.gate.weight[1:3]))
        )


@dataclass(frozen=True)
class Payload:
    """A prompt's readout: trajectories of every slot, and what the directive asked for besides."""

    trajectories: NDArray[np.float64]  # [sites * slots, m]; slots without a probe hold zeros
    first_token: FirstToken | None
    gated: bool
    activations: dict[Site, NDArray[np.float32]]  # site -> [m, width]; empty unless asked for

    @classmethod
    def decode(cls, wire: NDArray[np.float32], plan: Plan, directive: Directive) -> Payload:
        """Read a payload.  Raises EngineError for one of the wrong length, and its kinds for what
        is not to be read."""
        flat = _flat(
            wire, plan.payload + (plan.activation_floats() if directive.activations else 0)
        )
        layers, extras = plan.geometry.num_layers, flat[plan.payload - EXTRAS : plan.payload]
        logits = flat[: plan.payload - EXTRAS].reshape(-1, layers)
        _refuse(extras[3])
        if not np.isfinite(logits).all():
            layer = int(np.argwhere(~np.isfinite(logits))[0][1])
            raise NonFiniteReadout(
                f"layer {layer} gave a NaN or infinity at the answer onset: the model overflowed"
                " (load it with dtype bfloat16 or float32), or a graph ran that does not keep"
                " activations"
            )
        first = first_token_of(extras[:3]) if directive.needs_first_token else None
        activations: dict[Site, NDArray[np.float32]] = {}
        if directive.activations:
            start = plan.payload
            for site in plan.sites:
                count = layers * plan.geometry.width(site)
                activations[site] = flat[start : start + count].reshape(layers, -1)
                start += count
                if not np.isfinite(activations[site]).all():
                    raise NonFiniteReadout(
                        f"an activation of {site} holds a NaN or infinity; the model overflowed"
                    )
        return cls(logits.astype(np.float64), first, bool(extras[3] > 0.5), activations)


def answer_read(wire: NDArray[np.float32], plan: Plan) -> NDArray[np.float64]:
    """Return the truth logits [m] of one of an answer's own tokens.  Raises EngineError and its
    kinds.

    They may hold a NaN, which the answer's mean then is, too."""
    flat = _flat(wire, plan.geometry.num_layers + 1)
    _refuse(flat[-1])
    return flat[:-1].astype(np.float64)


def _flat(wire: NDArray[np.float32], expected: int) -> NDArray[np.float32]:
    flat = np.asarray(wire, np.float32).reshape(-1)
    if flat.size != expected:
        raise EngineError(
            f"the worker sent {flat.size} numbers where {expected} were expected; run one version"
            " of HalluTracer, with the same settings, in worker and server"
        )
    return flat


def _refuse(state: np.float32) -> None:
    if state == STALE:
        raise WeightsChanged(
            "the model's weights have changed: nothing is read before the golden prompts are"
            " replayed; where that does not happen, restart the engine"
        )
    if state == REPLACED:
        raise ProbeReplaced(
            "another server of this vLLM has put its own probe into a slot; try again"
        )
