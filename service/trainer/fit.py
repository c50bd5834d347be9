"""Probes: standardise, fit, select a head per layer, map to raw space, divide by the norm (App. probe-training).

Fits run in processes, not threads: liblinear draws its coordinate order from one random state per process, so that
threads would disturb each other and no fit could be repeated bit by bit.  Each process reads one layer at a time from
the rows file: at its peak one layer's slice in float32 and, of the head being fitted, its training rows in float32 and
float64 beside the solver's own copy (at the residual stream the head is the whole slice).  Knows no engine, no folds
and no classifier.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from joblib import Parallel, delayed, parallel_config
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from service.errors import NoDirection
from service.measures import auroc
from service.readout import Site
from service.trainer.options import ClassBalance
from service.trainer.run_folder import RowsFile

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

# liblinear penalises the intercept like a weight.  It sees a constant column of this height instead of 1, so that the
# penalty on an intercept b is |b| / 100: nothing beside the weights', while larger heights only slow it down.
_INTERCEPT_HEIGHT = 100.0
_CHUNK = 4096  # rows
_HAS_PENALTY = inspect.signature(LogisticRegression).parameters["penalty"].default == "l2"  # scikit-learn before 1.8


@dataclass(frozen=True, eq=False)
class Readouts:
    """The labelled rows of one site: row i is row ``index[i]`` of the file."""

    file: RowsFile
    index: Index  # [n]
    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated

    def subset(self, rows: NDArray[np.integer]) -> Readouts:
        """The same file, only these rows."""
        return Readouts(self.file, self.index[rows], self.label[rows])


@dataclass(frozen=True, eq=False)
class Task:
    """One partition to fit on and the rows whose logits are wanted, as positions in ``Readouts``."""

    train: Index
    test: Index
    c: float  # inverse strength of the penalty


@dataclass(frozen=True, eq=False)
class LayerProbe:
    """The selected probe of one layer: L_l = direction . a + bias (Eq. logit)."""

    layer: int
    head: int
    direction: Floats  # [d] unit norm, raw activation space
    bias: float
    scale: float  # pooled within-class standard deviation of L_l on the training partition
    auroc: float  # on the training partition; what selected the head


@dataclass(frozen=True, eq=False)
class ProbeFit:
    """All layers' probes of one partition, and the logits of its test rows."""

    layers: tuple[LayerProbe, ...]
    trajectory: Floats  # [n_test, m] unit-norm logits of ``Task.test``

    @cached_property
    def head(self) -> NDArray[np.int32]:
        """Selected heads, [m]."""
        return np.array([probe.head for probe in self.layers], np.int32)

    @cached_property
    def direction(self) -> Floats:
        """Unit directions, [m, d]."""
        return np.stack([probe.direction for probe in self.layers])

    @cached_property
    def bias(self) -> Floats:
        """Biases, [m]."""
        return np.array([probe.bias for probe in self.layers])

    @cached_property
    def scale(self) -> Floats:
        """Within-class training standard deviations, [m]; the divisors under ``standardized``."""
        return np.array([probe.scale for probe in self.layers])

    @cached_property
    def best_layer(self) -> int:
        """The layer of the single best head by training AUROC, ties to the lowest: the ITI rule."""
        return int(np.argmax([probe.auroc for probe in self.layers]))


def fit_head(
    x: NDArray[np.floating], label: NDArray[np.integer], c: float, site: Site, balance: ClassBalance
) -> tuple[Floats, float] | None:
    """Raw-space weight [d] and bias of one head's probe, not yet divided by its norm: x [n, d], label [n].

    Eq. standardize, standardized-probe and raw-space-probe.  L1 through liblinear at the attention site; L2 through
    lbfgs, whose intercept is free, at the residual stream.  None where every weight is zero.
    """
    if balance == "downsample":
        kept = _downsample(label)
        x, label = x[kept], label[kept]
    z = x.astype(np.float64)  # the one copy; at the residual stream it is a whole layer's
    mean = z.mean(axis=0)
    z -= mean
    std = np.sqrt(np.einsum("nd,nd->d", z, z) / len(z))
    # A constant column's computed deviation is rounding, not zero; divided by it, it would become a feature of noise.
    constant = std <= 1e-9 * np.abs(mean)
    std[constant] = 1.0
    z /= std
    z[:, constant] = 0.0
    l1 = site is Site.ATTENTION_HEAD
    options: dict[str, Any] = (
        {"solver": "liblinear", "intercept_scaling": _INTERCEPT_HEIGHT, "max_iter": 5000}
        if l1
        else {"solver": "lbfgs", "max_iter": 5000}
    )
    options |= {"penalty": "l1" if l1 else "l2"} if _HAS_PENALTY else {"l1_ratio": 1.0 if l1 else 0.0}
    sizes = np.bincount(label, minlength=2)
    weights = {value: len(label) / (2.0 * sizes[value]) for value in (0, 1)} if balance == "weights" else None
    # Rows were checked when they were collected; checking them again costs as much as a small fit.
    with config_context(assume_finite=True, skip_parameter_validation=True):
        model = LogisticRegression(C=c, class_weight=weights, random_state=0, **options).fit(z, label)
    weight = model.coef_[0] / std
    if not np.any(weight):
        return None
    return weight, float(model.intercept_[0] - weight @ mean)


