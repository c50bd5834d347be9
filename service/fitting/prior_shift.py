"""The share of hallucinations on traffic whose labels are not known, under prior shift; and whether prior shift holds.

Prior shift (label shift): given the class, risks are distributed on the traffic as they were in training; only the
share pi of hallucinated rows is another.  Then the odds of every risk change by one factor,

    logit(risk') = logit(risk) + logit(pi) - logit(pi_0),

and pi is found from unlabelled rows alone (Saerens, Latinne and Decaestecker 2002, Neural Computation 14, 21-41).
Where something else shifts, the share is wrong without a sign of it: ``prior_shift_test`` asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

from probes_store.records import EDGE, Recalibration
from service.fitting.scores import TAILS, Floats, Labels, equal_mass_bins, group_draws

LEVELS = 512  # distinct likelihood ratios that are told apart
LEVEL = 0.01  # of the test
NEGLIGIBLE = 0.03  # never refused: a large traffic would show by what refitted probes differ from cross-fitted ones
CUTS = 50  # risks at which the distribution functions are compared


class Traffic(NamedTuple):
    """Unlabelled rows, [n] each; rows of one group depend on each other."""

    risk: Floats  # as the bundle serves it
    group: Labels


class LabelledRisks(NamedTuple):
    """Labelled risks of training's own kind, by probes that were fitted without the row, [n] each."""

    risk: Floats
    label: Labels  # 1 factual
    group: Labels


@dataclass(frozen=True)
class ShareEstimate:
    """A share of hallucinated rows with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PriorShiftTest:
    """The traffic against the best mixture of the classes."""

    share: float  # of hallucinated rows in the best mixture: black-box shift estimation's answer
    distance: float  # largest difference between the two distribution functions
    limit: float  # above it prior shift is rejected
    p_value: float

    @property
    def explained(self) -> bool:
        """Whether prior shift alone can have made the traffic."""
        return self.distance <= self.limit


def most_likely_share(traffic: Traffic, prior: float, label: Labels | None = None) -> float:
    """Return the share of greatest likelihood on ``traffic``, whose risks hold at the share ``prior``; label [m]: of
    rows drawn at random from it, which are not among its rows."""
    ratio, level = _ratios(traffic.risk, prior)
    wrong = np.zeros(0, bool) if label is None else np.asarray(label) == 0
    counts = np.append(np.bincount(level), [wrong.sum(), (~wrong).sum()]).astype(np.float64)
    return float(_most_likely(ratio, counts[None])[0])


def estimate_share(
    traffic: Traffic, prior: float, label: Labels | None = None, group: Labels | None = None, seed: int = 0
) -> ShareEstimate:
    """Return ``most_likely_share`` with its interval by bootstrap over groups, which takes training's risks as exact;
    group [m] of the labelled rows is numbered with the traffic's."""
    wrong = np.zeros(0, bool) if label is None else np.asarray(label) == 0
    groups = traffic.group if group is None else np.concatenate([traffic.group, group])
    ratio, level = _ratios(traffic.risk, prior)
    rows = len(traffic.risk)
    drawn = [
        np.append(np.bincount(level, weight[:rows]), [weight[rows:][wrong].sum(), weight[rows:][~wrong].sum()])
        for weight in group_draws(groups, seed)
    ]
    low, high = np.quantile(_most_likely(ratio, np.array(drawn)), TAILS)
    return ShareEstimate(most_likely_share(traffic, prior, label), float(low), float(high))


def shift_to(share: float, prior: float, rows: int) -> Recalibration:
    """Return the map of risks that hold at the share ``prior`` to those that hold at ``share``, found on these rows."""
    half = 0.5 / rows  # a share of 0 or 1 would make every risk 0 or 1
    inside = float(np.clip(share, half, 1 - half))
    return Recalibration("prior_shift", c=float(logit(inside) - logit(prior)))


