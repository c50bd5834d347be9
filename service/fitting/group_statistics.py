"""How much rows in groups tell: the groups' effective number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.fitting.jackknife import Interval, jeffreys


def effective_groups(group: NDArray[np.integer]) -> float:
    """Kish's effective number, (sum n_g)^2 / sum n_g^2: group [n].  As many groups of equal size tell as much."""
    size = np.unique(group, return_counts=True)[1].astype(np.float64)
    return float(size.sum() ** 2 / (size**2).sum())


def largest_share(group: NDArray[np.integer]) -> float:
    """Share of the rows that the largest group has: group [n]."""
    size = np.unique(group, return_counts=True)[1]
    return float(size.max() / size.sum())


def share_interval(share: float, group: NDArray[np.integer]) -> Interval:
    """Of a share that was seen among rows of ``group`` [n]: Jeffreys' interval, counting effective groups, not rows.

    Rows of a group are taken as copies of each other, the worst that they can be: the interval is too wide rather than
    too narrow.
    """
    return jeffreys(share, effective_groups(group))
