"""ITI-Probe: the single best attention head (App. baseline-impl; Li et al. 2023).

An L2 logistic regression (liblinear, C = 1) at every (layer, head), the globally best head by training AUROC, and
there the mean logit of three probes fitted on bootstrap samples of the training rows, drawn by whole groups.  The
paper does not say what is averaged: logits, since saturated probabilities would tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs, in_processes
from hallutracer_research.evaluation.methods.linear import fit_linear
from service.errors import TrainingError
from service.fitting.probes import Readouts
from service.fitting.scores import auroc
from service.readout import Site

MAX_DRAWS = 100  # of one bootstrap sample, until it has both classes


@dataclass(frozen=True)
class Iti:
    """The best head of the training rows, three bootstrap probes."""

    c: float = 1.0
    probes: int = 3
    jobs: int | None = None  # processes; None: all cores

    def fit(self, inputs: MethodInputs, train: Index, test: Index, seed: int) -> Floats:
        """Select and fit on ``train``, score ``test``.  Raises TrainingError where the samples lack a class."""
        readouts = inputs.heads
        layer, head, _ = self.best_head(readouts, train)
        columns = readouts.file.head(layer, head)
        x, x_test = columns[readouts.index[train]], columns[readouts.index[test]]
        label = inputs.label[train]
        rng = np.random.default_rng(seed)
        total = np.zeros(len(test))
        with threadpool_limits(1):  # sums in one order, whatever the number of cores
            for _ in range(self.probes):
                drawn = group_bootstrap(label, inputs.group[train], rng)
                total += fit_linear(x[drawn], label[drawn], self.c, "l2").logits(x_test)
        return -total / self.probes

    def best_head(self, readouts: Readouts, train: Index) -> tuple[int, int, float]:
        """(layer, head, training AUROC); ties go to the lowest layer, and within it to the lowest head."""
        layers = range(readouts.file.geometry.num_layers)
        by_layer = in_processes(partial(_best_of_layer, readouts, train, self.c), layers, self.jobs)
        layer = int(np.argmax([quality for quality, _ in by_layer]))
        quality, head = by_layer[layer]
        return layer, head, quality


def group_bootstrap(label: Index, group: Index, rng: np.random.Generator) -> Index:
    """As many groups as there are, drawn with replacement, each with all its rows: positions in ``label`` [n].

    A sample without both classes is drawn again.  Raises TrainingError after 100 of them.
    """
    _, member = np.unique(group, return_inverse=True)
    order = np.argsort(member, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(member))[:-1])
    for _ in range(MAX_DRAWS):
        chosen = rng.integers(0, len(rows), len(rows))
        drawn: Index = np.concatenate([rows[number] for number in chosen]).astype(np.int64)
        if 0 < int(np.sum(label[drawn])) < len(drawn):
            return drawn
    raise TrainingError(
        f"{MAX_DRAWS} bootstrap samples of {len(rows)} groups had only one class: "
        f"{int(np.sum(label == 1))} factual and {int(np.sum(label == 0))} hallucinated rows are too few for iti",
        param="methods",
    )


def _best_of_layer(readouts: Readouts, train: Index, c: float, layer: int) -> tuple[float, int]:
    """(training AUROC, head) of the best head of one layer."""
    label = readouts.label[train]
    best = (-1.0, 0)
    with threadpool_limits(1):
        for head in range(readouts.file.geometry.heads(Site.ATTENTION_HEAD)):
            columns = readouts.file.head(layer, head)[readouts.index[train]]
            quality = auroc(label, fit_linear(columns, label, c, "l2").logits(columns))
            if quality > best[0]:
                best = (quality, head)
    return best
