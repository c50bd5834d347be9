"""Fits probes: standardises, fits, selects a head per layer, maps to raw space, normalises (App.
probe-training).

A row's soft label is the share of its sampled answers that agree with the greedy one.  Its logistic
loss is that share times a factual row's, plus the rest times a hallucinated one's, so the
regressions fit it as two weighted rows.  Heads and C are chosen, and scales taken, by the label."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from joblib import Parallel, delayed, parallel_config
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.linear_model import LogisticRegression

from service.data.run_folder import RowsFile
from service.errors import NoDirection
from service.fitting import ClassBalance
from service.fitting.scores import auroc
from service.fitting.solver import CONSTANT, one_numpy_thread, one_torch_thread, solve
from service.readout import Geometry, Site

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
Labels = NDArray[np.integer]

LARGER_C = (3.0, 10.0, 30.0, 100.0)  # factors on C to try if a layer has no probe
START_S = 60.0  # of waiting for processes, on a busy machine
_CHUNK = 4096  # rows


class ActivationArray(NamedTuple):
    """Activations in memory with the interface of ``RowsFile``: [N, m, heads, d] float32.

    A residual stream has one head."""

    values: NDArray[np.float32]
    site: Site

    @property
    def geometry(self) -> Geometry:
        """Return the shape of a model that has such activations."""
        _, layers, heads, dim = self.values.shape
        return Geometry(layers, heads, dim, dim)

    def layer(self, layer: int) -> NDArray[np.float32]:
        """Return all heads' columns of ``layer``, [N, width]."""
        return self.values[:, layer].reshape(len(self.values), -1)

    def head(self, layer: int, head: int) -> NDArray[np.float32]:
        """Return one head's columns of ``layer``, [N, d]."""
        return self.values[:, layer, head]


@dataclass(frozen=True, eq=False)
class Readouts:
    """The labelled activations of one site: row i is row ``index[i]`` of the file."""

    file: RowsFile | ActivationArray
    index: Index  # [n]
    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated
    soft_label: Floats | None = None  # [n] what the regressions learn in place of ``label``

    def subset(self, rows: Labels) -> Readouts:
        """Return the same file, restricted to these rows."""
        return Readouts(self.file, self.index[rows], self.label[rows], self.soft(rows))

    def soft(self, rows: Labels) -> Floats | None:
        """Return the soft labels of these rows, if there are any."""
        return None if self.soft_label is None else self.soft_label[rows]


class WeightedRows(NamedTuple):
    """r weighted rows made of n: first one of each, then the second ones of those that have two."""

    row: Index  # [r]
    label: NDArray[np.int64]  # [r] 1 factual, 0 hallucinated
    weight: Floats  # [r]; those of a row sum to 1


def weighted_rows(label: Labels, soft_label: Floats | None) -> WeightedRows:
    """Return the rows of label [n] or, if given, of ``soft_label`` [n], without those of weight
    zero."""
    rows = np.arange(len(label))
    if soft_label is None:
        return WeightedRows(rows, np.asarray(label, np.int64), np.ones(len(label)))
    first = (soft_label >= 0.5).astype(np.int64)
    mixed = np.flatnonzero((soft_label > 0) & (soft_label < 1))
    row, of_class = np.r_[rows, mixed], np.r_[first, 1 - first[mixed]]
    weight = np.where(of_class == 1, soft_label[row], 1 - soft_label[row])
    return WeightedRows(row, of_class, weight)


@dataclass(frozen=True, eq=False)
class Task:
    """One fit: training rows and rows to score, as positions in ``Readouts``."""

    train: Index
    test: Index
    c: float  # inverse strength of the penalty


class HeadProbe(NamedTuple):
    """One head's probe of one partition: L = direction . a + bias (Eq. logit)."""

    head: int
    direction: Floats  # [d] unit norm, raw activation space
    bias: float
    scale: float  # pooled within-class standard deviation of L on the training rows
    auroc: float  # on the training rows; selects the head
    logits: Floats  # [n_test]


@dataclass(frozen=True, eq=False)
class ProbeFit:
    """The selected probes of all m layers for one partition, and the logits of its test rows."""

    head: NDArray[np.int32]  # [m]
    direction: Floats  # [m, d] unit norm
    bias: Floats  # [m]
    scale: Floats  # [m] within-class standard deviations of the training logits
    auroc: Floats  # [m] on the training rows
    trajectory: Floats  # [n_test, m] unit-norm logits

    @property
    def standardized(self) -> Floats:
        """Return the trajectories, each logit over its within-class deviation, [n_test, m]."""
        return self.trajectory / self.scale

    @property
    def best_layer(self) -> int:
        """Return the layer of the single best head by training AUROC, ties to the lowest (the ITI
        rule)."""
        return int(np.argmax(self.auroc))


