"""Fact-Probe: an L1 logistic regression on the whole hidden state (App. baseline-impl).

Candidates are windows of 1 and of 5 neighbouring layers (the states of 5 laid side by side) with C in {0.1, 0.5}; the
mean AUROC of an inner grouped cross-validation chooses, ties to the first: fewer layers, lower layers, smaller C.  The
final probe is fitted on all training rows.

The search grows with the depth, so of more than 12 windows of one size only 12, evenly spaced from the first to the
last, take part.  The final fit is exact.  Memory, per process: the window's rows in float32, its
training rows in float64 and the solver's own copy, about 28 bytes a number in all.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from hallutracer_research.evaluation.methods.base import (
    INNER_FOLDS,
    Floats,
    Index,
    MethodInputs,
    Rows,
    fit_linear,
    held_out_auroc,
    in_processes,
)
from service.fitting.folds import group_folds
from service.fitting.probes import Readouts

SIZES, C_GRID = (1, 5), (0.1, 0.5)
MAX_WINDOWS = 12  # of one size


def fact_probe(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Return negated logits [n_test] of the best candidate.  Raises TrainingError where an inner fold lacks a class."""
    start, size, c, _ = search(inputs, train, seed, jobs)
    with threadpool_limits(1):
        probe = fit_linear(window(inputs.residual, start, size, train), inputs.label[train], c, "l1")
        return -probe.logits(window(inputs.residual, start, size, test))


def search(inputs: MethodInputs, train: Index, seed: int, jobs: int | None = None) -> tuple[int, int, float, float]:
    """Return (first layer, number of layers, C, mean AUROC on the inner folds) of the best candidate."""
    layers = inputs.residual.file.geometry.num_layers
    spans = [(start, size) for size in SIZES for start in starts(layers, size)]
    pairs = group_folds(inputs.label, inputs.group, train, INNER_FOLDS, seed, what="Fact-Probe inner fold")
    qualities = in_processes(partial(_inner_aurocs, inputs.residual, pairs), spans, jobs)
    best = (0, 1, C_GRID[0], -1.0)
    for (start, size), by_c in zip(spans, qualities, strict=True):
        for c, quality in zip(C_GRID, by_c, strict=True):
            if quality > best[3] + 1e-12:
                best = (start, size, c, quality)
    return best


def starts(layers: int, size: int, limit: int = MAX_WINDOWS) -> list[int]:
    """First layers of the windows of ``size`` that take part; [] where the model has fewer layers."""
    count = layers - size + 1
    if count < 1:
        return []
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, limit))})


def window(readouts: Readouts, start: int, size: int, rows: Index) -> NDArray[np.float32]:
    """The hidden states of ``size`` layers side by side: [n, size * hidden_size]."""
    index = readouts.index[rows]
    return np.concatenate([readouts.file.layer(layer)[index] for layer in range(start, start + size)], axis=1)


def _inner_aurocs(readouts: Readouts, pairs: list[tuple[Index, Index]], span: tuple[int, int]) -> list[float]:
    """Return the mean AUROC over the inner folds' held-out rows, by C, for one window; its layers are read once."""
    x = window(readouts, *span, np.arange(len(readouts.index)))
    with threadpool_limits(1):  # sums in one order, whatever the number of cores
        return [held_out_auroc(partial(_l1_logits, c), x, readouts.label, pairs) for c in C_GRID]


def _l1_logits(c: float, x: Rows, label: Index, x_held: Rows) -> Floats:
    return fit_linear(x, label, c, "l1").logits(x_held)
