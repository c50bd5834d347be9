"""Scores a risk (ranking, calibration), with 95 % intervals over groups; ``decisions`` scores a
gate.

Labels: 1 factual, 0 hallucinated.  A risk is P(hallucinated).  An interval is a jackknife's (Tukey
1958), which leaves out one group after the other, with Student's t of groups - 1 degrees of
freedom.  The jackknife repeats no fit.  The variation by other training sets enters as a factor on
the variance, 1 / (1 - share of the rows in a test side), after Nadeau and Bengio (2003, Mach.
Learn. 52, 239-281).  Measured coverage: ``benchmarks/LOG.md``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit
from scipy.stats import beta, t
from sklearn.metrics import brier_score_loss

Labels = NDArray[np.integer]
Floats = NDArray[np.floating]
Doubles = NDArray[np.float64]
Index = NDArray[np.integer]
Tests = Sequence[tuple[Index, Floats]]  # test sides: rows and their risks

ECE_BINS = 15
SUMMARY = ("auroc", "auprc_hallucinated", "auprc_factual", "brier", "ece")
TAILS = np.array([0.025, 0.975])


class ConfidenceInterval(NamedTuple):
    """Ends of a 95 % interval."""

    low: float
    high: float


class Gain(NamedTuple):
    """AUROC of one score minus that of another, with the ends of its 95 % interval."""

    difference: float
    low: float
    high: float
    p_value: float  # two-sided, of "there is no difference"


def auroc(label: Labels, score: Floats) -> float:
    """Return P(score of a factual row > score of a hallucinated row), ties half: label [N], score
    [N].

    The score increases with factuality.  Raises ValueError if a class is missing."""
    values = np.asarray(label, np.int64)
    hallucinated = np.sort(np.asarray(score)[values == 0])
    factual = np.sort(np.asarray(score)[values == 1])
    if not len(hallucinated) or not len(factual) or len(hallucinated) + len(factual) != len(values):
        raise ValueError(
            "both classes (1 factual, 0 hallucinated) are needed, found"
            f" {sorted(set(values.tolist()))}"
        )
    # Counting pairs gives the same number as scikit-learn's curve, faster: head selection needs it
    # many thousand times.
    below = (
        np.searchsorted(hallucinated, factual, "left").sum()
        + np.searchsorted(hallucinated, factual, "right").sum()
    )
    return float(below) / (2.0 * len(hallucinated) * len(factual))


def risk_auroc(label: Labels, risk: Floats) -> float:
    """Return the AUROC of a risk; hallucinated is the positive class."""
    return auroc(label, -np.asarray(risk))


def auprc(label: Labels, risk: Floats, *, positive: int) -> float:
    """Return the average precision with ``positive`` 0 (hallucinated) or 1; the paper does not say
    which it uses.  It is 0 without a positive row."""
    score = np.asarray(risk) if positive == 0 else -np.asarray(risk)
    order = np.argsort(score, kind="stable")[::-1]
    last_of_each = np.append(np.flatnonzero(np.diff(score[order])), len(score) - 1)
    hits = np.cumsum(np.asarray(label)[order] == positive, dtype=np.float64)[last_of_each]
    if not hits[-1]:
        return 0.0
    # scikit-learn's sum, in its order, to the bit: its checks cost many times as much.
    precision, recall = (hits / (last_of_each + 1))[::-1], (hits / hits[-1])[::-1]
    return float(-np.sum(np.diff(recall, append=0.0) * precision))


def equal_mass_bins(risk: Floats, bins: int = ECE_BINS) -> NDArray[np.int64]:
    """Return each row's bin, numbered from 0 without gaps: (nearly) equally many of the sorted
    risks [n] in each.

    Equal risks share the bin of the first of them."""
    values = np.asarray(risk, np.float64)
    first = np.searchsorted(np.sort(values), values, side="left")
    return np.unique(first * bins // len(values), return_inverse=True)[1].astype(np.int64)


def reliability(
    label: Labels, risk: Floats, bins: int = ECE_BINS
) -> tuple[Doubles, Doubles, NDArray[np.int64]]:
    """Return mean risk, share hallucinated and size of each of ``equal_mass_bins``, [b <= bins]."""
    order = np.argsort(risk, kind="stable")
    ranked, truth = np.asarray(risk, np.float64)[order], 1.0 - np.asarray(label, np.float64)[order]
    index = equal_mass_bins(ranked, bins)
    size = np.bincount(index)
    return np.bincount(index, ranked) / size, np.bincount(index, truth) / size, size


def shown_bins(count: int) -> int:
    """Return the number of bins in a plot of ``count`` rows: that of ECE, or fewer so that each has
    20 rows."""
    return max(1, min(ECE_BINS, count // 20))


def ece(label: Labels, risk: Floats, bins: int = ECE_BINS) -> float:
    """Return the expected calibration error, sum_b n_b / N |mean risk - share hallucinated|, of
    equal-mass bins."""
    predicted, observed, size = reliability(label, risk, bins)
    return float(np.sum(size * np.abs(predicted - observed)) / np.sum(size))


def squared_calibration_error(
    label: Labels, risk: Floats, group: Index, bins: int = ECE_BINS
) -> tuple[float, Doubles]:
    """Return the debiased squared calibration error (Kumar et al. 2019), of all rows and without
    each group.

    For each equal-mass bin it takes the squared difference minus the variance of the observed
    share, y (1 - y) / (n - 1); bins of one row are left out.  label, risk, group [n] -> a number
    and [G], which may be negative."""
    bin_of, member = equal_mass_bins(risk, bins), np.unique(group, return_inverse=True)[1]
    shape = (int(member.max()) + 1, int(bin_of.max()) + 1)
    cell = member * shape[1] + bin_of
    parts = (
        np.ones(len(cell)),
        (np.asarray(label) == 0).astype(np.float64),
        np.asarray(risk, np.float64),
    )
    sums = np.stack(
        [np.bincount(cell, part, shape[0] * shape[1]).reshape(shape) for part in parts]
    )  # [3, G, bins]
    whole = sums.sum(axis=1, keepdims=True)
    size, wrong, total = np.concatenate([whole, whole - sums], axis=1).round(9)  # [1 + G, bins]
    counted = size > 1
    safe = np.where(counted, size, 2.0)
    observed, predicted = wrong / safe, total / safe
    squared = (predicted - observed) ** 2 - observed * (1 - observed) / (safe - 1)
    errors = (counted * size * squared).sum(axis=1) / np.maximum((counted * size).sum(axis=1), 1.0)
    return float(errors[0]), errors[1:]


def debiased_calibration_error(label: Labels, risk: Floats, bins: int = ECE_BINS) -> float:
    """Return the root of ``squared_calibration_error``; 0 if that is negative."""
    return float(
        np.sqrt(
            max(0.0, squared_calibration_error(label, risk, np.zeros(len(risk), np.int64), bins)[0])
        )
    )


def number_together(*names: Iterable[Hashable]) -> list[NDArray[np.int64]]:
    """Return numbers for the names of several samples, in order of appearance; equal names have
    equal numbers."""
    codes: dict[Hashable, int] = {}
    numbers = []
    for sample in names:
        numbers.append(np.array([codes.setdefault(name, len(codes)) for name in sample], np.int64))
    return numbers


def within_stratum_auroc(label: Labels, risk: Floats, strata: Sequence[Hashable]) -> float | None:
    """Return the mean AUROC inside strata, weighted by (hallucinated, factual) pairs; None without
    any pair."""
    [index] = number_together(strata)
    total = pairs = 0.0
    for code in np.unique(index):
        inside = index == code
        weight = float(np.sum(label[inside] == 0)) * float(np.sum(label[inside] == 1))
        if weight:
            total += weight * risk_auroc(label[inside], risk[inside])
            pairs += weight
    return total / pairs if pairs else None


def summary(label: Labels, risk: Floats) -> dict[str, float]:
    """Return every score of one set of risks, by the names in ``SUMMARY``."""
    ranking = risk_auroc(label, risk)  # raises if a class is missing
    precision = [auprc(label, risk, positive=value) for value in (0, 1)]
    brier = float(brier_score_loss(1 - np.asarray(label), risk, pos_label=1))
    return dict(zip(SUMMARY, (ranking, *precision, brier, ece(label, risk)), strict=True))


# --- intervals ---


def jeffreys(share: float, trials: float) -> ConfidenceInterval:
    """Return the interval of a share of ``trials`` (Brown, Cai and DasGupta 2001, Statist. Sci.
    16(2), 101-133)."""
    low, high = np.asarray(beta.ppf(TAILS, share * trials + 0.5, (1 - share) * trials + 0.5))
    return ConfidenceInterval(0.0 if share == 0 else float(low), 1.0 if share == 1 else float(high))


def effective_groups(group: Index) -> float:
    """Return Kish's effective number of groups, (sum n_g)^2 / sum n_g^2: group [n]."""
    size = np.unique(group, return_counts=True)[1].astype(np.float64)
    return float(size.sum() ** 2 / (size**2).sum())