def fit_head(
    x: NDArray[np.floating],
    label: Labels,
    tasks: Sequence[Task],
    site: Site,
    balance: ClassBalance,
    soft_label: Floats | None = None,
) -> list[tuple[Floats, float] | None]:
    """Return each task's raw-space weight [d] and bias of one head, before normalisation: x [n, d],
    label [n], soft_label [n].

    Eq. standardize, standardized-probe and raw-space-probe: L1 at the attention site, all tasks at
    once (``solver``), L2 at the residual stream.  None if every weight is zero.  A row of both
    classes counts twice in the attention site's standardisation."""
    if site is Site.RESIDUAL_STREAM:
        ridges = []
        for task in tasks:
            soft = None if soft_label is None else soft_label[task.train]
            rows = weighted_rows(label[task.train], soft)
            ridges.append(_ridge(x[task.train], rows, task.c, balance))
        return ridges
    rows = weighted_rows(label, soft_label)
    partitions = {task.train.tobytes(): task.train for task in reversed(tasks)}
    weight = np.zeros((len(partitions), len(rows.row)))
    for of_partition, train in zip(weight, partitions.values(), strict=True):
        inside = np.isin(rows.row, train)
        of_partition[inside] = row_weights(rows.label[inside], balance, rows.weight[inside])
    number = {name: position for position, name in enumerate(partitions)}
    partition = np.array([number[task.train.tobytes()] for task in tasks])
    c = np.array([task.c for task in tasks])
    values = x if soft_label is None else x[rows.row]
    directions, intercepts = solve(
        np.ascontiguousarray(values, np.float32)[None], rows.label, weight, partition, c
    )
    pairs = zip(directions[0], intercepts[0], strict=True)
    return [(direction, float(bias)) if np.any(direction) else None for direction, bias in pairs]


def standardise(x: NDArray[np.floating]) -> tuple[Floats, Floats, Floats]:
    """Return x [n, d] standardised (Eq. standardize) as a float64 copy, its mean [d] and deviation
    [d].

    A constant column becomes zeros with deviation 1, since its computed deviation is only a
    rounding error."""
    z = x.astype(np.float64)
    mean = z.mean(axis=0)
    z -= mean
    std = np.sqrt(np.einsum("nd,nd->d", z, z) / len(z))
    constant = std <= CONSTANT * np.abs(mean)
    std[constant] = 1.0
    z /= std
    z[:, constant] = 0.0
    return z, mean, std


def row_weights(label: Labels, balance: ClassBalance, weight: Floats | None = None) -> Floats:
    """Return weights of the training rows, [n], that balance the classes; ``downsample`` gives some
    rows weight 0.  ``weight`` [n]: how much a row counts before it is balanced."""
    if balance == "downsample":
        weights = np.zeros(len(label))
        weights[_downsample(label)] = 1.0
        return weights
    counts = np.ones(len(label)) if weight is None else weight
    sizes = np.bincount(label, counts, minlength=2)
    return np.asarray(counts * (counts.sum() / (2.0 * sizes))[label])


def _ridge(
    x: NDArray[np.floating], rows: WeightedRows, c: float, balance: ClassBalance
) -> tuple[Floats, float] | None:
    if balance == "downsample":  # never of soft labels
        chosen = _downsample(rows.label)
        x, rows = x[chosen], weighted_rows(rows.label[chosen], None)
    z, mean, std = standardise(x)
    weight = row_weights(rows.label, "weights", rows.weight)
    # Collection has checked the rows; a second check costs as much as a small fit.
    with config_context(assume_finite=True, skip_parameter_validation=True):
        model = LogisticRegression(C=c, max_iter=5000)
        model.fit(z[rows.row], rows.label, sample_weight=weight)
    raw = model.coef_[0] / std
    return (raw, float(model.intercept_[0] - raw @ mean)) if np.any(raw) else None


def _downsample(label: Labels) -> Index:
    """Return rows with equal class sizes, drawn with a fixed seed, in the data's order."""
    rng = np.random.default_rng(0)
    sides = [np.flatnonzero(label == value) for value in (0, 1)]
    size = min(map(len, sides))
    return np.sort(np.concatenate([rng.permutation(side)[:size] for side in sides]))