def fit_probes(
    readouts: Readouts,
    tasks: Sequence[Task],
    *,
    balance: ClassBalance,
    jobs: int,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[ProbeFit | NoDirection]:
    """One ProbeFit per task, over all layers and heads or those given; each layer is read once for all tasks.

    A task with a layer whose every probe is zero gives a NoDirection instead, not raised, since a search over C may
    go on without it; ``require`` raises it.
    """
    geometry, site = readouts.file.geometry, readouts.file.site
    layers = range(geometry.num_layers) if layers is None else layers
    heads = range(geometry.heads(site)) if heads is None else heads
    pieces = max(1, min(len(heads), -(-2 * jobs // len(layers))))  # fewer layers than processes: split the heads
    chunks = [[int(head) for head in chunk] for chunk in np.array_split(np.asarray(heads), pieces)]
    items = [(layer, chunk) for layer in layers for chunk in chunks]
    if jobs == 1 or len(items) == 1:
        found = [_fit_layer(readouts, tasks, layer, chunk, balance) for layer, chunk in items]
    else:
        with parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1):
            found = Parallel()(delayed(_fit_layer)(readouts, tasks, layer, chunk, balance) for layer, chunk in items)
    results: list[ProbeFit | NoDirection] = []
    for number, task in enumerate(tasks):
        chosen = []
        for place, layer in enumerate(layers):
            candidates = [found[place * pieces + piece][number] for piece in range(pieces)]
            best = max((one for one in candidates if one is not None), key=lambda one: one[0].auroc, default=None)
            if best is None:
                results.append(_no_direction(layer, task, len(heads), site))
                break
            chosen.append(best)
        else:
            trajectory = np.stack([logits for _, logits in chosen], axis=1)
            results.append(ProbeFit(tuple(probe for probe, _ in chosen), trajectory))
    return results


def require(results: Sequence[ProbeFit | NoDirection]) -> list[ProbeFit]:
    """The fits, or the first NoDirection raised."""
    fits = []
    for result in results:
        if isinstance(result, NoDirection):
            raise result
        fits.append(result)
    return fits


def _fit_layer(
    readouts: Readouts, tasks: Sequence[Task], layer: int, heads: Sequence[int], balance: ClassBalance
) -> list[tuple[LayerProbe, Floats] | None]:
    """The best of ``heads`` at one layer for each task, with its test logits; None where all are zero."""
    dim = readouts.file.geometry.dim(readouts.file.site)
    first, last = heads[0], heads[-1] + 1
    # One sequential read; the training rows of the tasks are then cut from memory.
    block = readouts.file.layer(layer)[:, first * dim : last * dim][readouts.index]
    best: list[tuple[LayerProbe, Floats] | None] = [None] * len(tasks)
    with threadpool_limits(1):  # sums in one order, whatever the number of cores
        for head in heads:
            columns = slice((head - first) * dim, (head - first + 1) * dim)
            for number, task in enumerate(tasks):
                label = readouts.label[task.train]
                fitted = fit_head(block[task.train, columns], label, task.c, readouts.file.site, balance)
                if fitted is None:
                    continue
                norm = float(np.linalg.norm(fitted[0]))
                direction, bias = fitted[0] / norm, fitted[1] / norm
                logits = _project(block, task.train, columns, direction, bias)
                quality = auroc(label, logits)
                current = best[number]
                if current is None or quality > current[0].auroc:  # ties stay with the lower head
                    probe = LayerProbe(layer, head, direction, bias, within_class_std(label, logits), quality)
                    best[number] = (probe, _project(block, task.test, columns, direction, bias))
    return best


def _project(block: NDArray[np.float32], rows: Index, columns: slice, direction: Floats, bias: float) -> Floats:
    """Truth logits of ``rows`` [n] in float64, a few thousand rows at a time so that no whole copy is made."""
    logits = np.empty(len(rows))
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        logits[start : start + _CHUNK] = block[chunk, columns].astype(np.float64) @ direction + bias
    return logits


def within_class_std(label: NDArray[np.integer], values: Floats) -> float:
    """Pooled standard deviation around the class means: label [n], values [n]; 1 where it is zero."""
    rest = values.astype(np.float64)
    for value in (0, 1):
        rest[label == value] -= rest[label == value].mean()
    return float(np.sqrt(np.mean(rest**2))) or 1.0


def _downsample(label: NDArray[np.integer]) -> Index:
    """As many rows of the larger class as the smaller has, drawn with a fixed seed, in the data's order."""
    rng = np.random.default_rng(0)
    sides = [np.flatnonzero(label == value) for value in (0, 1)]
    size = min(map(len, sides))
    return np.sort(np.concatenate([rng.permutation(side)[:size] for side in sides]))


def _no_direction(layer: int, task: Task, heads: int, site: Site) -> NoDirection:
    probes = f"all {heads} probes are" if heads > 1 else "the probe is"
    reading = "the readouts there may be constant" if site is Site.RESIDUAL_STREAM else "the penalty is too strong"
    return NoDirection(
        f"layer {layer}: {probes} zero at C = {task.c:g} on {len(task.train)} rows ({reading}): "
        f"give a larger C (or larger values in the grid), or more rows",
        param="c",
    )
