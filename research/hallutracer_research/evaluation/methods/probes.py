"""Linear probes of the prompt's last token: the paper's (App. baseline-impl) and its field's.

``iti``: the best attention head by training AUROC of an L2 logistic regression (Li et al. 2023),
there the mean logit of three probes on bootstrap samples of whole groups; inner folds choose C,
each with its own best head.  The paper does not say what is averaged; probabilities would tie.
``pca_heads``: all heads of all layers at once, in the directions in which training rows vary most,
without labels; an L2 logistic regression on as many of them, and with the C, that inner folds
choose.
``fact_probe``: an L1 logistic regression on windows of 1 and of 5 neighbouring layers, C in {0.1,
0.5}; inner folds choose, ties to fewer and lower layers and smaller C.  Of a size at most 12
windows, evenly spaced, take part. ``p_ik`` (Kadavath et al. 2022): there a value head is trained
with the whole model; here the model stays as it is. ``mass_mean`` (Marks and Tegmark 2023):
Sigma^-1 (mean of factual - mean of hallucinated rows), Sigma within the classes shrunk on
standardised coordinates by Ledoit and Wolf's share (rows as independent), 0.3, or 1: the plain
difference. ``sep`` (Kossen et al. 2024): the training rows' semantic entropy is cut in two where
the squared distances from both means are smallest, and a logistic regression learns the side: no
label of the set, no samples of test rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from sklearn.covariance import empirical_covariance, ledoit_wolf, shrunk_covariance

from hallutracer_research.evaluation.methods.base import (
    INNER_FOLDS,
    Fold,
    Linear,
    Rows,
    best_c,
    fit_at_best_layer,
    held_out_auroc,
    held_out_aurocs,
    in_processes,
    linear_logits,
    required,
    window,
)
from service.errors import TrainingError
from service.fitting.probes import Floats, Index, Readouts, standardise
from service.fitting.scores import auroc
from service.readout import Site

ITI_GRID, PROBES = (0.01, 0.1, 1.0), 3
COMPONENTS = (20, 50, 100)
MAX_DRAWS = 100  # of one bootstrap sample, until it has both classes
FACT_C, MAX_WINDOWS = (0.1, 0.5), 12  # windows of one size
C_GRID = (0.001, 0.01, 0.1)
FITS = [partial(linear_logits, c, "l2") for c in C_GRID]
SHRINKAGE = (None, 0.3, 1.0)  # None: Ledoit and Wolf's


def iti(fold: Fold) -> Floats:
    """Return the mean of ``PROBES`` negated logits, [n_test].  Raises TrainingError where the
    samples lack a class."""
    readouts, label = fold.inputs.heads, fold.label
    c, layer, head = iti_head(fold)
    columns = readouts.file.head(layer, head)
    x, x_test = columns[readouts.index[fold.train]], columns[readouts.index[fold.test]]
    rng = np.random.default_rng(fold.seed)
    total = np.zeros(len(fold.test))
    for _ in range(PROBES):
        drawn = group_bootstrap(label, fold.inputs.group[fold.train], rng)
        total += linear_logits(c, "l2", x[drawn], label[drawn], x_test)
    return -total / PROBES


def iti_head(fold: Fold) -> tuple[float, int, int]:
    """Return C, layer and head: of each C's best head the one with the best mean AUROC of
    ``INNER_FOLDS``; ties: the smaller C.  Raises TrainingError where no inner fold has both
    classes."""
    readouts = fold.inputs.heads
    pairs = fold.usable_folds("ITI inner fold")
    candidates = []
    for c in ITI_GRID:
        layer, head, _ = best_head(readouts, fold.train, c, fold.jobs)
        x = readouts.file.head(layer, head)[readouts.index]
        fit = partial(linear_logits, c, "l2")
        quality = held_out_auroc(fit, x, fold.inputs.label, pairs)
        candidates.append((round(quality, 12), -c, layer, head))
    _, c, layer, head = max(candidates)
    return -c, layer, head


def best_head(
    readouts: Readouts, train: Index, c: float, jobs: int | None = None
) -> tuple[int, int, float]:
    """Return (layer, head, training AUROC); ties go to the lowest layer, and within it to the
    lowest head."""
    layers = range(readouts.file.geometry.num_layers)
    by_layer = in_processes(partial(_head_aurocs, readouts, train, c), layers, jobs)
    layer, head = map(int, np.unravel_index(np.argmax(by_layer), np.shape(by_layer)))
    return layer, head, by_layer[layer][head]


def pca_heads(fold: Fold) -> Floats:
    """Return the scores [n_test].  Memory: a few [n, n] float64 matrices and one layer's columns.
    Raises TrainingError where no inner fold has both classes."""
    inputs, train, test = fold.inputs, fold.train, fold.test
    rows = np.r_[train, test]
    components = principal_components(inputs.heads, train, rows, max(COMPONENTS))
    x = np.zeros((len(inputs.label), components.shape[1]))
    x[rows] = components
    pairs = fold.usable_folds("PCA inner fold")
    counts = sorted({min(count, x.shape[1]) for count in COMPONENTS})
    choices = [best_c(x[:, :count], inputs.label, pairs, C_GRID) for count in counts]
    best = int(np.argmax([quality for _, quality in choices]))
    count, c = counts[best], choices[best][0]
    return -linear_logits(c, "l2", x[train, :count], fold.label, x[test, :count])


def principal_components(readouts: Readouts, train: Index, rows: Index, count: int) -> Floats:
    """Return the rows' coordinates along the ``count`` directions in which the standardised columns
    of the ``train`` rows, of all layers at once, vary most, [rows, count]; of ``rows``, those of
    ``train`` come first.  By inner products of rows: there are far fewer of them than columns."""
    products = np.zeros((len(rows), len(train)))
    for layer in range(readouts.file.geometry.num_layers):
        columns = readouts.file.layer(layer)
        z, mean, std = standardise(columns[readouts.index[train]])
        z_test = (columns[readouts.index[rows[len(train) :]]] - mean) / std
        products += np.concatenate([z, z_test]) @ z.T
    values, vectors = np.linalg.eigh(products[: len(train)])
    largest = np.argsort(-values)[: min(count, int((values > values.max() * 1e-9).sum()))]
    return np.asarray(products @ (vectors[:, largest] / np.sqrt(values[largest])), np.float64)


def _head_aurocs(readouts: Readouts, train: Index, c: float, layer: int) -> list[float]:
    label, aurocs = readouts.label[train], []
    for head in range(readouts.file.geometry.heads(Site.ATTENTION_HEAD)):
        columns = readouts.file.head(layer, head)[readouts.index[train]]
        aurocs.append(auroc(label, linear_logits(c, "l2", columns, label, columns)))
    return aurocs


def group_bootstrap(label: Index, group: Index, rng: np.random.Generator) -> Index:
    """Draw as many groups as there are, with replacement, each with all its rows: positions in
    ``label`` [n].  A sample without both classes is drawn again.  Raises TrainingError after 100 of
    them."""
    _, member = np.unique(group, return_inverse=True)
    order = np.argsort(member, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(member))[:-1])
    for _ in range(MAX_DRAWS):
        chosen = rng.integers(0, len(rows), len(rows))
        drawn: Index = np.concatenate([rows[number] for number in chosen]).astype(np.int64)
        if 0 < int(np.sum(label[drawn])) < len(drawn):
            return drawn
    raise TrainingError(
        f"{MAX_DRAWS} bootstrap samples of {len(rows)} groups had only one class:"
        f" {int(np.sum(label == 1))} factual and {int(np.sum(label == 0))} hallucinated rows are"
        " too few for iti",
        param="methods",
    )


def fact_probe(fold: Fold) -> Floats:
    """Return negated logits [n_test] of the best candidate.  Raises TrainingError where an inner
    fold lacks a class."""
    start, size, c, _ = search(fold)
    residual = fold.inputs.residual
    x, x_test = (window(residual, start, size, rows) for rows in (fold.train, fold.test))
    return -linear_logits(c, "l1", x, fold.label, x_test)


def search(fold: Fold) -> tuple[int, int, float, float]:
    """Return (first layer, number of layers, C, mean AUROC on the inner folds) of the best
    candidate."""
    residual = fold.inputs.residual
    layers = residual.file.geometry.num_layers
    spans = [(start, size) for size in (1, 5) for start in starts(layers, size)]
    pairs = fold.folds(INNER_FOLDS, "Fact-Probe inner fold")
    fits = [partial(linear_logits, c, "l1") for c in FACT_C]
    qualities = in_processes(partial(held_out_aurocs, residual, pairs, fits), spans, fold.jobs)
    best = (0, 1, FACT_C[0], -1.0)
    for span, by_c in zip(spans, qualities, strict=True):
        for c, quality in zip(FACT_C, by_c, strict=True):
            if quality > best[3] + 1e-12:
                best = (*span, c, quality)
    return best


def starts(layers: int, size: int) -> list[int]:
    """Return the first layers of the windows of ``size`` that take part; [] where the model has
    fewer layers."""
    count = max(layers - size + 1, 0)
    return sorted({round(start) for start in np.linspace(0, count - 1, min(count, MAX_WINDOWS))})


def p_ik(fold: Fold) -> Floats:
    """Return the scores [n_test].  Raises TrainingError where an inner fold lacks a class."""
    return fit_at_best_layer(fold, FITS, "p(IK) inner fold")


def mass_mean(fold: Fold) -> Floats:
    """Return the scores [n_test], with a few float64 matrices of hidden_size by hidden_size in
    memory.  Raises TrainingError where an inner fold lacks a class."""
    fits = [partial(discriminant, share) for share in SHRINKAGE]
    return fit_at_best_layer(fold, fits, "mass-mean inner fold")


def discriminant(shrinkage: float | None, x: Rows, label: Index, x_test: Rows) -> Floats:
    """Return truth logits [t]: x [n, d], label [n], x_test [t, d]; zero halfway between the class
    means."""
    z, mean, std = standardise(x)
    means = [z[label == value].mean(axis=0) for value in (0, 1)]
    inside = z - np.where(label[:, None] == 1, means[1], means[0])
    if shrinkage is None:
        covariance, _ = ledoit_wolf(inside, assume_centered=True)
    else:
        covariance = shrunk_covariance(
            empirical_covariance(inside, assume_centered=True), shrinkage
        )
    constant = (
        np.diag(covariance) == 0.0
    )  # only where every row is its class's mean: nothing to correct by
    covariance[constant, constant] = 1.0
    direction = np.linalg.solve(covariance, means[1] - means[0])
    bias = -float(direction @ (means[0] + means[1])) / 2.0
    weight = direction / std
    return Linear(weight, bias - float(weight @ mean)).logits(x_test)


def sep(fold: Fold) -> Floats:
    """Return log-odds of a high semantic entropy, [n_test].  Raises TrainingError without samples,
    where all entropies are the same, and where no inner fold has both sides."""
    inputs, train = fold.inputs, fold.train
    entropy = required(
        inputs.answers.entropy, "sep learns from sampled answers, and there are none"
    )
    low = np.zeros(len(inputs.label), np.int64)  # of test rows nothing is known
    low[train] = entropy[train] < best_split(entropy[train])
    by_side = replace(inputs, label=low, residual=replace(inputs.residual, label=low))
    return fit_at_best_layer(replace(fold, inputs=by_side), FITS, "SEP inner fold")


def best_split(values: Floats) -> float:
    """Return the threshold t for which values < t and values >= t are closest to their means, in
    sum of squares."""
    ordered = np.sort(values)
    cuts = np.flatnonzero(np.diff(ordered)) + 1  # the upper side's first row
    if not len(cuts):
        raise TrainingError(
            "every training row has the same semantic entropy: sep has nothing to learn; leave"
            " it out"
        )
    losses = [
        ordered[:cut].var() * cut + ordered[cut:].var() * (len(ordered) - cut)
        for cut in cuts.tolist()
    ]
    return float(ordered[cuts[int(np.argmin(np.round(losses, 12)))]])
