"""Where the probe lies in the readouts' space (Table validation-results, App. dynamic_vs_static), from one layer to the
next (Prop. decomp, Eq. decomp), and the classes' spread along it (Lemma snr, Table kappa-calibration).

The exact split of a trajectory's increments is dL_l = W_l + K_l.  W_l = phi_l(a_{l+1}^{(k_l)}) - L_l: the frozen probe
and head of layer l on the next layer, the increment along v_l.  K_l = L_{l+1} - phi_l(a_{l+1}^{(k_l)}): what the new
probe and head change.  Two of the table's columns are named in the paper and not defined; ``Transition`` defines the
substitutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import ttest_1samp

from hallutracer_research.paper.diagnostics.classes import (
    Floats,
    as_document,
    as_float,
    covariance,
    defined,
    effect_size,
    gap,
    labelled,
    mean_or_none,
    middle_layers,
    middle_transitions,
    pooled_variance,
    variances,
)
from hallutracer_research.paper.diagnostics.two_samples import distance_correlation
from service.errors import TrainingError
from service.readout import Geometry, Site

RowsOf = Callable[[int], NDArray[np.floating]]  # layer -> rows [N, width]


@dataclass(frozen=True, eq=False)
class Increments:
    """w [N, m - 1] intrinsic displacement, k [N, m - 1] readout change."""

    w: Floats
    k: Floats


@dataclass(frozen=True, eq=False)
class Crossing:
    """What the transition layer -> layer + 1 is made of: the NEXT layer's readouts, [N, d] each, of two heads."""

    layer: int
    same_head: Floats  # a_{l+1} of k_l, the head selected at ``layer``
    next_head: Floats  # a_{l+1} of k_{l+1}, the head selected one layer up


def decompose(trajectory: ArrayLike, crossed: ArrayLike) -> Increments:
    """Trajectory [N, m] and crossed [N, m - 1] = phi_l(a_{l+1}^{(k_l)}) -> W and K with W + K = dL to rounding.

    TrainingError on shapes that do not fit or numbers that are not finite.
    """
    values, across = as_float(trajectory, "trajectory", 2), as_float(crossed, "crossed", 2)
    n, m = values.shape
    if across.shape != (n, m - 1):
        raise TrainingError(f"crossed has shape {list(across.shape)}: [{n}, {m - 1}] is needed for this trajectory")
    w, k = across - values[:, :-1], values[:, 1:] - across
    # Each side is rounded at most twice, relative to the largest number in it.
    allowed = 8 * np.finfo(np.float64).eps * (np.abs(values[:, 1:]) + np.abs(values[:, :-1]) + 2 * np.abs(across))
    if np.any(np.abs(w + k - np.diff(values, axis=1)) > allowed):
        raise TrainingError("W + K differs from dL by more than rounding: the logits overflow float64")
    return Increments(w, k)


def crossings(rows_of: RowsOf, head: ArrayLike, geometry: Geometry, site: Site) -> Iterator[Crossing]:
    """The transitions of a model, in order: ``rows_of(layer)`` [N, width] is asked once for each layer from 1 up.

    head [m] are the selected heads; at the residual stream, which has one readout a layer, they are 0.
    """
    heads = np.asarray(head)
    if heads.shape != (geometry.num_layers,):
        raise TrainingError(f"head has shape {list(heads.shape)}: one per layer, [{geometry.num_layers}], is needed")
    for layer in range(geometry.num_layers - 1):
        by_head = geometry.by_head(np.asarray(rows_of(layer + 1)), site)
        yield Crossing(
            layer,
            by_head[:, int(heads[layer])].astype(np.float64),
            by_head[:, int(heads[layer + 1])].astype(np.float64),
        )


TOP_VARIANCE = 0.9
MAX_CONDITION = 1e12


@dataclass(frozen=True)
class Layer:
    """One layer; None where there is no direction, or a ratio has a zero denominator."""

    mean_shift_norm: float  # |mu_F - mu_H|
    stable_rank: float | None  # Tr(Sigma)^2 / Tr(Sigma^2), 1 .. d
    stable_rank_share: float | None  # of d
    stable_rank_share_factual: float | None
    stable_rank_share_hallucinated: float | None
    trace_ratio: float | None  # Tr(Sigma_F) / Tr(Sigma_H)
    energy_fraction: float | None  # v'Sigma v / Tr(Sigma); 1/d for a random direction
    v2_top90: float | None  # squared length of v in the fewest top eigenvectors with 90 % of the variance
    alignment: float | None  # |<v, mean shift>| / |mean shift|
    fisher_cos2: float | None  # cos^2(v, Sigma^-1 mean shift); None where Sigma is singular (as for N <= d)


@dataclass(frozen=True)
class Transition:
    """One transition l -> l + 1; None where a spread is zero."""

    adjacent_cos: float  # |<v_l, v_{l+1}>|
    cohen_d: float | None  # of W (Eq. cohen-d)
    increment_d: float | None  # Cohen's d of dL
    r_w: float | None  # cohen_d / increment_d: for the paper's r_w, which it does not define
    distance_correlation: float | None  # of W and K, all rows; for the paper's dCov, which it does not define


