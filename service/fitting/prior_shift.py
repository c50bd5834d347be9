"""The share of hallucinations on traffic whose labels are not known, under prior shift.

Prior shift (label shift): given the class, risks are distributed on the traffic as they were in training; only the
share pi of hallucinated rows is another.  Then the odds of every risk change by one factor,

    logit(risk') = logit(risk) + logit(pi) - logit(pi_0),

and pi is found from unlabelled rows alone (Saerens, Latinne and Decaestecker 2002, Neural Computation 14, 21-41).
Where something else shifts, the same sums give a wrong share without a sign of it: see ``label_shift``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

from probes_store.records import EDGE, Recalibration
from service.fitting.group_draws import group_draws
from service.fitting.jackknife import TAILS
from service.fitting.scores import equal_mass_bins

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]

LEVELS = 512  # distinct likelihood ratios that are told apart
_STEPS = 50  # of a bisection


@dataclass(frozen=True, eq=False)
class Traffic:
    """Unlabelled rows; rows of one group depend on each other."""

    risk: Floats  # [n] as the bundle serves it
    group: NDArray[np.integer]  # [n]


@dataclass(frozen=True)
class Share:
    """A share of hallucinated rows with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def most_likely_share(traffic: Traffic, prior: float, label: Labels | None = None) -> float:
    """The share of greatest likelihood on ``traffic``, whose risks hold at the share ``prior``.

    label [m]: labelled rows of the same traffic, drawn at random from it, which are not among its rows.
    """
    ratio, level = _ratios(traffic.risk, prior)
    wrong = 0 if label is None else int((np.asarray(label) == 0).sum())
    right = 0 if label is None else len(label) - wrong
    return float(_most_likely(ratio, np.append(np.bincount(level), [wrong, right]).astype(np.float64)[None])[0])


def estimate_share(
    traffic: Traffic, prior: float, label: Labels | None = None, group: NDArray[np.integer] | None = None, seed: int = 0
) -> Share:
    """``most_likely_share`` with its interval; group [m] of the labelled rows is numbered together with the traffic's.

    The interval is by bootstrap over groups; it takes training's risks as exact.
    """
    labels = np.zeros(0, np.int64) if label is None else np.asarray(label)
    groups = traffic.group if group is None else np.concatenate([traffic.group, group])
    ratio, level = _ratios(traffic.risk, prior)
    rows, wrong = len(traffic.risk), labels == 0
    drawn = _most_likely(
        ratio,
        np.array([
            np.append(np.bincount(level, weight[:rows]), [weight[rows:][wrong].sum(), weight[rows:][~wrong].sum()])
            for weight in group_draws(groups, seed)
        ]),
    )  # fmt: skip
    low, high = np.quantile(drawn, TAILS)
    return Share(most_likely_share(traffic, prior, label), float(low), float(high))


def shift_to(share: float, prior: float, rows: int) -> Recalibration:
    """The map of risks that hold at the share ``prior`` to those that hold at ``share``, found on so many rows.

    A share of 0 or 1 would make every risk 0 or 1: it is taken as half a row.
    """
    half = 0.5 / rows
    inside = float(np.clip(share, half, 1 - half))
    return Recalibration("prior_shift", c=float(logit(inside) - logit(prior)))


def _ratios(risk: Floats, prior: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """p(risk | hallucinated) / p(risk | factual) at no more than LEVELS levels [L], and the level of each row [n]."""
    inside = np.clip(np.asarray(risk, np.float64), EDGE, 1 - EDGE)
    ratio = inside / (1 - inside) * (1 - prior) / prior
    level = equal_mass_bins(ratio, min(LEVELS, len(ratio)))
    return np.bincount(level, ratio) / np.bincount(level), level


def _most_likely(ratio: Floats, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of greatest likelihood of each of D samples: ratio [L], counts [D, L + 2] -> [D].

    sum_j n_j log(1 + pi (ratio_j - 1)) + h log(pi) + f log(1 - pi) is concave: bisection on its slope finds the
    maximum that the EM of Saerens et al. climbs to.
    """
    rise = np.asarray(ratio) - 1.0
    unlabelled, wrong, right = counts[:, :-2], counts[:, -2], counts[:, -1]
    low, high = np.zeros(len(counts)), np.ones(len(counts))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        slope = (
            (unlabelled * (rise / (1.0 + middle[:, None] * rise))).sum(axis=1) + wrong / middle - right / (1 - middle)
        )
        low, high = np.where(slope > 0, middle, low), np.where(slope > 0, high, middle)
    return (low + high) / 2


def number_together(*names: Sequence[str]) -> list[NDArray[np.int64]]:
    """Group names of several samples -> numbers, the same for the same name."""
    codes: dict[str, int] = {}
    return [np.array([codes.setdefault(name, len(codes)) for name in of_one], np.int64) for of_one in names]
