"""What every diagnostic shares: two classes, their gap, their pooled spread, the middle layers, a result as JSON.

The pooled within-class covariance is sum_c pi_c Cov_c (App. uniform-proof) with pi_c = n_c / N and Cov_c the unbiased
sample covariance.  Arrays are [N, ...]: rows first, any further axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from service.errors import TrainingError

Floats = NDArray[np.float64]
Labels = NDArray[np.integer]
Mask = NDArray[np.bool_]


def factual_rows(label: ArrayLike, minimum: int = 2) -> Mask:
    """True where factual: label [N] -> [N].

    TrainingError where a label is neither 0 nor 1, or a class has fewer than ``minimum`` rows.
    """
    values = np.asarray(label)
    factual: Mask = np.asarray(values == 1)
    counts = {"factual (1)": int(factual.sum()), "hallucinated (0)": int(np.sum(values == 0))}
    if values.ndim != 1 or sum(counts.values()) != len(values):
        raise TrainingError(f"label must be one number per row, 0 or 1: found {np.unique(values)[:5].tolist()}")
    for name, count in counts.items():
        if count < minimum:
            raise TrainingError(f"{count} rows are {name} and at least {minimum} are needed: give more rows of it")
    return factual


def as_float(x: ArrayLike, name: str, ndim: int) -> Floats:
    """A float64 array of ``ndim`` axes; TrainingError naming ``name`` where it is not one or not finite."""
    values = np.asarray(x, np.float64)
    if values.ndim != ndim:
        raise TrainingError(f"{name} has shape {list(values.shape)}: {ndim} axes are needed")
    if not np.isfinite(values).all():
        raise TrainingError(f"{name} holds {int(np.sum(~np.isfinite(values)))} numbers that are not finite")
    return values


def labelled(x: ArrayLike, label: ArrayLike, name: str, *, minimum: int = 2) -> tuple[Floats, Mask]:
    """``as_float`` of x [N, k] and ``factual_rows`` of label [N]; TrainingError too where their lengths differ."""
    values, count = as_float(x, name, 2), len(np.asarray(label))
    if len(values) != count:
        raise TrainingError(f"{name} has {len(values)} rows and label {count}: one label per row is needed")
    return values, factual_rows(label, minimum)


def gap(x: Floats, factual: Mask) -> Floats:
    """Mean of the factual rows minus mean of the others: x [N, ...] -> [...]."""
    return np.asarray(x[factual].mean(axis=0) - x[~factual].mean(axis=0))


def centred(x: Floats, factual: Mask) -> Floats:
    """x [N, ...] less the mean of each row's own class."""
    rest = x.copy()
    for rows in (factual, ~factual):
        rest[rows] -= x[rows].mean(axis=0)
    return rest


def variances(x: Floats, factual: Mask) -> tuple[Floats, Floats]:
    """Unbiased variances of the (hallucinated, factual) rows: x [N, ...] -> two of [...]."""
    return np.asarray(x[~factual].var(axis=0, ddof=1)), np.asarray(x[factual].var(axis=0, ddof=1))


def pooled_variance(x: Floats, factual: Mask) -> Floats:
    """sum_c pi_c Var_c: x [N, ...] -> [...]."""
    share = float(factual.mean())
    hallucinated_variance, factual_variance = variances(x, factual)
    return np.asarray(share * factual_variance + (1.0 - share) * hallucinated_variance)


def covariance(x: Floats) -> Floats:
    """Unbiased covariance: x [n, d] -> [d, d]."""
    rest = x - x.mean(axis=0)
    return np.asarray(rest.T @ rest / (len(x) - 1))


def pooled_covariance(x: Floats, factual: Mask) -> Floats:
    """sum_c pi_c Cov_c (App. uniform-proof): x [N, d] -> [d, d]."""
    share = float(factual.mean())
    return np.asarray(share * covariance(x[factual]) + (1.0 - share) * covariance(x[~factual]))


def effect_size(x: Floats, factual: Mask) -> Floats:
    """|gap| over the pooled within-class standard deviation (Eq. cohen-d): x [N, ...] -> [...].

    NaN where the pooled variance is zero; ``as_document`` writes it as null.
    """
    spread = np.sqrt(pooled_variance(x, factual))
    return np.asarray(np.divide(np.abs(gap(x, factual)), spread, out=np.full_like(spread, np.nan), where=spread > 0))


def middle_layers(m: int) -> range:
    """The middle 60 % of m layers, floor(m / 5) <= l < ceil(4 m / 5).

    The paper names the share, not the rule; this one gives its counts for every model it lists (Table
    validation-results, column CQ sig.: 18 of 28, 20 of 32, 30 of 48, 40 of 64, 48 of 80).
    """
    return range(m // 5, -(-4 * m // 5))


def middle_transitions(m: int) -> range:
    """The transitions l -> l + 1 that start at a middle layer; as many as middle layers, for m >= 5."""
    layers = middle_layers(m)
    return range(layers.start, min(layers.stop, m - 1))


def mean_or_none(values: Sequence[float | None] | Floats) -> float | None:
    """Mean of the numbers that are defined (neither None nor NaN); None where there is none."""
    array = np.asarray(values, np.float64)  # None becomes NaN
    kept = array[np.isfinite(array)]
    return float(kept.mean()) if len(kept) else None


def defined(value: float) -> float | None:
    """The number, or None where it is not finite."""
    return float(value) if np.isfinite(value) else None


def as_document(value: Any) -> Any:
    """A result as JSON: dataclasses and mappings become objects, arrays lists, undefined numbers null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_document(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_document(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return as_document(value.tolist())
    if isinstance(value, (list, tuple)):
        return [as_document(item) for item in value]
    if isinstance(value, np.generic):
        return as_document(value.item())
    if isinstance(value, float):
        return defined(value)
    return value