def share_interval(share: float, group: Index) -> ConfidenceInterval:
    """Return Jeffreys' interval of a share of rows; rows of a ``group`` [n] count as copies of each
    other."""
    return jeffreys(share, effective_groups(group))


def group_draws(group: Index, seed: int = 0) -> Iterator[Doubles]:
    """Yield 1,000 bootstrap draws of whole groups, as the count of each row of ``group`` [n]."""
    names, member = np.unique(group, return_inverse=True)
    rng = np.random.default_rng(seed)
    for _ in range(1_000):
        yield np.bincount(rng.integers(0, len(names), len(names)), minlength=len(names))[
            member
        ].astype(np.float64)


def standard_error(without: Floats) -> float:
    """Return the jackknife's standard error; ``without`` [groups] are the values with each group
    left out."""
    count = len(without)
    return float(np.sqrt((count - 1) / count * np.sum((without - without.mean()) ** 2)))


def t_interval(value: float, without: Floats, folds: int | None = None) -> ConfidenceInterval:
    """Return the interval of any figure; ``without`` [groups] are its values with each group left
    out.

    ``folds`` are those of its cross-validation, None for rows that no fit has seen."""
    error = standard_error(without) * (1 if folds is None else np.sqrt(folds / (folds - 1)))
    low, high = value + t.ppf(TAILS, len(without) - 1) * error
    return ConfidenceInterval(float(low), float(high))