@dataclass(frozen=True)
class ReadoutGeometry:
    """Per layer, per transition, and means over the middle 60 % of layers (those where a value is defined)."""

    layers: tuple[Layer, ...]
    transitions: tuple[Transition, ...]  # empty without directions
    middle: dict[str, float | None]  # by the fields of ``Layer`` and ``Transition``; r_w is the ratio of two means
    dim: int
    expected_cos: float  # sqrt(2 / (pi d)), the paper's value for random directions
    expected_cos_exact: float  # Gamma(d/2) / (sqrt(pi) Gamma((d + 1)/2)), which it approximates
    cos_p_value: float | None  # t-test of the middle |cos| against ``expected_cos_exact``, two-sided
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """For the JSON file: the means by name, then every layer's values as lists under ``by_layer``."""
        names = [field.name for field in fields(Layer)]
        by_layer: dict[str, Any] = {name: [getattr(layer, name) for layer in self.layers] for name in names}
        for field in fields(Transition) if self.transitions else ():
            by_layer[field.name] = [getattr(one, field.name) for one in self.transitions]
        plain = {
            name: getattr(self, name) for name in ("dim", "expected_cos", "expected_cos_exact", "cos_p_value", "notes")
        }
        return dict(as_document({**self.middle, **plain, "by_layer": by_layer}))


def layer_geometry(readout: ArrayLike, label: ArrayLike, direction: ArrayLike | None = None) -> Layer:
    """Readout [N, d], label [N], unit direction [d] or None -> one layer; Sigma is pooled within class."""
    x, factual = labelled(readout, label, "readout")
    each = covariance(x[factual]), covariance(x[~factual])
    share, d = float(factual.mean()), x.shape[1]
    sigma = share * each[0] + (1.0 - share) * each[1]
    shift, trace = gap(x, factual), float(np.trace(sigma))
    norm = float(np.linalg.norm(shift))
    rank, rank_factual, rank_hallucinated = (_stable_rank(one) for one in (sigma, *each))
    trace_factual, trace_hallucinated = (float(np.trace(one)) for one in each)
    energy = top = aligned = fisher = None
    if direction is not None:
        v = _unit(as_float(direction, "direction", 1), d)
        values, vectors = np.linalg.eigh(sigma)
        if trace > 0:
            energy = float(v @ sigma @ v) / trace
            falling = np.cumsum(values[::-1])
            count = int(np.searchsorted(falling, TOP_VARIANCE * falling[-1])) + 1
            top = float(np.sum((v @ vectors[:, ::-1][:, :count]) ** 2))
        if norm > 0:
            aligned = abs(float(v @ shift)) / norm
            if values[0] > values[-1] / MAX_CONDITION:
                f = vectors @ ((vectors.T @ shift) / values)
                fisher = float(v @ f) ** 2 / float(f @ f)
    return Layer(
        mean_shift_norm=norm, stable_rank=rank, stable_rank_share=rank / d if rank is not None else None,
        stable_rank_share_factual=rank_factual / d if rank_factual is not None else None,
        stable_rank_share_hallucinated=rank_hallucinated / d if rank_hallucinated is not None else None,
        trace_ratio=trace_factual / trace_hallucinated if trace_hallucinated > 0 else None, energy_fraction=energy,
        v2_top90=top, alignment=aligned, fisher_cos2=fisher,
    )  # fmt: skip


def transition_geometry(increments: Increments, direction: ArrayLike, label: ArrayLike) -> tuple[Transition, ...]:
    """W and K [N, m - 1], directions [m, d], label [N] -> one entry per transition."""
    v = as_float(direction, "direction", 2)
    _, factual = labelled(increments.w, label, "w")
    if len(v) != increments.w.shape[1] + 1:
        raise TrainingError(f"direction has {len(v)} layers and the increments {increments.w.shape[1]} transitions")
    drift, whole = effect_size(increments.w, factual), effect_size(increments.w + increments.k, factual)
    return tuple(
        Transition(
            adjacent_cos=float(cosine),
            cohen_d=defined(drift[step]),
            increment_d=defined(whole[step]),
            r_w=defined(drift[step] / whole[step]) if whole[step] > 0 else None,
            distance_correlation=distance_correlation(increments.w[:, step], increments.k[:, step]),
        )
        for step, cosine in enumerate(adjacent_cosines(v))
    )


def adjacent_cosines(direction: ArrayLike) -> Floats:
    """|<v_l, v_{l+1}>| (Eq. ortho-cond): unit directions [m, d] -> [m - 1]."""
    v = as_float(direction, "direction", 2)
    return np.asarray(np.abs(np.einsum("ld,ld->l", v[:-1], v[1:])))


def expected_cosine(d: float) -> float:
    """sqrt(2 / (pi d)), the paper's mean |cos| of two random unit vectors in d dimensions, right as d grows."""
    return math.sqrt(2.0 / (math.pi * d))


