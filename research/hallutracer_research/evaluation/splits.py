"""One outer split of one set: everything that our method and the ablations need of it, fitted once
and kept on disk. Everything learned comes from the training side: C, the heads, the probes, and, by
an inner cross-fit, the training rows' out-of-fold trajectories.  Probes are those of
``fitting.probes`` (``fit_head``), kept for every head."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from joblib import cpu_count
from numpy.typing import NDArray
from scipy.special import logit

from hallutracer_research.evaluation.methods import ANSWER_MAX, RUNNING
from hallutracer_research.evaluation.methods.base import (
    Fold,
    MethodInputs,
    best_c,
    linear_logits,
    required,
)
from hallutracer_research.evaluation.methods.references import kind_prior
from hallutracer_research.evaluation.options import EvaluateOptions
from probes_store.local import atomic_write
from service.errors import NoDirection, TrainingError
from service.fitting.estimator import DepthMeanProbe
from service.fitting.folds import OuterFold, group_folds, outer_folds
from service.fitting.probes import (
    LARGER_C,
    Floats,
    Index,
    Labels,
    ProbeFit,
    Readouts,
    Task,
    fit_probes,
)
from service.fitting.solver import one_numpy_thread
from service.readout import Site
from service.risk import depth_mean

PROBES = ("direction", "bias", "scale", "auroc")  # what ``HeadProbes`` has of each probe


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

    def trajectory(self, head: Labels | None = None) -> Floats:
        """Return [n_test, m] of the selected heads, or of ``head`` [m]."""
        chosen = self.selected if head is None else np.asarray(head)
        return np.take_along_axis(self.logits, chosen[None, :, None], axis=2)[..., 0].astype(
            np.float64
        )

    def of(self, head: Labels) -> tuple[Floats, Floats]:
        """Return directions [m, d] and biases [m] of ``head`` [m]."""
        layers = np.arange(len(self.bias))
        return self.direction[layers, head], self.bias[layers, head]


def fit_all_heads(readouts: Readouts, tasks: Sequence[Task], *, jobs: int) -> list[HeadProbes]:
    """Fit and score all heads of all layers for each task, a layer without a probe at the first
    larger C with one. Raises NoDirection where a layer's probes are all zero at any."""
    every_layer = range(readouts.file.geometry.num_layers)
    results = _fit_heads(readouts, tasks, every_layer, jobs)
    for task, probes in zip(tasks, results, strict=True):
        for layer in np.flatnonzero(probes.auroc.max(axis=1) == 0).tolist():
            relaxed = _with_larger_c(readouts, task, layer)
            for name in PROBES:
                getattr(probes, name)[layer] = getattr(relaxed, name)[0]
            probes.logits[:, layer] = relaxed.logits[:, 0]
    return results


def _with_larger_c(readouts: Readouts, task: Task, layer: int) -> HeadProbes:
    """Return one layer's probes at the first larger C that gives one.  Raises NoDirection."""
    for factor in LARGER_C:
        (probes,) = _fit_heads(readouts, [replace(task, c=task.c * factor)], [layer], 1)
        if probes.auroc.max() > 0:
            return probes
    where = f"at C = {task.c:g} on {len(task.train)} rows"
    raise NoDirection(f"layer {layer}: every probe is zero {where}; give a larger C", param="c")


def _fit_heads(
    readouts: Readouts, tasks: Sequence[Task], layers: Sequence[int], jobs: int
) -> list[HeadProbes]:
    """Return all heads' probes of these layers for each task."""
    by_head = [
        fit_probes(
            readouts,
            tasks,
            balance="weights",
            jobs=jobs,
            layers=layers,
            heads=[head],
            zero_layers=True,
        )
        for head in range(readouts.file.geometry.heads(readouts.file.site))
    ]
    return [_side_by_side(fits) for fits in zip(*by_head, strict=True)]


def _side_by_side(fits: Sequence[ProbeFit]) -> HeadProbes:
    """Return the probes of all heads from the fits of each."""
    direction, bias, scale, auroc = (
        np.stack(list(map(attrgetter(name), fits)), axis=1) for name in PROBES
    )
    logits = np.stack([fit.trajectory for fit in fits], axis=2).astype(np.float32)
    return HeadProbes(direction, bias, scale, np.where(direction.any(axis=2), auroc, 0.0), logits)


