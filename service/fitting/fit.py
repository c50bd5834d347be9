"""Probes: standardise, fit, select a head per layer, map to raw space, divide by the norm (App. probe-training).

Each process reads one layer at a time and of it one head's columns, which ``solver`` fits for all partitions and all
values of C together.  At the residual stream the one head is the whole activation and scikit-learn fits it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from joblib import Parallel, delayed, parallel_config
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from service.data.run_folder import RowsFile
from service.errors import NoDirection
from service.fitting.options import SEVERAL, ClassBalance
from service.fitting.soft_labels import Copies, check_shares, copies_of, soft_auroc
from service.fitting.solver import CONSTANT, one_torch_thread, solve
from service.readout import Site

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

_CHUNK = 4096  # rows
RELAXED = (3.0, 10.0, 30.0, 100.0)  # times C, where a layer would have no probe
_HAS_PENALTY = inspect.signature(LogisticRegression).parameters["penalty"].default == "l2"  # scikit-learn before 1.8


@dataclass(frozen=True, eq=False)
class Readouts:
    """The labelled activations of one site: row i is row ``index[i]`` of the file."""

    file: RowsFile
    index: Index  # [n]
    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated
    share: Floats | None = None  # [n] soft labels to fit on: the share of sampled answers that is right

    def subset(self, rows: NDArray[np.integer]) -> Readouts:
        """The same file, restricted to these rows."""
        return Readouts(self.file, self.index[rows], self.label[rows], self.share_of(rows))

    def share_of(self, rows: NDArray[np.integer]) -> Floats | None:
        """The soft labels of these rows, where there are any."""
        return None if self.share is None else self.share[rows]

    def auroc(self, rows: NDArray[np.integer], score: Floats) -> float:
        """AUROC of the truth scores [r] of ``rows`` [r], by the labels that are fitted on."""
        return soft_auroc(self.label[rows], self.share_of(rows), score)


@dataclass(frozen=True, eq=False)
class Task:
    """One fit: training rows and rows to score, as positions in ``Readouts``."""

    train: Index
    test: Index
    c: float  # inverse strength of the penalty


@dataclass(frozen=True, eq=False)
class HeadProbe:
    """One head's probe of one partition: L = direction . a + bias (Eq. logit)."""

    head: int
    direction: Floats  # [d] unit norm, raw activation space
    bias: float
    scale: float  # pooled within-class standard deviation of L on the training rows
    auroc: float  # on the training rows; selects the head


Candidates = list[tuple[HeadProbe, Floats]]
"""Probes of one layer, each with its test logits."""


@dataclass(frozen=True, eq=False)
class ProbeFit:
    """The selected probes of all m layers for one partition, and the logits of its test rows."""

    head: NDArray[np.int32]  # [m]
    direction: Floats  # [m, d] unit norm
    bias: Floats  # [m]
    scale: Floats  # [m] within-class standard deviations of the training logits
    auroc: Floats  # [m] on the training rows
    trajectory: Floats  # [n_test, m] unit-norm logits
    several: Floats  # [len(SEVERAL), n_test] depth means where a layer's logit is the mean over its 2, 4, 8 best heads

    @property
    def standardized(self) -> Floats:
        """The trajectories, each logit over its within-class deviation, [n_test, m]."""
        return self.trajectory / self.scale

    @property
    def best_layer(self) -> int:
        """The layer of the single best head by training AUROC, ties to the lowest (the ITI rule)."""
        return int(np.argmax(self.auroc))


def fit_head(
    x: NDArray[np.floating],
    label: NDArray[np.integer],
    tasks: Sequence[Task],
    site: Site,
    balance: ClassBalance,
    share: Floats | None = None,
) -> list[tuple[Floats, float] | None]:
    """Each task's raw-space weight [d] and bias of one head's probe, not yet divided by its norm: x [n, d], label [n].

    Eq. standardize, standardized-probe and raw-space-probe.  L1 at the attention site, all tasks at once (``solver``);
    L2 through lbfgs, whose intercept is free, at the residual stream.  None where every weight is zero.  ``share`` [n]:
    soft labels; rows of which both classes have a part count twice in the attention site's standardisation.
    """
    if site is Site.RESIDUAL_STREAM:
        return [
            _ridge(x[task.train], copies_of(label[task.train], None if share is None else share[task.train]),
                   task.c, balance)
            for task in tasks
        ]  # fmt: skip
    copies = copies_of(label, share)
    names = [task.train.tobytes() for task in tasks]
    first = {name: place for place, name in reversed(list(enumerate(names)))}  # partitions by their first task
    number = {name: place for place, name in enumerate(first)}
    weight = np.zeros((len(first), len(copies.row)))
    for name, place in first.items():
        inside = np.zeros(len(x), bool)
        inside[tasks[place].train] = True
        kept = inside[copies.row]
        weight[number[name], kept] = row_weights(copies.label[kept], balance, copies.weight[kept])
    partition = np.array([number[name] for name in names])
    c = np.array([task.c for task in tasks])
    rows = np.ascontiguousarray(x if share is None else x[copies.row], np.float32)[None]
    solution = solve(rows, copies.label, weight, partition, c)
    return [
        (direction, float(bias)) if np.any(direction) else None
        for direction, bias in zip(solution.weight[0], solution.intercept[0], strict=True)
    ]


