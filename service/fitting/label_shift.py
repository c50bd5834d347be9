"""Does prior shift alone explain the traffic?

Under prior shift the traffic's risks are a mixture of training's two class-conditional distributions.  The best mixture
is found (the least squares of black-box shift estimation, Lipton, Wang and Smola 2018, on the distribution functions),
and the largest distance that remains is compared with what chance leaves, by a centred bootstrap over groups of both
samples.  A traffic that happens to be such a mixture passes whatever else shifted: then only labels tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.fitting.group_draws import group_draws
from service.fitting.prior_shift import Traffic

Floats = NDArray[np.floating]

LEVEL = 0.01  # of the test
NEGLIGIBLE = 0.03  # never refused: a large traffic would show by what refitted probes differ from cross-fitted ones
CUTS = 50  # risks at which the distribution functions are compared


@dataclass(frozen=True, eq=False)
class Source:
    """Labelled risks of training's own kind, by probes that were fitted without the row."""

    risk: Floats  # [n]
    label: NDArray[np.integer]  # [n] 1 factual
    group: NDArray[np.integer]  # [n]


@dataclass(frozen=True)
class ShiftTest:
    """The traffic against the best mixture of the classes."""

    share: float  # of hallucinated rows in the best mixture: black-box shift estimation's answer
    distance: float  # largest difference between the two distribution functions
    limit: float  # above it prior shift is rejected
    p_value: float

    @property
    def explained(self) -> bool:
        """Whether prior shift alone can have made the traffic."""
        return self.distance <= self.limit


def label_shift_test(source: Source, traffic: Traffic, seed: int = 0) -> ShiftTest:
    """Compare; ValueError where the source lacks a class."""
    bad = np.asarray(source.label) == 0
    if not bad.any() or bad.all():
        raise ValueError("the source needs rows of both classes")
    cuts = np.unique(np.quantile(np.concatenate([source.risk, traffic.risk]), np.linspace(0, 1, CUTS + 2)[1:-1]))
    of_source, of_traffic = (np.searchsorted(cuts, risk, "left") for risk in (source.risk, traffic.risk))
    size = len(cuts) + 1

    def functions(own: NDArray[np.float64], seen: NDArray[np.float64]) -> tuple[Floats, Floats, Floats]:
        """Distribution functions at the cuts of hallucinated, factual and traffic rows, which count so often."""
        parts = (of_source[bad], own[bad]), (of_source[~bad], own[~bad]), (of_traffic, seen)
        hallucinated, factual, unknown = (
            np.cumsum(np.bincount(place, weight, size))[:-1] / weight.sum() for place, weight in parts
        )
        return hallucinated, factual, unknown

    def rest(share: float, of_classes: tuple[Floats, Floats, Floats]) -> Floats:
        hallucinated, factual, unknown = of_classes
        return np.asarray(unknown - share * hallucinated - (1 - share) * factual)

    found = functions(np.ones(len(bad)), np.ones(len(traffic.risk)))
    free = _best_share(*found)
    share = float(np.clip(free, 0.0, 1.0))
    distance, centre = float(np.abs(rest(share, found)).max()), rest(free, found)
    chance = []
    for own, seen in zip(group_draws(source.group, seed), group_draws(traffic.group, seed + 1), strict=True):
        if own[bad].any() and own[~bad].any():  # a draw may lack a class of few groups
            drawn = functions(own, seen)
            chance.append(np.abs(rest(_best_share(*drawn), drawn) - centre).max())
    p_value = (1 + int((np.array(chance) >= distance).sum())) / (1 + len(chance))
    limit = max(NEGLIGIBLE, float(np.quantile(chance, 1 - LEVEL))) if chance else 1.0
    return ShiftTest(share, distance, limit, p_value)


def _best_share(hallucinated: Floats, factual: Floats, unknown: Floats) -> float:
    """Least squares, not held between 0 and 1; 0 where the classes do not differ."""
    direction = hallucinated - factual
    length = float(direction @ direction)
    return float((unknown - factual) @ direction) / length if length else 0.0
