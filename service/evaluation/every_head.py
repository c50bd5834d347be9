"""Probes of every head, not only of the selected ones: what the ablations over heads need.  Knows no table.

The same fits as ``trainer.fit`` (``fit_head``, class weights), kept whole instead of reduced to one head a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from service.errors import NoDirection
from service.evaluation.methods.base import in_processes
from service.fitting.fit import Floats, Index, Readouts, Task, fit_head, project, unit_probe
from service.fitting.solver import one_torch_thread
from service.readout import Site


@dataclass(frozen=True, eq=False)
class EveryHead:
    """One partition's probes; a probe that is all zeros has an AUROC of 0 and zero logits."""

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


def fit_every_head(readouts: Readouts, tasks: Sequence[Task], *, jobs: int) -> list[EveryHead]:
    """Fit and score all heads of all layers for each task.  Raises NoDirection where a layer's probes are all zero."""
    geometry, site = readouts.file.geometry, readouts.file.site
    pieces = max(1, min(geometry.heads(site), -(-2 * jobs // geometry.num_layers)))
    chunks = [chunk.tolist() for chunk in np.array_split(np.arange(geometry.heads(site)), pieces)]
    items = [(readouts, tuple(tasks), layer, chunk) for layer in range(geometry.num_layers) for chunk in chunks]
    found = in_processes(_fit, items, jobs)
    results = []
    for number, task in enumerate(tasks):
        parts = [one[number] for one in found]
        layers = [
            [np.concatenate(one, axis=-1 if field == LOGITS else 0)
             for field, one in enumerate(zip(*parts[layer * pieces : (layer + 1) * pieces], strict=True))]
            for layer in range(geometry.num_layers)
        ]  # fmt: skip
        direction, bias, scale, quality = (np.stack([layer[field] for layer in layers]) for field in range(4))
        if (quality.max(axis=1) == 0).any():
            layer = int(np.argmin(quality.max(axis=1)))
            raise NoDirection(
                f"layer {layer}: every probe is zero at C = {task.c:g} on {len(task.train)} rows; give a larger C",
                param="c",
            )
        logits = np.stack([layer[LOGITS] for layer in layers], axis=1)
        results.append(EveryHead(direction, bias, scale, quality, logits))
    return results


LOGITS = 4  # place in a Part
Part = tuple[Floats, Floats, Floats, Floats, NDArray[np.float32]]


def _fit(item: tuple[Readouts, tuple[Task, ...], int, list[int]]) -> list[Part]:
    """Some heads of one layer, for every task."""
    readouts, tasks, layer, heads = item
    dim = readouts.file.geometry.dim(readouts.file.site)
    slab = readouts.file.layer(layer)
    made: list[list[tuple[Floats, float, float, float, NDArray[np.float32]]]] = [[] for _ in tasks]
    with threadpool_limits(1), one_torch_thread():
        for head in heads:
            x = slab[:, head * dim : (head + 1) * dim][readouts.index]
            for number, (task, found) in enumerate(
                zip(tasks, fit_head(x, readouts.label, tasks, Site.ATTENTION_HEAD, "weights"), strict=True)
            ):
                if found is None:
                    made[number].append((np.zeros(dim), 0.0, 1.0, 0.0, np.zeros(len(task.test), np.float32)))
                    continue
                probe = unit_probe(x, readouts.label, task, head, found)
                test = project(x, task.test, probe.direction, probe.bias).astype(np.float32)
                made[number].append((probe.direction, probe.bias, probe.scale, probe.auroc, test))
    return [
        (
            np.stack([one[0] for one in heads_]),
            np.array([one[1] for one in heads_]),
            np.array([one[2] for one in heads_]),
            np.array([one[3] for one in heads_]),
            np.stack([one[4] for one in heads_], axis=-1),
        )
        for heads_ in made
    ]
