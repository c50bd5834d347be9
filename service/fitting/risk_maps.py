"""Fits of a strictly increasing map from risk to risk on labelled rows: intercept, Platt, beta, isotonic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit
from sklearn.isotonic import isotonic_regression

from probes_store.records import EDGE, Method, Recalibration
from service.fitting.calibration import fit_classifier

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]

_WIDEST = 60.0  # largest change of the log odds that is looked for
_STEPS = 60  # of a bisection
_TAIL = 0.99  # of the last value that is kept at the end of the scale: risks beyond all rows stay in order


def fit_intercept(label: Labels, risk: Floats) -> Recalibration | None:
    """The change of the log odds of greatest likelihood: then the mean risk is the share of hallucinated rows."""
    x, bad = _log_odds(risk), np.asarray(label) == 0
    if not bad.any() or bad.all():
        return None
    low, high = -_WIDEST, _WIDEST
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if expit(x + middle).sum() < bad.sum() else (low, middle)
    return Recalibration("intercept", c=(low + high) / 2)


def fit_platt(label: Labels, risk: Floats) -> Recalibration | None:
    """Slope and intercept of the log odds (Cox 1958, Platt 1999); None where risks do not rise with hallucination."""
    weight, intercept = _logistic(label, _log_odds(risk)[:, None])
    slope = float(weight[0])
    return Recalibration("platt", slope, slope, intercept) if slope > 0 else None


def fit_beta(label: Labels, risk: Floats) -> Recalibration | None:
    """Kull, Silva Filho and Flach 2017: logistic regression on log(risk) and -log(1 - risk) with a, b >= 0.

    A coefficient that comes out negative is 0 and the other is fitted alone, as in the paper.
    """
    inside = _inside(risk)
    features = np.stack([np.log(inside), -np.log1p(-inside)], axis=1)
    kept = [0, 1]
    while kept:
        weight, intercept = _logistic(label, features[:, kept])
        if (weight > 0).all():
            a, b = (float(weight[kept.index(place)]) if place in kept else 0.0 for place in (0, 1))
            return Recalibration("beta", a, b, intercept)
        kept.remove(kept[int(weight.argmin())])
    return None


def fit_isotonic(label: Labels, risk: Floats) -> Recalibration | None:
    """Pool-adjacent-violators, linear between the means of its blocks, so that rows of one block keep their order.

    Values are drawn towards the rows' share by one row's weight: a block without an error is no proof of risk 0.
    None where one block has all rows.
    """
    order = np.argsort(risk, kind="stable")
    x, bad = np.asarray(risk, np.float64)[order], (np.asarray(label)[order] == 0).astype(np.float64)
    levels, place, size = np.unique(x, return_inverse=True, return_counts=True)
    fitted = isotonic_regression(np.bincount(place, bad) / size, sample_weight=size.astype(np.float64))
    values, block = np.unique(fitted.round(12), return_inverse=True)
    if len(values) < 2:
        return None
    centres = np.bincount(block, levels * size) / np.bincount(block, size)
    values = (values * len(x) + bad.mean()) / (len(x) + 1)
    knots = np.concatenate([[0.0], centres, [1.0]])
    ends = np.concatenate([[_TAIL * values[0]], values, [1 - _TAIL * (1 - values[-1])]])
    inner = np.concatenate([[True], (centres > 0) & (centres < 1), [True]])
    return Recalibration("isotonic", knots=tuple(knots[inner].tolist()), values=tuple(ends[inner].tolist()))


FITS: dict[Method, Callable[[Labels, Floats], Recalibration | None]] = {  # from simple to flexible
    "intercept": fit_intercept,
    "platt": fit_platt,
    "beta": fit_beta,
    "isotonic": fit_isotonic,
}


def _logistic(label: Labels, features: NDArray[np.float64]) -> tuple[Floats, float]:
    """Weights and intercept of P(hallucinated): features [n, k] -> [k]."""
    classifier = fit_classifier(features, np.asarray(label))  # of factual: every sign turns
    return -classifier.weight, -classifier.intercept


def _inside(risk: Floats) -> NDArray[np.float64]:
    return np.clip(np.asarray(risk, np.float64), EDGE, 1 - EDGE)


def _log_odds(risk: Floats) -> NDArray[np.float64]:
    return np.asarray(logit(_inside(risk)))
