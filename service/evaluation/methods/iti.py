"""ITI-Probe: the single best attention head (App. baseline-impl; Li et al. 2023).

An L2 logistic regression (liblinear, C = 1) at every (layer, head), the globally best head by training AUROC, and
there the mean logit of three probes fitted on bootstrap samples of the training rows, drawn by whole groups.  The
paper does not say what is averaged: logits, since saturated probabilities would tie.

The training rows' own scores come from an inner cross-fit in which the head is selected anew each time; it costs
``calibration_folds`` further passes over all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from service.errors import TrainingError
from service.evaluation.methods.base import Floats, Index, Material, Scores, gather, in_processes, inner_pairs
from service.evaluation.methods.linear import fit_linear
from service.fitting.fit import Readouts
from service.fitting.scores import auroc
from service.readout import Site

_DRAWS = 100  # of one bootstrap sample, until it has both classes


@dataclass(frozen=True)
class Iti:
    """The best head of the training rows, three bootstrap probes."""

    name: ClassVar[str] = "iti"
    title: ClassVar[str] = "ITI-Probe"
    needs: ClassVar[tuple[Site, ...]] = (Site.ATTENTION_HEAD,)

    c: float = 1.0
    probes: int = 3
    calibration_folds: int = 3  # 0: no scores of the training rows
    jobs: int | None = None  # processes; None: all cores

    def fit(self, material: Material, train: Index, test: Index, seed: int) -> Scores:
        """Select and fit on ``train``.  Raises TrainingError where inner folds or samples lack a class."""
        readouts = material.heads
        pairs = inner_pairs(material, train, self.calibration_folds, seed, "ITI-Probe calibration fold")
        sides = [(train, test), *pairs]
        work = partial(_best_of_layer, readouts, [fit for fit, _ in sides], self.c)
        by_layer = in_processes(work, range(readouts.file.geometry.num_layers), self.jobs)
        scores, places = [], []
        for number, (fit, held) in enumerate(sides):
            qualities = [best[number][0] for best in by_layer]
            layer = int(np.argmax(qualities))  # ties: the lowest layer, and within a layer the lowest head
            head = by_layer[layer][number][1]
            places.append(f"layer {layer}, head {head}, training AUROC {qualities[layer]:.3f}")
            scores.append(self._ensemble(material, layer, head, fit, held, seed))
        parts = [(held, values) for (_, held), values in zip(pairs, scores[1:], strict=True)]
        return Scores(scores[0], gather(train, parts), places[0])

    def _ensemble(self, material: Material, layer: int, head: int, fit: Index, held: Index, seed: int) -> Floats:
        """Risk-like scores of ``held``: minus the mean logit of the bootstrap probes."""
        readouts = material.heads
        dim = readouts.file.geometry.dim(Site.ATTENTION_HEAD)
        columns = readouts.file.layer(layer)[:, head * dim : (head + 1) * dim]
        x, x_held = columns[readouts.index[fit]], columns[readouts.index[held]]
        label = material.label[fit]
        rng = np.random.default_rng(seed)
        total = np.zeros(len(held))
        with threadpool_limits(1):  # sums in one order, whatever the number of cores
            for _ in range(self.probes):
                drawn = group_bootstrap(label, material.group[fit], rng)
                total += fit_linear(x[drawn], label[drawn], self.c, "l2").logits(x_held)
        return -total / self.probes


def group_bootstrap(label: Index, group: Index, rng: np.random.Generator) -> Index:
    """As many groups as there are, drawn with replacement, each with all its rows: positions in ``label`` [n].

    A sample without both classes is drawn again.  Raises TrainingError after 100 of them.
    """
    _, member = np.unique(group, return_inverse=True)
    order = np.argsort(member, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(member))[:-1])
    for _ in range(_DRAWS):
        drawn: Index = np.concatenate([rows[one] for one in rng.integers(0, len(rows), len(rows))]).astype(np.int64)
        if 0 < int(np.sum(label[drawn])) < len(drawn):
            return drawn
    raise TrainingError(
        f"{_DRAWS} bootstrap samples of {len(rows)} groups had only one class: "
        f"{int(np.sum(label == 1))} factual and {int(np.sum(label == 0))} hallucinated rows are too few for iti",
        param="methods",
    )


def _best_of_layer(readouts: Readouts, fits: Sequence[Index], c: float, layer: int) -> list[tuple[float, int]]:
    """(training AUROC, head) of the best head of one layer, for each set of training rows; the layer is read once."""
    geometry = readouts.file.geometry
    dim = geometry.dim(Site.ATTENTION_HEAD)
    block = readouts.file.layer(layer)[readouts.index]
    best = [(-1.0, 0)] * len(fits)
    with threadpool_limits(1):
        for head in range(geometry.heads(Site.ATTENTION_HEAD)):
            columns = block[:, head * dim : (head + 1) * dim]
            for number, rows in enumerate(fits):
                x, label = columns[rows], readouts.label[rows]
                quality = auroc(label, fit_linear(x, label, c, "l2").logits(x))
                if quality > best[number][0]:
                    best[number] = (quality, head)
    return best