def mean_auroc(label: Index, tests: Tests, strata: Index | None = None) -> float:
    """Return the mean AUROC over test sides, with ``strata`` [n] of pairs inside a stratum; NaN
    without any pair."""
    return _mean_auroc(label, np.zeros(len(label), np.int64), tests, strata)[0]


def auroc_interval(
    label: Index, group: Index, tests: Tests, strata: Index | None = None
) -> ConfidenceInterval:
    """Return the interval of the mean AUROC over test sides with both classes, by its log odds:
    label, group [n].

    With ``strata`` [n] it is that of pairs inside a stratum."""
    value, without = _mean_auroc(label, group, tests, strata)
    if not np.isfinite(without).all() or len(without) < 2:
        return ConfidenceInterval(0.0, 1.0)  # nothing is known
    if value in (
        0.0,
        1.0,
    ):  # the jackknife sees no variation: take each group of the rarer class as a trial
        return jeffreys(value, min(len(np.unique(group[label == wanted])) for wanted in (0, 1)))
    error = standard_error(without) * np.sqrt(_refitting(tests)) / (value * (1 - value))
    low, high = expit(logit(value) + t.ppf(TAILS, len(without) - 1) * error)
    return ConfidenceInterval(float(low), float(high))


def gain(
    label: Index, group: Index, tests: Tests, base_tests: Tests, strata: Index | None = None
) -> Gain:
    """Return the mean AUROC of ``tests`` less that of ``base_tests``, on the same test sides:
    label, group [n].

    With ``strata`` [n] it is that of pairs inside a stratum."""
    (value, without), (base, base_without) = (
        _mean_auroc(label, group, sides, strata) for sides in (tests, base_tests)
    )
    difference, apart = value - base, without - base_without
    if not np.isfinite(apart).all() or len(apart) < 2:
        return Gain(difference, -1.0, 1.0, 1.0)  # nothing is known
    if np.abs(apart).max() < 1e-12:  # equal rankings
        return Gain(0.0, 0.0, 0.0, 1.0)
    error = standard_error(apart) * np.sqrt(_refitting(tests))
    if (
        error < 1e-12
    ):  # leaving out any group changes nothing, so the jackknife cannot give an interval
        return Gain(difference, -1.0, 1.0, 1.0)
    low, high = np.clip(difference + t.ppf(TAILS, len(apart) - 1) * error, -1, 1)
    return Gain(
        difference,
        float(low),
        float(high),
        float(2 * t.sf(abs(difference) / error, len(apart) - 1)),
    )