def expected_cosine_exact(d: float) -> float:
    """Gamma(d/2) / (sqrt(pi) Gamma((d + 1)/2)): the same for every d."""
    return math.exp(math.lgamma(d / 2.0) - math.lgamma((d + 1.0) / 2.0)) / math.sqrt(math.pi)


def readout_geometry(layers: Sequence[Layer], transitions: Sequence[Transition], dim: int) -> ReadoutGeometry:
    """Put ``layer_geometry`` of every layer and ``transition_geometry`` together; transitions may be empty."""
    m = len(layers)
    inner, between = middle_layers(m), middle_transitions(m)
    middle: dict[str, float | None] = {}
    notes: list[str] = []
    for kind, entries, places in ((Layer, layers, inner), (Transition, transitions, between)):
        for field in fields(kind) if entries else ():
            values = [getattr(entries[place], field.name) for place in places]
            middle[field.name] = mean_or_none([math.nan if value is None else value for value in values])
            missing = sum(value is None for value in values)
            if missing and (transitions or field.name not in _OF_DIRECTION):
                notes.append(f"{field.name} has no value at {missing} of {len(values)} middle layers")
    if middle.get("r_w") is not None:
        # Of the means: where one increment has hardly any gap, its own ratio would be the whole mean of ratios.
        drift, whole = middle["cohen_d"], middle["increment_d"]
        middle["r_w"] = drift / whole if drift is not None and whole else None
    if not transitions:
        notes.append("no directions were given: what needs one is left out")
    return ReadoutGeometry(
        layers=tuple(layers), transitions=tuple(transitions), middle=middle, dim=dim,
        expected_cos=expected_cosine(dim), expected_cos_exact=expected_cosine_exact(dim),
        cos_p_value=_cos_p_value([transitions[place].adjacent_cos for place in between], dim) if transitions else None,
        notes=tuple(notes),
    )  # fmt: skip


_OF_DIRECTION = ("energy_fraction", "v2_top90", "alignment", "fisher_cos2")


def _cos_p_value(cosines: Sequence[float], dim: int) -> float | None:
    if len(cosines) < 2 or np.ptp(cosines) == 0:
        return None
    return defined(float(ttest_1samp(cosines, expected_cosine_exact(dim)).pvalue))


def _stable_rank(sigma: Floats) -> float | None:
    square = float(np.sum(sigma**2))
    return float(np.trace(sigma)) ** 2 / square if square > 0 else None


def _unit(v: Floats, d: int) -> Floats:
    if v.shape != (d,):
        raise TrainingError(f"direction has {len(v)} components and the readout {d}")
    norm = float(np.linalg.norm(v))
    if abs(norm - 1.0) > 1e-3:
        raise TrainingError(f"direction has length {norm:.4g}: a unit direction is needed, divide it by its length")
    return v / norm


@dataclass(frozen=True)
class KappaTable:
    """The table's columns, over the middle transitions that have variance in both classes; None where none has."""

    kappa_mean: float | None
    kappa_median: float | None
    kappa_p95: float | None
    effect_size: float | None  # d_pi: mean pooled effect size
    worst_case_snr: float | None  # m^wc: mean of the smaller class's SNR
    degradation: float | None  # 1 - m^wc / d_pi
    factual_wider: float | None  # share of transitions with q_F > q_H
    transitions: int  # how many were counted
    kappa_by_layer: tuple[float | None, ...]  # all m - 1
    notes: tuple[str, ...] = ()


def kappa_table(w: ArrayLike, label: ArrayLike) -> KappaTable:
    """w [N, m - 1] (``increments.decompose``), label [N] -> the table's row, over the middle 60 % of layers."""
    values, factual = labelled(w, label, "w")
    hallucinated_variance, factual_variance = variances(values, factual)
    low, high = np.minimum(hallucinated_variance, factual_variance), np.maximum(hallucinated_variance, factual_variance)
    kappa = np.divide(high, low, out=np.full_like(high, np.nan), where=low > 0)
    middle = np.array(middle_transitions(values.shape[1] + 1), np.int64)
    kept = middle[low[middle] > 0]
    by_layer = tuple(as_document(kappa))
    notes = (
        (f"{len(middle) - len(kept)} of {len(middle)} middle transitions have a class without variance",)
        if len(kept) < len(middle)
        else ()
    )
    if not len(kept):
        return KappaTable(None, None, None, None, None, None, None, 0, by_layer, notes)
    size = np.abs(gap(values, factual)[kept])
    effect = float(np.mean(size / np.sqrt(pooled_variance(values, factual)[kept])))
    worst = float(np.mean(size / np.sqrt(high[kept])))
    return KappaTable(
        kappa_mean=float(kappa[kept].mean()), kappa_median=float(np.median(kappa[kept])),
        kappa_p95=float(np.percentile(kappa[kept], 95)), effect_size=effect, worst_case_snr=worst,
        degradation=1.0 - worst / effect if effect > 0 else None,
        factual_wider=float(np.mean(factual_variance[kept] > hallucinated_variance[kept])), transitions=len(kept),
        kappa_by_layer=by_layer, notes=notes,
    )  # fmt: skip
