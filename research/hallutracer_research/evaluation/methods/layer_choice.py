"""Methods that read one layer of the residual stream: which one, and how to fit there, is chosen inside training rows.

Candidates are a few layers and a few ways to fit (the values of one hyperparameter); the mean AUROC on the held-out
sides of group-disjoint inner folds chooses, ties to the lower layer and there to the first way.  The chosen fit is
repeated on all training rows.  Each process holds the rows of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs, in_processes
from service.fitting.folds import usable_folds
from service.fitting.probes import Readouts
from service.fitting.scores import auroc

INNER_FOLDS = 3
Rows = NDArray[np.float32]
Fit = Callable[[Rows, NDArray[np.int64], Rows], Floats]
"""Training rows [n, d], labels [n], rows to score [t, d] -> truth logits [t]; processes must be able to pickle it."""


def at_depths(layers: int, shares: Sequence[float]) -> list[int]:
    """The layers at these shares of the depth, 0 the first block and 1 the last; each once, in order."""
    return sorted({round(share * (layers - 1)) for share in shares})


def fit_at_best_layer(
    inputs: MethodInputs,
    train: Index,
    test: Index,
    seed: int,
    *,
    layers: Sequence[int],
    fits: Sequence[Fit],
    jobs: int | None,
    what: str,
) -> Floats:
    """Scores of the test rows, [n_test].  Raises TrainingError: no inner fold, named ``what``, has both classes."""
    layer, fit = choose(inputs, train, seed, layers=layers, fits=fits, jobs=jobs, what=what)
    rows = inputs.residual.file.layer(layer)
    index = inputs.residual.index
    with threadpool_limits(1):  # sums in one order, whatever the number of cores
        return -fits[fit](rows[index[train]], inputs.label[train], rows[index[test]])


def choose(
    inputs: MethodInputs,
    train: Index,
    seed: int,
    *,
    layers: Sequence[int],
    fits: Sequence[Fit],
    jobs: int | None,
    what: str,
) -> tuple[int, int]:
    """(layer, position in ``fits``) of the best candidate on the inner folds.  Raises TrainingError as above."""
    pairs = usable_folds(inputs.label, inputs.group, train, INNER_FOLDS, seed, what=what)
    found = in_processes(partial(_inner_aurocs, inputs.residual, pairs, fits), layers, jobs)
    # Rounded, so that the order of a sum does not decide a tie.
    place, fit = np.unravel_index(int(np.argmax(np.round(found, 12))), (len(layers), len(fits)))
    return layers[int(place)], int(fit)


def _inner_aurocs(
    readouts: Readouts, pairs: Sequence[tuple[Index, Index]], fits: Sequence[Fit], layer: int
) -> list[float]:
    """Mean AUROC over the inner folds' held-out rows, by way to fit; the layer is read once."""
    x, label = readouts.file.layer(layer)[readouts.index], readouts.label
    with threadpool_limits(1):
        return [
            float(np.mean([auroc(label[held], fit(x[inside], label[inside], x[held])) for inside, held in pairs]))
            for fit in fits
        ]
