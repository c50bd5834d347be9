"""Heads: whether probe directions of a FIXED head are like independent random ones (App. isotropy-verification), how
alike the heads of a layer are (App. head-uniformity, Table head_distribution).

The paper's protocol takes one head for all layers, so that directions share a space; with per-layer heads the numbers
are the same sums in coordinates that the fixed readout gauge identifies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, f_oneway, kstest, linregress, shapiro

from hallutracer_research.paper.diagnostics.classes import Floats, as_float, defined, mean_or_none, middle_transitions
from hallutracer_research.paper.diagnostics.geometry import expected_cosine
from service.errors import TrainingError

MAX_GAP = 9


@dataclass(frozen=True)
class Isotropy:
    """Table isotropy-results for one model; p-values are None where too few pairs exist, ``notes`` says which."""

    pairs: int  # adjacent ones, among the middle layers
    dim: int
    effective_rank: float | None
    mean_abs_cos: float
    expected_ambient: float  # sqrt(2 / (pi d))
    expected_rank: float | None  # sqrt(2 / (pi r_eff))
    # Test 1: inner products are normal
    ks_ambient_p: float | None  # sqrt(d) <v_l, v_{l+1}> against N(0, 1)
    ks_rank_p: float | None  # sqrt(r_eff) <v_l, v_{l+1}> against N(0, 1), the paper's
    shapiro_p: float | None
    # Test 2: |cos| does not depend on the gap
    gap_means: tuple[float, ...]  # mean |<v_l, v_{l+k}>|, k = 1 ..
    trend_slope: float | None
    trend_p: float | None
    anova_p: float | None
    # Test 3: against sets of random directions
    permutation_ambient_p: float | None
    permutation_rank_p: float | None
    notes: tuple[str, ...] = ()


def isotropy(
    direction: ArrayLike, effective_rank: float | None = None, permutations: int = 10_000, seed: int = 0
) -> Isotropy:
    """Unit directions [m, d] and the readouts' stable rank -> tests 1 to 3 on the middle 60 % of layers.

    Adjacent pairs start at a middle layer.  Test 2 takes every pair within those layers at gaps 1 .. 9, or as many as
    there are: a least-squares line through all |cos| over the gap, and a one-way analysis of variance (gaps of one pair
    left out there).  TrainingError below 3 layers or where a direction is not of unit length.
    """
    v = as_float(direction, "direction", 2)
    m, d = v.shape
    if m < 3 or d < 2:
        raise TrainingError(f"direction is {m} layers x {d} numbers: at least 3 x 2 are needed")
    norms = np.linalg.norm(v, axis=1)
    if np.any(np.abs(norms - 1.0) > 1e-3):
        raise TrainingError(f"direction of layer {int(np.argmax(np.abs(norms - 1.0)))} is not of unit length")
    steps = middle_transitions(m)
    chosen = (v / norms[:, None])[steps.start : steps.stop + 1]
    cosine = chosen @ chosen.T
    adjacent = np.diagonal(cosine, 1)
    notes: list[str] = []
    gaps = [np.abs(np.diagonal(cosine, k)) for k in range(1, min(MAX_GAP, len(chosen) - 1) + 1)]
    if len(gaps) < MAX_GAP:
        notes.append(f"gaps 1 .. {len(gaps)} of {MAX_GAP}: only {len(chosen)} layers are in the middle")
    slope, trend, anova = _gap_tests(gaps, notes)
    normality = None
    if len(adjacent) >= 3 and np.ptp(adjacent) > 0:
        normality = float(shapiro(adjacent).pvalue)
    else:
        notes.append("shapiro_p is left out: it needs at least 3 different adjacent pairs")
    ranked = effective_rank is not None and effective_rank >= 2
    if not ranked:
        notes.append("no effective rank of at least 2 was given: its comparisons are left out")
    r = float(effective_rank) if effective_rank is not None and ranked else math.nan
    rng = np.random.default_rng(seed)
    return Isotropy(
        pairs=len(adjacent), dim=d, effective_rank=effective_rank, mean_abs_cos=float(np.abs(adjacent).mean()),
        expected_ambient=expected_cosine(d), expected_rank=expected_cosine(r) if ranked else None,
        ks_ambient_p=float(kstest(math.sqrt(d) * adjacent, "norm").pvalue),
        ks_rank_p=float(kstest(math.sqrt(r) * adjacent, "norm").pvalue) if ranked else None, shapiro_p=normality,
        gap_means=tuple(float(one.mean()) for one in gaps), trend_slope=slope, trend_p=trend, anova_p=anova,
        permutation_ambient_p=permutation_p_value(adjacent, d, permutations, rng),
        permutation_rank_p=permutation_p_value(adjacent, round(r), permutations, rng) if ranked else None,
        notes=tuple(notes),
    )  # fmt: skip


def permutation_p_value(inner: ArrayLike, dim: int, permutations: int, rng: np.random.Generator) -> float:
    """p = (1 + #{b: D_b >= D}) / (1 + B): inner [n], against B sets of n adjacent inner products of random directions.

    D is the Kolmogorov-Smirnov distance between a set's empirical distribution and the exact one on the sphere
    S^{dim - 1}, where (1 + <p, q>) / 2 is Beta((dim - 1)/2, (dim - 1)/2); D_b is the same of random set b.  The inner
    products of successive independent uniform directions are themselves independent (each is so given the direction it
    shares with the last), and therefore the sets are drawn from that Beta, not from B n d normals.
    """
    values = as_float(inner, "inner", 1)
    if permutations < 1:
        raise ValueError("permutations must be at least 1")
    law = beta((dim - 1) / 2.0, (dim - 1) / 2.0)
    observed = _ks_distance(law.cdf((1.0 + values[None]) / 2.0))[0]
    # Through their distribution function the sets are uniform whatever the Beta: that is all D_b depends on.
    drawn = _ks_distance(rng.random((permutations, len(values))))
    return float(1 + np.sum(drawn >= observed)) / (1 + permutations)


def _ks_distance(probability: Floats) -> Floats:
    """sup |F_n - F| of each row, from F at its points: [B, n] in any order -> [B]."""
    ranked = np.sort(probability, axis=1)
    n = ranked.shape[1]
    place = np.arange(n)
    return np.asarray(np.maximum((place + 1) / n - ranked, ranked - place / n).max(axis=1))


def _gap_tests(gaps: list[Floats], notes: list[str]) -> tuple[float | None, float | None, float | None]:
    """Slope and p-value of the trend, p-value of the analysis of variance; None where the pairs do not allow it."""
    values = np.concatenate(gaps)
    place = np.concatenate([np.full(len(one), k + 1.0) for k, one in enumerate(gaps)])
    slope = trend = anova = None
    if len(gaps) > 1 and len(values) > 2 and np.ptp(values) > 0:
        line = linregress(place, values)
        slope, trend = float(line.slope), defined(float(line.pvalue))
    groups = [one for one in gaps if len(one) > 1]
    if len(groups) > 1 and np.ptp(np.concatenate(groups)) > 0:
        anova = defined(float(f_oneway(*groups).pvalue))
    if trend is None or anova is None:
        notes.append("the tests over gaps need at least 2 gaps with 2 pairs each")
    return slope, trend, anova


@dataclass(frozen=True)
class Uniformity:
    """The table's columns; None where a layer has one head, or one whose score varies."""

    layers: int
    heads: int
    auc_cv: float  # standard deviation / mean of the AUROC within a layer, averaged over layers
    switch_rate: float | None  # share of adjacent layers whose best head (ties: lowest) differs
    correlation: float | None  # mean pairwise Pearson correlation of scores within a layer
    effective_rank: float | None  # exp(entropy of the correlation matrix's eigenvalues / heads), mean over layers
    rank_share: float | None  # of the heads
    notes: tuple[str, ...] = ()


def uniformity(auroc: ArrayLike, scores: Callable[[int], NDArray[np.floating]]) -> Uniformity:
    """Training auroc [m, K], and every head's probe scores by layer, layer -> [N, K].

    Heads with constant scores have no correlation; they
    are left out of their layer's correlation and rank, and counted in ``notes``.
    """
    quality = as_float(auroc, "auroc", 2)
    m, heads = quality.shape
    best = np.argmax(quality, axis=1)
    correlations: list[float] = []
    ranks: list[float] = []
    constant = 0
    for layer in range(m):
        values = as_float(scores(layer), f"scores of layer {layer}", 2)
        if values.shape[1] != heads:
            raise TrainingError(f"scores of layer {layer} have {values.shape[1]} heads and auroc {heads}")
        kept = values[:, np.ptp(values, axis=0) > 0]
        constant += heads - kept.shape[1]
        if kept.shape[1] < 2:
            continue
        matrix = np.corrcoef(kept, rowvar=False)
        correlations.append(float(matrix[np.triu_indices(len(matrix), 1)].mean()))
        share = np.clip(np.linalg.eigvalsh(matrix), 0.0, None) / len(matrix)
        share = share[share > 0]
        ranks.append(float(np.exp(-np.sum(share * np.log(share)))))
    rank = mean_or_none(ranks)
    notes = [f"{constant} heads have constant scores and are left out of correlation and rank"] if constant else []
    if not ranks:
        notes.append("correlation and rank are left out: no layer has two heads whose scores vary")
    return Uniformity(
        layers=m, heads=heads, auc_cv=float(np.mean(quality.std(axis=1) / quality.mean(axis=1))),
        switch_rate=float(np.mean(best[1:] != best[:-1])) if m > 1 else None, correlation=mean_or_none(correlations),
        effective_rank=rank, rank_share=rank / heads if rank is not None else None, notes=tuple(notes),
    )  # fmt: skip
