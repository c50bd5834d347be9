"""How much the best linear weighting of layers could gain over the mean (Thm. uniform-optimal, Table fisher-gap).

The gain is computed twice, by the paper's level and shape parts and directly, and must agree.  All of it is estimated
on the rows it is given, where even layers of pure noise seem to help: R^2 is too large by about
(m - 1) (1/n_F + 1/n_H) / SNR^2 of the mean.  ``r_fisher_unbiased`` takes that out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import cho_factor, cho_solve, helmert

from hallutracer_research.paper.diagnostics.classes import Floats, Mask, centred, gap, labelled, pooled_covariance
from service.errors import TrainingError

Shrinkage = Literal["ledoit_wolf"] | float | None
MAX_CONDITION = 1e12
AGREEMENT = 1e-9  # relative, between the two computations of R_Fisher


@dataclass(frozen=True)
class FisherGap:
    """Diagnostics of Eq. fisher-diagnostics and the gap of Eq. fisher-gap-exact; R is a ratio of SNRs, at least 1."""

    theta: float  # level-shape coupling, in [0, 1)
    chi: float  # shape energy
    t: float  # cross term
    r_fisher: float  # sqrt(chi^2 + (1 - t)^2 / (1 - theta))
    r_fisher_direct: float  # sqrt(d' Sigma^-1 d / (s^2 / a))
    r_fisher_unbiased: float | None  # None under shrinkage, and where the rows are too few to correct
    cauchy_schwarz: float | None  # t / (sqrt(theta) chi), in [-1, 1]; None where a factor is zero
    snr_mean: float  # SNR of the depth mean, s / sqrt(a)
    condition: float  # of Sigma as inverted
    shrinkage: float  # the share of the scaled identity in Sigma; 0 is none
    shrinkage_rule: str  # "none", "fixed" or "ledoit_wolf"
    rows: int
    layers: int
    notes: tuple[str, ...] = ()


def fisher_gap(trajectory: ArrayLike, label: ArrayLike, shrinkage: Shrinkage = None) -> FisherGap:
    """Trajectory [N, m], label [N] -> the gap between the Fisher-optimal weights and the plain mean.

    Sigma = sum_c pi_c Cov_c, with pi_c = n_c / N and unbiased Cov_c (App. uniform-proof).  ``shrinkage`` replaces it
    by (1 - g) Sigma + g tr(Sigma) / m I: a share g in [0, 1], or "ledoit_wolf" to estimate g.  TrainingError where
    Sigma is singular (rank below m or condition above 1e12), where the classes have one depth mean, or where the two
    computations differ by more than 1e-9 relative (more where the condition leaves fewer digits, from 3e5 on).
    """
    values, factual = labelled(trajectory, label, "trajectory")
    n, m = values.shape
    if m < 2:
        raise TrainingError(f"trajectory has {m} layer: the Fisher gap needs at least 2")
    sigma, share, rule = _shrunk(pooled_covariance(values, factual), values, factual, shrinkage)
    condition = _require_regular(sigma, n)
    d = gap(values, factual)

    u = np.full(m, 1.0 / math.sqrt(m))
    q = helmert(m).T  # [m, m - 1]: an orthonormal basis of the shapes, all orthogonal to u
    s, z = float(u @ d), q.T @ d
    if abs(s) <= 1e-12 * float(np.linalg.norm(d)):
        raise TrainingError("both classes have the same depth mean: the gain over it has no value (s = 0)")
    a, b = float(u @ sigma @ u), q.T @ sigma @ u
    factor = cho_factor(q.T @ sigma @ q)
    by_b, by_z = cho_solve(factor, b), cho_solve(factor, z)
    theta, chi, t = float(b @ by_b) / a, math.sqrt(max(a * float(z @ by_z), 0.0)) / abs(s), float(b @ by_z) / s
    squared = chi**2 + (1.0 - t) ** 2 / (1.0 - theta)
    mahalanobis = float(d @ cho_solve(cho_factor(sigma), d))
    level = s**2 / a
    direct = mahalanobis / level
    # Either computation loses as many digits as the covariance's condition has.
    allowed = max(AGREEMENT, 16 * float(np.finfo(np.float64).eps) * condition)
    if not abs(squared - direct) <= allowed * direct:
        raise TrainingError(
            f"R_Fisher^2 is {squared!r} by its parts and {direct!r} directly, more than {allowed:.1g} apart: the "
            f"covariance of the layers is too near singular (condition {condition:.1e}); use shrinkage"
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


def _shrunk(sigma: Floats, values: Floats, factual: Mask, shrinkage: Shrinkage) -> tuple[Floats, float, str]:
    if shrinkage is None:
        return sigma, 0.0, "none"
    if shrinkage == "ledoit_wolf":
        from sklearn.covariance import ledoit_wolf_shrinkage

        share, rule = float(ledoit_wolf_shrinkage(centred(values, factual), assume_centered=True)), "ledoit_wolf"
    else:
        share, rule = float(shrinkage), "fixed"
        if not 0.0 <= share <= 1.0:
            raise TrainingError(f"shrinkage is {share:g}: a share between 0 and 1, or 'ledoit_wolf', is needed")
    m = len(sigma)
    return (1.0 - share) * sigma + share * float(np.trace(sigma)) / m * np.eye(m), share, rule


def _require_regular(sigma: Floats, n: int) -> float:
    """The condition number; TrainingError where sigma cannot be inverted."""
    m = len(sigma)
    eigenvalues = np.linalg.eigvalsh(sigma)
    low, high = float(eigenvalues[0]), float(eigenvalues[-1])
    condition = high / low if low > 0 else math.inf
    if condition <= MAX_CONDITION:
        return condition
    rank = int(np.sum(eigenvalues > max(high, 0.0) / MAX_CONDITION))
    raise TrainingError(
        f"the within-class covariance of {m} layers from {n} trajectories is singular (rank {rank} of {m}, condition "
        f"{condition:.1e}): give more rows (at least {m + 2}, better {10 * m}), leave out layers whose logits are "
        f"constant or copies of another's, or shrink it (shrinkage 'ledoit_wolf', or --shrinkage ledoit_wolf)"
    )


def _unbiased(mahalanobis: float, level: float, factual: Mask, m: int, rule: str, notes: list[str]) -> float | None:
    """R_Fisher from unbiased estimates of both squared SNRs, under normal classes of one covariance."""
    n = len(factual)
    noise = n / (float(factual.sum()) * float((~factual).sum()))  # 1 / n_F + 1 / n_H
    if rule != "none":
        notes.append("r_fisher_unbiased is left out: its correction does not hold for a shrunk covariance")
        return None
    best = mahalanobis * (n - m - 3) / (n - 2) - m * noise
    plain = level * (n - 4) / (n - 2) - noise
    if plain <= 0 or best <= 0 or n - m - 3 <= 0:
        notes.append(
            "r_fisher_unbiased is left out: the rows are too few, or the classes too near, to correct for noise"
        )
        return None
    return math.sqrt(best / plain)
