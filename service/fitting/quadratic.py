"""Coordinate descent on many small L1-penalised quadratics at once: the inner step of ``solver``.

    minimise over w   g . (w - v) + 1/2 (w - v)' H (w - v) + sum_j penalty_j |w_j|

H is shared by all problems of a partition, so that it stays in the cache for every C and every step of the solver.
A coordinate that stays zero costs one comparison.  ``descend`` is compiled for a CPU; ``descend_batched`` does the same
in torch operations, for a GPU, where one launch works on every problem of a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tensor = torch.Tensor


# contract: fused multiply-add is allowed; nothing is reordered.
@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def descend(
    metric: NDArray[np.float32],
    partition: NDArray[np.int64],
    start: Floats,
    gradient: Floats,
    penalty: Floats,
    sweeps: int,
    decrease: float,
) -> tuple[Floats, Floats]:
    """Minimisers and their gradients without the penalty, [P, D] each, for metric [F, D, D], partition [P], start v and
    its gradient g [P, D], penalty [P, D].

    A problem stops after ``sweeps``, or when a sweep gains less than ``decrease`` of the first sweep's gain.
    Coordinates without curvature keep their start.  H and the running gradient are float32, which halves the memory
    traffic; the solver computes its gradient anew in each step, which corrects the rounding.
    """
    weights = start.copy()
    problems, size = start.shape
    slopes = gradient.astype(np.float32)
    for problem in range(problems):
        h = metric[partition[problem]]
        w = weights[problem]
        slope = slopes[problem]
        first = 0.0
        for sweep in range(sweeps):
            gained = 0.0
            for j in range(size):
                curvature = np.float64(h[j, j])
                if curvature <= 0.0:
                    continue
                target = curvature * w[j] - np.float64(slope[j])
                bound = penalty[problem, j]
                if target > bound:
                    new = (target - bound) / curvature
                elif target < -bound:
                    new = (target + bound) / curvature
                else:
                    new = 0.0
                step = new - w[j]
                if step != 0.0:
                    w[j] = new
                    gained += curvature * step * step
                    row, short = h[j], np.float32(step)
                    for i in range(size):
                        slope[i] += short * row[i]
            if sweep == 0:
                first = gained
            if gained <= decrease * first:
                break
    return weights, slopes.astype(np.float64)


def descend_batched(
    metric: Tensor, partition: Tensor, start: Tensor, gradient: Tensor, penalty: Tensor, sweeps: int, decrease: float
) -> tuple[Tensor, Tensor]:
    """``descend`` in torch operations; all problems take as many sweeps as the slowest."""
    weights, slope, metric = start.clone(), gradient.clone(), metric.to(start)
    curvature = metric.diagonal(dim1=1, dim2=2)[partition]  # [P, D]
    usable = curvature > 0
    divisor = torch.where(usable, curvature, 1.0)
    first: Any = None
    for _ in range(sweeps):
        gained = torch.zeros_like(start[:, 0])
        for j in range(start.shape[1]):
            target = divisor[:, j] * weights[:, j] - slope[:, j]
            new = torch.nn.functional.softshrink(target.abs() - penalty[:, j], 0.0).clamp_min(0.0) * target.sign()
            step = torch.where(usable[:, j], new / divisor[:, j] - weights[:, j], 0.0)
            weights[:, j] += step
            gained += divisor[:, j] * step**2
            slope += step[:, None] * metric[:, j][partition]
        first = gained if first is None else first
        if bool((gained <= decrease * first).all()):
            break
    return weights, slope