Arrays = dict[str, NDArray[Any]]
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

    def fold_of(self, inputs: MethodInputs, jobs: int | None = None) -> Fold:
        """Return these sides of the rows, for a method."""
        return Fold(inputs, self.train, self.test, self.seed, jobs)


def outer_splits(inputs: MethodInputs, options: EvaluateOptions) -> list[OuterFold]:
    """Return every outer split, seeds in order."""
    return outer_folds(inputs.label, inputs.group, folds=options.folds, seeds=range(options.seeds))


def fit_options(options: EvaluateOptions) -> DepthMeanProbe:
    """Return the estimator with these options."""
    jobs = options.jobs or cpu_count()
    return DepthMeanProbe(
        options.c or "auto", c_grid=options.c_grid, inner_folds=options.inner_folds, n_jobs=jobs
    )


def fit_split(inputs: MethodInputs, outer: OuterFold, options: EvaluateOptions) -> Split:
    """Choose C, then fit the training side and its inner folds together.  Raises NoDirection,
    TrainingError."""
    fits = fit_options(options)
    seed, _, train, test = outer
    label, group, readouts = inputs.label, inputs.group, inputs.heads
    c = fits.choose_c(readouts, group, train, seed).c
    inner = group_folds(label, group, train, options.inner_folds, seed, what="inner fold")
    tasks = [Task(train, test, c), *(Task(fitted, held, c) for fitted, held in inner)]
    probes, *of_inner = fit_all_heads(readouts, tasks, jobs=fits.n_jobs)
    layers = probes.logits.shape[1]
    trajectory = np.full((len(label), layers), np.nan)
    crossed = np.full((len(label), layers - 1), np.nan)
    for (_, held), of_fold in zip(inner, of_inner, strict=True):
        trajectory[held] = of_fold.trajectory()
        crossed[held] = cross(readouts, of_fold, held)
    test_crossed = cross(readouts, probes, test)
    return Split(*outer, c, probes, trajectory[train], crossed[train], test_crossed)


def cross(readouts: Readouts, probes: HeadProbes, rows: Index) -> Floats:
    """Return phi_l of layer l + 1's readout of the same head (Def. cross-readout), [r, m - 1]."""
    head = probes.selected
    direction, bias = probes.of(head)
    crossed = np.empty((len(rows), len(head) - 1))
    for layer, number in enumerate(head[:-1].tolist()):
        x = readouts.file.head(layer + 1, number)[readouts.index[rows]].astype(np.float64)
        crossed[:, layer] = x @ direction[layer] + bias[layer]
    return crossed


def chosen_depth_mean(readouts: Readouts, fold: Fold, options: EvaluateOptions) -> Floats:
    """Return depth means [n_test] of probes of one site; C is chosen for it on the training
    side."""
    return depth_mean(_chosen_fit(readouts, fold, options).trajectory)


def _chosen_fit(readouts: Readouts, fold: Fold, options: EvaluateOptions) -> ProbeFit:
    fits = fit_options(options)
    c = fits.choose_c(readouts, fold.inputs.group, fold.train, fold.seed).c
    return fits.refit(readouts, fold.train, fold.test, c)


WEAK = 100.0  # C of a fit of two numbers on many rows


def with_kind(inputs: MethodInputs, split: Split) -> Floats:
    """Return scores [n_test] of a logistic regression on the log odds of the kind's share and the
    depth mean, both out of fold on the training side.  Raises TrainingError where rows name no
    kind, and where an inner fold lacks a class."""
    if len(set(inputs.kind.tolist())) < 2:
        raise TrainingError("the rows name fewer than two kinds", param="methods")
    shares = _out_of_fold(split.fold_of(inputs), 3, "kind inner fold", kind_prior)
    return _beside_depth_mean(inputs, split, logit(np.clip(shares, 1e-3, 1 - 1e-3)))


def with_entropy(first_token: Floats | None, inputs: MethodInputs, split: Split) -> Floats:
    """Return scores [n_test] of a logistic regression on the depth mean and the entropy of another
    token's distribution: ``first_token`` [n, 2].  Raises TrainingError where that was not read."""
    first_token = required(first_token, "there is no other token to read beside the depth mean")
    return _beside_depth_mean(inputs, split, first_token[:, 1])


