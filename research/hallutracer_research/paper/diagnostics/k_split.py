"""The four parts of the readout change K_l: probe, metric, head and bias (Lemma k-decomp; Tables k-decomp-auroc, -cov).

Defined for the paper's unit-norm logits.  z_l is always the standardisation of layer l's SELECTED head, also where it
is applied to another head's activations, as the lemma writes.  The caller
passes out-of-fold probes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from hallutracer_research.paper.diagnostics.classes import Floats, as_float, labelled
from hallutracer_research.paper.diagnostics.features import zones
from hallutracer_research.paper.diagnostics.geometry import Crossing
from service.errors import TrainingError

PARTS = ("k", "probe", "metric", "head")  # of Table k-decomp-auroc; the bias part is one number per layer
_CHUNK = 64  # permutations at a time


@dataclass(frozen=True, eq=False)
class StandardizedProbes:
    """Selected probes in standardised coordinates (Eq. selected-standardized-readout): [m, d] each, intercept [m].

    phi_l(a) = weight_l . (a - mean_l) / std_l + intercept_l, with mean and std of the selected head's training rows.
    """

    weight: Floats
    intercept: Floats
    mean: Floats
    std: Floats

    @classmethod
    def of(cls, direction: ArrayLike, bias: ArrayLike, mean: ArrayLike, std: ArrayLike) -> StandardizedProbes:
        """From raw-space probes: w_l = std_l v_l, b~_l = b_l + v_l . mean_l (Eq. raw-space-probe, backwards)."""
        v, centre, spread = (
            as_float(x, name, 2) for x, name in ((direction, "direction"), (mean, "mean"), (std, "std"))
        )
        if not (v.shape == centre.shape == spread.shape) or np.any(spread <= 0):
            raise TrainingError(
                "direction, mean and std must all be [m, d], std above 0 (1 where a column is constant)"
            )
        return cls(spread * v, np.asarray(bias, np.float64) + np.einsum("md,md->m", v, centre), centre, spread)

    def z(self, layer: int, readout: Floats) -> Floats:
        """z_layer(readout): [N, d] -> [N, d]."""
        return np.asarray((readout - self.mean[layer]) / self.std[layer])


@dataclass(frozen=True, eq=False)
class KSplit:
    """K and its parts, [N, m - 1] each, bias [m - 1]; probe + metric + head + bias = k."""

    k: Floats  # computed by itself, from the raw-space probes
    probe: Floats
    metric: Floats
    head: Floats
    bias: Floats
    reconstruction_error: (
        float  # largest |sum of parts - k| over the largest |k| + |probe| + |metric| + |head| + |bias|
    )


@dataclass(frozen=True)
class Part:
    """One column of the two tables, averaged over the recognition zone's transitions."""

    signal: float  # mean of max(AUROC, 1 - AUROC)
    null: float  # its mean over permuted labels
    variance: float  # over all rows, classes together


@dataclass(frozen=True)
class KTable:
    """Tables k-decomp-auroc and k-decomp-cov for one set."""

    parts: dict[str, Part]  # by the names in ``PARTS``
    cov_metric_head: float
    reconstruction_error: float


def split_readout_change(
    crossings: Iterable[Crossing], probes: StandardizedProbes, direction: ArrayLike, bias: ArrayLike
) -> KSplit:
    """The four parts of every transition, from ``increments.crossings``; one transition in memory at a time.

    direction [m, d] and bias [m] are the raw-space probes, from which K itself comes, so that the reconstruction error
    compares two computations.  It is some 1e-15 for ordinary activations and reaches 1e-12 only where a training mean
    is thousands of times its deviation.
    """
    v, b = as_float(direction, "direction", 2), as_float(bias, "bias", 1)
    columns: dict[str, list[Floats]] = {name: [] for name in PARTS}
    steps: list[float] = []
    worst = largest = 0.0
    for one in crossings:
        layer, weight = one.layer, probes.weight[one.layer]
        next_own, next_old, same_old = (
            probes.z(layer + 1, one.next_head), probes.z(layer, one.next_head), probes.z(layer, one.same_head)
        )  # fmt: skip
        k = one.next_head @ v[layer + 1] + b[layer + 1] - (one.same_head @ v[layer] + b[layer])
        probe = next_own @ (probes.weight[layer + 1] - weight)
        metric, head = (next_own - next_old) @ weight, (next_old - same_old) @ weight
        step = float(probes.intercept[layer + 1] - probes.intercept[layer])
        size = np.abs(k) + np.abs(probe) + np.abs(metric) + np.abs(head) + abs(step)
        worst = max(worst, float(np.max(np.abs(probe + metric + head + step - k))))
        largest = max(largest, float(np.max(size)))
        for name, part in zip(PARTS, (k, probe, metric, head), strict=True):
            columns[name].append(part)
        steps.append(step)
    if not steps:
        raise TrainingError("no transition was given: the split of K needs at least 2 layers")
    stacked = {name: np.stack(parts, axis=1) for name, parts in columns.items()}
    return KSplit(**stacked, bias=np.array(steps), reconstruction_error=worst / largest if largest > 0 else 0.0)


def k_table(split: KSplit, label: ArrayLike, permutations: int = 200, seed: int = 0) -> KTable:
    """What each part tells of the label, over the transitions of the recognition zone (Eq. zone-index-sets).

    The null is the mean, over ``permutations`` permutations of the label shared by all parts, of the same averaged
    signal: a folded AUROC is above 0.5 by chance.  Labels are permuted across rows, groups are not kept together.
    """
    if permutations < 1:
        raise ValueError("permutations must be at least 1")
    _, factual = labelled(split.k, label, "k")
    steps = zones(split.k.shape[1] + 1).recognition_steps
    rng = np.random.default_rng(seed)
    shuffled = np.stack([rng.permutation(factual) for _ in range(permutations)])
    parts = {}
    for name in PARTS:
        values = np.asarray(getattr(split, name))[:, steps]
        ranks = np.asarray(rankdata(values, axis=0), np.float64)
        chunks = [_signals(ranks, shuffled[i : i + _CHUNK]) for i in range(0, permutations, _CHUNK)]
        parts[name] = Part(
            signal=float(_signals(ranks, factual[None])[0]),
            null=float(np.mean(np.concatenate(chunks))),
            variance=float(values.var(axis=0, ddof=1).mean()),
        )
    metric, head = split.metric[:, steps], split.head[:, steps]
    covariance = np.sum((metric - metric.mean(axis=0)) * (head - head.mean(axis=0)), axis=0) / (len(metric) - 1)
    return KTable(parts, float(covariance.mean()), split.reconstruction_error)


def _signals(ranks: Floats, factual: np.ndarray[Any, np.dtype[np.bool_]]) -> Floats:
    """Mean over columns of max(AUROC, 1 - AUROC): ranks [N, s], factual [P, N] -> [P]; ties count half."""
    ones = float(factual[0].sum())
    zeros = ranks.shape[0] - ones
    auroc = (factual.astype(np.float64) @ ranks - ones * (ones + 1) / 2) / (ones * zeros)
    return np.asarray(np.maximum(auroc, 1.0 - auroc).mean(axis=1))
