"""What the model computes while it decodes a batch: each token's log-probability, and the states it was predicted from.

The state of step t is the residual stream, at every layer, of the token that the t-th answer token is predicted from:
t* for the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from service.engines.base import Completion, TracedAnswer
from service.engines.families import ModelModules
from service.engines.transformers.hooks import ActivationBuffer, OnsetIndex, reading
from service.readout import Site

Tensor = torch.Tensor


class Tracer:
    """Follows one ``decode_batch``.  Memory: three states [m, hidden_size] for each answer."""

    def __init__(self, modules: ModelModules, head: torch.nn.Module, onset: Tensor) -> None:
        """``onset``: the prompts' states at t*, [m, answers, hidden_size] float32."""
        self._modules, self._head = modules, head
        self._states = onset  # of the step that comes, by row
        self._last, self._sum = onset.clone(), torch.zeros_like(onset)
        self._log_prob: list[list[float]] = [[] for _ in range(onset.shape[1])]

    def reading(self, rows: int) -> AbstractContextManager[None]:
        """Around the forward pass of one step with so many rows."""
        sink = ActivationBuffer([Site.RESIDUAL_STREAM], self._modules.geometry, rows, self._states.device)
        self._states = sink.buffers[Site.RESIDUAL_STREAM]
        onset = OnsetIndex([0] * rows, self._states.device)
        return reading(self._modules, self._head, sink, onset, stop=False)

    def take(self, logits: Tensor, taken: Sequence[tuple[int, int, int]]) -> None:
        """One step: logits [rows, vocab] and the (row, answer, token) that were chosen from them."""
        if not taken:
            return
        row, answer, token = torch.tensor(taken, device=logits.device).T
        chosen = logits[row, token].double() - logits[row].double().logsumexp(dim=-1)
        states = self._states[:, row]
        self._last[:, answer] = states
        for (_, index, _), value in zip(taken, chosen.tolist(), strict=True):
            self._log_prob[index].append(value)
        follows = torch.tensor([len(self._log_prob[index]) > 1 for _, index, _ in taken], device=logits.device)
        self._sum[:, answer[follows]] += states[:, follows]

    def answers(self, completions: Sequence[Completion]) -> list[TracedAnswer]:
        """What was traced of each answer."""
        count = torch.tensor([len(one) - 1 for one in self._log_prob], device=self._sum.device)
        mean = torch.where(count[:, None] > 0, self._sum / count.clamp(min=1)[:, None], self._last)
        last, means = (part.cpu().numpy() for part in (self._last, mean))
        return [
            TracedAnswer(completion, np.array(self._log_prob[index], np.float64), last[:, index], means[:, index])
            for index, completion in enumerate(completions)
        ]
