"""One step of decoding for several prompts at once, each with its own cache.

The linear layers run on all rows together, which reads the weights once instead of once for each row; attention runs
row by row on the row's own keys and values, so that nothing is padded or copied and a row may come and go at any step.
transformers has a place for both: a cache whose ``update`` hands on what it likes, and registered attention functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from service.engines.families import text_config
from service.engines.transformers.kv import KvContinuation

Tensor = torch.Tensor
NAME = "hallutracer_rows"


def next_logits(model: Any, rows: Sequence[KvContinuation], device: torch.device) -> Tensor:
    """Read each row's last token: float32 logits [rows, vocab].  The caches are extended in place."""
    tokens, positions = zip(*(row.last for row in rows), strict=True)
    inputs = {
        "input_ids": torch.tensor(tokens, device=device)[:, None],
        "position_ids": torch.tensor(positions, device=device)[:, None],
        "use_cache": True,
    }
    if len(rows) == 1:
        output = model(past_key_values=rows[0].cache, **inputs)
    else:
        with row_by_row(model):
            output = model(past_key_values=RowCaches([row.cache for row in rows]), **inputs)
    return cast(Tensor, output.logits[:, -1].float())


class RowCaches(Cache):
    """The caches of several prompts as one, for one token of each."""

    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__(layers=rows[0].layers)
        self._rows = rows

    def update(  # type: ignore[override]  # lists, for ``_attend`` alone
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Each row's keys and values [1, heads, tokens of the row, head_dim], for ``_attend``."""
        pairs = [
            row.update(key_states[place : place + 1], value_states[place : place + 1], layer_idx, *args, **kwargs)
            for place, row in enumerate(self._rows)
        ]
        return [keys for keys, _ in pairs], [values for _, values in pairs]


_implementation: ContextVar[str] = ContextVar("the model's own attention")


def _attend(
    module: Any, query: Tensor, key: Sequence[Tensor], value: Sequence[Tensor], attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The model's own attention, for each row's one query: no mask is needed, because all that is cached is visible."""
    own = _implementation.get()
    if own == "eager":
        attention = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attention = AttentionInterface._global_mapping[own]
    rows = [
        attention(module, query[place : place + 1], keys, values, None, **kwargs)[0]
        for place, (keys, values) in enumerate(zip(key, value, strict=True))
    ]
    return torch.cat(rows), None


AttentionInterface.register(NAME, _attend)


@contextmanager
def row_by_row(model: Any) -> Iterator[None]:
    """Within the block the model's attention takes the lists of ``RowCaches``."""
    config = text_config(model.config)
    own = config._attn_implementation
    token = _implementation.set(own)
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = own
        _implementation.reset(token)
