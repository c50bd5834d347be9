"""Two classes of rows: gap, pooled spread, middle layers, distance correlation, Chen and Qin's
test; results as JSON.

Arrays are [N, ...]: rows first; label is 1 for factual, 0 for hallucinated.  The pooled
within-class covariance is sum_c (n_c / N) Cov_c (App. uniform-proof).  The test of equal means
(Chen and Qin 2010, Ann. Statist. 38(2), 808-835) needs no probe and no invertible covariance.  Sums
over pairs of rows are written in moments or taken in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm

from service.errors import TrainingError
from service.fitting.probes import Floats, Index

Mask = NDArray[np.bool_]
# of each class, for Chen and Qin's test: a pair of rows must leave one over in the variance
MIN_ROWS = 3
_PAIRS, _BLOCK = 512, 1024


def factual_rows(label: ArrayLike, minimum: int = 2) -> Mask:
    """Return where rows are factual: label [N] -> [N].  Raises TrainingError where a label is
    neither 0 nor 1, or a class has fewer than ``minimum`` rows."""
    values = np.asarray(label)
    factual: Mask = np.asarray(values == 1)
    counts = {"factual (1)": int(factual.sum()), "hallucinated (0)": int(np.sum(values == 0))}
    if values.ndim != 1 or sum(counts.values()) != len(values):
        raise TrainingError(
            f"label must be one number per row, 0 or 1: found {np.unique(values)[:5].tolist()}"
        )
    for name, count in counts.items():
        if count < minimum:
            raise TrainingError(
                f"{count} rows are {name} and at least {minimum} are needed: give more rows of it"
            )
    return factual


def as_float(x: ArrayLike, name: str, ndim: int) -> Floats:
    """Return a float64 array of ``ndim`` axes.  Raises TrainingError where it is not one or not
    finite."""
    values = np.asarray(x, np.float64)
    if values.ndim != ndim:
        raise TrainingError(f"{name} has shape {list(values.shape)}: {ndim} axes are needed")
    if not np.isfinite(values).all():
        raise TrainingError(
            f"{name} holds {int(np.sum(~np.isfinite(values)))} numbers that are not finite"
        )
    return values


def labelled(x: ArrayLike, label: ArrayLike, name: str, *, minimum: int = 2) -> tuple[Floats, Mask]:
    """Return ``as_float`` of x [N, k] and ``factual_rows`` of label [N].  Raises TrainingError."""
    return as_float(x, name, 2), factual_rows(label, minimum)


def gap(x: Floats, factual: Mask) -> Floats:
    """Return the mean of the factual rows minus that of the others: x [N, ...] -> [...]."""
    return np.asarray(x[factual].mean(axis=0) - x[~factual].mean(axis=0))


def centred(x: Floats, factual: Mask) -> Floats:
    """Return x [N, ...] less the mean of each row's own class."""
    away = x.copy()
    for rows in (factual, ~factual):
        away[rows] -= x[rows].mean(axis=0)
    return away


def variances(x: Floats, factual: Mask) -> tuple[Floats, Floats]:
    """Return unbiased variances of the (hallucinated, factual) rows: x [N, ...] -> two of [...]."""
    return np.asarray(x[~factual].var(axis=0, ddof=1)), np.asarray(x[factual].var(axis=0, ddof=1))


def pooled_variance(x: Floats, factual: Mask) -> Floats:
    """Return sum_c pi_c Var_c: x [N, ...] -> [...]."""
    share = float(factual.mean())
    hallucinated_variance, factual_variance = variances(x, factual)
    return np.asarray(share * factual_variance + (1.0 - share) * hallucinated_variance)


def covariance(x: Floats) -> Floats:
    """Return the unbiased covariance: x [n, d] -> [d, d]."""
    away = x - x.mean(axis=0)
    return np.asarray(away.T @ away / (len(x) - 1))


def pooled_covariance(x: Floats, factual: Mask) -> Floats:
    """Return sum_c pi_c Cov_c (App. uniform-proof): x [N, d] -> [d, d]."""
    share = float(factual.mean())
    return np.asarray(share * covariance(x[factual]) + (1.0 - share) * covariance(x[~factual]))


def effect_size(x: Floats, factual: Mask) -> Floats:
    """Return |gap| over the pooled within-class deviation (Eq. cohen-d): x [N, ...] -> [...]; NaN
    without spread."""
    spread = np.sqrt(pooled_variance(x, factual))
    return np.asarray(
        np.divide(
            np.abs(gap(x, factual)), spread, out=np.full_like(spread, np.nan), where=spread > 0
        )
    )


