"""Random-intercept variance components of trajectories: ICC and residual correlation by lag (Table variance-decomp).

L_l = mu_l^(c) + alpha_i + eps_{i,l}.  The paper's ICC (Eq. icc) is a plug-in: it takes Var(alpha-hat), which holds
sigma_eps^2 / m besides sigma_alpha^2, over the sum of both.  ``icc_unbiased`` separates them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hallutracer_research.paper.diagnostics.classes import Floats, centred, labelled, mean_or_none
from service.errors import TrainingError

MAX_LAG = 12


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
    acf_floor: float  # -1 / (m - 1): what independent residuals give, since the estimated ones sum to zero
    notes: tuple[str, ...] = ()


def variance_components(trajectory: ArrayLike, label: ArrayLike) -> VarianceComponents:
    """Trajectory [N, m], label [N] -> components as App. hd-geometry estimates them; TrainingError below 3 layers.

    alpha-hat_i is the depth mean less its class mean, eps-hat what is left; variances are plain means of squares.
    The residual correlation at a lag is the mean over layer pairs of the correlation across the samples of one class.
    """
    values, factual = labelled(trajectory, label, "trajectory")
    n, m = values.shape
    if m < 3:
        raise TrainingError(f"trajectory has {m} layers: variance components and their lags need at least 3")
    away = centred(values, factual)
    alpha = away.mean(axis=1)
    epsilon = away - alpha[:, None]
    notes: list[str] = []
    epsilon2 = float(np.sum(epsilon**2)) / (max(n - 2, 1) * (m - 1))
    alpha2 = float(np.sum(alpha**2)) / max(n - 2, 1) - epsilon2 / m
    everything = _icc(alpha, epsilon)
    if everything is None:
        notes.append("every class has one trajectory only: there is no within-class variance to share out")
    whole = alpha2 + epsilon2
    acf = _acf(epsilon[factual])
    acf_hallucinated = _acf(epsilon[~factual])
    if None in acf or None in acf_hallucinated:
        notes.append("a lag is null where every pair of layers at it has a layer without residual variance")
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
    """Mean correlation over layer pairs at each lag: epsilon [n, m], centred over rows -> lags 1 .. min(12, m - 2)."""
    m = epsilon.shape[1]
    norm = np.sqrt(np.sum(epsilon**2, axis=0))
    safe = np.where(norm > 0, norm, np.nan)
    correlation = epsilon.T @ epsilon / np.outer(safe, safe)
    return tuple(mean_or_none(np.diagonal(correlation, lag)) for lag in range(1, min(MAX_LAG, m - 2) + 1))
