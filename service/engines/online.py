"""The other kind of engine: one that schedules by itself, takes prompts at any time and goes on decoding unasked.

Imports no torch and no engine.  ``service.serving.live`` puts tickets in front, as ``service.serving.room`` does for a
``SteppingEngine``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from service.engines.base import Completion, Engine, Onset, Sampling, TokenIds
from service.readout import Probes


@dataclass(frozen=True, slots=True)
class Gate:
    """When an answer must not begin, told to an engine that would go on by itself: at ``risk >= threshold``.

    The risk is the classifier's over (depth mean of the first probe, log max probability, entropy), a weight of 0
    where a signal has no part in it (``risk.risk``).
    """

    weight: tuple[float, float, float]
    intercept: float
    threshold: float


@dataclass(frozen=True, slots=True)
class Update:
    """News of one prompt.  The first has the ``onset``, the last one of an answer its ``completion``."""

    onset: Onset | None = None
    piece: str = ""  # text, "" where a token completes nothing yet
    tokens: int = 0  # decoded since the last update
    completion: Completion | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache; with the onset
    queue_s: float = 0.0  # from submission to the start of its first forward pass; with the onset
    prefill_s: float = 0.0  # from there to the first token; with the onset


@runtime_checkable
class OnlineEngine(Engine, Protocol):
    """An engine with a scheduler of its own.  Its synchronous methods must not be called on ``loop``'s thread."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where ``answer`` runs."""
        ...

    @property
    def alive(self) -> bool:
        """False once only a new engine helps."""
        ...

    def answer(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        sampling: Sampling | None = None,
        gate: Gate | None = None,
    ) -> AsyncGenerator[Update, None]:
        """One prompt: its onset, then its answer, all of one request on one KV cache.

        Without ``sampling`` the onset is all.  Where ``gate`` closes, the request ends in the step that finished its
        prefill and the onset is all.  Closing the generator, or cancelling who waits for it, ends the request.
        Raises what ``score`` raises, and EngineError once the engine is gone.
        """
        ...
