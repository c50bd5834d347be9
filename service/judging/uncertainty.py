"""Computes the uncertainty of a risk: its interval over refits, and whether training had such
prompts.

It needs only the trajectory and numpy, so every engine gives the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.records import OUTSIDE
from service.risk import Floats, served_risk

FAR_READINGS = "readings: farther from those of training than nearly all of its own are"


def distance(trajectory: Floats, mean: Floats, whitening: Floats) -> NDArray[np.float64]:
    """Return |whitening (L - mean)|, a Mahalanobis distance: L [..., n], mean [n], whitening [n, n]
    -> [...]."""
    away = np.asarray(trajectory, np.float64) - mean
    return np.asarray(np.linalg.norm(away @ np.asarray(whitening, np.float64).T, axis=-1))


@dataclass(frozen=True, slots=True)
class Uncertain:
    """The uncertainty of one prompt's risk."""

    distance: float  # from the logits of training, in units of the cutoff
    interval: (
        tuple[float, float] | None
    )  # ends of the risk over refits; None if the bundle has no interval
    unlike: str | None = (
        None  # why training had no prompt of its form; it does not depend on the distance
    )

    @property
    def untrained(self) -> bool:
        """Return whether training had no prompt of its form, for any readings."""
        return self.unlike is not None

    @property
    def outside(self) -> bool:
        """Return whether the prompt lies outside training."""
        return self.untrained or self.distance >= OUTSIDE

    @property
    def outside_because(self) -> str | None:
        """Return why it lies outside; None if it does not."""
        return self.unlike or (FAR_READINGS if self.outside else None)


def uncertain(
    bundle: Bundle, logits: Floats, signals: Floats, *, unlike: str | None = None
) -> Uncertain:
    """Return the uncertainty of a prompt's logits [(1 + A) m] and the classifier's input [k].

    ``unlike`` is the reason why training had no prompt of its form, if it had none."""
    manifest, probes = bundle.manifest, bundle.probes
    away = float(distance(logits, probes.reference_mean, probes.reference_whitening))
    if (record := manifest.uncertainty.interval) is None:
        return Uncertain(away, None, unlike)
    log_odds = (
        float(signals @ np.array(manifest.classifier.weight, np.float64))
        + manifest.classifier.intercept
    )
    half = record.half_width(log_odds, away)
    interval = (
        float(served_risk(signals, manifest, half)),
        float(served_risk(signals, manifest, -half)),
    )
    return Uncertain(away, interval, unlike)
