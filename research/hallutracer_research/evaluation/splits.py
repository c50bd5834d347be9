"""One outer split of one set: everything that our method and the ablations need of it, fitted once and kept on disk.

Everything learned comes from the training side: C, the heads, the probes, and, by an inner cross-fit, the training
rows' out-of-fold trajectories.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from joblib import cpu_count
from numpy.typing import NDArray

from hallutracer_research.evaluation.head_probes import HeadProbes, fit_all_heads
from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.methods.trajectory_ridge import trajectory_ridge
from hallutracer_research.evaluation.options import EvaluateOptions
from probes_store.local import atomic_write
from service.fitting.calibration import FitOptions, choose_c, refit
from service.fitting.fit import Floats, Index, Readouts, Task
from service.fitting.folds import OuterFold, group_folds, outer_folds
from service.risk import depth_mean


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
    train_crossed: Floats  # [n_train, m - 1] phi_l of layer l + 1's readout (Def. cross-readout), the same way
    test_crossed: Floats  # [n_test, m - 1]

    @property
    def test_trajectory(self) -> Floats:
        """[n_test, m]."""
        return self.probes.trajectory()


def outer_splits(inputs: MethodInputs, options: EvaluateOptions) -> list[OuterFold]:
    """Every outer split, seeds in order."""
    return outer_folds(inputs.label, inputs.group, folds=options.folds, seeds=range(options.seeds))


def fit_options(options: EvaluateOptions) -> FitOptions:
    """The options of the functions in ``fitting``."""
    return FitOptions("weights", options.inner_folds, options.c, options.c_grid, options.jobs or cpu_count())


def fit_split(inputs: MethodInputs, seed: int, fold: int, train: Index, test: Index, options: EvaluateOptions) -> Split:
    """Choose C, then fit the training side and its inner folds together.  Raises NoDirection, TrainingError."""
    fits = fit_options(options)
    label, group, readouts = inputs.label, inputs.group, inputs.heads
    c = choose_c(readouts, group, train, seed, fits).c
    inner = group_folds(label, group, train, options.inner_folds, seed, what="inner fold")
    tasks = [Task(train, test, c), *(Task(fitted, held, c) for fitted, held in inner)]
    outer, *parts = fit_all_heads(readouts, tasks, jobs=fits.jobs)
    place = {int(row): number for number, row in enumerate(train)}
    trajectory = np.full((len(train), outer.logits.shape[1]), np.nan)
    crossed = np.full((len(train), outer.logits.shape[1] - 1), np.nan)
    for (_, held), part in zip(inner, parts, strict=True):
        where = [place[int(row)] for row in held]
        trajectory[where] = part.trajectory()
        crossed[where] = cross(readouts, part, held)
    return Split(seed, fold, train, test, c, outer, trajectory, crossed, cross(readouts, outer, test))


def cross(readouts: Readouts, probes: HeadProbes, rows: Index) -> Floats:
    """phi_l of layer l + 1's readout of the same head (Def. cross-readout), [r, m - 1]."""
    head = probes.selected
    direction, bias = probes.of(head)
    crossed = np.empty((len(rows), len(head) - 1))
    for layer, number in enumerate(head[:-1].tolist()):
        x = readouts.file.head(layer + 1, number)[readouts.index[rows]].astype(np.float64)
        crossed[:, layer] = x @ direction[layer] + bias[layer]
    return crossed


def residual_depth_mean(inputs: MethodInputs, split: Split, options: EvaluateOptions) -> Floats:
    """Depth means of the test side, read from the residual stream, [n_test]; C is chosen for that site."""
    fits = fit_options(options)
    c = choose_c(inputs.residual, inputs.group, split.train, split.seed, fits).c
    return depth_mean(refit(inputs.residual, split.train, split.test, c, fits).trajectory)


def whole_trajectory(inputs: MethodInputs, split: Split) -> Floats:
    """Scores of the test side that rise with hallucination, [n_test], from all m truth logits."""
    label, group = inputs.label[split.train], inputs.group[split.train]
    return trajectory_ridge(split.train_trajectory, label, group, split.test_trajectory, split.seed)


def shuffled_depth_mean(inputs: MethodInputs, split: Split, options: EvaluateOptions) -> Floats:
    """Depth means of the test side, [n_test], by probes whose training labels were shuffled: a leak shows above .5."""
    label = inputs.label.copy()
    label[split.train] = np.random.default_rng([split.seed, split.fold]).permutation(label[split.train])
    readouts = replace(inputs.heads, label=label)
    return depth_mean(refit(readouts, split.train, split.test, split.c, fit_options(options)).trajectory)


def pooled_depth_mean(readouts: Readouts, split: Split, options: EvaluateOptions) -> Floats:
    """Depth means of the test side from another pooling of the attention heads, at the split's C: [n_test]."""
    task = Task(split.train, split.test, split.c)
    return depth_mean(fit_all_heads(readouts, [task], jobs=fit_options(options).jobs)[0].trajectory())


def kept(path: Path, make: Callable[[], dict[str, NDArray[np.generic]]]) -> dict[str, NDArray[np.generic]]:
    """The arrays in ``path`` (.npz), computed and written first where it is missing: a killed run loses nothing."""
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
    folder: Path, inputs: MethodInputs, seed: int, fold: int, train: Index, test: Index, options: EvaluateOptions
) -> Split:
    """``fit_split``, or what an earlier run has kept of it."""
    of_probes = [field.name for field in fields(HeadProbes)]
    of_split = ("train_trajectory", "train_crossed", "test_crossed")

    def make() -> dict[str, NDArray[np.generic]]:
        made = fit_split(inputs, seed, fold, train, test, options)
        return (
            {"c": np.array(made.c)}
            | {name: getattr(made.probes, name) for name in of_probes}
            | {name: getattr(made, name) for name in of_split}
        )

    arrays: dict[str, Any] = kept(folder / f"seed{seed}-fold{fold}.npz", make)
    probes = HeadProbes(*(arrays[name] for name in of_probes))
    return Split(seed, fold, train, test, float(arrays["c"]), probes, *(arrays[name] for name in of_split))
