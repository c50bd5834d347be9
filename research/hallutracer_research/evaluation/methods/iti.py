"""ITI-Probe: the single best attention head (App. baseline-impl; Li et al. 2023).

An L2 logistic regression (liblinear, C = 1) at every (layer, head), the globally best head by training AUROC, and
there the mean logit of three probes fitted on bootstrap samples of the training rows, drawn by whole groups.  The
paper does not say what is averaged: logits, since saturated probabilities would tie.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs, fit_linear, in_processes
from service.errors import TrainingError
from service.fitting.probes import Readouts
from service.fitting.scores import auroc
from service.readout import Site

C, PROBES = 1.0, 3
MAX_DRAWS = 100  # of one bootstrap sample, until it has both classes


def iti(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Return the mean of ``PROBES`` negated logits, [n_test].  Raises TrainingError where the samples lack a class."""
    readouts = inputs.heads
    layer, head, _ = best_head(readouts, train, jobs)
    columns = readouts.file.head(layer, head)
    x, x_test = columns[readouts.index[train]], columns[readouts.index[test]]
    label = inputs.label[train]
    rng = np.random.default_rng(seed)
    total = np.zeros(len(test))
    with threadpool_limits(1):  # sums in one order, whatever the number of cores
        for _ in range(PROBES):
            drawn = group_bootstrap(label, inputs.group[train], rng)
            total += fit_linear(x[drawn], label[drawn], C, "l2").logits(x_test)
    return -total / PROBES


def best_head(readouts: Readouts, train: Index, jobs: int | None = None) -> tuple[int, int, float]:
    """Return (layer, head, training AUROC); ties go to the lowest layer, and within it to the lowest head."""
    by_layer = in_processes(partial(_best_of_layer, readouts, train), range(readouts.file.geometry.num_layers), jobs)
    layer = int(np.argmax([quality for quality, _ in by_layer]))
    quality, head = by_layer[layer]
    return layer, head, quality


def group_bootstrap(label: Index, group: Index, rng: np.random.Generator) -> Index:
    """Draw as many groups as there are, with replacement, each with all its rows: positions in ``label`` [n].

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


def _best_of_layer(readouts: Readouts, train: Index, layer: int) -> tuple[float, int]:
    """Return (training AUROC, head) of the best head of one layer."""
    label = readouts.label[train]
    best = (-1.0, 0)
    with threadpool_limits(1):
        for head in range(readouts.file.geometry.heads(Site.ATTENTION_HEAD)):
            columns = readouts.file.head(layer, head)[readouts.index[train]]
            quality = auroc(label, fit_linear(columns, label, C, "l2").logits(columns))
            if quality > best[0]:
                best = (quality, head)
    return best
