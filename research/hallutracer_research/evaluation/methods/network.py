"""A small network, as three papers train it on activations: widths 256, 128 and 64, one thread and one seed.

A fit can so be repeated bit by bit; torch's settings and its global random state are left as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from service.fitting.solver import CONSTANT, one_torch_thread

HIDDEN = (256, 128, 64)


def mlp(width: int, outputs: int, dropout: float = 0.0) -> nn.Sequential:
    """Return ``width`` inputs, ReLU layers of the ``HIDDEN`` widths, and ``outputs``."""
    sizes = (width, *HIDDEN)
    layers: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    for inputs, next_width in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(inputs, next_width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with torch on one thread and its random numbers from ``seed``."""
    with one_torch_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def scaled(rows: NDArray[np.float32], *parts: NDArray[np.float32]) -> list[torch.Tensor]:
    """Return ``parts`` standardised by the training ``rows`` [n, d]; a column that is constant there says nothing."""
    mean, std = rows.mean(axis=0, dtype=np.float64), rows.std(axis=0, dtype=np.float64)
    std[std <= CONSTANT * np.abs(mean)] = np.inf
    return [torch.from_numpy(((part - mean) / std).astype(np.float32)) for part in parts]
