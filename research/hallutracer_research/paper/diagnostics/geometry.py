"""Where the probe lies in the readouts' space, by layer (Table validation-results, App.
dynamic_vs_static); whether probe directions of a FIXED head are like independent random ones (App.
isotropy-verification): with heads by layer the numbers are the same sums in coordinates that the
readout gauge identifies.  ``Transition`` substitutes for two columns that the paper does not
define."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import beta, f_oneway, kstest, linregress, shapiro, ttest_1samp

from hallutracer_research.paper.diagnostics import classes
from hallutracer_research.paper.diagnostics.classes import as_float, defined, mean_or_none
from hallutracer_research.paper.diagnostics.increments import Increments
from service.errors import TrainingError
from service.fitting.probes import Floats

TOP_VARIANCE = 0.9
MAX_CONDITION = 1e12
MAX_GAP = 9  # between layers, of isotropy's second test
_OF_DIRECTION = ("energy_fraction", "v2_top90", "alignment", "fisher_cos2")


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
    # squared length of v in the fewest top eigenvectors with 90 % of the variance
    v2_top90: float | None
    alignment: float | None  # |<v, mean shift>| / |mean shift|
    # cos^2(v, Sigma^-1 mean shift); None where Sigma is singular (as for N <= d)
    fisher_cos2: float | None


@dataclass(frozen=True)
class Transition:
    """One transition l -> l + 1; None where a spread is zero."""

    adjacent_cos: float  # |<v_l, v_{l+1}>|
    cohen_d: float | None  # of W (Eq. cohen-d)
    increment_d: float | None  # Cohen's d of dL
    r_w: float | None  # cohen_d / increment_d: for the paper's r_w, which it does not define
    # of W and K, all rows; for the paper's dCov, which it does not define
    distance_correlation: float | None


@dataclass(frozen=True)
class ReadoutGeometry:
    """Per layer, per transition, and means over the middle 60 % of layers (those where a value is
    defined)."""

    layers: tuple[Layer, ...]
    transitions: tuple[Transition, ...]  # empty without directions
    # by the fields of ``Layer`` and ``Transition``; r_w is the ratio of two means
    middle: dict[str, float | None]
    dim: int
    expected_cos: float  # sqrt(2 / (pi d)), the paper's value for random directions
    expected_cos_exact: float  # Gamma(d/2) / (sqrt(pi) Gamma((d + 1)/2)), which it approximates
    # t-test of the middle |cos| against ``expected_cos_exact``, two-sided
    cos_p_value: float | None
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the means by name, then every layer's values as lists under ``by_layer``, as
        JSON."""
        by_layer: dict[str, list[Any]] = {}
        for entries in (self.layers, self.transitions):
            for field in fields(entries[0]) if entries else ():
                by_layer[field.name] = [getattr(entry, field.name) for entry in entries]
        names = ("dim", "expected_cos", "expected_cos_exact", "cos_p_value", "notes")
        plain = {name: getattr(self, name) for name in names}
        return dict(classes.as_document({**self.middle, **plain, "by_layer": by_layer}))


def layer_geometry(
    readout: ArrayLike, label: ArrayLike, direction: ArrayLike | None = None
) -> Layer:
    """Return one layer's geometry: readout [N, d], label [N], unit direction [d] or None; Sigma is
    pooled."""
    x, factual = classes.labelled(readout, label, "readout")
    of_class = classes.covariance(x[factual]), classes.covariance(x[~factual])
    share, d = float(factual.mean()), x.shape[1]
    sigma = share * of_class[0] + (1.0 - share) * of_class[1]
    shift, trace = classes.gap(x, factual), float(np.trace(sigma))
    norm = float(np.linalg.norm(shift))
    ranks = [_stable_rank(covariance) for covariance in (sigma, *of_class)]
    shares = [None if rank is None else rank / d for rank in ranks]
    trace_factual, trace_hallucinated = map(float, map(np.trace, of_class))
    energy = top = aligned = fisher = None
    if direction is not None:
        v = _unit(as_float(direction, "direction", 1))
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
        norm,
        ranks[0],
        shares[0],
        shares[1],
        shares[2],
        trace_ratio=trace_factual / trace_hallucinated if trace_hallucinated > 0 else None,
        energy_fraction=energy,
        v2_top90=top,
        alignment=aligned,
        fisher_cos2=fisher,
    )


def _stable_rank(sigma: Floats) -> float | None:
    square = float(np.sum(sigma**2))
    return float(np.trace(sigma)) ** 2 / square if square > 0 else None


def _unit(v: Floats) -> Floats:
    norm = float(np.linalg.norm(v))
    if abs(norm - 1.0) > 1e-3:
        raise TrainingError(
            f"direction has length {norm:.4g}: a unit direction is needed, divide it by its length"
        )
    return v / norm


