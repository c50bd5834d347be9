"""Fact-Probe: an L1 logistic regression on the whole hidden state (App. baseline-impl).

Candidates are windows of 1 and of 5 neighbouring layers (the states of 5 laid side by side) with C in {0.1, 0.5}; the
mean AUROC of an inner grouped cross-validation chooses, ties to the first: fewer layers, lower layers, smaller C.  The
final probe is fitted on all training rows.

The search grows with the depth, so of more than 12 windows of one size only 12, evenly spaced from the first to the
last, take part.  The final fit is exact.  Memory, per process: the window's rows in float32, its
training rows in float64 and the solver's own copy, about 28 bytes a number in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs, in_processes
from hallutracer_research.evaluation.methods.linear import fit_linear
from service.fitting.folds import group_folds
from service.fitting.probes import Readouts
from service.fitting.scores import auroc

MAX_WINDOWS = 12  # of one size


@dataclass(frozen=True)
class FactProbe:
    """The best window and C by inner cross-validation."""

    sizes: tuple[int, ...] = (1, 5)
    c_grid: tuple[float, ...] = (0.1, 0.5)
    inner_folds: int = 3
    jobs: int | None = None  # processes; None: all cores

    def fit(self, inputs: MethodInputs, train: Index, test: Index, seed: int) -> Floats:
        """Search and fit on ``train``, score ``test``.  Raises TrainingError where an inner fold lacks a class."""
        readouts = inputs.residual
        start, size, c, _ = self.search(inputs, train, seed)
        with threadpool_limits(1):
            probe = fit_linear(window(readouts, start, size, train), inputs.label[train], c, "l1")
            return -probe.logits(window(readouts, start, size, test))

    def search(self, inputs: MethodInputs, train: Index, seed: int) -> tuple[int, int, float, float]:
        """(first layer, number of layers, C, mean AUROC on the inner folds) of the best candidate."""
        readouts = inputs.residual
        layers = readouts.file.geometry.num_layers
        spans = [(start, size) for size in self.sizes for start in starts(layers, size)]
        pairs = group_folds(inputs.label, inputs.group, train, self.inner_folds, seed, what="Fact-Probe inner fold")
        qualities = in_processes(partial(_inner_aurocs, readouts, pairs, self.c_grid), spans, self.jobs)
        best = (0, 1, self.c_grid[0], -1.0)
        for (start, size), by_c in zip(spans, qualities, strict=True):
            for c, quality in zip(self.c_grid, by_c, strict=True):
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


def _inner_aurocs(
    readouts: Readouts, pairs: list[tuple[Index, Index]], c_grid: tuple[float, ...], span: tuple[int, int]
) -> list[float]:
    """Mean AUROC over the inner folds' held-out rows, by C, for one window; its layers are read once."""
    x, label = window(readouts, *span, np.arange(len(readouts.index))), readouts.label
    with threadpool_limits(1):  # sums in one order, whatever the number of cores
        return [
            float(np.mean([auroc(label[held], fit_linear(x[fit], label[fit], c, "l1").logits(x[held]))
                           for fit, held in pairs]))
            for c in c_grid
        ]  # fmt: skip