def middle_layers(m: int) -> range:
    """Return the middle 60 % of m layers, floor(m / 5) <= l < ceil(4 m / 5).  The paper names the
    share, not the rule; this one gives its counts for every model it lists (Table
    validation-results, column CQ sig.: 18 of 28, 20 of 32, 30 of 48, 40 of 64, 48 of 80)."""
    return range(m // 5, -(-4 * m // 5))


def middle_transitions(m: int) -> range:
    """Return the transitions l -> l + 1 that start at a middle layer; as many as middle layers, for
    m >= 5."""
    layers = middle_layers(m)
    return range(layers.start, min(layers.stop, m - 1))


def mean_or_none(values: Sequence[float | None] | Floats) -> float | None:
    """Return the mean of the numbers that are defined (neither None nor NaN); None where there is
    none."""
    array = np.asarray(values, np.float64)  # None becomes NaN
    finite = array[np.isfinite(array)]
    return float(finite.mean()) if len(finite) else None


def defined(value: float) -> float | None:
    """Return the number, or None where it is not finite."""
    return float(value) if np.isfinite(value) else None


def as_document(value: Any) -> Any:
    """Return a result as JSON: dataclasses and mappings become objects, arrays lists, undefined
    numbers null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_document(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_document(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return as_document(value.tolist())
    if isinstance(value, list | tuple):
        return [as_document(item) for item in value]
    return defined(value) if isinstance(value, float) else value


def distance_correlation(x: Floats, y: Floats) -> float | None:
    """Return dCor (Szekely, Rizzo and Bakirov 2007) of x [N], y [N], in [0, 1]; None where either
    is constant.  The V-statistic: dCov^2 = mean(a b) + mean(a) mean(b) - 2 mean_i(a_i. b_i.) with
    a_ij = |x_i - x_j|, a_i. its row means; the definition's double centring, multiplied out.
    O(N^2) time, since one sum over pairs remains."""
    n = len(x)
    # Distances stay; rounding of large offsets goes.
    first, second = x - x.mean(), y - y.mean()
    rows_first, rows_second = _row_means(first), _row_means(second)
    pairs = 0.0
    for start in range(0, n, _PAIRS):
        block = slice(start, start + _PAIRS)
        product = (first[block, None] - first) * (second[block, None] - second)
        pairs += float(np.abs(product, out=product).sum())
    covariance = (
        pairs / n**2
        + float(rows_first.mean() * rows_second.mean())
        - 2.0 * float(np.mean(rows_first * rows_second))
    )
    spread = _squared_spread(first, rows_first) * _squared_spread(second, rows_second)
    if spread <= 0:
        return None
    return math.sqrt(min(max(covariance / math.sqrt(spread), 0.0), 1.0))


def _row_means(x: Floats) -> Floats:
    """Return mean_j |x_i - x_j| for every i, by sorting: [N] -> [N]."""
    n = len(x)
    order = np.argsort(x, kind="stable")
    ranked = x[order]
    below = np.concatenate([[0.0], np.cumsum(ranked)[:-1]])
    means = np.empty(n)
    means[order] = (
        ranked * (2 * np.arange(n) - n + 1) - below + (ranked.sum() - below - ranked)
    ) / n
    return means - min(float(means.min()), 0.0)  # rounding, where all are equal


def _squared_spread(x: Floats, rows: Floats) -> float:
    """Return dVar^2 of x [N]; the mean of squared distances is twice the variance."""
    if np.ptp(x) == 0:
        return 0.0
    return 2.0 * float(x.var()) + float(rows.mean()) ** 2 - 2.0 * float(np.mean(rows**2))


@dataclass(frozen=True)
class ChenQin:
    """statistic: an unbiased estimate of |mu_F - mu_H|^2, which may be negative; p_value:
    one-sided, for it > 0.  All are of independent rows; None where there are too few."""

    statistic: float | None = None
    variance: float | None = None  # of the statistic where the means are equal
    z: float | None = None
    p_value: float | None = None  # None where the variance is not estimated as positive
    trace: float | None = None  # Tr(Sigma), pooled within class
    energy_ratio: float | None = None  # statistic / trace; None where there is no variance
    notes: tuple[str, ...] = ()


def one_row_a_group(group: ArrayLike, seed: int = 0) -> Index:
    """Return one row of each group, drawn with a seed, in the data's order: group [N] -> [G] rows.
    Rows of a group depend on each other, and a group may have rows of both classes: its means would
    tie the classes."""
    names = np.asarray(group)
    order = np.random.default_rng(seed).permutation(len(names))
    return np.asarray(np.sort(order[np.unique(names[order], return_index=True)[1]]), np.int64)


def chen_qin_by_group(x: ArrayLike, label: ArrayLike, group: ArrayLike) -> ChenQin:
    """Return the test of ``one_row_a_group``: x [N, d], label, group [N].  All rows would call
    their own likeness within a group a difference of the classes.  Without a number, and with a
    note, below 3 of these rows of a class."""
    rows = one_row_a_group(group)
    classes = np.asarray(label)[rows]
    least = min(int(np.sum(classes == value)) for value in (0, 1))
    if least < MIN_ROWS:
        note = (
            f"one row of each group leaves {least} rows of a class, and {MIN_ROWS} are needed: give"
            " more groups"
        )
        return ChenQin(notes=(note,))
    return chen_qin(np.asarray(x)[rows], classes)


def chen_qin(x: ArrayLike, label: ArrayLike) -> ChenQin:
    """Return the test of equal class means: x [N, d], label [N], of independent rows (else
    ``chen_qin_by_group``).

    T = mean_{i != j} x_i'x_j within each class, less twice the mean across; its variance under H0
    is 2 tr(S_F^2) / (n_F (n_F - 1)) + 2 tr(S_H^2) / (n_H (n_H - 1)) + 4 tr(S_F S_H) / (n_F n_H), by
    their leave-out estimators. Their tr(S_c^2) changes where all rows are moved; here each class is
    moved by the OTHER's mean, which is independent of
    it: the estimator is otherwise theirs.  Raises TrainingError below 3 rows of a class."""
    values, factual = labelled(x, label, "x", minimum=MIN_ROWS)
    # Changes nothing but rounding: everything below is moved again or invariant.
    values = values - values.mean(axis=0)
    first, second = values[factual], values[~factual]
    n1, n2 = len(first), len(second)
    mean1, mean2 = first.mean(axis=0), second.mean(axis=0)
    statistic = _within(first) + _within(second) - 2.0 * float(mean1 @ mean2)
    variance = (
        2.0 * squared_trace(first - mean2) / (n1 * (n1 - 1))
        + 2.0 * squared_trace(second - mean1) / (n2 * (n2 - 1))
        + 4.0 * _mixed_trace(first, second) / (n1 * n2)
    )
    trace = float(pooled_variance(values, factual).sum())
    energy_ratio = statistic / trace if trace > 0 else None
    if not variance > 0:
        note = "z and p_value are left out: the variance estimate is not positive"
        return ChenQin(statistic, variance, None, None, trace, energy_ratio, (note,))
    z = statistic / math.sqrt(variance)
    return ChenQin(statistic, variance, z, float(norm.sf(z)), trace, energy_ratio)


def squared_trace(x: Floats) -> float:
    """Return Chen and Qin's estimate of tr(Sigma^2) from x [n, d], n >= 3.  Theirs: mean over j !=
    k of [x_j'(x_k - M)] [x_k'(x_j - M)], M the mean of the other n - 2 rows.  With G = X X', h_j =
    sum_{i != j} G_ij, a factor is ((n - 1) G_jk - h_j) / (n - 2), and the sum needs only |X'X|^2,
    diag G and h."""
    n = len(x)
    diagonal = np.einsum("nd,nd->n", x, x)
    h = x @ x.sum(axis=0) - diagonal
    # |X X'|^2 = |X'X|^2, by blocks of the smaller one.
    short = x if n <= x.shape[1] else np.ascontiguousarray(x.T)
    pairs = _squared_products(short, short) - float(diagonal @ diagonal)  # over j != k of G_jk^2
    squares = float(h @ h)
    total = (n - 1) ** 2 * pairs - 2 * (n - 1) * squares + float(h.sum()) ** 2 - squares
    return total / (n * (n - 1) * (n - 2) ** 2)


def _squared_products(first: Floats, second: Floats) -> float:
    """Return sum_ij (x_i . y_j)^2 of the rows of two arrays."""
    blocks = range(0, len(first), _BLOCK)
    return sum(float(np.sum((first[i : i + _BLOCK] @ second.T) ** 2)) for i in blocks)


def _within(x: Floats) -> float:
    n, total = len(x), x.sum(axis=0)
    return (float(total @ total) - float(np.sum(x * x))) / (n * (n - 1))


def _mixed_trace(first: Floats, second: Floats) -> float:
    """Return tr(S_1 S_2) of the unbiased covariances: what their leave-one-out estimate comes to,
    exactly."""
    a, b = first - first.mean(axis=0), second - second.mean(axis=0)
    d = a.shape[1]
    if min(len(a), len(b)) < d:
        total = _squared_products(a, b)
    else:
        total = sum(
            float(np.sum((a[:, i : i + _BLOCK].T @ a) * (b[:, i : i + _BLOCK].T @ b)))
            for i in range(0, d, _BLOCK)
        )
    return total / ((len(a) - 1) * (len(b) - 1))