def fit_probes(
    readouts: Readouts,
    tasks: Sequence[Task],
    *,
    balance: ClassBalance,
    jobs: int,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    retry_larger_c: bool = False,
    zero_layers: bool = False,
) -> list[ProbeFit]:
    """Return one ProbeFit per task, over all or the given layers and heads; each layer is read once
    for all tasks.

    If every probe of a layer is zero, ``retry_larger_c`` fits it again with the factors of
    ``LARGER_C``.  A layer that still has no direction gets a direction and logits of zero with
    ``zero_layers``; without it, raises NoDirection."""
    geometry, site = readouts.file.geometry, readouts.file.site
    layers = range(geometry.num_layers) if layers is None else layers
    heads = [*range(geometry.heads(site))] if heads is None else [*map(int, heads)]
    pieces = max(
        1, min(len(heads), -(-2 * jobs // len(layers)))
    )  # split the heads if layers are fewer than processes
    items = [(layer, chunk.tolist()) for layer in layers for chunk in np.array_split(heads, pieces)]
    with _processes(1 if len(items) == 1 else jobs):
        best = Parallel()(
            delayed(_fit_layer)(readouts, tasks, layer, chunk, balance) for layer, chunk in items
        )

    fits = []
    for number, task in enumerate(tasks):
        chosen: list[HeadProbe] = []
        for position, layer in enumerate(layers):
            candidates = [
                part[number] for part in best[position * pieces : (position + 1) * pieces]
            ]
            usable = [candidate for candidate in candidates if candidate is not None]
            probe: HeadProbe | None = max(
                usable, key=lambda candidate: candidate.auroc, default=None
            )
            for factor in LARGER_C if retry_larger_c and probe is None else ():
                (probe,) = _fit_layer(
                    readouts, [replace(task, c=task.c * factor)], layer, heads, balance
                )
                if probe is not None:
                    break
            if probe is None and zero_layers:
                probe = HeadProbe(
                    heads[0], np.zeros(geometry.dim(site)), 0.0, 1.0, 0.5, np.zeros(len(task.test))
                )
            if probe is None:
                probes = f"all {len(heads)} probes are" if len(heads) > 1 else "the probe is"
                strong = (
                    site is Site.ATTENTION_HEAD
                )  # the L2 penalty at the residual stream never gives zeros
                reason = (
                    "the penalty is too strong" if strong else "the readouts there may be constant"
                )
                where = (
                    f"layer {layer}: {probes} zero at C = {task.c:g} on {len(task.train)} rows"
                    f" ({reason})"
                )
                raise NoDirection(
                    f"{where}: give a larger C or larger values in the grid, or more rows",
                    param="c",
                )
            chosen.append(probe)
        head, direction, bias, scale, quality, logits = map(np.array, zip(*chosen, strict=True))
        fits.append(
            ProbeFit(
                head.astype(np.int32),
                direction,
                bias,
                scale,
                quality,
                np.ascontiguousarray(logits.T),
            )
        )
    return fits


def _processes(jobs: int) -> parallel_config:
    return parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1)


def start_processes(jobs: int) -> None:
    """Start those that fit, and wait until each of them answers: the first fits would wait for
    them, or do without."""
    answering, until = set[int](), time.monotonic() + START_S
    while jobs > 1 and len(answering) < jobs and time.monotonic() < until:
        with _processes(jobs):
            answering |= set(Parallel()(delayed(_answers)() for _ in range(jobs)))


def _answers() -> int:
    time.sleep(0.02)  # else one process answers for all
    return os.getpid()


def _fit_layer(
    readouts: Readouts,
    tasks: Sequence[Task],
    layer: int,
    heads: Sequence[int],
    balance: ClassBalance,
) -> list[HeadProbe | None]:
    """Return the best of ``heads`` at one layer for each task, ties to the first; None if all are
    zero."""
    best: list[HeadProbe | None] = [None] * len(tasks)
    with (
        one_numpy_thread(),
        one_torch_thread(),
    ):  # the same order of summation for any number of cores
        for head in heads:
            x = readouts.file.head(layer, head)[readouts.index]
            fitted = fit_head(
                x, readouts.label, tasks, readouts.file.site, balance, readouts.soft_label
            )
            for number, (task, raw) in enumerate(zip(tasks, fitted, strict=True)):
                if raw is not None:
                    probe, current = unit_probe(x, readouts.label, task, head, raw), best[number]
                    best[number] = (
                        probe if current is None or probe.auroc > current.auroc else current
                    )
    return best


def unit_probe(
    x: NDArray[np.float32], label: Labels, task: Task, head: int, raw: tuple[Floats, float]
) -> HeadProbe:
    """Divide ``fit_head``'s weight and bias by the norm (Eq. raw-space-normalized-probe) and rate
    the probe.

    It is rated on the training rows: x [n, d], label [n]."""
    norm = float(np.linalg.norm(raw[0]))
    direction, bias = raw[0] / norm, raw[1] / norm
    inside, logits = label[task.train], project(x, task.train, direction, bias)
    scale, quality = within_class_std(inside, logits), auroc(inside, logits)
    return HeadProbe(head, direction, bias, scale, quality, project(x, task.test, direction, bias))


def project(x: NDArray[np.float32], rows: Index, direction: Floats, bias: float) -> Floats:
    """Return truth logits of ``rows`` [n] in float64, without a full float64 copy of x."""
    logits = np.empty(len(rows))
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        logits[start : start + _CHUNK] = x[chunk].astype(np.float64) @ direction + bias
    return logits


def within_class_std(label: Labels, values: Floats) -> float:
    """Return the pooled deviation around the class means: label [n], values [n]; 1 if it is
    zero."""
    residual = values.astype(np.float64)
    for value in (0, 1):
        inside = label == value
        residual[inside] -= residual[inside].mean()
    return float(np.sqrt(np.mean(residual**2))) or 1.0
