"""Slope against depth mean: predicted and measured ratio of their SNRs (Prop. snr, Table snr_verification)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from hallutracer_research.paper.diagnostics.classes import Floats, Mask, gap, labelled, pooled_covariance, variances
from hallutracer_research.paper.diagnostics.features import slope_weights
from hallutracer_research.paper.diagnostics.variance import variance_components
from service.errors import TrainingError

ROUNDING: Final = 1e-14  # a variance below this share of the whole is what floating point leaves of zero


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
    """Trajectory [N, m], label [N] -> the table's row; TrainingError below 3 layers or without a mean gap.

    r_plugin uses Sigma = sum_c pi_c Cov_c.  r_empirical takes slope and mean of every sample and divides the class gap
    by sqrt((s_F^2 + s_H^2) / 2), each class counting equally.  The slope being linear, the two can differ only where
    classes are unequal in size AND in spread: eta is 1 by algebra on balanced sets, no test of the theory.
    """
    values, factual = labelled(trajectory, label, "trajectory")
    m = values.shape[1]
    parts = variance_components(values, label)
    d = gap(values, factual)
    mean_gap, weights = float(d.mean()), slope_weights(m)
    if abs(mean_gap) <= 1e-12 * float(np.linalg.norm(d)):
        raise TrainingError("both classes have the same depth mean: ratios to its SNR have no value")
    slope_gap = float(weights @ d)
    rho = abs(slope_gap) * m / abs(mean_gap)
    notes: list[str] = []

    gamma = gamma_plugin = independent = None
    if parts.sigma_epsilon2 > ROUNDING * parts.sigma_alpha2:
        # 1 + m sigma_alpha^2 / sigma_eps^2 is m Var(alpha-hat) / sigma_eps^2, and so never negative.
        gamma = math.sqrt(max(1.0 + m * parts.sigma_alpha2 / parts.sigma_epsilon2, 0.0))
        independent = rho * gamma / math.sqrt(12.0) * math.sqrt(1.0 - 1.0 / m**2)
        if parts.icc is not None and parts.icc < 1:
            gamma_plugin = math.sqrt(1.0 + m * parts.icc / (1.0 - parts.icc))
    else:
        notes.append("gamma and r_independent are left out: trajectories of one class are parallel, sigma_eps^2 is 0")

    sigma = pooled_covariance(values, factual)
    floor = ROUNDING * float(np.trace(sigma))  # of the variance of a unit-norm combination of layers
    least = floor * float(weights @ weights), floor / m
    plugin = _ratio(slope_gap, float(weights @ sigma @ weights), mean_gap, float(sigma.mean()), least)
    slope, mean = values @ weights, values.mean(axis=1)
    empirical = _ratio(
        float(gap(slope, factual)),
        _equal_variance(slope, factual),
        float(gap(mean, factual)),
        _equal_variance(mean, factual),
        least,
    )
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


def _equal_variance(scalar: Floats, factual: Mask) -> float:
    hallucinated_variance, factual_variance = variances(scalar, factual)
    return float(hallucinated_variance + factual_variance) / 2.0


def _ratio(
    slope_gap: float, slope_variance: float, mean_gap: float, mean_variance: float, least: tuple[float, float]
) -> float | None:
    """SNR(slope) / SNR(mean); None where either variance is no more than the rounding in it, ``least``."""
    if slope_variance <= least[0] or mean_variance <= least[1]:
        return None
    return abs(slope_gap) / math.sqrt(slope_variance) / (abs(mean_gap) / math.sqrt(mean_variance))