def standardise(x: NDArray[np.floating]) -> tuple[Floats, Floats, Floats]:
    """Standardise x [n, d] (Eq. standardize): a float64 copy, its mean [d] and deviation [d].

    A constant column becomes zeros with deviation 1: its computed deviation is rounding error, and dividing by it would
    make a feature of noise.
    """
    z = x.astype(np.float64)
    mean = z.mean(axis=0)
    z -= mean
    std = np.sqrt(np.einsum("nd,nd->d", z, z) / len(z))
    constant = std <= CONSTANT * np.abs(mean)
    std[constant] = 1.0
    z /= std
    z[:, constant] = 0.0
    return z, mean, std


def penalty(kind: Literal["l1", "l2"]) -> dict[str, Any]:
    """scikit-learn's keyword argument for a penalty, renamed in 1.8."""
    return {"penalty": kind} if _HAS_PENALTY else {"l1_ratio": 1.0 if kind == "l1" else 0.0}


def row_weights(label: NDArray[np.integer], balance: ClassBalance, weight: Floats | None = None) -> Floats:
    """Weights of the training rows, [n], that balance the classes; ``downsample`` zeroes rows of the larger one.

    ``weight`` [n]: how much a row counts before it is balanced; 1 where it is not given.
    """
    if balance == "downsample":
        kept = np.zeros(len(label))
        kept[_downsample(label)] = 1.0
        return kept
    counts = np.ones(len(label)) if weight is None else weight
    sizes = np.bincount(label, counts, minlength=2)
    balanced: Floats = counts * np.where(label == 1, counts.sum() / (2.0 * sizes[1]), counts.sum() / (2.0 * sizes[0]))
    return balanced


def _ridge(x: NDArray[np.floating], copies: Copies, c: float, balance: ClassBalance) -> tuple[Floats, float] | None:
    """The residual stream's L2 probe of one partition, not yet divided by its norm."""
    if balance == "downsample":  # never with soft labels
        kept = _downsample(copies.label)
        x, copies = x[kept], copies_of(copies.label[kept], None)
    z, mean, std = standardise(x)
    weight = row_weights(copies.label, "weights", copies.weight)
    # Rows were checked on collection; checking them again costs as much as a small fit.
    with config_context(assume_finite=True, skip_parameter_validation=True):
        model = LogisticRegression(C=c, max_iter=5000, **penalty("l2"))
        model.fit(z[copies.row], copies.label, sample_weight=weight)
    raw = model.coef_[0] / std
    return (raw, float(model.intercept_[0] - raw @ mean)) if np.any(raw) else None