def transition_geometry(
    increments: Increments, direction: Floats, label: ArrayLike
) -> tuple[Transition, ...]:
    """Return one entry per transition: W and K [N, m - 1], directions [m, d], label [N]."""
    factual = classes.factual_rows(label)
    drift = classes.effect_size(increments.w, factual)
    whole = classes.effect_size(increments.w + increments.k, factual)
    transitions = []
    for step, cosine in enumerate(adjacent_cosines(direction)):
        ratio = defined(drift[step] / whole[step]) if whole[step] > 0 else None
        dependence = classes.distance_correlation(increments.w[:, step], increments.k[:, step])
        transitions.append(
            Transition(float(cosine), defined(drift[step]), defined(whole[step]), ratio, dependence)
        )
    return tuple(transitions)


def adjacent_cosines(v: Floats) -> Floats:
    """Return |<v_l, v_{l+1}>| (Eq. ortho-cond): unit directions [m, d] -> [m - 1]."""
    return np.asarray(np.abs(np.einsum("ld,ld->l", v[:-1], v[1:])))


def expected_cosine(d: float) -> float:
    """Return sqrt(2 / (pi d)), the paper's mean |cos| of two random unit vectors in d dimensions,
    right as d grows."""
    return math.sqrt(2.0 / (math.pi * d))


def expected_cosine_exact(d: float) -> float:
    """Return Gamma(d/2) / (sqrt(pi) Gamma((d + 1)/2)): the same for every d."""
    return math.exp(math.lgamma(d / 2.0) - math.lgamma((d + 1.0) / 2.0)) / math.sqrt(math.pi)


