"""Muon for the blocks' matrices, AdamW for embeddings and norms, one learning-rate schedule for both."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

WARM_UP_STEPS = 80
DECAY_FROM = 0.3  # of the steps; linear to zero from there


def orthogonalised(gradient: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz towards the nearest orthogonal matrix, for a stack [n, rows, columns] (Muon's quintic)."""
    wide = gradient.size(-2) > gradient.size(-1)
    x = gradient.mT if wide else gradient
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result: torch.Tensor = x.float()
    return result.mT if wide else result


class Muon:
    """Orthogonalised momentum (Jordan 2024); matrices of equal shape are stacked for speed."""

    def __init__(self, matrices: list[nn.Parameter], lr: float = 0.02, decay: float = 0.05) -> None:
        self._lr, self._decay = lr, decay
        stacks: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            stacks[matrix.shape].append(matrix)
        self._stacks = list(stacks.values())
        self._momentum = [torch.zeros(len(s), *s[0].shape) for s in self._stacks]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with the learning rate times `scale`."""
        lr = self._lr * scale
        for stack, momentum in zip(self._stacks, self._momentum, strict=True):
            gradient = torch.stack([p.grad if p.grad is not None else torch.zeros_like(p) for p in stack])
            momentum.lerp_(gradient, 0.05)
            update = orthogonalised(gradient.lerp_(momentum, 0.95))
            rate = lr * max(1.0, stack[0].size(0) / stack[0].size(1)) ** 0.5
            for parameter, change in zip(stack, update.unbind(), strict=True):
                parameter.mul_(1 - lr * self._decay).add_(change, alpha=-rate)


class Optimizer:
    """Both optimizers and their common schedule: warm up, hold, decay linearly to zero."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self._model, self._steps = model, steps

    def scale(self, progress: float) -> float:
        """The schedule at `progress` in [0, 1)."""
        warm = (progress * self._steps + 1) / WARM_UP_STEPS
        return max(0.0, min(1.0, warm, (1 - progress) / (1 - DECAY_FROM)))

    def step(self, progress: float) -> None:
        """Clip, update, clear the gradients."""
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        scale = self.scale(progress)
        for group in self._adam.param_groups:
            group["lr"] = 5e-3 * scale
        self._adam.step()
        self._muon.step(scale)
        self._model.zero_grad(set_to_none=True)
