"""Increments of a trajectory (Prop. decomp, Eq. decomp), the classes' spread along the probe, the
parts of K.

dL_l = W_l + K_l exactly.  W_l = phi_l(a_{l+1}^{(k_l)}) - L_l: layer l's probe and head on the next
layer (Lemma snr, Table kappa-calibration).  K_l = L_{l+1} - phi_l(a_{l+1}^{(k_l)}): what the new
probe and head change: probe, metric, head and bias (Lemma k-decomp; Tables k-decomp-auroc, -cov).
z_l is always the standardisation of layer l's SELECTED head, as the lemma writes.  The caller
passes out-of-fold probes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from hallutracer_research.paper.diagnostics import classes
from hallutracer_research.paper.diagnostics.classes import Mask, as_float
from hallutracer_research.paper.diagnostics.features import zones
from service.errors import TrainingError
from service.fitting.probes import Floats

# of Table k-decomp-auroc; the bias part is one number per layer
PARTS = ("k", "probe", "metric", "head")
_CHUNK = 64  # permutations at a time


class Increments(NamedTuple):
    """w [N, m - 1] intrinsic displacement, k [N, m - 1] readout change."""

    w: Floats
    k: Floats


def decompose(trajectory: ArrayLike, crossed: ArrayLike) -> Increments:
    """Return W and K with W + K = dL to rounding: trajectory [N, m], crossed [N, m - 1] =
    phi_l(a_{l+1}^{(k_l)}). Raises TrainingError on shapes that do not fit or numbers that are not
    finite."""
    values, across = as_float(trajectory, "trajectory", 2), as_float(crossed, "crossed", 2)
    n, m = values.shape
    if across.shape != (n, m - 1):
        raise TrainingError(
            f"crossed has shape {list(across.shape)}: [{n}, {m - 1}] is needed for this trajectory"
        )
    return Increments(across - values[:, :-1], values[:, 1:] - across)


class Crossing(NamedTuple):
    """What the transition layer -> layer + 1 is made of: the NEXT layer's readouts, [N, d] each, of
    two heads."""

    layer: int
    same_head: Floats  # a_{l+1} of k_l, the head selected at ``layer``
    next_head: Floats  # a_{l+1} of k_{l+1}, the head selected one layer up


def crossings(readout_of: Callable[[int, int], Floats], head: Sequence[int]) -> Iterator[Crossing]:
    """Yield the transitions of a model, in order: head [m] are the selected heads;
    ``readout_of(layer, head)`` [N, d] is called for one layer after the other, from 1 up."""
    for layer, (same, following) in enumerate(pairwise(head)):
        yield Crossing(layer, readout_of(layer + 1, same), readout_of(layer + 1, following))


@dataclass(frozen=True)
class KappaTable:
    """The table's columns, over the middle transitions that have variance in both classes; None
    where none has."""

    kappa_mean: float | None = None
    kappa_median: float | None = None
    kappa_p95: float | None = None
    effect_size: float | None = None  # d_pi: mean pooled effect size
    worst_case_snr: float | None = None  # m^wc: mean of the smaller class's SNR
    degradation: float | None = None  # 1 - m^wc / d_pi
    factual_wider: float | None = None  # share of transitions with q_F > q_H
    transitions: int = 0  # how many were counted
    kappa_by_layer: tuple[float | None, ...] = ()  # all m - 1
    notes: tuple[str, ...] = ()


def kappa_table(w: ArrayLike, label: ArrayLike) -> KappaTable:
    """Return the table's row over the middle 60 % of layers: w [N, m - 1] of ``decompose``, label
    [N]."""
    values, factual = classes.labelled(w, label, "w")
    of_class = classes.variances(values, factual)
    low, high = np.minimum(*of_class), np.maximum(*of_class)
    kappa = np.divide(high, low, out=np.full_like(high, np.nan), where=low > 0)
    middle = np.array(classes.middle_transitions(values.shape[1] + 1), np.int64)
    varied = middle[low[middle] > 0]
    by_layer: tuple[float | None, ...] = tuple(classes.as_document(kappa))
    notes: tuple[str, ...] = ()
    if missing := len(middle) - len(varied):
        notes = (f"{missing} of {len(middle)} middle transitions have a class without variance",)
    if not len(varied):
        return KappaTable(kappa_by_layer=by_layer, notes=notes)
    size = np.abs(classes.gap(values, factual)[varied])
    effect = float(np.mean(size / np.sqrt(classes.pooled_variance(values, factual)[varied])))
    worst = float(np.mean(size / np.sqrt(high[varied])))
    return KappaTable(
        kappa_mean=float(kappa[varied].mean()),
        kappa_median=float(np.median(kappa[varied])),
        kappa_p95=float(np.percentile(kappa[varied], 95)),
        effect_size=effect,
        worst_case_snr=worst,
        degradation=1.0 - worst / effect if effect > 0 else None,
        factual_wider=float(np.mean(np.greater(*of_class[::-1])[varied])),
        transitions=len(varied),
        kappa_by_layer=by_layer,
        notes=notes,
    )


class StandardizedProbes(NamedTuple):
    """Selected probes in standardised coordinates (Eq. selected-standardized-readout): [m, d] each,
    intercept [m]. phi_l(a) = weight_l . (a - mean_l) / std_l + intercept_l, with mean and std of
    the selected head's training rows."""

    weight: Floats
    intercept: Floats
    mean: Floats
    std: Floats

    @classmethod
    def of(cls, v: Floats, bias: Floats, mean: Floats, std: Floats) -> StandardizedProbes:
        """Convert raw-space probes: w_l = std_l v_l, b~_l = b_l + v_l . mean_l (Eq.
        raw-space-probe, backwards)."""
        if np.any(std <= 0):
            raise TrainingError("std above 0 is needed (1 where a column is constant)")
        return cls(std * v, bias + np.einsum("md,md->m", v, mean), mean, std)

    def z(self, layer: int, readout: Floats) -> Floats:
        """Return z_layer(readout): [N, d] -> [N, d]."""
        return np.asarray((readout - self.mean[layer]) / self.std[layer])


