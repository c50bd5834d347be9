"""Distance correlation of two scalars (Szekely, Rizzo and Bakirov 2007), exact for all rows, in O(N) memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from hallutracer_research.paper.diagnostics.classes import Floats, as_float
from service.errors import TrainingError

_BLOCK = 512


def distance_correlation(x: ArrayLike, y: ArrayLike) -> float | None:
    """x [N], y [N] -> dCor in [0, 1], 0 in the limit exactly for independence; None where either is constant.

    The V-statistic: dCov^2 = mean(a b) + mean(a) mean(b) - 2 mean_i(a_i. b_i.) with a_ij = |x_i - x_j|, a_i. its row
    means; the definition's double centring, multiplied out.  O(N^2) time, since one sum over pairs remains.
    """
    one, two = as_float(x, "x", 1), as_float(y, "y", 1)
    if len(one) != len(two) or not len(one):
        raise TrainingError(f"x has {len(one)} values and y {len(two)}: as many, at least one, are needed")
    n = len(one)
    one, two = one - one.mean(), two - two.mean()  # distances stay; rounding of large offsets goes
    rows_one, rows_two = _row_means(one), _row_means(two)
    pairs = 0.0
    for start in range(0, n, _BLOCK):
        block = slice(start, start + _BLOCK)
        product = (one[block, None] - one) * (two[block, None] - two)
        pairs += float(np.abs(product, out=product).sum())
    covariance = pairs / n**2 + float(rows_one.mean() * rows_two.mean()) - 2.0 * float(np.mean(rows_one * rows_two))
    spread = _squared_spread(one, rows_one) * _squared_spread(two, rows_two)
    if spread <= 0:
        return None
    return math.sqrt(min(max(covariance / math.sqrt(spread), 0.0), 1.0))


def _row_means(x: Floats) -> Floats:
    """mean_j |x_i - x_j| for every i, by sorting: [N] -> [N]."""
    n = len(x)
    order = np.argsort(x, kind="stable")
    ranked = x[order]
    below = np.concatenate([[0.0], np.cumsum(ranked)[:-1]])
    place = np.arange(n)
    means = np.empty(n)
    means[order] = (ranked * (2 * place - n + 1) - below + (ranked.sum() - below - ranked)) / n
    return means - min(float(means.min()), 0.0)  # rounding, where all are equal


def _squared_spread(x: Floats, rows: Floats) -> float:
    """dVar^2 of x [N]; the mean of squared distances is twice the variance."""
    if np.ptp(x) == 0:
        return 0.0
    return 2.0 * float(x.var()) + float(rows.mean()) ** 2 - 2.0 * float(np.mean(rows**2))