def readout_geometry(
    layers: Sequence[Layer], transitions: Sequence[Transition], dim: int
) -> ReadoutGeometry:
    """Put ``layer_geometry`` of every layer and ``transition_geometry`` together; transitions may
    be empty."""
    m = len(layers)
    inner, between = classes.middle_layers(m), classes.middle_transitions(m)
    middle: dict[str, float | None] = {}
    notes: list[str] = []
    parts: Any = (layers, inner), (transitions, between)
    for entries, chosen in parts:
        for field in fields(entries[0]) if entries else ():
            values = [getattr(entries[number], field.name) for number in chosen]
            middle[field.name] = mean_or_none(values)
            missing = sum(value is None for value in values)
            if missing and (transitions or field.name not in _OF_DIRECTION):
                notes.append(
                    f"{field.name} has no value at {missing} of {len(values)} middle layers"
                )
    if middle.get("r_w") is not None:
        # Of the means: where one increment has hardly any gap, its own ratio would be the whole
        # mean of ratios.
        drift, whole = middle["cohen_d"], middle["increment_d"]
        middle["r_w"] = drift / whole if drift is not None and whole else None
    p_value = None
    if transitions:
        cosines = [transitions[step].adjacent_cos for step in between]
        if len(cosines) > 1 and np.ptp(cosines) > 0:
            p_value = defined(float(ttest_1samp(cosines, expected_cosine_exact(dim)).pvalue))
    else:
        notes.append("no directions were given: what needs one is left out")
    return ReadoutGeometry(
        tuple(layers),
        tuple(transitions),
        middle,
        dim,
        expected_cosine(dim),
        expected_cosine_exact(dim),
        p_value,
        tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class Isotropy:
    """Table isotropy-results for one model; p-values are None where too few pairs exist, ``notes``
    says which."""

    pairs: int  # adjacent ones, among the middle layers
    dim: int
    effective_rank: float | None
    mean_abs_cos: float
    expected_ambient: float  # sqrt(2 / (pi d))
    expected_rank: float | None = None  # sqrt(2 / (pi r_eff))
    # Test 1: inner products are normal
    ks_ambient_p: float | None  # sqrt(d) <v_l, v_{l+1}> against N(0, 1)
    # sqrt(r_eff) <v_l, v_{l+1}> against N(0, 1), the paper's
    ks_rank_p: float | None = None
    shapiro_p: float | None
    # Test 2: |cos| does not depend on the gap
    gap_means: tuple[float, ...]  # mean |<v_l, v_{l+k}>|, k = 1 ..
    trend_slope: float | None
    trend_p: float | None
    anova_p: float | None
    # Test 3: against sets of random directions
    permutation_ambient_p: float | None
    permutation_rank_p: float | None = None
    notes: tuple[str, ...] = ()


def isotropy(
    direction: ArrayLike,
    effective_rank: float | None = None,
    permutations: int = 10_000,
    seed: int = 0,
) -> Isotropy:
    """Return tests 1 to 3 on the middle 60 % of layers: unit directions [m, d] and the readouts'
    stable rank.  Adjacent pairs start at a middle layer.  Test 2 takes every pair within those
    layers at gaps 1 .. 9, or as many as there are: a least-squares line through all |cos| over the
    gap, and a one-way analysis of variance (gaps of one pair left out there).  Raises TrainingError
    below 3 layers or where a direction is not of unit length."""
    v = as_float(direction, "direction", 2)
    m, d = v.shape
    if m < 3 or d < 2:
        raise TrainingError(f"direction is {m} layers x {d} numbers: at least 3 x 2 are needed")
    norms = np.linalg.norm(v, axis=1)
    if np.any(np.abs(norms - 1.0) > 1e-3):
        raise TrainingError(
            f"direction of layer {int(np.argmax(np.abs(norms - 1.0)))} is not of unit length"
        )
    steps = classes.middle_transitions(m)
    chosen = (v / norms[:, None])[steps.start : steps.stop + 1]
    cosine = chosen @ chosen.T
    adjacent = np.diagonal(cosine, 1)
    notes: list[str] = []
    gaps = [np.abs(np.diagonal(cosine, k)) for k in range(1, min(MAX_GAP, len(chosen) - 1) + 1)]
    if len(gaps) < MAX_GAP:
        notes.append(
            f"gaps 1 .. {len(gaps)} of {MAX_GAP}: only {len(chosen)} layers are in the middle"
        )
    slope, trend, anova = _gap_tests(gaps)
    if trend is None or anova is None:
        notes.append("the tests over gaps need at least 2 gaps with 2 pairs each")
    normality = None
    if len(adjacent) >= 3 and np.ptp(adjacent) > 0:
        normality = float(shapiro(adjacent).pvalue)
    else:
        notes.append("shapiro_p is left out: it needs at least 3 different adjacent pairs")
    rng = np.random.default_rng(seed)
    ambient_p = permutation_p_value(adjacent, d, permutations, rng)
    of_rank: dict[str, float] = {}
    if effective_rank is not None and effective_rank >= 2:
        r = float(effective_rank)
        of_rank = {
            "expected_rank": expected_cosine(r),
            "ks_rank_p": float(kstest(math.sqrt(r) * adjacent, "norm").pvalue),
            "permutation_rank_p": permutation_p_value(adjacent, round(r), permutations, rng),
        }
    else:
        notes.append("no effective rank of at least 2 was given: its comparisons are left out")
    return Isotropy(
        pairs=len(adjacent),
        dim=d,
        effective_rank=effective_rank,
        mean_abs_cos=float(np.abs(adjacent).mean()),
        expected_ambient=expected_cosine(d),
        ks_ambient_p=float(kstest(math.sqrt(d) * adjacent, "norm").pvalue),
        shapiro_p=normality,
        gap_means=tuple(float(cosines.mean()) for cosines in gaps),
        trend_slope=slope,
        trend_p=trend,
        anova_p=anova,
        permutation_ambient_p=ambient_p,
        notes=tuple(notes),
        **of_rank,
    )


def permutation_p_value(
    inner: Floats, dim: int, permutations: int, rng: np.random.Generator
) -> float:
    """Return (1 + #{b: D_b >= D}) / (1 + B): inner [n], against B sets of n inner products of
    random neighbours.  D is the Kolmogorov-Smirnov distance between a set's empirical distribution
    and the exact one on the sphere S^{dim - 1}, where (1 + <p, q>) / 2 is Beta((dim - 1)/2, (dim -
    1)/2); D_b is the same of random set b.  The inner products of successive independent uniform
    directions are themselves independent (each is so given the direction it shares with the last),
    and therefore the sets are drawn from that Beta, not from B n d normals."""
    law = beta((dim - 1) / 2.0, (dim - 1) / 2.0)
    observed = _ks_distance(law.cdf((1.0 + inner[None]) / 2.0))[0]
    # Through their distribution function the sets are uniform whatever the Beta: that is all D_b
    # depends on.
    drawn = _ks_distance(rng.random((permutations, len(inner))))
    return float(1 + np.sum(drawn >= observed)) / (1 + permutations)


def _ks_distance(probability: Floats) -> Floats:
    """Return sup |F_n - F| of each row, from F at its points: [B, n] in any order -> [B]."""
    ranked = np.sort(probability, axis=1)
    n = ranked.shape[1]
    below = np.arange(n)
    return np.asarray(np.maximum((below + 1) / n - ranked, ranked - below / n).max(axis=1))


def _gap_tests(gaps: list[Floats]) -> tuple[float | None, float | None, float | None]:
    """Return slope and p-value of the trend, p-value of the analysis of variance; None where pairs
    are too few."""
    values = np.concatenate(gaps)
    gap = np.concatenate([np.full(len(cosines), k) for k, cosines in enumerate(gaps, 1)])
    slope = trend = anova = None
    if len(gaps) > 1 and len(values) > 2 and np.ptp(values) > 0:
        line = linregress(gap, values)
        slope, trend = float(line.slope), defined(float(line.pvalue))
    groups = [cosines for cosines in gaps if len(cosines) > 1]
    if len(groups) > 1 and np.ptp(np.concatenate(groups)) > 0:
        anova = defined(float(f_oneway(*groups).pvalue))
    return slope, trend, anova
