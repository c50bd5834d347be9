"""The whole trajectory instead of its mean: an L2 logistic regression on the m truth logits.

It reads what HalluTracer reads, and may weigh the layers.  It is fitted on the training rows' out-of-fold trajectories
(in-fold ones look better than those of new rows are); group-disjoint inner folds choose C by AUROC, ties to the
stronger penalty.
"""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

from hallutracer_research.evaluation.methods.base import Floats, Index
from hallutracer_research.evaluation.methods.linear import fit_linear
from service.fitting.folds import group_folds
from service.fitting.scores import auroc

C_GRID = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
INNER_FOLDS = 3


def trajectory_ridge(trajectory: Floats, label: Index, group: Index, test_trajectory: Floats, seed: int) -> Floats:
    """Scores of the test rows, [n_test]: trajectory [n_train, m], label [n_train], group [n_train], test [n_test, m].

    Raises TrainingError where an inner fold lacks a class.
    """
    pairs = group_folds(label, group, np.arange(len(label)), INNER_FOLDS, seed, what="trajectory inner fold")
    with threadpool_limits(1):  # sums in one order, whatever the number of cores
        found = [
            np.mean([auroc(label[held], fit_linear(trajectory[fit], label[fit], c, "l2").logits(trajectory[held]))
                     for fit, held in pairs])
            for c in C_GRID
        ]  # fmt: skip
        c = C_GRID[int(np.argmax(np.round(found, 12)))]
        return -fit_linear(trajectory, label, c, "l2").logits(test_trajectory)
