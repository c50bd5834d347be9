"""The uncertainty record of a bundle: how far a risk would move with other training rows, and which prompts are unlike
all that training saw.

It belongs to the tensors ``reference_mean`` and ``reference_whitening`` of probes.safetensors.  The distance of a
trajectory L [m] is |whitening (L - mean)|, a Mahalanobis distance in units of its own cutoff: from 1 on, the prompt
lies outside what training saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

OUTSIDE = 1.0  # the distance from which on a prompt lies outside


@dataclass(frozen=True, slots=True)
class RefitInterval:
    """Where refits on other training rows would put a risk.

    The half-width, sqrt(base + by_log_odds (z - centre)^2 + by_distance distance^2), is in log odds, around
    z = weight . signals + intercept.
    """

    level: float  # share of the refits that lie inside
    fits: int  # whose spread it was taken from
    centre: float
    base: float
    by_log_odds: float
    by_distance: float

    def half_width(self, log_odds: float, distance: float) -> float:
        """The half-width in log odds."""
        wide = self.base + self.by_log_odds * (log_odds - self.centre) ** 2 + self.by_distance * distance**2
        return math.sqrt(wide)


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """What is known of a risk's uncertainty."""

    outside_share: float  # of fresh prompts like the training rows, that are to lie outside
    outside_rows: int  # whose distances gave the cutoff, each by probes and a reference that were made without it
    interval: RefitInterval | None  # None where the run had no refits: no nested evaluation, or one seed
    statement: str  # what both mean, and what not


def check_uncertainty(uncertainty: Uncertainty, require: Callable[[bool, str, object, object], None]) -> None:
    """Check ranges; ``require`` raises where a check fails."""
    share = uncertainty.outside_share
    require(0.0 < share < 1.0, "uncertainty.outside_share", "a number between 0 and 1", share)
    rows = uncertainty.outside_rows
    require(rows >= 1, "uncertainty.outside_rows", "1 or more", rows)
    require(uncertainty.statement != "", "uncertainty.statement", "a non-empty string", "")
    interval = uncertainty.interval
    if interval is None:
        return
    where = "uncertainty.interval"
    require(0.0 < interval.level < 1.0, f"{where}.level", "a number between 0 and 1", interval.level)
    require(interval.fits >= 2, f"{where}.fits", "2 or more", interval.fits)
    for field in ("base", "by_log_odds", "by_distance"):
        value = getattr(interval, field)
        require(value >= 0.0, f"{where}.{field}", "0 or more", value)
