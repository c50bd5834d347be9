"""95 % intervals by leaving out one group after the other: of an AUROC, of a difference of two, of anything.

Rows of a group depend on each other, groups do not.  Leaving out a group with all its rows and seeing what changes
gives a standard error (the jackknife, Tukey 1958), and Student's t with groups - 1 degrees of freedom the interval.
With few groups it is wider than a percentile bootstrap's, which is too short there.

Leaving out a group changes no fit.  What another training set would have changed is allowed for by a factor on the
variance, 1 / (1 - share of the rows in a test side): 1.25 for five folds.  It is a rule in the manner of Nadeau and
Bengio (2003, Mach. Learn. 52, 239-281), since no unbiased estimate exists (Bengio and Grandvalet 2004); how often the
intervals cover was measured: ``benchmarks/LOG.md``.  Risks rise with hallucination; label 1 is factual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit
from scipy.stats import beta, rankdata, t

Floats = NDArray[np.floating]
Flags = NDArray[np.bool_]
Index = NDArray[np.integer]
Tests = Sequence[tuple[Index, Floats]]  # test sides: rows and their risks

TAILS = np.array([0.025, 0.975])


class Interval(NamedTuple):
    """Ends of a 95 % interval."""

    low: float
    high: float


class Gain(NamedTuple):
    """AUROC of one score minus that of another, with the ends of its 95 % interval."""

    difference: float
    low: float
    high: float
    p_value: float  # two-sided, of "there is no difference"


def jeffreys(share: float, trials: float) -> Interval:
    """Of a share that was seen in so many trials.  Brown, Cai and DasGupta 2001, Statist. Sci. 16(2), 101-133."""
    low, high = np.asarray(beta.ppf(TAILS, share * trials + 0.5, (1 - share) * trials + 0.5))
    return Interval(0.0 if share == 0 else float(low), 1.0 if share == 1 else float(high))


def auroc_interval(label: Index, group: Index, tests: Tests) -> Interval:
    """Of the mean AUROC over test sides: label, group [n].

    On the scale of its log odds, so that it stays within 0 and 1.  A test side without a class is left out.
    """
    value, without = _mean_auroc(label, group, tests)
    if not np.isfinite(without).all() or len(without) < 2:
        return Interval(0.0, 1.0)  # nothing is known
    if value in (0.0, 1.0):  # no group's absence changes it: as many trials as groups have the rarer class
        return jeffreys(value, min(len(np.unique(group[label == wanted])) for wanted in (0, 1)))
    error = standard_error(without) * np.sqrt(_refitting(tests)) / (value * (1 - value))
    low, high = expit(logit(value) + t.ppf(TAILS, len(without) - 1) * error)
    return Interval(float(low), float(high))


def gain(label: Index, group: Index, one: Tests, other: Tests) -> Gain:
    """Of the mean AUROC of ``one`` over that of ``other``, on the same test sides: label, group [n]."""
    (value, without), (base, base_without) = (_mean_auroc(label, group, tests) for tests in (one, other))
    difference, apart = value - base, without - base_without
    if not np.isfinite(apart).all() or len(apart) < 2:
        return Gain(difference, -1.0, 1.0, 1.0)  # nothing is known
    if np.abs(apart).max() < 1e-12:  # equal rankings
        return Gain(0.0, 0.0, 0.0, 1.0)
    error = standard_error(apart) * np.sqrt(_refitting(one))
    if error < 1e-12:  # both rank every pair alike, one of them for the worse: how sure that is cannot be told
        return Gain(difference, -1.0, 1.0, 1.0)
    low, high = np.clip(difference + t.ppf(TAILS, len(apart) - 1) * error, -1, 1)
    return Gain(difference, float(low), float(high), float(2 * t.sf(abs(difference) / error, len(apart) - 1)))


def t_interval(value: float, without: Floats, folds: int | None = None) -> Interval:
    """Of any figure: ``without`` [groups] are its values with each group left out.

    ``folds``: the figure is of a cross-validation; None: of rows that no fit has seen.
    """
    error = standard_error(without) * (1 if folds is None else np.sqrt(folds / (folds - 1)))
    low, high = value + t.ppf(TAILS, len(without) - 1) * error
    return Interval(float(low), float(high))


def standard_error(without: Floats) -> float:
    """The jackknife's: ``without`` [groups] are the values with each group left out."""
    count = len(without)
    return float(np.sqrt((count - 1) / count * np.sum((without - without.mean()) ** 2)))


def _refitting(tests: Tests) -> float:
    """The factor on the variance; 1 for a single test side, which is rows that no fit has seen."""
    rows = len(np.unique(np.concatenate([side for side, _ in tests])))
    share = float(np.mean([len(side) for side, _ in tests])) / rows
    return 1.0 if share == 1 else 1 / (1 - share)


def _mean_auroc(label: Index, group: Index, tests: Tests) -> tuple[float, NDArray[np.float64]]:
    """The mean AUROC over test sides, and its values without each group [groups]; NaN where no side has a pair."""
    rows = np.concatenate([side for side, _ in tests])
    names, member = np.unique(np.asarray(group)[rows], return_inverse=True)
    ends = np.cumsum([len(side) for side, _ in tests])
    bad = np.asarray(label) == 0
    sides = [
        _auroc(bad[side], np.asarray(risk, np.float64), of_side, len(names))
        for (side, risk), of_side in zip(tests, np.split(member, ends[:-1]), strict=True)
    ]
    found = np.array([[value, *without] for value, without in sides])  # [sides, 1 + groups]
    count = np.isfinite(found).sum(axis=0)
    means = np.where(count > 0, np.nansum(found, axis=0) / np.maximum(count, 1), np.nan)
    return float(means[0]), means[1:]


def _auroc(bad: Flags, risk: Floats, member: Index, groups: int) -> tuple[float, NDArray[np.float64]]:
    """AUROC of one test side, and without each group [groups]: all but its rows' pairs, O(n log n).  NaN: no pairs."""
    level = np.unique(risk, return_inverse=True)[1]
    pairs_won = _won(bad, level)
    lost = np.bincount(member, pairs_won, groups)
    # Pairs inside a group were counted by both of their rows.
    inside = _won(bad, member * (len(risk) + 1) + level, member)
    lost -= np.bincount(member[bad], inside[bad], groups)
    hallucinated = np.bincount(member[bad], minlength=groups)
    factual = np.bincount(member[~bad], minlength=groups)
    pairs = (bad.sum() - hallucinated) * ((~bad).sum() - factual)
    total = float(pairs_won[bad].sum())
    without = np.divide(total - lost, pairs, out=np.full(groups, np.nan), where=pairs > 0)
    whole = int(bad.sum()) * int((~bad).sum())
    return (total / whole if whole else np.nan), without


def _won(bad: Flags, key: Index, member: Index | None = None) -> NDArray[np.float64]:
    """For each row, its pairs with rows of the other class that are ranked right, ties half: key [n] ranks.

    With ``member``, by which the key is sorted first, pairs of one group only.
    """
    found = np.empty(len(bad))
    every = rankdata(key)
    for side in (bad, ~bad):
        found[side] = every[side] - rankdata(key[side])  # rows of the other class below, ties half
    if member is not None:
        for side in (bad, ~bad):
            sizes = np.bincount(member[~side], minlength=int(member.max(initial=0)) + 1)
            found[side] -= (np.cumsum(sizes) - sizes)[member[side]]  # those of earlier groups
    others = (
        np.bincount(member[bad], minlength=int(member.max(initial=0)) + 1)[member] if member is not None else bad.sum()
    )
    return np.where(bad, found, others - found)