def fit_probes(
    readouts: Readouts,
    tasks: Sequence[Task],
    *,
    balance: ClassBalance,
    jobs: int,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    relax: bool = False,
    blank: bool = False,
    several: bool = False,
) -> list[ProbeFit | NoDirection]:
    """One ProbeFit per task, over all or the given layers and heads; each layer is read once for all tasks.

    Where every probe of a layer is zero, the task's result is a NoDirection: returned, since a search over C may
    continue without it; ``require`` raises it.  With ``relax``, once C was chosen, such a layer is fitted
    again with the next C of ``RELAXED`` that leaves it a direction.  With ``blank``, for folds, whose probes are never
    published, a layer that no C gives a direction, as where its readouts are constant on the training rows, gets
    logits of zero: it tells nothing there.  Without ``several`` only the best head of a layer is kept.
    """
    for task in tasks:
        if (share := readouts.share_of(task.train)) is not None:
            check_shares(share)
    geometry, site = readouts.file.geometry, readouts.file.site
    layers = range(geometry.num_layers) if layers is None else layers
    heads = range(geometry.heads(site)) if heads is None else heads
    pieces = max(1, min(len(heads), -(-2 * jobs // len(layers))))  # fewer layers than processes: split the heads
    chunks = [[int(head) for head in chunk] for chunk in np.array_split(np.asarray(heads), pieces)]
    items = [(layer, chunk) for layer in layers for chunk in chunks]
    keep = max(SEVERAL) if several else 1
    if jobs == 1 or len(items) == 1:
        best = [_fit_layer(readouts, tasks, layer, chunk, balance, keep) for layer, chunk in items]
    else:
        with parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1):
            best = Parallel()(
                delayed(_fit_layer)(readouts, tasks, layer, chunk, balance, keep) for layer, chunk in items
            )
    results: list[ProbeFit | NoDirection] = []
    for number, task in enumerate(tasks):
        chosen = []
        for place, layer in enumerate(layers):
            candidates = [pair for piece in range(pieces) for pair in best[place * pieces + piece][number]]
            if not candidates and relax:
                candidates = _relaxed(readouts, task, layer, list(map(int, heads)), balance, keep)
            if not candidates and blank:
                candidates = [_blank(task, int(heads[0]), geometry.dim(site))]
            if not candidates:
                results.append(_no_direction(layer, task, len(heads), site))
                break
            chosen.append(_best(candidates, keep))
        else:
            results.append(_stack(chosen))
    return results


def _relaxed(
    readouts: Readouts, task: Task, layer: int, heads: list[int], balance: ClassBalance, keep: int
) -> Candidates:
    """The layer's best probes at the first larger C that has one; empty where none has."""
    for factor in RELAXED:
        (found,) = _fit_layer(readouts, [replace(task, c=task.c * factor)], layer, heads, balance, keep)
        if found:
            return found
    return []


def _best(candidates: Candidates, keep: int) -> Candidates:
    """The best by training AUROC, best first; ties stay with the lower head."""
    return sorted(candidates, key=lambda pair: -pair[0].auroc)[:keep]


def _blank(task: Task, head: int, dim: int) -> tuple[HeadProbe, Floats]:
    """A probe without a direction, which tells nothing, and its test logits."""
    return HeadProbe(head, np.zeros(dim), bias=0.0, scale=1.0, auroc=0.5), np.zeros(len(task.test))


def _stack(layers: Sequence[Candidates]) -> ProbeFit:
    """The best probes of each layer, with their test logits, as arrays over layers."""
    probes = [candidates[0][0] for candidates in layers]
    means = [[np.mean([logits for _, logits in candidates[:k]], axis=0) for candidates in layers] for k in SEVERAL]
    return ProbeFit(
        np.array([probe.head for probe in probes], np.int32),
        np.stack([probe.direction for probe in probes]),
        np.array([probe.bias for probe in probes]),
        np.array([probe.scale for probe in probes]),
        np.array([probe.auroc for probe in probes]),
        np.stack([candidates[0][1] for candidates in layers], axis=1),
        np.mean(means, axis=1),
    )


def require(results: Sequence[ProbeFit | NoDirection]) -> list[ProbeFit]:
    """The fits.  Raises the first NoDirection."""
    fits = []
    for result in results:
        if isinstance(result, NoDirection):
            raise result
        fits.append(result)
    return fits


def _fit_layer(
    readouts: Readouts, tasks: Sequence[Task], layer: int, heads: Sequence[int], balance: ClassBalance, keep: int
) -> list[Candidates]:
    """The best of ``heads`` at one layer for each task, with their test logits, best first; none where all are zero."""
    best: list[Candidates] = [[] for _ in tasks]
    with threadpool_limits(1), one_torch_thread():  # one order of summation, whatever the number of cores
        for head in heads:
            x = readouts.file.head(layer, head)[readouts.index]
            fitted = fit_head(x, readouts.label, tasks, readouts.file.site, balance, readouts.share)
            for number, (task, raw) in enumerate(zip(tasks, fitted, strict=True)):
                if raw is None:
                    continue
                probe = unit_probe(x, readouts.label, task, head, raw, readouts.share)
                current = best[number]
                if len(current) < keep or probe.auroc > current[-1][0].auroc:
                    logits = project(x, task.test, probe.direction, probe.bias)
                    best[number] = _best([*current, (probe, logits)], keep)
    return best


def unit_probe(
    x: NDArray[np.float32],
    label: NDArray[np.integer],
    task: Task,
    head: int,
    raw: tuple[Floats, float],
    share: Floats | None = None,
) -> HeadProbe:
    """Divide ``fit_head``'s weight and bias by the norm (Eq. raw-space-normalized-probe) and rate the probe on the
    training rows: x [n, d], label [n], share [n]."""
    norm = float(np.linalg.norm(raw[0]))
    direction, bias = raw[0] / norm, raw[1] / norm
    inside, soft = label[task.train], None if share is None else share[task.train]
    logits = project(x, task.train, direction, bias)
    copies = copies_of(inside, soft)
    scale = within_class_std(copies.label, logits[copies.row], copies.weight)
    return HeadProbe(head, direction, bias, scale, soft_auroc(inside, soft, logits))


def project(x: NDArray[np.float32], rows: Index, direction: Floats, bias: float) -> Floats:
    """Truth logits of ``rows`` [n] in float64, in chunks, so that no full float64 copy is made."""
    logits = np.empty(len(rows))
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        logits[start : start + _CHUNK] = x[chunk].astype(np.float64) @ direction + bias
    return logits


def within_class_std(label: NDArray[np.integer], values: Floats, weight: Floats | None = None) -> float:
    """Pooled standard deviation around the class means: label [n], values [n], weight [n]; 1 where it is zero."""
    rest = values.astype(np.float64)
    counts = np.ones(len(rest)) if weight is None else weight
    for value in (0, 1):
        inside = label == value
        rest[inside] -= np.average(rest[inside], weights=counts[inside])
    return float(np.sqrt(np.average(rest**2, weights=counts))) or 1.0


def _downsample(label: NDArray[np.integer]) -> Index:
    """Rows with equal class sizes, drawn with a fixed seed, in the data's order."""
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