def _refitting(tests: Tests) -> float:
    """Return the factor on the variance for other training sets; 1 for a single test side, which no
    fit has seen."""
    rows = len(np.unique(np.concatenate([side for side, _ in tests])))
    share = float(np.mean([len(side) for side, _ in tests])) / rows
    return 1.0 if share == 1 else 1 / (1 - share)


def _mean_auroc(
    label: Index, group: Index, tests: Tests, strata: Index | None = None
) -> tuple[float, Doubles]:
    """Return the mean AUROC over test sides, and its values without each group [groups]; NaN if no
    side has a pair."""
    names, member = np.unique(
        np.concatenate([np.asarray(group)[side] for side, _ in tests]), return_inverse=True
    )
    ends = np.cumsum([len(side) for side, _ in tests])
    stratum = np.zeros(len(label), np.int64) if strata is None else np.asarray(strata)
    sides = [
        _auroc_without(
            np.asarray(label)[side] == 0,
            np.asarray(risk, np.float64),
            of_side,
            len(names),
            stratum[side],
        )
        for (side, risk), of_side in zip(tests, np.split(member, ends[:-1]), strict=True)
    ]
    table = np.array(sides)  # [sides, 1 + groups]
    count = np.isfinite(table).sum(axis=0)
    means = np.where(count > 0, np.nansum(table, axis=0) / np.maximum(count, 1), np.nan)
    return float(means[0]), means[1:]


def _auroc_without(
    bad: NDArray[np.bool_], risk: Floats, member: Index, groups: int, stratum: Index
) -> Floats:
    """Return the AUROC of one test side's pairs inside strata, then without each group,
    [1 + groups]; NaN: no pair."""
    won, pairs = np.zeros(groups + 1), np.zeros(groups + 1)
    for code in np.unique(stratum):
        inside = stratum == code
        of_stratum = _pairs_without(bad[inside], risk[inside], member[inside], groups)
        won, pairs = won + of_stratum[0], pairs + of_stratum[1]
    values = np.full(groups + 1, np.nan)
    np.divide(won, pairs, out=values, where=pairs > 0)
    return values


def _pairs_without(
    bad: NDArray[np.bool_], risk: Floats, member: Index, groups: int
) -> tuple[Floats, Floats]:
    """Return the numbers of correctly ranked pairs and of all pairs of classes: in all, then
    without each group."""
    low, of_low = risk[~bad], member[~bad]
    lost, total = np.zeros(groups), 0.0
    for part in np.array_split(
        np.flatnonzero(bad), bad.sum() // 256 + 1
    ):  # in parts, to save memory
        won = (
            np.sign(risk[part][:, None] - low) + 1
        ) / 2  # correctly ranked pairs of rows, ties half
        inside = np.where(member[part][:, None] == of_low, won, 0.0).sum(
            axis=1
        )  # pairs inside a group count once
        lost += np.bincount(member[part], won.sum(axis=1) - inside, groups)
        lost += np.bincount(of_low, won.sum(axis=0), groups)
        total += won.sum()
    hallucinated, factual = (np.bincount(member[side], minlength=groups) for side in (bad, ~bad))
    return total - np.append(0.0, lost), (bad.sum() - np.append(0, hallucinated)) * (
        (~bad).sum() - np.append(0, factual)
    )
