"""Level and shape of trajectories: variance components, slope against mean, and the Fisher gap.

Variance (Table variance-decomp): L_l = mu_l^(c) + alpha_i + eps_{i,l}.  The paper's ICC (Eq. icc)
is a plug-in: its Var(alpha-hat) holds sigma_eps^2 / m besides sigma_alpha^2; ``icc_unbiased``
separates them. Fisher gap (Thm. uniform-optimal, Table fisher-gap): how much the best linear
weighting of layers could gain over the mean, by the paper's level and shape parts and directly.  In
sample even pure noise seems to help: R^2 is too large by about (m - 1) (1/n_F + 1/n_H) / SNR^2 of
the mean; ``r_fisher_unbiased`` takes that out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import cho_factor, cho_solve, helmert

from hallutracer_research.paper.diagnostics import classes
from hallutracer_research.paper.diagnostics.classes import Mask, centred, gap, labelled
from hallutracer_research.paper.diagnostics.features import slope_weights
from service.errors import TrainingError
from service.fitting.probes import Floats

MAX_LAG = 12
ROUNDING = 1e-14  # a variance below this share of the whole is what floating point leaves of zero
MAX_CONDITION = 1e12
AGREEMENT = 1e-9  # relative, between the two computations of R_Fisher
Shrinkage = Literal["ledoit_wolf"] | float | None


@dataclass(frozen=True)
class VarianceComponents:
    """Shares of the within-class variance; a share is None where there is no variance at all."""

    icc: float | None  # plug-in, both classes (Eq. icc)
    icc_factual: float | None
    icc_hallucinated: float | None
    icc_unbiased: float | None  # method of moments; below 0 where layers are negatively correlated
    sigma_alpha2: float  # method of moments
    sigma_epsilon2: float  # method of moments
    residual_acf: tuple[float | None, ...]  # factual class, lags 1 .. min(12, m - 2)
    residual_acf_hallucinated: tuple[float | None, ...]
    acf_floor: (
        float  # -1 / (m - 1): what independent residuals give, since the estimated ones sum to zero
    )
    notes: tuple[str, ...] = ()


def variance_components(trajectory: ArrayLike, label: ArrayLike) -> VarianceComponents:
    """Return components as App. hd-geometry estimates them: trajectory [N, m], label [N].
    alpha-hat_i is the depth mean less its class mean, eps-hat what is left; variances are plain
    means of squares. The residual correlation at a lag is the mean over layer pairs of the
    correlation across the samples of one class. Raises TrainingError below 3 layers."""
    values, factual = labelled(trajectory, label, "trajectory")
    n, m = values.shape
    if m < 3:
        raise TrainingError(
            f"trajectory has {m} layers: variance components and their lags need at least 3"
        )
    away = centred(values, factual)
    alpha = away.mean(axis=1)
    epsilon = away - alpha[:, None]
    notes: list[str] = []
    epsilon2 = float(np.sum(epsilon**2)) / (max(n - 2, 1) * (m - 1))
    alpha2 = float(np.sum(alpha**2)) / max(n - 2, 1) - epsilon2 / m
    if (everything := _icc(alpha, epsilon)) is None:
        notes.append(
            "every class has one trajectory only: there is no within-class variance to share out"
        )
    whole = alpha2 + epsilon2
    acf, acf_hallucinated = (_acf(epsilon[rows]) for rows in (factual, ~factual))
    if None in acf + acf_hallucinated:
        notes.append(
            "a lag is null where every pair of layers at it has a layer without residual variance"
        )
    return VarianceComponents(
        icc=everything,
        icc_factual=_icc(alpha[factual], epsilon[factual]),
        icc_hallucinated=_icc(alpha[~factual], epsilon[~factual]),
        icc_unbiased=alpha2 / whole if whole > 0 else None,
        sigma_alpha2=alpha2,
        sigma_epsilon2=epsilon2,
        residual_acf=acf,
        residual_acf_hallucinated=acf_hallucinated,
        acf_floor=-1.0 / (m - 1),
        notes=tuple(notes),
    )


def _icc(alpha: Floats, epsilon: Floats) -> float | None:
    between, within = float(np.mean(alpha**2)), float(np.mean(epsilon**2))
    return between / (between + within) if between + within > 0 else None


def _acf(epsilon: Floats) -> tuple[float | None, ...]:
    """Return the mean correlation over layer pairs at lags 1 .. min(12, m - 2): epsilon [n, m],
    centred over rows."""
    m = epsilon.shape[1]
    norm = np.sqrt(np.sum(epsilon**2, axis=0))
    safe = np.where(norm > 0, norm, np.nan)
    correlation = epsilon.T @ epsilon / np.outer(safe, safe)
    return tuple(
        classes.mean_or_none(np.diagonal(correlation, lag))
        for lag in range(1, min(MAX_LAG, m - 2) + 1)
    )


@dataclass(frozen=True)
class SnrTable:
    """One row of Table snr_verification; every ratio is SNR(slope) / SNR(mean)."""

    rho: float  # divergence ratio |slope of the gap| m / |mean gap|
    gamma: float | None  # sqrt(1 + m sigma_alpha^2 / sigma_eps^2), method of moments
    gamma_plugin: float | None  # the same from the paper's plug-in variances (Eq. icc)
    rho_shape: float  # |r| / (|mean gap| sqrt(m)) (Eq. rho-shape)
    r_independent: float | None  # Eq. snr-ratio: rho gamma / sqrt(12) sqrt(1 - 1 / m^2)
    r_plugin: float | None  # from the pooled covariance
    r_empirical: float | None  # from the two scalars of each sample
    eta: float | None  # r_empirical / r_plugin
    notes: tuple[str, ...] = ()


def snr_table(trajectory: ArrayLike, label: ArrayLike) -> SnrTable:
    """Return the table's row: trajectory [N, m], label [N].  Raises TrainingError below 3 layers,
    without a mean gap. r_plugin uses Sigma = sum_c pi_c Cov_c.  r_empirical takes slope and mean of
    every sample and divides the class gap by sqrt((s_F^2 + s_H^2) / 2), each class counting
    equally.  The slope being linear, the two can differ only where classes are unequal in size AND
    in spread: eta is 1 by algebra on balanced sets, no test of the theory."""
    values, factual = labelled(trajectory, label, "trajectory")
    m = values.shape[1]
    parts = variance_components(values, label)
    d = gap(values, factual)
    mean_gap, weights = float(d.mean()), slope_weights(m)
    if abs(mean_gap) <= 1e-12 * float(np.linalg.norm(d)):
        raise TrainingError(
            "both classes have the same depth mean: ratios to its SNR have no value"
        )
    slope_gap = float(weights @ d)
    rho = abs(slope_gap) * m / abs(mean_gap)
    notes: list[str] = []

    gamma = gamma_plugin = independent = None
    if parts.sigma_epsilon2 > ROUNDING * parts.sigma_alpha2:
        # 1 + m sigma_alpha^2 / sigma_eps^2 is m Var(alpha-hat) / sigma_eps^2, and so never
        # negative.
        gamma = math.sqrt(max(1.0 + m * parts.sigma_alpha2 / parts.sigma_epsilon2, 0.0))
        independent = rho * gamma / math.sqrt(12.0) * math.sqrt(1.0 - 1.0 / m**2)
        if parts.icc is not None and parts.icc < 1:
            gamma_plugin = math.sqrt(1.0 + m * parts.icc / (1.0 - parts.icc))
    else:
        notes.append(
            "gamma and r_independent are left out: trajectories of one class are parallel,"
            " sigma_eps^2 is 0"
        )

    sigma = classes.pooled_covariance(values, factual)
    floor = ROUNDING * float(
        np.trace(sigma)
    )  # of the variance of a unit-norm combination of layers
    least = floor * float(weights @ weights), floor / m
    of_slope = slope_gap, float(weights @ sigma @ weights)
    plugin = _ratio(of_slope, (mean_gap, float(sigma.mean())), least)
    slope, mean = (
        # Each class counts alike.
        (float(gap(scalar, factual)), float(sum(classes.variances(scalar, factual))) / 2.0)
        for scalar in (values @ weights, values.mean(axis=1))
    )
    empirical = _ratio(slope, mean, least)
    if plugin is None or empirical is None:
        notes.append("ratios are left out: slope or mean has no variance within the classes")
    eta = empirical / plugin if plugin and empirical is not None else None
    if plugin == 0:
        notes.append("eta is left out: the gap has no slope")
    shape = float(np.linalg.norm(d - mean_gap)) / (abs(mean_gap) * math.sqrt(m))
    return SnrTable(
        rho=rho,
        gamma=gamma,
        gamma_plugin=gamma_plugin,
        rho_shape=shape,
        r_independent=independent,
        r_plugin=plugin,
        r_empirical=empirical,
        eta=eta,
        notes=tuple(notes),
    )


Pair = tuple[float, float]


def _ratio(slope: Pair, mean: Pair, least: Pair) -> float | None:
    """Return SNR(slope) / SNR(mean), each of a gap and a variance; None where either variance is no
    more than the rounding in it, ``least``."""
    if slope[1] <= least[0] or mean[1] <= least[1]:
        return None
    return abs(slope[0]) / math.sqrt(slope[1]) / (abs(mean[0]) / math.sqrt(mean[1]))


@dataclass(frozen=True)
class FisherGap:
    """Diagnostics of Eq. fisher-diagnostics and the gap of Eq. fisher-gap-exact; R is a ratio of
    SNRs, at least 1."""

    theta: float  # level-shape coupling, in [0, 1)
    chi: float  # shape energy
    t: float  # cross term
    r_fisher: float  # sqrt(chi^2 + (1 - t)^2 / (1 - theta))
    r_fisher_direct: float  # sqrt(d' Sigma^-1 d / (s^2 / a))
    r_fisher_unbiased: (
        float | None
    )  # None under shrinkage, and where the rows are too few to correct
    cauchy_schwarz: float | None  # t / (sqrt(theta) chi), in [-1, 1]; None where a factor is zero
    snr_mean: float  # SNR of the depth mean, s / sqrt(a)
    condition: float  # of Sigma as inverted
    shrinkage: float  # the share of the scaled identity in Sigma; 0 is none
    shrinkage_rule: str  # "none", "fixed" or "ledoit_wolf"
    rows: int
    layers: int
    notes: tuple[str, ...] = ()


def fisher_gap(trajectory: ArrayLike, label: ArrayLike, shrinkage: Shrinkage = None) -> FisherGap:
    """Return, for trajectory [N, m] and label [N], the gap between the Fisher-optimal weights and
    the plain mean. Sigma = sum_c pi_c Cov_c, with pi_c = n_c / N and unbiased Cov_c (App.
    uniform-proof).  ``shrinkage`` replaces it by (1 - g) Sigma + g tr(Sigma) / m I: a share g in
    [0, 1], or "ledoit_wolf" to estimate g.  Raises TrainingError where Sigma is singular (rank
    below m or condition above 1e12), where the classes have one depth mean, or where the two
    computations differ by more than 1e-9 relative (more where the condition leaves fewer digits,
    from 3e5 on)."""
    values, factual = labelled(trajectory, label, "trajectory")
    n, m = values.shape
    if m < 2:
        raise TrainingError(f"trajectory has {m} layer: the Fisher gap needs at least 2")
    sigma, share, rule = _shrunk(
        classes.pooled_covariance(values, factual), values, factual, shrinkage
    )
    condition = _require_regular(sigma, n)
    d = gap(values, factual)

    u = np.full(m, 1.0 / math.sqrt(m))
    q = helmert(m).T  # [m, m - 1]: an orthonormal basis of the shapes, all orthogonal to u
    s, z = float(u @ d), q.T @ d
    if abs(s) <= 1e-12 * float(np.linalg.norm(d)):
        raise TrainingError(
            "both classes have the same depth mean: the gain over it has no value (s = 0)"
        )
    a, b = float(u @ sigma @ u), q.T @ sigma @ u
    factor = cho_factor(q.T @ sigma @ q)
    by_b, by_z = cho_solve(factor, b), cho_solve(factor, z)
    theta = float(b @ by_b) / a
    chi = math.sqrt(max(a * float(z @ by_z), 0.0)) / abs(s)
    t = float(b @ by_z) / s
    squared = chi**2 + (1.0 - t) ** 2 / (1.0 - theta)
    mahalanobis = float(d @ cho_solve(cho_factor(sigma), d))
    level = s**2 / a
    direct = mahalanobis / level
    # Either computation loses as many digits as the covariance's condition has.
    allowed = max(AGREEMENT, 16 * float(np.finfo(np.float64).eps) * condition)
    if not abs(squared - direct) <= allowed * direct:
        raise TrainingError(
            f"R_Fisher^2 is {squared!r} by its parts and {direct!r} directly, more than"
            f" {allowed:.1g} apart: the covariance of the layers is too near singular (condition"
            f" {condition:.1e}); use shrinkage"
        )
    bound = math.sqrt(max(theta, 0.0)) * chi
    notes: list[str] = []
    unbiased = _unbiased(mahalanobis, level, factual, m, rule, notes)
    return FisherGap(
        theta=theta,
        chi=chi,
        t=t,
        r_fisher=math.sqrt(squared),
        r_fisher_direct=math.sqrt(direct),
        r_fisher_unbiased=unbiased,
        cauchy_schwarz=t / bound if bound > 0 else None,
        snr_mean=math.sqrt(level),
        condition=condition,
        shrinkage=share,
        shrinkage_rule=rule,
        rows=n,
        layers=m,
        notes=tuple(notes),
    )


def _shrunk(
    sigma: Floats, values: Floats, factual: Mask, shrinkage: Shrinkage
) -> tuple[Floats, float, str]:
    if shrinkage is None:
        return sigma, 0.0, "none"
    if shrinkage == "ledoit_wolf":
        from sklearn.covariance import ledoit_wolf_shrinkage

        share = float(ledoit_wolf_shrinkage(centred(values, factual), assume_centered=True))
        rule = "ledoit_wolf"
    else:
        share, rule = float(shrinkage), "fixed"
        if not 0.0 <= share <= 1.0:
            raise TrainingError(
                f"shrinkage is {share:g}: a share between 0 and 1, or 'ledoit_wolf', is needed"
            )
    m = len(sigma)
    return (1.0 - share) * sigma + share * float(np.trace(sigma)) / m * np.eye(m), share, rule


def _require_regular(sigma: Floats, n: int) -> float:
    """Return the condition number.  Raises TrainingError where sigma cannot be inverted."""
    m = len(sigma)
    eigenvalues = np.linalg.eigvalsh(sigma)
    low, high = float(eigenvalues[0]), float(eigenvalues[-1])
    condition = high / low if low > 0 else math.inf
    if condition <= MAX_CONDITION:
        return condition
    rank = int(np.sum(eigenvalues > max(high, 0.0) / MAX_CONDITION))
    raise TrainingError(
        f"the within-class covariance of {m} layers from {n} trajectories is singular (rank {rank}"
        f" of {m}, condition {condition:.1e}): give more rows (at least {m + 2}, better {10 * m}),"
        " leave out layers whose logits are constant or copies of another's, or shrink it"
        " (shrinkage 'ledoit_wolf', or --shrinkage ledoit_wolf)"
    )


def _unbiased(
    mahalanobis: float, level: float, factual: Mask, m: int, rule: str, notes: list[str]
) -> float | None:
    """Return R_Fisher from unbiased estimates of both squared SNRs, under normal classes of one
    covariance."""
    n = len(factual)
    noise = n / (float(factual.sum()) * float((~factual).sum()))  # 1 / n_F + 1 / n_H
    if rule != "none":
        notes.append(
            "r_fisher_unbiased is left out: its correction does not hold for a shrunk covariance"
        )
        return None
    best = mahalanobis * (n - m - 3) / (n - 2) - m * noise
    plain = level * (n - 4) / (n - 2) - noise
    if plain <= 0 or best <= 0 or n - m - 3 <= 0:
        notes.append(
            "r_fisher_unbiased is left out: rows too few, or classes too near, to correct for noise"
        )
        return None
    return math.sqrt(best / plain)
