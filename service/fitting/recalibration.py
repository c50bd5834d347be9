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
from service.fitting.jackknife import t_interval

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


def recalibration(label: Labels, group: NDArray[np.integer], risks: Floats, folds: int | None = None) -> dict[str, Any]:
    """By ``KEYS``, mean and deviation over seeds, low and high of a 95 % interval of the mean: risks [seeds, n].

    label, group [n]; ``folds`` of the cross-validation that the risks are from, None for rows that no fit has seen.
    None where a seed has no line.  The interval is by jackknife over groups (``jackknife``).  Without a group the line
    is found by one Newton step from the whole data's (Shao and Tu 1995, The Jackknife and Bootstrap): it needs only
    sums over groups, and stays finite where the rest is separable; no low and high where it has no step.
    """
    lines = [recalibrate(label, risk) for risk in risks]
    if any(line is None for line in lines):
        return dict.fromkeys(KEYS)
    found = np.array([(line.intercept, line.slope) for line in lines if line is not None])  # [seeds, 2]
    table: dict[str, Any] = {
        key: {"mean": float(column.mean()), "std": float(column.std())}
        for key, column in zip(KEYS, (found[:, 1], found[:, 0]), strict=True)
    }
    without = _without(np.asarray(label) == 0, group, risks, found)
    if without is not None:
        for key, column in zip(KEYS, (without[:, 1], without[:, 0]), strict=True):
            table[key] |= t_interval(table[key]["mean"], column, folds)._asdict()
    return table


def _without(bad: NDArray[np.bool_], group: NDArray[np.integer], risks: Floats, found: Floats) -> Floats | None:
    """Mean over seeds of (intercept, slope) without each group, [groups, 2]; None where a step has no finite end."""
    names, member = np.unique(group, return_inverse=True)
    steps = []
    for risk, (intercept, slope) in zip(risks, found, strict=True):
        x = _log_odds(risk)
        p = expit(intercept + slope * x)
        rest, spread = bad - p, p * (1 - p)
        steps.append([np.bincount(member, part) for part in (rest, rest * x, spread, spread * x, spread * x * x)])
    sums = np.array(steps).transpose(2, 0, 1).reshape(len(names), -1)  # gradient and Hessian by group: [G, seeds x 5]
    left = (sums.sum(axis=0) - sums).reshape(len(names), len(risks), 5)
    g0, g1, h00, h01, h11 = np.moveaxis(left, 2, 0)
    determinant = h00 * h11 - h01**2
    if len(names) < 2 or not (determinant > 1e-9 * h00 * h11).all():
        return None
    step = np.stack([h11 * g0 - h01 * g1, h00 * g1 - h01 * g0], axis=-1) / determinant[..., None]
    return np.asarray((found + step).mean(axis=1))


def _log_odds(risk: Floats) -> NDArray[np.float64]:
    return np.asarray(logit(np.clip(np.asarray(risk, np.float64), _EXTREME, 1 - _EXTREME)))
