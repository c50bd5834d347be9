"""p(IK): a linear probe on the last prompt token's hidden state (Kadavath et al. 2022, "Language Models (Mostly) Know
What They Know").

There a value head on the last token is trained, with the whole model, to predict whether the model knows the answer.
Here the model stays as it is: an L2 logistic regression on the residual stream, at one of five layers evenly spaced
from a fifth of the depth to the last, with C in {0.001, 0.01, 0.1}; inner folds choose both.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.evaluation.methods.base import (
    Floats,
    Index,
    MethodInputs,
    Rows,
    fit_at_best_layer,
    fit_linear,
)  # fmt: skip

C_GRID = (0.001, 0.01, 0.1)


def p_ik(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Return the scores [n_test].  Raises TrainingError where an inner fold lacks a class."""
    fits = [partial(logistic, c) for c in C_GRID]
    return fit_at_best_layer(inputs, train, test, seed, jobs, fits=fits, what="p(IK) inner fold")


def logistic(c: float, x: Rows, label: NDArray[np.int64], x_test: Rows) -> Floats:
    """Return truth logits [t] of an L2 logistic regression with inverse strength ``c``."""
    return fit_linear(x, label, c, "l2").logits(x_test)
