"""Probes of all heads, not only of the selected ones: what the ablations over heads need.

The same fits as ``fitting.probes`` (``fit_head``, class weights), kept for every head instead of one head a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from hallutracer_research.evaluation.methods.base import in_processes
from service.errors import NoDirection
from service.fitting.probes import RELAXED, Floats, Index, Readouts, Task, fit_head, project, unit_probe
from service.fitting.solver import one_torch_thread
from service.readout import Site


@dataclass(frozen=True, eq=False)
class HeadProbes:
    """The probes of one training side; a probe that is all zeros has an AUROC of 0 and zero logits."""

    direction: Floats  # [m, K, d] unit norm, raw space
    bias: Floats  # [m, K]
    scale: Floats  # [m, K] pooled within-class deviation of the logits on the training rows
    auroc: Floats  # [m, K] on the training rows
    logits: NDArray[np.float32]  # [n_test, m, K] unit-norm truth logits of the test rows

    @property
    def selected(self) -> Index:
        """The paper's head of each layer, [m]: best training AUROC, ties to the lowest."""
        return np.asarray(self.auroc.argmax(axis=1), np.int64)

    def trajectory(self, head: NDArray[np.integer] | None = None) -> Floats:
        """[n_test, m] of the selected heads, or of ``head`` [m]."""
        chosen = self.selected if head is None else np.asarray(head)
        return np.take_along_axis(self.logits, chosen[None, :, None], axis=2)[..., 0].astype(np.float64)

    def of(self, head: NDArray[np.integer]) -> tuple[Floats, Floats]:
        """Directions [m, d] and biases [m] of ``head`` [m]."""
        layers = np.arange(len(self.bias))
        return self.direction[layers, head], self.bias[layers, head]


def fit_all_heads(readouts: Readouts, tasks: Sequence[Task], *, jobs: int) -> list[HeadProbes]:
    """Fit and score all heads of all layers for each task.  Raises NoDirection where a layer's probes are all zero."""
    geometry, site = readouts.file.geometry, readouts.file.site
    layers, count = geometry.num_layers, geometry.heads(site)
    chunks = np.array_split(np.arange(count), max(1, min(count, -(-2 * jobs // layers))))
    items = [(readouts, tuple(tasks), layer, chunk.tolist()) for layer in range(layers) for chunk in chunks]
    parts = in_processes(_fit, items, jobs)
    results = []
    for number, task in enumerate(tasks):
        direction, bias, scale, quality, logits = (
            np.concatenate(chunk).reshape(layers, count, *chunk[0].shape[1:])
            for chunk in zip(*(part[number] for part in parts), strict=True)
        )
        for layer in np.flatnonzero(quality.max(axis=1) == 0).tolist():
            relaxed = _relaxed(readouts, task, layer, count)
            if relaxed is not None:
                for values, of_layer in zip((direction, bias, scale, quality, logits), relaxed, strict=True):
                    values[layer] = of_layer
                continue
            raise NoDirection(
                f"layer {layer}: every probe is zero at C = {task.c:g} on {len(task.train)} rows; give a larger C",
                param="c",
            )
        by_row = np.ascontiguousarray(logits.transpose(2, 0, 1))
        results.append(HeadProbes(direction, bias, scale, quality, by_row))
    return results


def _relaxed(readouts: Readouts, task: Task, layer: int, count: int) -> list[NDArray[Any]] | None:
    """All heads of a layer at the first larger C at which one has a probe; None where none has at any."""
    for factor in RELAXED:
        (found,) = _fit((readouts, (replace(task, c=task.c * factor),), layer, list(range(count))))
        if found[3].max() > 0:
            return found
    return None


def _fit(item: tuple[Readouts, tuple[Task, ...], int, list[int]]) -> list[list[NDArray[Any]]]:
    """Some heads of one layer: for every task, direction, bias, scale, auroc and logits [n_test], stacked by head."""
    readouts, tasks, layer, heads = item
    fitted: list[list[tuple[Any, ...]]] = [[] for _ in tasks]
    with threadpool_limits(1), one_torch_thread():
        for head in heads:
            x = readouts.file.head(layer, head)[readouts.index]
            fits = fit_head(x, readouts.label, tasks, Site.ATTENTION_HEAD, "weights")
            for of_task, task, fit in zip(fitted, tasks, fits, strict=True):
                if fit is None:
                    of_task.append((np.zeros(x.shape[1]), 0.0, 1.0, 0.0, np.zeros(len(task.test), np.float32)))
                    continue
                probe = unit_probe(x, readouts.label, task, head, fit)
                logits = project(x, task.test, probe.direction, probe.bias).astype(np.float32)
                of_task.append((probe.direction, probe.bias, probe.scale, probe.auroc, logits))
    return [[np.stack(values) for values in zip(*of_task, strict=True)] for of_task in fitted]
