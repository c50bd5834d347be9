"""Padded micro-batches of prompts of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from service.engines.base import TokenIds

Tensor = torch.Tensor


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
    """Group prompts by length so that rows x longest <= budget; a prompt longer than the budget gets its own batch.

    ``equal_lengths`` forbids padding, for models whose position encoding depends on the batch's longest prompt.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):  # ascending: the newest is the longest
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
    """Make one micro-batch of ``prompts[i] for i in index``; ``side`` is "left" or "right".

    The first ``prefix`` tokens of each are left out; then ``side`` is "right".
    """
    prompts = [prompt[prefix:] for prompt in prompts] if prefix else prompts
    lengths = [len(prompts[i]) for i in index]
    columns = max(lengths)
    starts = [columns - length if side == "left" else 0 for length in lengths]
    ids = np.full((len(index), columns), filler, np.int64)
    for row, (i, start, length) in enumerate(zip(index, starts, lengths, strict=True)):
        ids[row, start : start + length] = prompts[i]
    mask = positions = None
    if any(starts):
        mask = torch.from_numpy(np.arange(columns) >= np.array(starts)[:, None]).to(device).long()
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    return Batch(
        index=tuple(index),
        lengths=tuple(lengths),
        starts=tuple(starts),
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=mask,
        position_ids=positions,
        prefix=prefix,
    )
