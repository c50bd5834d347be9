"""Distance correlation (Szekely, Rizzo and Bakirov 2007), and Chen and Qin's (2010) two-sample test of equal means.

The test needs no probe and no invertible covariance: Ann. Statist. 38(2), 808-835; the paper's "probe-free" columns of
Table validation-results.  Sums over pairs of rows are written in moments, exactly, or taken in blocks, so that N rows
need no N x N numbers in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm

from hallutracer_research.paper.diagnostics.classes import Floats, as_float, labelled, pooled_variance
from service.errors import TrainingError

_PAIRS = 512


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
    for start in range(0, n, _PAIRS):
        block = slice(start, start + _PAIRS)
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


MIN_ROWS = 3  # of each class: a pair of rows must leave one over in the variance
_BLOCK = 1024


@dataclass(frozen=True)
class ChenQin:
    """statistic: an unbiased estimate of |mu_F - mu_H|^2, which may be negative; p_value: one-sided, for it > 0.

    All are of independent rows; None where there are too few.
    """

    statistic: float | None
    variance: float | None  # of the statistic where the means are equal
    z: float | None
    p_value: float | None  # None where the variance is not estimated as positive
    trace: float | None  # Tr(Sigma), pooled within class
    energy_ratio: float | None  # statistic / trace; None where there is no variance
    notes: tuple[str, ...] = ()


def one_row_a_group(group: ArrayLike, seed: int = 0) -> NDArray[np.int64]:
    """One row of each group, drawn with a seed, in the data's order: group [N] -> [G] rows.

    Rows of a group depend on each other, and a group may have rows of both classes: its means would tie the classes.
    """
    names = np.asarray(group)
    order = np.random.default_rng(seed).permutation(len(names))
    return np.asarray(np.sort(order[np.unique(names[order], return_index=True)[1]]), np.int64)


def chen_qin_by_group(x: ArrayLike, label: ArrayLike, group: ArrayLike) -> ChenQin:
    """The test of ``one_row_a_group``: x [N, d], label, group [N].

    All rows would call their own likeness within a group a difference of the classes.  Without a number, and with a
    note, below 3 of these rows of a class.
    """
    rows = one_row_a_group(group)
    kept = np.asarray(label)[rows]
    least = min(int(np.sum(kept == value)) for value in (0, 1))
    if least < MIN_ROWS:
        note = f"one row of each group leaves {least} rows of a class, and {MIN_ROWS} are needed: give more groups"
        return ChenQin(None, None, None, None, None, None, (note,))
    return chen_qin(np.asarray(x)[rows], kept)


def chen_qin(x: ArrayLike, label: ArrayLike) -> ChenQin:
    """x [N, d], label [N] -> the test of equal class means; TrainingError below 3 rows of a class.

    The rows must be independent: where they are in groups, ``chen_qin_by_group``.

    T = mean_{i != j} x_i'x_j within each class, less twice the mean across; its variance under H0 is
    2 tr(S_F^2) / (n_F (n_F - 1)) + 2 tr(S_H^2) / (n_H (n_H - 1)) + 4 tr(S_F S_H) / (n_F n_H), each trace by their
    leave-out estimators.  T and the mixed trace do not change when all rows are moved; their tr(S_c^2) does, by noise
    of the order of the squared distance of the mean from the origin.  Here each class is moved by the OTHER class's
    mean before it is taken, which is independent of it: the estimator is otherwise theirs.
    """
    values, factual = labelled(x, label, "x", minimum=MIN_ROWS)
    values = values - values.mean(axis=0)  # changes nothing but rounding: everything below is moved again or invariant
    one, two = values[factual], values[~factual]
    n1, n2 = len(one), len(two)
    statistic = _within(one) + _within(two) - 2.0 * float(one.mean(axis=0) @ two.mean(axis=0))
    square1 = squared_trace(one - two.mean(axis=0))
    square2 = squared_trace(two - one.mean(axis=0))
    mixed = _mixed_trace(one, two)
    variance = 2.0 * square1 / (n1 * (n1 - 1)) + 2.0 * square2 / (n2 * (n2 - 1)) + 4.0 * mixed / (n1 * n2)
    trace = float(pooled_variance(values, factual).sum())
    z = statistic / math.sqrt(variance) if variance > 0 else None
    notes = () if variance > 0 else ("z and p_value are left out: the variance estimate is not positive",)
    return ChenQin(
        statistic=statistic, variance=variance, z=z, p_value=float(norm.sf(z)) if z is not None else None,
        trace=trace, energy_ratio=statistic / trace if trace > 0 else None, notes=notes,
    )  # fmt: skip


def squared_trace(x: Floats) -> float:
    """Chen and Qin's estimate of tr(Sigma^2) from x [n, d], n >= 3.

    Theirs: mean over j != k of [x_j'(x_k - M)] [x_k'(x_j - M)], M the mean of the other n - 2 rows.  With G = X X',
    h_j = sum_{i != j} G_ij, a factor is ((n - 1) G_jk - h_j) / (n - 2), and the sum needs only |X'X|^2, diag G and h.
    """
    n = len(x)
    own = np.einsum("nd,nd->n", x, x)
    rest = x @ x.sum(axis=0) - own
    pairs = _gram_square(x) - float(own @ own)  # sum over j != k of G_jk^2
    squares = float(rest @ rest)
    total = (n - 1) ** 2 * pairs - 2 * (n - 1) * squares + float(rest.sum()) ** 2 - squares
    return total / (n * (n - 1) * (n - 2) ** 2)


def _within(x: Floats) -> float:
    n, total = len(x), x.sum(axis=0)
    return (float(total @ total) - float(np.sum(x * x))) / (n * (n - 1))


def _gram_square(x: Floats) -> float:
    """|X X'|_F^2 = |X'X|_F^2 by blocks of the smaller of the two: x [n, d] -> sum of all squared products."""
    short = x if len(x) <= x.shape[1] else np.ascontiguousarray(x.T)
    return sum(float(np.sum((short[i : i + _BLOCK] @ short.T) ** 2)) for i in range(0, len(short), _BLOCK))


def _mixed_trace(one: Floats, two: Floats) -> float:
    """tr(S_1 S_2) of the unbiased covariances: what their leave-one-out estimate comes to, exactly."""
    a, b = one - one.mean(axis=0), two - two.mean(axis=0)
    d = a.shape[1]
    if min(len(a), len(b)) < d:
        total = sum(float(np.sum((a[i : i + _BLOCK] @ b.T) ** 2)) for i in range(0, len(a), _BLOCK))
    else:
        total = sum(
            float(np.sum((a[:, i : i + _BLOCK].T @ a) * (b[:, i : i + _BLOCK].T @ b))) for i in range(0, d, _BLOCK)
        )
    return total / ((len(a) - 1) * (len(b) - 1))
