"""Fact-Probe: an L1 logistic regression on the whole hidden state (App. baseline-impl).

Candidates are windows of 1 and of 5 neighbouring layers (the states of 5 laid side by side) with C in {0.1, 0.5}; the
mean AUROC of an inner grouped cross-validation chooses, ties to the first: fewer layers, lower layers, smaller C.  The
final probe is fitted on all training rows.

The search grows with the depth, so of more than 12 windows of one size only 12, evenly spaced from the first to the
last, take part; the note says so.  The final fit is exact.  Memory, per process: the window's rows in float32, its
training rows in float64 and the solver's own copy, about 28 bytes a number in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from service.errors import TrainingError
from service.evaluation.methods.base import Floats, Index, Material, Scores, gather, in_processes, inner_pairs
from service.evaluation.methods.linear import fit_linear
from service.fitting.fit import Readouts
from service.fitting.scores import auroc
from service.readout import Site

MOST_WINDOWS = 12  # of one size


@dataclass(frozen=True)
class FactProbe:
    """The best window and C by inner cross-validation."""

    name: ClassVar[str] = "fact-probe"
    title: ClassVar[str] = "Fact-Probe"
    needs: ClassVar[tuple[Site, ...]] = (Site.RESIDUAL_STREAM,)

    sizes: tuple[int, ...] = (1, 5)
    c_grid: tuple[float, ...] = (0.1, 0.5)
    inner_folds: int = 3
    jobs: int | None = None  # processes; None: all cores

    def fit(self, material: Material, train: Index, test: Index, seed: int) -> Scores:
        """Search and fit on ``train``.

        ``train_oof`` are the inner held-out logits of the chosen candidate: no row was fitted on, but the choice among
        the candidates saw them all.  Raises TrainingError where an inner fold lacks a class.
        """
        readouts = material.readouts(Site.RESIDUAL_STREAM)
        layers = readouts.file.geometry.num_layers
        if self.inner_folds < 2:
            raise TrainingError(
                f"fact-probe chooses its layers by inner folds: give 2 or more, not {self.inner_folds}", param="methods"
            )
        spans = [(start, size) for size in self.sizes for start in starts(layers, size)]
        pairs = inner_pairs(material, train, self.inner_folds, seed, "Fact-Probe inner fold")
        found = in_processes(partial(_held_out, readouts, pairs, self.c_grid), spans, self.jobs)
        best: tuple[float, int, int] | None = None
        for number, by_c in enumerate(found):
            for place, logits in enumerate(by_c):
                folds = zip(pairs, logits, strict=True)
                quality = float(np.mean([auroc(material.label[held], values) for (_, held), values in folds]))
                if best is None or quality > best[0] + 1e-12:
                    best = (quality, number, place)
        assert best is not None, "there is always a window of one layer"
        quality, number, place = best
        start, size = spans[number]
        c = self.c_grid[place]
        with threadpool_limits(1):
            probe = fit_linear(window(readouts, start, size, train), material.label[train], c, "l1")
            scores = -probe.logits(window(readouts, start, size, test))
        parts = [(held, -values) for (_, held), values in zip(pairs, found[number][place], strict=True)]
        where = f"layer {start}" if size == 1 else f"layers {start}-{start + size - 1}"
        note = f"{where}, C = {c:g}, inner AUROC {quality:.3f}, {np.count_nonzero(probe.weight)} weights"
        all_spans = sum(max(0, layers - each + 1) for each in self.sizes)
        if len(spans) < all_spans:
            note += f"; searched {len(spans)} of {all_spans} windows, evenly spaced"
        return Scores(scores, gather(train, parts), note)


def starts(layers: int, size: int, most: int = MOST_WINDOWS) -> list[int]:
    """First layers of the windows of ``size`` that take part; [] where the model has fewer layers."""
    count = layers - size + 1
    if count < 1:
        return []
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def window(readouts: Readouts, start: int, size: int, rows: Index) -> NDArray[np.float32]:
    """The hidden states of ``size`` layers side by side: [n, size * hidden_size]."""
    index = readouts.index[rows]
    return np.concatenate([readouts.file.layer(layer)[index] for layer in range(start, start + size)], axis=1)


def _held_out(
    readouts: Readouts, pairs: list[tuple[Index, Index]], c_grid: tuple[float, ...], span: tuple[int, int]
) -> list[list[Floats]]:
    """Logits of every inner fold's held-out rows, by C and fold, for one window; its layers are read once."""
    x = window(readouts, *span, np.arange(len(readouts.index)))
    with threadpool_limits(1):  # sums in one order, whatever the number of cores
        return [
            [fit_linear(x[fit], readouts.label[fit], c, "l1").logits(x[held]) for fit, held in pairs] for c in c_grid
        ]
