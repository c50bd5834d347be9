"""The fixed beginning of every chat, computed once: its keys and values are the same in front of every prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from service.engines.base import TokenIds
from service.errors import RequestError

MIN_TOKENS = 8  # shorter beginnings are not worth a cache


def chat_prefix(render_chat: Callable[[Sequence[dict[str, str]]], list[int]]) -> tuple[int, ...]:
    """The tokens with which every chat of one user message begins; () without a template, or where they are few."""
    try:
        first, second = (render_chat([{"role": "user", "content": content}]) for content in ("a", "0"))
    except RequestError:
        return ()
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return tuple(first[:same]) if same >= MIN_TOKENS else ()


class Prefix:
    """The beginning's tokens and, once it was run, its keys and values."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # [1, heads, tokens, head_dim] each

    def begins(self, prompt: TokenIds) -> bool:
        """Whether ``prompt`` begins with it and goes on."""
        return bool(self.tokens) and len(prompt) > len(self.tokens) and tuple(prompt[: len(self.tokens)]) == self.tokens

    def cache(self, model: Any, rows: int, device: torch.device) -> DynamicCache:
        """A new cache for ``rows`` prompts that holds the beginning.  Runs the model at the first call."""
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
    """Whether some layer sees a window only, whose cache is not the whole beginning."""
    cache: Any = DynamicCache(config=config)
    return any(layer.is_sliding for layer in cache.layers)