class KSplit(NamedTuple):
    """K and its parts, [N, m - 1] each, bias [m - 1]; probe + metric + head + bias = k."""

    k: Floats  # computed by itself, from the raw-space probes
    probe: Floats
    metric: Floats
    head: Floats
    bias: Floats
    reconstruction_error: float  # largest |sum of parts - k| over the largest sum of their sizes


def split_readout_change(
    steps: Iterable[Crossing], probes: StandardizedProbes, v: Floats, b: Floats
) -> KSplit:
    """Return the four parts of every transition of ``crossings``; one transition in memory at a
    time.  Directions v [m, d] and biases b [m] are the raw-space probes, from which K itself comes,
    so that the reconstruction error compares two computations.  It is some 1e-15 for ordinary
    activations and reaches 1e-12 only where a training mean is thousands of times its deviation."""
    columns: dict[str, list[Floats]] = {name: [] for name in PARTS}
    biases: list[float] = []
    worst = largest = 0.0
    for crossing in steps:
        layer, weight = crossing.layer, probes.weight[crossing.layer]
        same, following = crossing.same_head, crossing.next_head
        z_new, z_old = probes.z(layer + 1, following), probes.z(layer, following)
        k = following @ v[layer + 1] + b[layer + 1] - (same @ v[layer] + b[layer])
        probe = z_new @ (probes.weight[layer + 1] - weight)
        metric = (z_new - z_old) @ weight
        head = (z_old - probes.z(layer, same)) @ weight
        step = float(probes.intercept[layer + 1] - probes.intercept[layer])
        size = sum(map(np.abs, (k, probe, metric, head, step)))
        worst = max(worst, float(np.max(np.abs(probe + metric + head + step - k))))
        largest = max(largest, float(np.max(size)))
        for name, part in zip(PARTS, (k, probe, metric, head), strict=True):
            columns[name].append(part)
        biases.append(step)
    stacked = {name: np.stack(parts, axis=1) for name, parts in columns.items()}
    return KSplit(
        **stacked,
        bias=np.array(biases),
        reconstruction_error=worst / largest if largest > 0 else 0.0,
    )


class Part(NamedTuple):
    """One column of the two tables, averaged over the recognition zone's transitions."""

    signal: float  # mean of max(AUROC, 1 - AUROC)
    null: float  # its mean over permuted labels
    variance: float  # over all rows, classes together


class KTable(NamedTuple):
    """Tables k-decomp-auroc and k-decomp-cov for one set."""

    parts: dict[str, Part]  # by the names in ``PARTS``
    cov_metric_head: float
    reconstruction_error: float


def k_table(split: KSplit, label: ArrayLike, permutations: int = 200, seed: int = 0) -> KTable:
    """Return what each part tells of the label, over the transitions of the recognition zone (Eq.
    zone-index-sets). The null is the mean, over ``permutations`` permutations of the label shared
    by all parts, of the same averaged signal: a folded AUROC is above 0.5 by chance.  Labels are
    permuted across rows, groups are not kept together."""
    factual = classes.factual_rows(label)
    steps = zones(split.k.shape[1] + 1).recognition_steps
    rng = np.random.default_rng(seed)
    shuffled = np.stack([rng.permutation(factual) for _ in range(permutations)])
    parts = {}
    for name in PARTS:
        values = np.asarray(getattr(split, name))[:, steps]
        ranks = np.asarray(rankdata(values, axis=0), np.float64)
        chunks = [_signals(ranks, shuffled[i : i + _CHUNK]) for i in range(0, permutations, _CHUNK)]
        null = float(np.mean(np.concatenate(chunks)))
        variance = float(values.var(axis=0, ddof=1).mean())
        parts[name] = Part(float(_signals(ranks, factual[None])[0]), null, variance)
    metric, head = (part - part.mean(axis=0) for part in (split.metric, split.head))
    covariance = np.sum((metric * head)[:, steps], axis=0) / (len(metric) - 1)
    return KTable(parts, float(covariance.mean()), split.reconstruction_error)


def _signals(ranks: Floats, factual: Mask) -> Floats:
    """Return the mean over columns of max(AUROC, 1 - AUROC), ties half: ranks [N, s], factual
    [P, N] -> [P]."""
    ones = float(factual[0].sum())
    zeros = len(ranks) - ones
    auroc = (factual.astype(np.float64) @ ranks - ones * (ones + 1) / 2) / (ones * zeros)
    return np.asarray(np.maximum(auroc, 1.0 - auroc).mean(axis=1))
