"""Trajectories whose variance components and class gap are known."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


def random_intercepts(
    n: int, m: int, *, alpha: float = 1.0, epsilon: float = 1.0, gap: ArrayLike = 0.8, share: float = 0.5, seed: int = 0
) -> tuple[Floats, Labels]:
    """L_l = alpha_i + gap_l label + eps_il with standard deviations alpha, epsilon: trajectory [n, m], label [n]."""
    rng = np.random.default_rng(seed)
    label = (np.arange(n) < share * n).astype(np.int64)
    level = alpha * rng.standard_normal((n, 1)) + epsilon * rng.standard_normal((n, m))
    return level + np.asarray(gap) * label[:, None], label


def unit_rows(x: Floats) -> Floats:
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))
