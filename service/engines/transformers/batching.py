"""Padded micro-batches of prompts, the fixed beginning of every chat, and the facts of a model that bound both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from service.engines.base import TokenIds
from service.engines.families import geometry, text_config
from service.errors import ModelLoadError, RequestError

Tensor = torch.Tensor
MIN_PREFIX = 8  # tokens; shorter beginnings are not worth a cache
# RoPE variants whose frequencies follow the longest position in the batch.
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})
# Else a large model's cache would take as much memory as its weights: of 7B with 8 key-value heads 4 GiB instead of 14.
MAX_DECODE_TOKENS = 32_768


@dataclass(frozen=True)
class Batch:
    """Prompts padded to one length.

    ``index`` maps rows to the caller's prompts.  ``attention_mask`` and ``position_ids`` are None where causal
    attention alone hides the padding: right padding, or prompts of one length.
    """

    index: tuple[int, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]  # column of each row's first real token
    input_ids: Tensor  # [batch, columns]
    attention_mask: Tensor | None
    position_ids: Tensor | None
    prefix: int = 0  # tokens before the first column, whose keys and values are there already

    @property
    def prompt_tokens(self) -> list[int]:
        """Tokens of each row's whole prompt."""
        return [self.prefix + length for length in self.lengths]

    @property
    def onsets(self) -> list[int]:
        """Column of t* per row."""
        return [start + length - 1 for start, length in zip(self.starts, self.lengths, strict=True)]


def micro_batches(lengths: Sequence[int], budget: int, *, equal_lengths: bool = False) -> list[list[int]]:
    """Group by length: rows x longest <= budget, or one prompt.  ``equal_lengths`` forbids padding (longrope)."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):  # ascending: the newest is the longest
        current = groups[-1] if groups else []
        fits = bool(current) and (len(current) + 1) * lengths[index] <= budget
        if fits and not (equal_lengths and lengths[index] != lengths[current[0]]):
            current.append(index)
        else:
            groups.append([index])
    return groups


def pad(
    prompts: Sequence[TokenIds], index: Sequence[int], side: str, filler: int, device: torch.device, prefix: int = 0
) -> Batch:
    """Make a micro-batch of ``prompts[i] for i in index`` without their first ``prefix`` tokens; side left or right."""
    own = [prompts[i][prefix:] for i in index]
    lengths = [len(prompt) for prompt in own]
    columns = max(lengths)
    starts = [columns - length if side == "left" else 0 for length in lengths]
    ids = np.full((len(index), columns), filler, np.int64)
    for row, (prompt, start, length) in enumerate(zip(own, starts, lengths, strict=True)):
        ids[row, start : start + length] = prompt
    mask = positions = None
    if any(starts):
        mask = torch.from_numpy(np.arange(columns) >= np.array(starts)[:, None]).to(device).long()
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    input_ids = torch.from_numpy(ids).to(device)
    return Batch(tuple(index), tuple(lengths), tuple(starts), input_ids, mask, positions, prefix)


def chat_prefix(render_chat: Callable[[Sequence[dict[str, str]]], list[int]]) -> tuple[int, ...]:
    """Return the tokens with which every chat of one user message begins; () without a template, or where few."""
    try:
        same = commonprefix([render_chat([{"role": "user", "content": content}]) for content in ("a", "0")])
    except RequestError:
        return ()
    return tuple(same) if len(same) >= MIN_PREFIX else ()


class Prefix:
    """The beginning's tokens and, once it was run, its keys and values: the same in front of every prompt."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self._layers: list[tuple[Tensor, Tensor]] = []  # [1, heads, tokens, head_dim] each

    def begins(self, prompt: TokenIds) -> bool:
        """Return whether ``prompt`` begins with it and goes on."""
        return bool(self.tokens) and len(prompt) > len(self.tokens) and tuple(prompt[: len(self.tokens)]) == self.tokens

    def cache(self, model: Any, rows: int, device: torch.device) -> DynamicCache:
        """Return a new cache for ``rows`` prompts that holds the beginning.  Runs the model at the first call."""
        if not self._layers:
            own: Any = DynamicCache()
            ids = torch.tensor([self.tokens], device=device)
            model(input_ids=ids, past_key_values=own, use_cache=True, logits_to_keep=1)
            self._layers = [(layer.keys, layer.values) for layer in own.layers]
        cache = DynamicCache()
        for place, (keys, values) in enumerate(self._layers):
            cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), place)
        return cache


def has_windows(config: Any) -> bool:
    """Return whether some layer sees a window only, whose cache is not the whole beginning."""
    cache: Any = DynamicCache(config=config)
    return any(layer.is_sliding for layer in cache.layers)


def depends_on_longest(config: Any) -> bool:
    """Return whether the encoding of positions depends on the batch's longest prompt (Phi-3's longrope)."""
    parameters = getattr(text_config(config), "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return any(entry.get("rope_type") in LENGTH_DEPENDENT_ROPE for entry in (parameters, *per_layer_type))


def tokens_worth_the_weights(model: Any) -> int:
    """Return how many tokens' keys and values take as many bytes as the model's weights, at most ``MAX_DECODE_TOKENS``.

    A step of decoding reads all weights and every row's cache: up to so many, a larger batch costs less than twice.
    """
    shape = geometry(model.config)
    kv_heads = getattr(text_config(model.config), "num_key_value_heads", None) or shape.num_heads
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    element = next(model.parameters()).element_size()
    return min(MAX_DECODE_TOKENS, int(weights // (2 * shape.num_layers * kv_heads * shape.head_dim * element)))


def context_length(config: Any) -> int:
    """Return the longest sequence that the model supports.  Raises ModelLoadError if the config lacks it."""
    length = getattr(text_config(config), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelLoadError("config.json has no max_position_embeddings, by which long prompts are refused; add it")
    return length


def end_tokens(model: Any) -> frozenset[int]:
    """Return the tokens that end an answer: from the generation config if it has any, else from the config."""
    for config in (getattr(model, "generation_config", None), model.config, text_config(model.config)):
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            return frozenset(int(token) for token in (tokens if isinstance(tokens, list | tuple) else [tokens]))
    return frozenset()