def _ratios(risk: Floats, prior: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return p(risk | hallucinated) / p(risk | factual) at no more than LEVELS levels [L], and each row's level [n]."""
    inside = np.clip(np.asarray(risk, np.float64), EDGE, 1 - EDGE)
    ratio = inside / (1 - inside) * (1 - prior) / prior
    level = equal_mass_bins(ratio, min(LEVELS, len(ratio)))
    return np.bincount(level, ratio) / np.bincount(level), level


def _most_likely(ratio: Floats, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of greatest likelihood of each of D samples: ratio [L], counts [D, L + 2] -> [D].

    sum_j n_j log(1 + pi (ratio_j - 1)) + h log(pi) + f log(1 - pi) is concave: bisection on its slope, of all samples
    at once, finds the maximum that the EM of Saerens et al. climbs to.
    """
    rise = np.asarray(ratio) - 1.0
    unlabelled, wrong, right = counts[:, :-2], counts[:, -2], counts[:, -1]
    low, high = np.zeros(len(counts)), np.ones(len(counts))
    for _ in range(50):
        middle = (low + high) / 2
        slope = (unlabelled * (rise / (1.0 + middle[:, None] * rise))).sum(axis=1)
        rising = slope + wrong / middle - right / (1 - middle) > 0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    return (low + high) / 2


def number_together(*names: Sequence[str]) -> list[NDArray[np.int64]]:
    """Return numbers for the group names of several samples, the same for the same name."""
    codes: dict[str, int] = {}
    return [np.array([codes.setdefault(name, len(codes)) for name in of_one], np.int64) for of_one in names]


def prior_shift_test(source: LabelledRisks, traffic: Traffic, seed: int = 0) -> PriorShiftTest:
    """Return how the traffic compares with the best mixture of training's two class-conditional distributions.

    The mixture is the least squares of black-box shift estimation (Lipton, Wang and Smola 2018) on the distribution
    functions; the largest distance that remains is compared with what chance leaves, by a centred bootstrap over groups
    of both samples.  A traffic that happens to be such a mixture passes.  Raises ValueError: the source lacks a class.
    """
    bad = np.asarray(source.label) == 0
    if not bad.any() or bad.all():
        raise ValueError("the source needs rows of both classes")
    cuts = np.unique(np.quantile(np.concatenate([source.risk, traffic.risk]), np.linspace(0, 1, CUTS + 2)[1:-1]))
    of_source, of_traffic = (np.searchsorted(cuts, risk, "left") for risk in (source.risk, traffic.risk))

    def functions(own: NDArray[np.float64], seen: NDArray[np.float64]) -> list[Floats]:
        """Return the distribution functions at the cuts of hallucinated, factual and traffic rows, of such weights."""
        parts = (of_source[bad], own[bad]), (of_source[~bad], own[~bad]), (of_traffic, seen)
        return [np.cumsum(np.bincount(place, w, len(cuts) + 1))[:-1] / w.sum() for place, w in parts]

    def rest(share: float, hallucinated: Floats, factual: Floats, unknown: Floats) -> Floats:
        return np.asarray(unknown - share * hallucinated - (1 - share) * factual)

    found = functions(np.ones(len(bad)), np.ones(len(traffic.risk)))
    free = _best_share(*found)
    share = float(np.clip(free, 0.0, 1.0))
    distance, centre = float(np.abs(rest(share, *found)).max()), rest(free, *found)
    chance = []
    for own, seen in zip(group_draws(source.group, seed), group_draws(traffic.group, seed + 1), strict=True):
        if own[bad].any() and own[~bad].any():  # a draw may lack a class of few groups
            drawn = functions(own, seen)
            chance.append(np.abs(rest(_best_share(*drawn), *drawn) - centre).max())
    p_value = (1 + int((np.array(chance) >= distance).sum())) / (1 + len(chance))
    limit = max(NEGLIGIBLE, float(np.quantile(chance, 1 - LEVEL))) if chance else 1.0
    return PriorShiftTest(share, distance, limit, p_value)


def _best_share(hallucinated: Floats, factual: Floats, unknown: Floats) -> float:
    """Return the share by least squares, not held between 0 and 1; 0 where the classes do not differ."""
    direction = hallucinated - factual
    length = float(direction @ direction)
    return float((unknown - factual) @ direction) / length if length else 0.0
