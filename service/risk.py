"""The idea, whole: readout -> truth logit -> running depth mean -> risk.  READ THIS FIRST.

Symbols follow the paper: m layers, l one of them (0-based), a_l the readout [d] at the answer onset
t*, v_l and b_l the probe's unit direction [d] and bias.  Label 1 is factual, so risk falls as the
depth mean rises. Numpy only.  Engines compute the same sums on their own tensors and are tested
against these functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probes_store.manifest import Manifest

Floats = NDArray[np.floating]


def truth_logits(
    readout: Floats, direction: Floats, bias: Floats, scale: Floats | float = 1.0
) -> NDArray[np.float64]:
    """L_l = (v_l . a_l + b_l) / scale_l (Eq. logit); scale is 1 in the paper's rule.

    readout [..., m, d], direction [m, d], bias [m], scale [m] or 1 -> trajectory [..., m] (Eq.
    trajectory)."""
    projected = np.einsum(
        "...ld,ld->...l", np.asarray(readout, np.float64), np.asarray(direction, np.float64)
    )
    return np.asarray((projected + bias) / scale, np.float64)


@dataclass(slots=True)
class RunningDepthMean:
    """The depth mean (Eq. detector) as layers arrive: O(m) time, O(1) space.

    mean_n = mean_{n-1} + (L_n - mean_{n-1}) / n, so ``mean`` after layer l is the anytime score of
    the first l + 1."""

    mean: float = 0.0
    layers: int = 0

    def update(self, truth_logit: float) -> float:
        """Take one layer's truth logit and return the mean so far."""
        self.layers += 1
        self.mean += (truth_logit - self.mean) / self.layers
        return self.mean


def running_means(trajectory: Floats) -> NDArray[np.float64]:
    """The running mean after each layer: trajectory [m] -> [m]; its last entry is the depth
    mean."""
    running = RunningDepthMean()
    return np.array([running.update(float(truth_logit)) for truth_logit in trajectory])


def depth_mean(trajectory: Floats) -> NDArray[np.float64]:
    """L-bar (Eq. detector) of whole trajectories at once: [..., m] -> [...]."""
    return np.asarray(np.mean(np.asarray(trajectory, np.float64), axis=-1))


def risk(signals: Floats, weight: Floats, intercept: float) -> NDArray[np.float64]:
    """P(hallucinated) = 1 - sigmoid(w . x + c): signals [..., k], weight [k] -> [...] in [0, 1].

    With the paper's rule k = 1 and x is the depth mean.  Written as sigmoid(-z) so that neither
    tail overflows."""
    z = np.asarray(signals, np.float64) @ np.asarray(weight, np.float64) + intercept
    tail = np.exp(-np.abs(z))
    return np.asarray(np.where(z > 0, tail, 1.0) / (1.0 + tail))


def served_risk(signals: Floats, manifest: Manifest, moved: float = 0.0) -> NDArray[np.float64]:
    """The risk that a bundle serves, its classifier's or what recalibration makes of it: signals
    [..., k] -> [...].

    ``moved`` is added to z = w . x + c: an end of the risk's interval."""
    value = risk(
        signals, np.array(manifest.classifier.weight), manifest.classifier.intercept + moved
    )
    return value if manifest.recalibration is None else manifest.recalibration(value)
