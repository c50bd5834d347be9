"""Bootstrap draws of whole groups, for figures that leaving out one group hardly changes: a largest distance, a share
at the end of its range."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1_000


def group_draws(group: NDArray[np.integer], seed: int = 0) -> Iterator[NDArray[np.float64]]:
    """``RESAMPLES`` draws of groups with replacement: how often each row [n] of ``group`` [n] counts."""
    names, member = np.unique(group, return_inverse=True)
    rng = np.random.default_rng(seed)
    for _ in range(RESAMPLES):
        yield np.bincount(rng.integers(0, len(names), len(names)), minlength=len(names))[member].astype(np.float64)
