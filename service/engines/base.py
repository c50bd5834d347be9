"""The Engine protocol: what every engine does, in the words of the method.  Imports no torch and no engine.

Token ids in, numbers out.  The same engine that serves also feeds the trainer (``extract`` and ``generate``), so a
probe never meets an activation that was computed by other code than the one it was fitted on.
Engines are synchronous and used from one thread at a time; ``service.serving`` puts a thread in front.  Only
``tokenize``, ``render_chat`` and ``check`` may be called beside a running forward, and beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from service.errors import EngineError, RequestError
from service.readout import Geometry, Pooling, Probes, Site

TokenIds = Sequence[int]
EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What a bundle compares before it agrees to read a model."""

    model: str  # hub name, or the last part of the folder's path
    revision: str  # hub commit, or "local"
    fingerprint: str  # sha256 over config and weight files' sizes, heads and tails
    architecture: str  # e.g. LlamaForCausalLM
    model_type: str  # e.g. llama
    tokenizer: str  # sha256 of the tokenizer's own serialisation
    chat_template: str | None  # sha256, None where the tokenizer has none
    dtype: str  # float32 | bfloat16 | float16
    geometry: Geometry
    max_tokens: int  # longest prompt plus answer that the model can hold


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first answer token's distribution, which a prefill that may go on decoding has already paid for."""

    log_max_prob: float  # nats, <= 0
    entropy: float  # nats, >= 0
    token: int  # the greedy first token


@dataclass(frozen=True)
class Onset:
    """Everything read at one prompt's answer onset t*."""

    trajectories: tuple[NDArray[np.float64], ...]  # one [m] for each of the probes asked for
    first_token: FirstToken | None  # only where it was asked for
    prompt_tokens: int


@dataclass(frozen=True)
class Extraction:
    """All readouts of a batch, for training."""

    rows: dict[Site, NDArray[np.float32]]  # site -> [n, m, width]
    first_tokens: tuple[FirstToken, ...]
    pooled: dict[tuple[Site, Pooling], NDArray[np.float32]] = field(default_factory=dict)  # [n, m, width]; no last_1


def beyond_onset(poolings: Sequence[Pooling]) -> list[Pooling]:
    """What ``poolings`` asks for besides the row at t*, each once, in a fixed order."""
    return [pooling for pooling in Pooling if pooling in poolings and pooling is not Pooling.LAST_1]


def check_onset_only(poolings: Sequence[Pooling], engine: str) -> None:
    """Raise EngineError where an engine that reads t* alone is asked for more."""
    if others := beyond_onset(poolings):
        raise EngineError(
            f"the {engine} engine reads the answer onset alone (last_1) and cannot pool {', '.join(others)}: load the "
            "model with the transformers engine for the readout-position ablation, or ask for last_1",
            param="poolings",
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to decode.  ``temperature`` 0 is greedy."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


def check_sampling(sampling: Sampling) -> None:
    """Raise RequestError naming the option at fault."""
    if sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {sampling.max_tokens}; it must be at least 1", param="max_tokens")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise RequestError(
            f"temperature is {sampling.temperature}; it must be 0 (greedy) or a positive number", param="temperature"
        )
    if not 0.0 < sampling.top_p <= 1.0:
        raise RequestError(f"top_p is {sampling.top_p}; it must lie in (0, 1]", param="top_p")
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**63:
        raise RequestError(f"seed is {sampling.seed}; it must fit into 64 bits", param="seed")
    if any(not stop for stop in sampling.stop):
        raise RequestError("stop holds an empty string, which would end every answer at once; remove it", param="stop")


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer.  ``token_ids`` includes the end token where there is one, ``text`` does not."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length" | "cancelled"


@dataclass
class Counters:
    """Work done since the engine started; tests count on these."""

    forward_tokens: int = 0  # tokens that went through the forward pass, padding excluded
    prefills: int = 0  # prompts
    decode_steps: int = 0
    open_continuations: int = 0


class Continuation(Protocol):
    """One prefilled prompt that may go on decoding from the same KV cache.  Whoever called ``begin`` closes it."""

    @property
    def onset(self) -> Onset:
        """What was read at t*."""
        ...

    def decode(self, sampling: Sampling, cancelled: Callable[[], bool] = ...) -> Iterator[str]:
        """Yield one piece of text per token, "" where it completes nothing yet; ``completion`` holds the whole.

        Stops at once when ``cancelled()`` turns true or the iterator is closed.
        """
        ...

    @property
    def completion(self) -> Completion | None:
        """The answer so far; None before ``decode``."""
        ...

    def close(self) -> None:
        """Free the KV cache.  Safe to call twice."""
        ...


class Engine(Protocol):
    """A loaded model.  Going on with an answer is a ``SteppingEngine``'s or an ``online.OnlineEngine``'s part."""

    @property
    def identity(self) -> ModelIdentity:
        """Which model this is."""
        ...

    @property
    def counters(self) -> Counters:
        """Work done so far."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Plain text to ids, with the tokenizer's own special tokens."""
        ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages to ids through the chat template, generation prompt included.

        Raises RequestError where the tokenizer has no chat template or the template refuses the messages.
        """
        ...

    def detokenize(self, token_ids: TokenIds) -> str:
        """Ids to text, special tokens left out."""
        ...

    @property
    def max_batch_tokens(self) -> int:
        """Padded tokens in one forward pass, at most."""
        ...

    def check(self, prompts: Sequence[TokenIds]) -> None:
        """Raise EmptyPrompt, PromptTooLong or RequestError for the first prompt that no forward would take."""
        ...

    def score(self, prompts: Sequence[TokenIds], probes: Sequence[Probes], *, first_token: bool = False) -> list[Onset]:
        """Prefill only.  Without ``first_token`` the forward stops after the last readout: no lm_head."""
        ...

    def extract(
        self, prompts: Sequence[TokenIds], sites: Sequence[Site], poolings: Sequence[Pooling] = (Pooling.LAST_1,)
    ) -> Extraction:
        """Prefill and return every layer's rows, all heads; other poolings from the same forward pass.

        ``rows`` are always those at t*, whether ``poolings`` names last_1 or not.  Raises EngineError where the engine
        does not pool.
        """
        ...

    def generate(self, prompts: Sequence[TokenIds], sampling: Sampling) -> list[Completion]:
        """Batched decoding, for labelling."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


class SteppingEngine(Engine, Protocol):
    """An engine that runs what it is told, when it is told: whoever uses it makes the batches and takes the turns."""

    def begin(self, prompts: Sequence[TokenIds], probes: Sequence[Probes]) -> Sequence[Continuation]:
        """Prefill and keep the KV cache, so that any of the prompts can go on decoding."""
        ...


@dataclass(frozen=True)
class EngineOptions:
    """How to load a model."""

    model: str
    revision: str | None = None
    dtype: str = "auto"  # auto: float32 on CPU, the checkpoint's own on CUDA
    device: str = "auto"  # auto: cuda where there is one
    max_batch_tokens: int | None = None  # padded tokens in one forward pass; None: what suits the device
    padding_side: str = "right"
    trust_remote_code: bool = False
    engine: EngineName = "transformers"
    extra: dict[str, str] = field(default_factory=dict)
