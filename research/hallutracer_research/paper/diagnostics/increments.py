"""The exact split of a trajectory's increments, dL_l = W_l + K_l (Prop. decomp, Eq. decomp), from readouts.

W_l = phi_l(a_{l+1}^{(k_l)}) - L_l: the frozen probe and head of layer l on the next layer.  K_l = L_{l+1} -
phi_l(a_{l+1}^{(k_l)}): what the new probe and head change.  One layer's rows are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hallutracer_research.paper.diagnostics.classes import Floats, as_float
from service.errors import TrainingError
from service.readout import Geometry, Site

RowsOf = Callable[[int], NDArray[np.floating]]  # layer -> rows [N, width]


@dataclass(frozen=True, eq=False)
class Increments:
    """w [N, m - 1] intrinsic displacement, k [N, m - 1] readout change."""

    w: Floats
    k: Floats


@dataclass(frozen=True, eq=False)
class Crossing:
    """What the transition layer -> layer + 1 is made of: the NEXT layer's readouts, [N, d] each, of two heads."""

    layer: int
    same_head: Floats  # a_{l+1} of k_l, the head selected at ``layer``
    next_head: Floats  # a_{l+1} of k_{l+1}, the head selected one layer up


def decompose(trajectory: ArrayLike, crossed: ArrayLike) -> Increments:
    """Trajectory [N, m] and crossed [N, m - 1] = phi_l(a_{l+1}^{(k_l)}) -> W and K with W + K = dL to rounding.

    TrainingError on shapes that do not fit or numbers that are not finite.
    """
    values, across = as_float(trajectory, "trajectory", 2), as_float(crossed, "crossed", 2)
    n, m = values.shape
    if across.shape != (n, m - 1):
        raise TrainingError(f"crossed has shape {list(across.shape)}: [{n}, {m - 1}] is needed for this trajectory")
    w, k = across - values[:, :-1], values[:, 1:] - across
    # Each side is rounded at most twice, relative to the largest number in it.
    allowed = 8 * np.finfo(np.float64).eps * (np.abs(values[:, 1:]) + np.abs(values[:, :-1]) + 2 * np.abs(across))
    if np.any(np.abs(w + k - np.diff(values, axis=1)) > allowed):
        raise TrainingError("W + K differs from dL by more than rounding: the logits overflow float64")
    return Increments(w, k)


def crossings(rows_of: RowsOf, head: ArrayLike, geometry: Geometry, site: Site) -> Iterator[Crossing]:
    """The transitions of a model, in order: ``rows_of(layer)`` [N, width] is asked once for each layer from 1 up.

    head [m] are the selected heads; at the residual stream, which has one readout a layer, they are 0.
    """
    heads = np.asarray(head)
    if heads.shape != (geometry.num_layers,):
        raise TrainingError(f"head has shape {list(heads.shape)}: one per layer, [{geometry.num_layers}], is needed")
    for layer in range(geometry.num_layers - 1):
        by_head = geometry.by_head(np.asarray(rows_of(layer + 1)), site)
        yield Crossing(
            layer,
            by_head[:, int(heads[layer])].astype(np.float64),
            by_head[:, int(heads[layer + 1])].astype(np.float64),
        )
