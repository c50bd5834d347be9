"""Numbers made of a trajectory: five diagnostics, median and trimmed mean, 2m + 5 and 13 features,
depth subsets.  App. features (definitions), App. mean-vs-median, App. depth-weighting.  What needs
training statistics takes them as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hallutracer_research.paper.diagnostics.classes import as_float
from service.errors import TrainingError
from service.fitting.probes import Floats, Index

# Guards three ratios against a zero denominator. In units of squared truth logits for friction and
# energy, of truth logits for the condition number; far below any spread that a probe's logits have.
EPSILON = 1e-6

M_EFF = (1, 2, *range(4, 29, 4))  # App. depth-weighting; full depth comes after these
FIVE = ("mean", "slope", "zone_shift", "total_variation", "range")
SOURCE_NAMES = (
    "rho_rz",
    "l_rz",
    "l_end",
    "w_rz",
    "tv_w_rz",
    "k_rz",
    "tv_k_rz",
    "log_energy_ratio",
    "friction_rz",
    "condition_rz",
    "rho_oz",
    "k_oz",
    "rho_last",
)
# Columns of ``source_features`` by group (Table source_features_def).
GROUPS = {
    "state": range(3),
    "kinematic": range(3, 8),
    "friction": range(8, 10),
    "output": range(10, 13),
}


@dataclass(frozen=True, eq=False)
class Zones:
    """Index sets of Eq. zone-index-sets: layers, and the transitions l -> l + 1 that start in
    them."""

    recognition: Index
    output: Index
    recognition_steps: Index
    output_steps: Index


class Standard(NamedTuple):
    """Per-layer mean [m] and standard deviation [m] of the TRAINING partition's truth logits (std 0
    becomes 1)."""

    mean: Floats
    std: Floats

    @classmethod
    def of(cls, trajectory: Floats) -> Standard:
        """Measure training trajectories [N, m]."""
        std = trajectory.std(axis=0)
        return cls(trajectory.mean(axis=0), np.where(std > 0, std, 1.0))


def zones(m: int) -> Zones:
    """Return the recognition zone floor(m/3) <= l < floor(3m/4) and the output zone up to m - 1
    (Eq. zone-index-sets). Below 5 layers no transition starts in the output zone.  Raises
    TrainingError below 3 layers."""
    if m < 3:
        raise TrainingError(
            f"{m} layers: a trajectory needs at least 3 to have a recognition and an output zone"
        )
    recognition, output = np.arange(m // 3, 3 * m // 4), np.arange(3 * m // 4, m)
    return Zones(recognition, output, recognition[recognition < m - 1], output[output < m - 1])


def slope_weights(m: int) -> Floats:
    """Return weights [m] of the least-squares slope over the depth index; they sum to zero (App.
    snr-proof)."""
    depth = np.arange(m) - (m - 1) / 2.0
    return np.asarray(depth / np.sum(depth**2))


def trimmed_layers(m: int) -> int:
    """Return how many layers the 10 % trimmed mean leaves out at EACH end: floor(m / 10); 0 below
    10 layers."""
    return m // 10


def trajectory_features(trajectory: ArrayLike) -> dict[str, Floats]:
    """Return seven features, each [N], of [N, m]: ``FIVE`` (App. features), median and 10 % trimmed
    mean.  The trimmed mean leaves out the ``trimmed_layers(m)`` smallest and as many largest logits
    of each trajectory."""
    values = as_float(trajectory, "trajectory", 2)
    m = values.shape[1]
    zone, cut = zones(m), trimmed_layers(m)
    ranked = np.sort(values, axis=1)
    return {
        "mean": values.mean(axis=1),
        "slope": values @ slope_weights(m),
        "zone_shift": (
            values[:, zone.output].mean(axis=1) - values[:, zone.recognition].mean(axis=1)
        ),
        "total_variation": np.abs(np.diff(values, axis=1)).sum(axis=1),
        "range": ranked[:, -1] - ranked[:, 0],
        "median": np.median(values, axis=1),
        "trimmed_mean": ranked[:, cut : m - cut].mean(axis=1),
    }


def full_trajectory(values: Floats) -> Floats:
    """Return the full-trajectory baseline: [N, m] -> [N, 2m + 5].  Logits (m), their differences (m
    - 1), then mean, standard deviation, minimum, maximum, last, last minus first."""
    first, last = values[:, 0], values[:, -1]
    four = [summary(values, axis=1) for summary in (np.mean, np.std, np.min, np.max)]
    return np.column_stack([values, np.diff(values, axis=1), *four, last, last - first])


def source_features(
    trajectory: ArrayLike, w: ArrayLike, k: ArrayLike, standard: Standard
) -> Floats:
    """Return the 13 source-level features (Table source_features_def), [N, 13] by ``SOURCE_NAMES``:
    [N, m], W, K. Three quantities the paper names and does not define, here: rho_l = (L_l - mean_l)
    / std_l with ``standard``; friction zeta_l = -dL_l (L_l - L-bar) / ((L_l - L-bar)^2 + eps);
    condition number kappa_l = (|W_l| + |K_l|) / (|dL_l| + eps), eps = ``EPSILON``, which also
    stands in both terms of log(E_W / E_K).  Raises TrainingError below 5 layers, where the output
    zone has no transition."""
    values = as_float(trajectory, "trajectory", 2)
    drift, change = as_float(w, "w", 2), as_float(k, "k", 2)
    n, m = values.shape
    for name, array in (("w", drift), ("k", change)):
        if array.shape != (n, m - 1):
            raise TrainingError(
                f"{name} has shape {list(array.shape)}: [{n}, {m - 1}] is needed for this"
                " trajectory"
            )
    zone = zones(m)
    steps = zone.recognition_steps
    if not len(zone.output_steps):
        raise TrainingError(
            f"{m} layers: the 13 source features need at least 5 (a transition in the output zone)"
        )
    rho = (values - standard.mean) / standard.std
    increment = np.diff(values, axis=1)
    away = (values - values.mean(axis=1, keepdims=True))[:, :-1]
    friction = -increment * away / (away**2 + EPSILON)
    condition = (np.abs(drift) + np.abs(change)) / (np.abs(increment) + EPSILON)
    drift_rz, change_rz = drift[:, steps], change[:, steps]
    of_drift, of_change = (np.mean(x**2, axis=1) + EPSILON for x in (drift_rz, change_rz))
    columns = (
        rho[:, zone.recognition].mean(axis=1),
        values[:, zone.recognition].mean(axis=1),
        values[:, -1] - values[:, 0],
        drift_rz.mean(axis=1),
        np.abs(np.diff(drift_rz, axis=1)).sum(axis=1),
        change_rz.mean(axis=1),
        np.abs(np.diff(change_rz, axis=1)).sum(axis=1),
        np.log(of_drift) - np.log(of_change),
        friction[:, steps].mean(axis=1),
        condition[:, steps].mean(axis=1),
        rho[:, zone.output].mean(axis=1),
        change[:, zone.output_steps].mean(axis=1),
        rho[:, -1],
    )
    return np.stack(columns, axis=1)


def depth_layers(m: int, m_eff: int, best_layer: int) -> Index | None:
    """Return the layers of one point of the depth curve (App. depth-weighting), ascending.  m_eff =
    1: ``best_layer``, the one with the highest TRAINING AUROC.  m_eff = m: every layer.  Otherwise
    l_min + floor(j (l_max - l_min) / (m_eff - 1)) with l_min = 3, l_max = m - 3.  None where fewer
    than m_eff layers lie in that range: the formula would repeat layers."""
    if m_eff in (1, m):
        return np.array([best_layer]) if m_eff < m else np.arange(m)
    first, last = 3, m - 3
    if last - first + 1 < m_eff:
        return None
    return first + np.arange(m_eff) * (last - first) // (m_eff - 1)


def depth_sizes(m: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the paper's list of m_eff with full depth, split into those this model has layers for
    and those left out. A 32-layer model has 27 layers in [3, 29], so that the paper's own 28 is
    left out there."""
    listed = [*(size for size in M_EFF if size < m), m]
    kept = tuple(size for size in listed if depth_layers(m, size, best_layer=0) is not None)
    return kept, tuple(size for size in (*M_EFF, m) if size not in kept)
