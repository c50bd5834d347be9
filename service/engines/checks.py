"""Checks and numbers shared by all engines: prompts, sampling options, probes, poolings, the first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from service.engines.base import FirstToken, LoadedModel, Prompts, Sampling
from service.errors import EmptyPrompt, EngineError, NonFiniteReadout, PromptTooLong, RequestError
from service.readout import Geometry, Pooling, Probes

if TYPE_CHECKING:
    from torch import Tensor

SEGMENT = 65_536  # characters encoded at a time to find out whether a text is far too long


def check_length(texts: Sequence[str], engine: LoadedModel) -> None:
    """Raise PromptTooLong for a prompt of at least twice as many tokens as the context holds, at the cost of so many.

    Encoding a text of megabytes takes seconds.  In pieces it has a few more tokens at each seam, not twice as many.
    """
    most = engine.identity.max_tokens
    segment = max(SEGMENT, 4 * most)
    if sum(map(len, texts)) <= segment:
        return
    tokens = 0
    for text in texts:
        for start in range(0, len(text), segment):
            tokens += len(engine.tokenize(text[start : start + segment]))
            if tokens > 2 * most:
                raise _too_long("the prompt has more than", tokens, most)


def _too_long(what: str, tokens: int, most: int) -> PromptTooLong:
    return PromptTooLong(
        f"{what} {tokens} tokens and the model's context holds {most}; shorten the prompt (it is never truncated "
        "silently)", param="prompt",
    )  # fmt: skip


def check_special_tokens(contents: Sequence[str], engine: LoadedModel) -> None:
    """Raise RequestError for the first message that spells out a special token of the model."""
    for number, content in enumerate(contents):
        found = next((token for token in engine.special_tokens if token in content), None)
        if found is not None:
            raise RequestError(
                f"message {number} spells out the special token {found!r}, which is refused here; remove it",
                param=f"messages.{number}.content",
            )


def check_prompts(prompts: Prompts, *, vocabulary: int, max_tokens: int) -> None:
    """Raise EmptyPrompt, PromptTooLong or RequestError for the first invalid prompt, naming its index."""
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise EmptyPrompt(
                f"prompt {number} has no tokens, so it has no answer onset; send at least one token", param="input_ids"
            )
        if len(prompt) > max_tokens:
            raise _too_long(f"prompt {number} has", len(prompt), max_tokens)
        try:
            ids = np.asarray(prompt)
        except ValueError:  # nested lists of several lengths
            ids = np.asarray(None)
        large = ids.dtype.kind == "O" and all(type(token) is int for token in prompt)  # beyond 64 bits
        if not large and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            raise RequestError(f"prompt {number} is not a flat list of integer token ids", param="input_ids")
        if large or ids.min() < 0 or ids.max() >= vocabulary:
            shown = "beyond 64 bits" if large else int(ids.min() if ids.min() < 0 else ids.max())
            raise RequestError(
                f"prompt {number} holds token id {shown}; this model's vocabulary is 0 to {vocabulary - 1}",
                param="input_ids",
            )


def check_sampling(sampling: Sampling) -> None:
    """Raise RequestError naming the invalid option."""
    for name, valid, expected in (
        ("max_tokens", sampling.max_tokens >= 1, "be at least 1"),
        ("temperature", 0.0 <= sampling.temperature < float("inf"), "be 0 (greedy) or a positive number"),
        ("top_p", 0.0 < sampling.top_p <= 1.0, "lie in (0, 1]"),
        ("seed", sampling.seed is None or -(2**63) <= sampling.seed < 2**63, "fit into 64 bits"),
        ("stop", all(sampling.stop), "hold no empty string, which would end every answer at once"),
    ):
        if not valid:
            raise RequestError(f"{name} is {getattr(sampling, name)}; it must {expected}", param=name)


def check_probe(probe: Probes, geometry: Geometry) -> None:
    """Raise EngineError, naming the array and both shapes, for probes of another geometry."""
    m, d, heads = geometry.num_layers, geometry.dim(probe.site), geometry.heads(probe.site)
    for name, shape in {"head": (m,), "direction": (m, d), "bias": (m,), "scale": (m,)}.items():
        if (actual := np.shape(getattr(probe, name))) != shape:
            raise EngineError(
                f"the probes' {name} has shape {actual} where this model needs {shape} at site {probe.site}; "
                "the bundle was fitted on another model or site: load one that matches"
            )
    if np.any((probe.head < 0) | (probe.head >= heads)):
        raise EngineError(
            f"the probes' head must lie in [0, {heads}) at site {probe.site}; found {probe.head.tolist()}"
        )


def summarise(logits: Tensor) -> Tensor:
    """Reduce float32 logits [batch, vocab] to [batch, 3] float64: log max probability, entropy, greedy token."""
    import torch

    log_probabilities = torch.log_softmax(logits, dim=-1)
    largest, token = log_probabilities.max(dim=-1)
    entropy = torch.special.entr(log_probabilities.exp()).sum(dim=-1)  # 0 for probabilities that underflow to 0
    return torch.stack([largest.double(), entropy.double(), token.double()], dim=-1)


def first_token_of(summary: Sequence[float] | np.ndarray) -> FirstToken:
    """Return a summary [3] of ``summarise``, clipped to its range after rounding.  Raises NonFiniteReadout."""
    if not np.isfinite(summary).all():
        raise NonFiniteReadout(
            "the first token's logits hold a NaN or infinity; the model overflowed: load it with dtype bfloat16 or "
            "float32, and check its weights"
        )
    log_max_prob, entropy, token = summary
    return FirstToken(min(0.0, float(log_max_prob)), max(0.0, float(entropy)), int(token))


def refuse_tracing(engine: str) -> NoReturn:
    """Raise EngineError: an engine that decodes, but keeps neither log-probabilities nor states of its answers."""
    raise EngineError(
        f"the {engine} engine keeps neither log-probabilities nor states of its answers: load the model with the "
        "transformers engine for methods that read answers, or leave them out",
        param="methods",
    )


def beyond_onset(poolings: Sequence[Pooling]) -> list[Pooling]:
    """Return the poolings other than last_1, each once, in a fixed order."""
    return [pooling for pooling in Pooling if pooling in poolings and pooling is not Pooling.LAST_1]


def check_onset_only(poolings: Sequence[Pooling]) -> None:
    """Raise EngineError if other poolings than last_1 are asked for: engines read t* alone."""
    if others := beyond_onset(poolings):
        raise EngineError(
            f"the engine reads only the answer onset (last_1) and cannot pool {', '.join(others)}: hallutracer "
            "evaluate does, with the transformers engine", param="poolings",
        )  # fmt: skip
