"""One outer split of one set: everything that our method and the ablations need of it, fitted once
and kept on disk. Everything learned comes from the training side: C, the heads, the probes, and, by
an inner cross-fit, the training rows' out-of-fold trajectories.  Probes are those of
``fitting.probes`` (``fit_head``), kept for every head."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from joblib import cpu_count
from numpy.typing import NDArray
from scipy.special import logit

from hallutracer_research.evaluation.methods import ANSWER_MAX, RUNNING
from hallutracer_research.evaluation.methods.base import (
    MethodInputs,
    best_c,
    in_processes,
    linear_logits,
)
from hallutracer_research.evaluation.methods.references import kind_prior
from hallutracer_research.evaluation.options import EvaluateOptions
from probes_store.local import atomic_write
from service.errors import NoDirection, TrainingError
from service.fitting.estimator import DepthMeanProbe
from service.fitting.folds import OuterFold, group_folds, outer_folds
from service.fitting.probes import LARGER_C, Floats, Index, Readouts, Task, fit_head, unit_probe
from service.fitting.solver import one_numpy_thread, one_torch_thread
from service.readout import Site
from service.risk import depth_mean


@dataclass(frozen=True, eq=False)
class HeadProbes:
    """The probes of one training side; a probe that is all zeros has an AUROC of 0 and zero
    logits."""

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
        """Return [n_test, m] of the selected heads, or of ``head`` [m]."""
        chosen = self.selected if head is None else np.asarray(head)
        return np.take_along_axis(self.logits, chosen[None, :, None], axis=2)[..., 0].astype(
            np.float64
        )

    def of(self, head: NDArray[np.integer]) -> tuple[Floats, Floats]:
        """Return directions [m, d] and biases [m] of ``head`` [m]."""
        layers = np.arange(len(self.bias))
        return self.direction[layers, head], self.bias[layers, head]


def fit_all_heads(readouts: Readouts, tasks: Sequence[Task], *, jobs: int) -> list[HeadProbes]:
    """Fit and score all heads of all layers for each task, a layer without a probe at the first
    larger C with one. Raises NoDirection where a layer's probes are all zero at any."""
    geometry, site = readouts.file.geometry, readouts.file.site
    layers, count = geometry.num_layers, geometry.heads(site)
    chunks = np.array_split(np.arange(count), max(1, min(count, -(-2 * jobs // layers))))
    items = [
        (readouts, tuple(tasks), layer, chunk.tolist())
        for layer in range(layers)
        for chunk in chunks
    ]
    parts = in_processes(_fit, items, jobs)
    results = []
    for number, task in enumerate(tasks):
        of_task = [part[number] for part in parts]
        direction, bias, scale, quality, logits = (
            np.concatenate(chunk).reshape(layers, count, *chunk[0].shape[1:])
            for chunk in zip(*of_task, strict=True)
        )
        for layer in np.flatnonzero(quality.max(axis=1) == 0).tolist():
            larger = (replace(task, c=task.c * factor) for factor in LARGER_C)
            found = (_fit((readouts, (one,), layer, list(range(count))))[0] for one in larger)
            relaxed = next((of_heads for of_heads in found if of_heads[3].max() > 0), None)
            if relaxed is None:
                where = f"at C = {task.c:g} on {len(task.train)} rows"
                raise NoDirection(
                    f"layer {layer}: every probe is zero {where}; give a larger C", param="c"
                )
            for values, of_layer in zip(
                (direction, bias, scale, quality, logits), relaxed, strict=True
            ):
                values[layer] = of_layer
        by_row = np.ascontiguousarray(logits.transpose(2, 0, 1))
        results.append(HeadProbes(direction, bias, scale, quality, by_row))
    return results


def _fit(item: tuple[Readouts, tuple[Task, ...], int, list[int]]) -> list[list[NDArray[Any]]]:
    """Return direction, bias, scale, auroc and logits [n_test], stacked by head of one layer, for
    every task."""
    readouts, tasks, layer, heads = item
    fitted: list[list[tuple[Any, ...]]] = [[] for _ in tasks]
    with one_numpy_thread(), one_torch_thread():
        for head in heads:
            x = readouts.file.head(layer, head)[readouts.index]
            fits = fit_head(x, readouts.label, tasks, Site.ATTENTION_HEAD, "weights")
            for of_task, task, fit in zip(fitted, tasks, fits, strict=True):
                if fit is None:
                    of_task.append(
                        (np.zeros(x.shape[1]), 0.0, 1.0, 0.0, np.zeros(len(task.test), np.float32))
                    )
                    continue
                probe = unit_probe(x, readouts.label, task, head, fit)
                of_task.append((*probe[1:5], probe.logits.astype(np.float32)))
    return [list(map(np.stack, zip(*of_task, strict=True))) for of_task in fitted]


RIDGE_GRID = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def trajectory_ridge(
    trajectory: Floats, label: Index, group: Index, test_trajectory: Floats, seed: int
) -> Floats:
    """Return scores [n_test] of an L2 logistic regression on the m truth logits: what the mean
    reads, but weighed. trajectory [n_train, m], label [n_train], group [n_train], test
    [n_test, m].  Trajectories are out of fold (in-fold ones look better than those of new rows
    are); group-disjoint inner folds choose C by AUROC, ties to the stronger penalty.  Raises
    TrainingError where an inner fold lacks a class."""
    pairs = group_folds(label, group, np.arange(len(label)), 3, seed, what="trajectory inner fold")
    with one_numpy_thread():  # sums in one order, whatever the number of cores
        c, _ = best_c(trajectory, label, pairs, RIDGE_GRID)
        return -linear_logits(c, "l2", trajectory, label, test_trajectory)


@dataclass(frozen=True, eq=False)
class Split:
    """One fold of one seed.  Trajectories are of unit-norm probes."""

    seed: int
    fold: int
    train: Index
    test: Index
    c: float
    probes: HeadProbes  # fitted on the whole training side; logits of the test side
    train_trajectory: Floats  # [n_train, m] out of fold, by the inner probes
    train_crossed: (
        Floats  # [n_train, m - 1] phi_l of layer l + 1's readout (Def. cross-readout), the same way
    )
    test_crossed: Floats  # [n_test, m - 1]

    @property
    def test_trajectory(self) -> Floats:
        """[n_test, m]."""
        return self.probes.trajectory()


def outer_splits(inputs: MethodInputs, options: EvaluateOptions) -> list[OuterFold]:
    """Return every outer split, seeds in order."""
    return outer_folds(inputs.label, inputs.group, folds=options.folds, seeds=range(options.seeds))


def fit_options(options: EvaluateOptions) -> DepthMeanProbe:
    """Return the estimator with these options."""
    jobs = options.jobs or cpu_count()
    return DepthMeanProbe(
        options.c or "auto", c_grid=options.c_grid, inner_folds=options.inner_folds, n_jobs=jobs
    )


def fit_split(
    inputs: MethodInputs, seed: int, fold: int, train: Index, test: Index, options: EvaluateOptions
) -> Split:
    """Choose C, then fit the training side and its inner folds together.  Raises NoDirection,
    TrainingError."""
    fits = fit_options(options)
    label, group = inputs.label, inputs.group
    readouts = inputs.heads
    c = fits.choose_c(readouts, group, train, seed).c
    inner = group_folds(label, group, train, options.inner_folds, seed, what="inner fold")
    tasks = [Task(train, test, c), *(Task(fitted, held, c) for fitted, held in inner)]
    outer, *parts = fit_all_heads(readouts, tasks, jobs=fits.n_jobs)
    place = {int(row): number for number, row in enumerate(train)}
    trajectory = np.full((len(train), outer.logits.shape[1]), np.nan)
    crossed = np.full((len(train), outer.logits.shape[1] - 1), np.nan)
    for (_, held), part in zip(inner, parts, strict=True):
        where = [place[int(row)] for row in held]
        trajectory[where] = part.trajectory()
        crossed[where] = cross(readouts, part, held)
    return Split(
        seed, fold, train, test, c, outer, trajectory, crossed, cross(readouts, outer, test)
    )


def cross(readouts: Readouts, probes: HeadProbes, rows: Index) -> Floats:
    """Return phi_l of layer l + 1's readout of the same head (Def. cross-readout), [r, m - 1]."""
    head = probes.selected
    direction, bias = probes.of(head)
    crossed = np.empty((len(rows), len(head) - 1))
    for layer, number in enumerate(head[:-1].tolist()):
        x = readouts.file.head(layer + 1, number)[readouts.index[rows]].astype(np.float64)
        crossed[:, layer] = x @ direction[layer] + bias[layer]
    return crossed


def chosen_depth_mean(
    readouts: Readouts, group: Index, train: Index, test: Index, seed: int, options: EvaluateOptions
) -> Floats:
    """Return depth means [n_test] of probes of one site; C is chosen for it on the training
    side."""
    fits = fit_options(options)
    return depth_mean(
        fits.refit(readouts, train, test, fits.choose_c(readouts, group, train, seed).c).trajectory
    )


WEAK = 100.0  # C of a fit of two numbers on many rows


def with_kind(inputs: MethodInputs, split: Split) -> Floats:
    """Return scores [n_test] of a logistic regression on the log odds of the kind's share and the
    depth mean, both out of fold on the training side.  Raises TrainingError where rows name no
    kind, and where an inner fold lacks a class."""
    if len(set(inputs.kind.tolist())) < 2:
        raise TrainingError("the rows name fewer than two kinds", param="methods")
    train, prior = split.train, np.zeros(len(inputs.label))
    inner = group_folds(inputs.label, inputs.group, train, 3, split.seed, what="kind inner fold")
    for fitted, held in [*inner, (train, split.test)]:
        prior[held] = kind_prior(inputs, fitted, held)
    return _beside_depth_mean(inputs, split, logit(np.clip(prior, 1e-3, 1 - 1e-3)))


def with_entropy(read: Floats | None, inputs: MethodInputs, split: Split) -> Floats:
    """Return scores [n_test] of a logistic regression on the depth mean and the entropy of another
    token's
    distribution: ``read`` [n, 2].  Raises TrainingError where that was not read."""
    if read is None:
        raise TrainingError(
            "there is no other token to read beside the depth mean; leave it out", param="methods"
        )
    return _beside_depth_mean(inputs, split, read[:, 1])


def running(
    inputs: MethodInputs, split: Split, options: EvaluateOptions
) -> dict[str, NDArray[np.generic]]:
    """Return scores [n_test] of the test side's answers as they grow, by probes of whole answers'
    means: of the mean of each beginning, and of the one token whose risk is highest.  Raises
        TrainingError without answers."""
    if (behind := inputs.behind) is None:
        raise TrainingError("no answer's tokens were read; leave it out", param="methods")
    fits = fit_options(options)
    train, test = split.train, split.test
    fit = fits.refit(
        behind.mean, train, test, fits.choose_c(behind.mean, inputs.group, train, split.seed).c
    )
    dim = behind.mean.file.geometry.dim(Site.ATTENTION_HEAD)
    each = np.zeros((len(test), behind.tokens.shape[1]))
    for layer, (head, direction, bias) in enumerate(
        zip(fit.head.tolist(), fit.direction, fit.bias, strict=True)
    ):
        columns = behind.tokens[test, :, layer, head * dim : (head + 1) * dim].astype(np.float64)
        each -= (columns @ direction + bias) / len(fit.head)
    place = np.arange(each.shape[1])
    grown = np.cumsum(each, axis=1) / (1 + place)
    ends = np.minimum(behind.said[test], each.shape[1])
    found: dict[str, NDArray[np.generic]] = {
        name: grown[np.arange(len(test)), np.minimum(count, ends) - 1]
        for name, count in RUNNING.items()
    }
    return found | {ANSWER_MAX: np.where(place < ends[:, None], each, -np.inf).max(axis=1)}


def before_and_behind(
    behind: Readouts, inputs: MethodInputs, split: Split, options: EvaluateOptions
) -> Floats:
    """Return scores [n_test] of a logistic regression on two depth means, of the prompt's end and
    of ``behind``, both out of fold on the training side.  Raises TrainingError where an inner fold
    lacks a class."""
    fits, train = fit_options(options), split.train
    depth_means = np.zeros(len(inputs.label))
    c = fits.choose_c(behind, inputs.group, train, split.seed).c
    inner = group_folds(
        inputs.label, inputs.group, train, options.inner_folds, split.seed, what="inner fold"
    )
    for fitted, held in [*inner, (train, split.test)]:
        depth_means[held] = depth_mean(fits.refit(behind, fitted, held, c).trajectory)
    return _beside_depth_mean(inputs, split, depth_means)


def _beside_depth_mean(inputs: MethodInputs, split: Split, column: Floats) -> Floats:
    sides = (split.train, split.train_trajectory), (split.test, split.test_trajectory)
    x, x_test = (
        np.stack([column[rows], depth_mean(trajectory)], axis=1) for rows, trajectory in sides
    )
    with one_numpy_thread():
        return -linear_logits(WEAK, "l2", x, inputs.label[split.train], x_test)


def shuffled_depth_mean(inputs: MethodInputs, split: Split, options: EvaluateOptions) -> Floats:
    """Return depth means of the test side, [n_test], by probes of shuffled training labels: a leak
    shows above .5."""
    label = inputs.label.copy()
    label[split.train] = np.random.default_rng([split.seed, split.fold]).permutation(
        label[split.train]
    )
    readouts = replace(inputs.heads, label=label)
    return depth_mean(
        fit_options(options).refit(readouts, split.train, split.test, split.c).trajectory
    )


def pooled_depth_mean(readouts: Readouts, split: Split, options: EvaluateOptions) -> Floats:
    """Return depth means of the test side from another pooling of the attention heads, at the
    split's C: [n_test]."""
    task = Task(split.train, split.test, split.c)
    return depth_mean(
        fit_all_heads(readouts, [task], jobs=fit_options(options).n_jobs)[0].trajectory()
    )


def kept(
    path: Path, make: Callable[[], dict[str, NDArray[np.generic]]]
) -> dict[str, NDArray[np.generic]]:
    """Return the arrays in ``path`` (.npz), made and written first where it is missing: a killed
    run loses nothing."""
    if path.exists():
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    made = make()
    buffer = io.BytesIO()
    np.savez(buffer, **made)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, buffer.getvalue())
    return made


def kept_split(
    folder: Path,
    inputs: MethodInputs,
    seed: int,
    fold: int,
    train: Index,
    test: Index,
    options: EvaluateOptions,
) -> Split:
    """Return ``fit_split``, or what an earlier run has kept of it."""
    of_probes = [field.name for field in fields(HeadProbes)]
    of_split = ("train_trajectory", "train_crossed", "test_crossed")

    def make() -> dict[str, NDArray[np.generic]]:
        made = fit_split(inputs, seed, fold, train, test, options)
        probes = {name: getattr(made.probes, name) for name in of_probes}
        return {"c": np.array(made.c)} | probes | {name: getattr(made, name) for name in of_split}

    arrays: dict[str, Any] = kept(folder / f"seed{seed}-fold{fold}.npz", make)
    probes = HeadProbes(*(arrays[name] for name in of_probes))
    return Split(
        seed, fold, train, test, float(arrays["c"]), probes, *(arrays[name] for name in of_split)
    )
