"""How much rows in groups tell: the groups' effective number, and intervals by resampling whole groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]
Tests = Sequence[tuple[NDArray[np.integer], Floats]]  # test sides: rows and their risks

COVERAGE = 0.95
RESAMPLES = 1_000


class Interval(NamedTuple):
    """Ends of a 95 % percentile interval."""

    low: float
    high: float


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
    too narrow.  Brown, Cai and DasGupta 2001, Statist. Sci. 16(2), 101-133.
    """
    count = effective_groups(group)
    ends = np.array([(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    low, high = np.asarray(beta.ppf(ends, share * count + 0.5, (1 - share) * count + 0.5))
    return Interval(0.0 if share == 0 else float(low), 1.0 if share == 1 else float(high))


def group_draws(group: NDArray[np.integer], seed: int = 0) -> Iterator[NDArray[np.float64]]:
    """``RESAMPLES`` bootstrap draws of whole groups: how often each row [n] of ``group`` [n] counts."""
    names, member = np.unique(group, return_inverse=True)
    rng = np.random.default_rng(seed)
    for _ in range(RESAMPLES):
        yield np.bincount(rng.integers(0, len(names), len(names)), minlength=len(names))[member].astype(np.float64)


def auroc_interval(label: Labels, group: NDArray[np.integer], tests: Tests, seed: int = 0) -> Interval:
    """Of the mean AUROC over test sides, (rows, their risks) each: label, group [n].

    Whole groups are drawn with replacement; the fits stay as they are.  A test side that a draw leaves without a class
    is left out of that draw's mean.
    """
    means = [mean for mean in _drawn_means(label, group, tests, seed) if mean is not None]
    if len(means) < RESAMPLES / 2:
        return Interval(0.0, 1.0)  # nothing is known
    low, high = np.quantile(means, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(low), float(high))


def gain_interval(label: Labels, group: NDArray[np.integer], one: Tests, other: Tests, seed: int = 0) -> Interval:
    """Of the mean AUROC of ``one`` minus that of ``other``, on the same test sides and draws of groups."""
    pairs = zip(_drawn_means(label, group, one, seed), _drawn_means(label, group, other, seed), strict=True)
    gains = [of_one - of_other for of_one, of_other in pairs if of_one is not None and of_other is not None]
    if len(gains) < RESAMPLES / 2:
        return Interval(-1.0, 1.0)
    low, high = np.quantile(gains, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(low), float(high))


def _drawn_means(label: Labels, group: NDArray[np.integer], tests: Tests, seed: int) -> Iterator[float | None]:
    """The mean AUROC over test sides, draw by draw; None where no test side has both classes."""
    hallucinated = np.asarray(label) == 0
    levels = [np.unique(risk, return_inverse=True)[1] for _, risk in tests]
    for weight in group_draws(group, seed):
        drawn = [
            found
            for (rows, _), level in zip(tests, levels, strict=True)
            if (found := weighted_auroc(hallucinated[rows], level, weight[rows])) is not None
        ]
        yield float(np.mean(drawn)) if drawn else None


def weighted_auroc(
    hallucinated: NDArray[np.bool_], level: NDArray[np.intp], weight: NDArray[np.float64]
) -> float | None:
    """AUROC of rows that count ``weight`` times; ``level`` is the rank of the row's risk among the distinct ones.

    None where a class has no weight.
    """
    bad = np.bincount(level, weight * hallucinated)
    good = np.bincount(level, weight * ~hallucinated)
    pairs = bad.sum() * good.sum()
    if not pairs:
        return None
    below = np.cumsum(good) - good
    return float(bad @ (below + good / 2) / pairs)
