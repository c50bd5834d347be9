"""Mass-mean probe: the difference of the class means, corrected by the covariance (Marks and Tegmark 2023, "The
Geometry of Truth").

    direction = Sigma^-1 (mean of factual rows - mean of hallucinated rows)

Sigma is the covariance within the classes, so this is the direction of linear discriminant analysis.  With fewer rows
than coordinates the sample covariance has no inverse, so it is shrunk towards a multiple of the identity, on
standardised coordinates: by Ledoit and Wolf's share, which takes rows for independent and is too small where a group
has several, by 0.3, or by 1, which is the paper's plain difference of means.  Inner folds choose the share and one of
five layers of the residual stream.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray
from sklearn.covariance import empirical_covariance, ledoit_wolf, shrunk_covariance

from hallutracer_research.evaluation.methods.base import Floats, Index, Linear, MethodInputs, Rows, fit_at_best_layer
from service.fitting.probes import standardise

SHRINKAGE = (None, 0.3, 1.0)  # None: Ledoit and Wolf's


def mass_mean(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Return the scores [n_test].  Raises TrainingError where an inner fold lacks a class.

    Memory: a few float64 matrices of hidden_size by hidden_size.
    """
    fits = [partial(discriminant, share) for share in SHRINKAGE]
    return fit_at_best_layer(inputs, train, test, seed, jobs, fits=fits, what="mass-mean inner fold")


def discriminant(shrinkage: float | None, x: Rows, label: NDArray[np.int64], x_test: Rows) -> Floats:
    """Return truth logits [t]: x [n, d], label [n], x_test [t, d]; zero halfway between the class means."""
    z, mean, std = standardise(x)
    means = [z[label == value].mean(axis=0) for value in (0, 1)]
    inside = z - np.where(label[:, None] == 1, means[1], means[0])
    if shrinkage is None:
        covariance, _ = ledoit_wolf(inside, assume_centered=True)
    else:
        covariance = shrunk_covariance(empirical_covariance(inside, assume_centered=True), shrinkage)
    constant = np.diag(covariance) == 0.0  # only where every row is its class's mean: nothing to correct by
    covariance[constant, constant] = 1.0
    direction = np.linalg.solve(covariance, means[1] - means[0])
    bias = -float(direction @ (means[0] + means[1])) / 2.0
    weight = direction / std
    return Linear(weight, bias - float(weight @ mean)).logits(x_test)
