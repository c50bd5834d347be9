"""Fits the directions of all layers by one regression, instead of one regression for each layer.

A probe of a single layer uses everything that separates right from wrong answers there.  So the
mean over depth counts what all layers share, such as the wording of a question, once for each
layer.  One regression over the chosen heads of all layers weighs them against each other.  The
result is still a mean over depth: each layer has a direction of unit norm and a scale, so such a
bundle is served like any other."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.utils.extmath import randomized_svd

from service.errors import NoDirection
from service.fitting import ClassBalance
from service.fitting.probes import (
    Floats,
    ProbeFit,
    Readouts,
    Task,
    row_weights,
    standardise,
    weighted_rows,
)
from service.fitting.scores import auroc
from service.fitting.solver import one_numpy_thread

COMPONENTS: Final = 300  # leading components of the standardised columns
C: Final = 5e-4  # inverse strength of the L2 penalty on the components, as in scikit-learn


class JointFit(NamedTuple):
    """The regression by layer: the mean over layers of ``(direction . a + bias) / scale`` is the
    log odds of a factual answer, at equal shares of the classes."""

    direction: Floats  # [m, d] unit norm, raw activation space
    bias: Floats  # [m]
    scale: Floats  # [m]

    def trajectory(self, activations: NDArray[np.float32]) -> Floats:
        """Return each layer's truth logit, before the division by its scale: activations [n, m, d]
        -> [n, m]."""
        logits: Floats = (
            np.einsum("nmd,md->nm", activations, self.direction, dtype=np.float64) + self.bias
        )
        return logits


def joined(
    readouts: Readouts,
    task: Task,
    fit: ProbeFit,
    balance: ClassBalance,
    *,
    zero_layers: bool,
    c: float = C,
) -> ProbeFit:
    """Return ``fit`` of ``task`` with directions that are fitted together, at the heads of ``fit``.

    Its ``scale`` is the joint scale, so the depth mean is that of ``standardized``.  Raises
    NoDirection."""
    heads = fit.head.tolist()
    columns = [readouts.file.head(layer, head)[readouts.index] for layer, head in enumerate(heads)]
    activations, label = np.stack(columns, axis=1), readouts.label[task.train]
    joint = fit_joint(
        activations[task.train],
        label,
        balance,
        zero_layers=zero_layers,
        c=c,
        soft_label=readouts.soft(task.train),
    )
    quality = np.array(
        [auroc(label, logits) for logits in joint.trajectory(activations[task.train]).T]
    )
    return ProbeFit(fit.head, *joint, quality, joint.trajectory(activations[task.test]))


def fit_joint(
    activations: NDArray[np.float32],
    label: NDArray[np.int64],
    balance: ClassBalance,
    *,
    zero_layers: bool = False,
    c: float = C,
    soft_label: Floats | None = None,
) -> JointFit:
    """Fit one logistic regression on the leading components of the standardised columns of all
    layers.

    activations [n, m, d] of the chosen head of each layer, label [n] (1 factual, 0 hallucinated),
    or soft_label [n].  ``c`` is the inverse strength of the penalty.  A layer with constant
    activations gets a direction of zero with ``zero_layers``; without it, raises NoDirection."""
    n, layers, dim = activations.shape
    rows = weighted_rows(label, soft_label)
    weights = row_weights(rows.label, balance, rows.weight)
    with one_numpy_thread():  # the same order of summation for any number of cores
        columns, mean, deviation = standardise(activations.reshape(n, layers * dim))
        components = min(COMPONENTS, n, layers * dim)
        basis = randomized_svd(columns, components, n_oversamples=20, n_iter=4, random_state=0)[2].T
        model = LogisticRegression(C=c, solver="newton-cholesky", tol=1e-8)
        model.fit((columns @ basis)[rows.row], rows.label, sample_weight=weights)
    # The component of a constant column is only a rounding error.
    raw = np.where(columns.any(axis=0), (basis @ model.coef_[0]) / deviation, 0.0).reshape(
        layers, dim
    )
    norm = np.linalg.norm(raw, axis=1)
    if not (norm.all() or zero_layers):
        constant = ", ".join(map(str, np.flatnonzero(norm == 0)))
        raise NoDirection(f"layer {constant}: the activations are the same for every row")
    norm[norm == 0] = 1.0
    direction, scale = raw / norm[:, None], 1 / (layers * norm)
    center = np.einsum("md,md->m", direction, mean.reshape(layers, dim))
    return JointFit(direction, model.intercept_[0] * scale - center, scale)
