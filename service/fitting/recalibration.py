"""Is a risk a probability?  Slope and intercept of Cox's logistic recalibration, with intervals over groups.

log odds of hallucinated = intercept + slope x log odds of the risk (Cox 1958, Biometrika 45, 562-565): slope 1 and
intercept 0 are perfect; a slope below 1 says that risks are too extreme, an intercept above 0 that they are too low
around one half.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from service.fitting.calibration import fit_classifier
from service.fitting.group_statistics import COVERAGE, RESAMPLES, group_draws

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]

KEYS = ("calibration_slope", "calibration_intercept")
_EXTREME = 1e-9  # risks are kept this far from 0 and 1, whose log odds are infinite


class Line(NamedTuple):
    """Of one set of risks; 1 and 0 are perfect."""

    slope: float
    intercept: float


def recalibrate(label: Labels, risk: Floats) -> Line | None:
    """label, risk [n].  None where no finite line fits best: the risks separate the classes, or are all alike."""
    x, bad = _log_odds(risk), np.asarray(label) == 0
    if not bad.any() or bad.all() or x[bad].max() <= x[~bad].min() or x[~bad].max() <= x[bad].min():
        return None
    classifier = fit_classifier(x[:, None], np.asarray(label))  # of factual: both signs turn
    return Line(-float(classifier.weight[0]), -classifier.intercept)


def recalibration(label: Labels, group: NDArray[np.integer], risks: Floats, seed: int = 0) -> dict[str, Any]:
    """By ``KEYS``, mean and deviation over seeds, low and high of a 95 % interval of the mean: risks [seeds, n].

    label, group [n].  None where a seed has no line; no low and high where most draws have none.  The interval is by
    bootstrap over groups with the fits of probes and classifier held fixed.  Of each draw the line is found by one
    Newton step from the whole data's (the one-step bootstrap of Shao and Tu 1995): it needs only sums over groups, and
    stays finite where a draw happens to be separable.
    """
    lines = [recalibrate(label, risk) for risk in risks]
    if any(line is None for line in lines):
        return dict.fromkeys(KEYS)
    found = np.array([(line.intercept, line.slope) for line in lines if line is not None])  # [seeds, 2]
    table: dict[str, Any] = {
        key: {"mean": float(column.mean()), "std": float(column.std())}
        for key, column in zip(KEYS, (found[:, 1], found[:, 0]), strict=True)
    }
    drawn = _drawn(np.asarray(label) == 0, group, risks, found, seed)
    if len(drawn) >= RESAMPLES / 2:
        ends = np.quantile(drawn, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], axis=0)
        for key, (low, high) in zip(KEYS, (ends[:, 1], ends[:, 0]), strict=True):
            table[key] |= {"low": float(low), "high": float(high)}
    return table


def _drawn(bad: NDArray[np.bool_], group: NDArray[np.integer], risks: Floats, found: Floats, seed: int) -> Floats:
    """Mean over seeds of (intercept, slope) of each draw that has one, [draws, 2]; found [seeds, 2]."""
    names, member = np.unique(group, return_inverse=True)
    steps = []
    for risk, (intercept, slope) in zip(risks, found, strict=True):
        x = _log_odds(risk)
        p = expit(intercept + slope * x)
        rest, spread = bad - p, p * (1 - p)
        steps.append([np.bincount(member, part) for part in (rest, rest * x, spread, spread * x, spread * x * x)])
    sums = np.array(steps).transpose(2, 0, 1).reshape(len(names), -1)  # gradient and Hessian by group: [G, seeds x 5]
    drawn = np.array([count @ sums for count in group_draws(np.arange(len(names)), seed)]).reshape(-1, len(risks), 5)
    g0, g1, h00, h01, h11 = np.moveaxis(drawn, 2, 0)
    determinant = h00 * h11 - h01**2
    usable = (determinant > 1e-9 * h00 * h11).all(axis=1)
    g0, g1, h00, h01, h11, determinant = (part[usable] for part in (g0, g1, h00, h01, h11, determinant))
    step = np.stack([h11 * g0 - h01 * g1, h00 * g1 - h01 * g0], axis=-1) / determinant[..., None]
    return np.asarray((found + step).mean(axis=1))


def _log_odds(risk: Floats) -> NDArray[np.float64]:
    return np.asarray(logit(np.clip(np.asarray(risk, np.float64), _EXTREME, 1 - _EXTREME)))