def running(inputs: MethodInputs, split: Split, options: EvaluateOptions) -> Arrays:
    """Return scores [n_test] of the test side's answers as they grow, by probes of whole answers'
    means: of the mean of each beginning, and of the one token whose risk is highest.  Raises
    TrainingError without answers."""
    behind, test = required(inputs.behind, "no answer's tokens were read"), split.test
    fit = _chosen_fit(behind.mean, split.fold_of(inputs), options)
    dim = behind.mean.file.geometry.dim(Site.ATTENTION_HEAD)
    risks = np.zeros((len(test), behind.tokens.shape[1]))  # of each token by itself
    for layer, (head, direction, bias) in enumerate(
        zip(fit.head.tolist(), fit.direction, fit.bias, strict=True)
    ):
        columns = behind.tokens[test, :, layer, head * dim : (head + 1) * dim].astype(np.float64)
        risks -= (columns @ direction + bias) / len(fit.head)
    token = np.arange(risks.shape[1])
    grown = np.cumsum(risks, axis=1) / (1 + token)
    ends = np.minimum(behind.answer_tokens[test], risks.shape[1])
    scores: Arrays = {
        name: grown[np.arange(len(test)), np.minimum(count, ends) - 1]
        for name, count in RUNNING.items()
    }
    return scores | {ANSWER_MAX: np.where(token < ends[:, None], risks, -np.inf).max(axis=1)}


def before_and_behind(
    behind: Readouts, inputs: MethodInputs, split: Split, options: EvaluateOptions
) -> Floats:
    """Return scores [n_test] of a logistic regression on two depth means, of the prompt's end and
    of ``behind``, both out of fold on the training side.  Raises TrainingError where an inner fold
    lacks a class."""
    fits = fit_options(options)
    c = fits.choose_c(behind, inputs.group, split.train, split.seed).c

    def mean(fold: Fold) -> Floats:
        return depth_mean(fits.refit(behind, fold.train, fold.test, c).trajectory)

    means = _out_of_fold(split.fold_of(inputs), options.inner_folds, "inner fold", mean)
    return _beside_depth_mean(inputs, split, means)


def _out_of_fold(fold: Fold, folds: int, what: str, score: Callable[[Fold], Floats]) -> Floats:
    """Return a column [n]: the training side's by inner folds, the test side's by all of the
    training side."""
    column = np.zeros(len(fold.inputs.label))
    for train, test in [*fold.folds(folds, what), (fold.train, fold.test)]:
        column[test] = score(replace(fold, train=train, test=test))
    return column


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
    label, rng = inputs.label.copy(), np.random.default_rng([split.seed, split.fold])
    label[split.train] = rng.permutation(label[split.train])
    readouts = replace(inputs.heads, label=label)
    fit = fit_options(options).refit(readouts, split.train, split.test, split.c)
    return depth_mean(fit.trajectory)


def pooled_depth_mean(readouts: Readouts, split: Split, options: EvaluateOptions) -> Floats:
    """Return depth means of the test side from another pooling of the attention heads, at the
    split's C: [n_test]."""
    task = Task(split.train, split.test, split.c)
    (probes,) = fit_all_heads(readouts, [task], jobs=fit_options(options).n_jobs)
    return depth_mean(probes.trajectory())


def kept(path: Path, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays in ``path`` (.npz), made and written first where it is missing: a killed
    run loses nothing."""
    if path.exists():
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    arrays = make()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, buffer.getvalue())
    return arrays


def kept_score(path: Path, make: Callable[[], Floats]) -> Floats:
    """Return ``kept`` of one array."""
    return np.asarray(kept(path, lambda: {"score": make()})["score"], np.float64)


def kept_split(
    folder: Path, inputs: MethodInputs, outer: OuterFold, options: EvaluateOptions
) -> Split:
    """Return ``fit_split``, or what an earlier run has kept of it."""
    of_probes = (*PROBES, "logits")
    of_split = ("train_trajectory", "train_crossed", "test_crossed")

    def make() -> Arrays:
        split = fit_split(inputs, outer, options)
        of_both = vars(split.probes) | vars(split) | {"c": np.array(split.c)}
        return {name: of_both[name] for name in ("c", *of_probes, *of_split)}

    arrays: dict[str, Any] = kept(folder / f"seed{outer.seed}-fold{outer.fold}.npz", make)
    probes = HeadProbes(*(arrays[name] for name in of_probes))
    return Split(*outer, float(arrays["c"]), probes, *(arrays[name] for name in of_split))
