"""Fits weights of the layers, for context probes whose mean over depth weighs layers unequally.

    sum_l w_l L_l / m,  w_l > 0, mean of w = 1

is the mean of logits with scale_l = 1 / w_l, so a service computes it like the paper's rule (all
w_l = 1).  The weights come from a logistic regression on out-of-fold truth logits.  None is
negative, and a penalty pulls them towards the paper's rule: with sigma_l the deviation of L_l, v_l
= w_l sigma_l and p = sigma / |sigma|

    minimise   mean_i log(1 + exp(-y_i (v . L_i / sigma + b))) + lambda / 2 |v - (p . v) p|^2, v >=
               0"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from service.fitting.folds import group_folds
from service.fitting.probes import Floats, Labels
from service.fitting.scores import gain
from service.fitting.solver import one_numpy_thread

STRENGTHS = (math.inf, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003)  # lambda, strong to weak
FLOOR = (
    0.01  # smallest weight as a share of the mean: a weight of zero would give an infinite scale
)


class LayerWeights(NamedTuple):
    """The weights of n rows' trajectories."""

    weight: Floats  # [m] mean 1
    strength: float  # lambda; infinity, the paper's rule, if no other is certainly better
    out_of_fold: Floats  # [n, m] w_l L_l, with weights that were fitted without the row's fold


def fit_layer_weights(
    trajectory: Floats, label: Labels, group: Labels, *, folds: int, seed: int
) -> LayerWeights:
    """Fit the weights on out-of-fold trajectories [n, m] of unit-norm probes; label, group [n].

    Group-disjoint folds choose lambda by AUROC.  The choice is the paper's rule, lambda = infinity,
    unless a gain over it has an interval above zero.  Raises TrainingError if a fold lacks a
    class."""
    every = np.arange(len(label))
    pairs = group_folds(label, group, every, folds, seed, what="layer-weight fold")

    def fit(rows: NDArray[np.integer], strengths: Sequence[float]) -> list[Floats]:
        return _path(trajectory[rows], label[rows], strengths)

    with one_numpy_thread():  # the same order of summation for any number of cores
        paths = [fit(train, STRENGTHS) for train, _ in pairs]
        paper = [(held, -trajectory[held].sum(axis=1)) for _, held in pairs]
        gains = []
        for number in range(len(STRENGTHS)):
            tests = [
                (held, -trajectory[held] @ path[number])
                for path, (_, held) in zip(paths, pairs, strict=True)
            ]
            gains.append(gain(label, group, tests, paper))
        best = int(
            np.argmax([gained.difference if gained.low > 0 else 0.0 for gained in gains])
        )  # ties: the strongest
        out_of_fold = np.empty_like(trajectory)
        for path, (_, held) in zip(paths, pairs, strict=True):
            out_of_fold[held] = trajectory[held] * path[best]
        (weight,) = fit(every, [STRENGTHS[best]])
    return LayerWeights(weight, STRENGTHS[best], out_of_fold)


def _path(trajectory: Floats, label: Labels, strengths: Sequence[float]) -> list[Floats]:
    """Return the weights [m] at each strength; each search starts from the previous result."""
    sigma = trajectory.std(axis=0)
    sigma = np.where(sigma > 0, sigma, 1.0)  # a constant layer carries no information
    rows = trajectory / sigma
    sign, count = np.where(np.asarray(label) == 1, 1.0, -1.0), np.full(len(rows), 1 / len(rows))
    rows = rows - count @ rows
    paper = sigma / np.linalg.norm(sigma)

    def loss(point: Floats, strength: float) -> tuple[float, Floats]:
        margin = sign * (rows @ point[:-1] + point[-1])
        away = point[:-1] - (paper @ point[:-1]) * paper
        value = count @ np.logaddexp(0.0, -margin) + strength / 2 * (away @ away)
        slope = -count * sign * np.exp(-np.logaddexp(0.0, margin))
        return float(value), np.append(rows.T @ slope + strength * away, slope.sum())

    weights, point = [], np.append(paper * 1e-3, 0.0)
    bounds = [(0.0, None)] * len(sigma) + [(None, None)]
    for strength in strengths:
        weight = np.ones(len(sigma))
        if not math.isinf(strength):
            point = minimize(
                loss,
                point,
                (strength,),
                "L-BFGS-B",
                jac=True,
                bounds=bounds,
                options={"maxiter": 500},
            ).x
            if point[:-1].any():
                weight = point[:-1] / sigma
                weight = np.maximum(weight, FLOOR * weight.mean())
        weights.append(weight / weight.mean())
    return weights
