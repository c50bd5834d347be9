"""A logistic regression on standardised activations, mapped back to raw ones (Eq. standardize, raw-space-probe).

The linear baselines use liblinear, with an L1 or an L2 penalty.  As for the detector's own probes the classes weigh
the same (App. probe-training balances them) and the intercept is practically free, so that no baseline is handicapped
by a choice the paper leaves open.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.linear_model import LogisticRegression

from service.fitting.probes import project, standardise

Floats = NDArray[np.float64]
Penalty = Literal["l1", "l2"]

# liblinear penalises the intercept like a weight; this height of its constant column makes that a matter of 1 %.
_INTERCEPT_HEIGHT = 100.0
_HAS_PENALTY = inspect.signature(LogisticRegression).parameters["penalty"].default == "l2"  # scikit-learn before 1.8


@dataclass(frozen=True, eq=False)
class Linear:
    """logit = weight . x + bias in raw activations; it rises with factuality."""

    weight: Floats  # [d]
    bias: float

    def logits(self, x: NDArray[np.floating]) -> Floats:
        """x [n, d] -> [n], summed in float64 a few thousand rows at a time, so that no whole copy is made."""
        return project(x, np.arange(len(x)), self.weight, self.bias)


def fit_linear(x: NDArray[np.floating], label: NDArray[np.integer], c: float, kind: Penalty) -> Linear:
    """Fit x [n, d], label [n] with inverse strength ``c``.  An L1 fit may come back with all weights zero.

    Memory: one float64 copy of x and the solver's own, of 16 bytes a number.
    """
    z, mean, std = standardise(x)
    model = LogisticRegression(
        C=c,
        solver="liblinear",
        class_weight="balanced",
        intercept_scaling=_INTERCEPT_HEIGHT,
        max_iter=1000,
        random_state=0,
        **({"penalty": kind} if _HAS_PENALTY else {"l1_ratio": 1.0 if kind == "l1" else 0.0}),
    )
    with config_context(assume_finite=True, skip_parameter_validation=True):  # rows were checked when collected
        model.fit(z, label)
    weight = model.coef_[0] / std
    return Linear(weight, float(model.intercept_[0] - weight @ mean))
