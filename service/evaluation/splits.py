"""One outer split of one set: everything that our method and the ablations need of it, fitted once and kept.

Everything learned comes from the training side: C, the heads, the probes, and, by an inner cross-fit, what
trajectories of rows look like that the probes have not seen.  Knows no table.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from joblib import cpu_count
from numpy.typing import NDArray

from probes_store.durable import atomic_write
from service.errors import TrainingError
from service.evaluation.every_head import EveryHead, fit_every_head
from service.evaluation.methods.base import Material
from service.evaluation.options import EvaluateOptions
from service.fitting.calibration import FitOptions, choose_c, cross_fit, refit
from service.fitting.fit import Floats, Index, Readouts, Task
from service.fitting.folds import OuterFold, group_folds, outer_folds
from service.readout import Site
from service.risk import depth_mean


@dataclass(frozen=True, eq=False)
class Split:
    """One fold of one seed.  Trajectories are of unit-norm probes."""

    seed: int
    fold: int
    train: Index
    test: Index
    c: float
    every: EveryHead  # of the whole training side, logits of the test side
    train_trajectory: Floats  # [n_train, m] by inner probes that have not seen the row
    train_crossed: Floats  # [n_train, m - 1] phi_l of layer l + 1's readout (Def. cross-readout), the same way
    test_crossed: Floats  # [n_test, m - 1]

    @property
    def test_trajectory(self) -> Floats:
        """[n_test, m]."""
        return self.every.trajectory()


def outer_splits(material: Material, options: EvaluateOptions) -> list[OuterFold]:
    """Every outer split, seeds in order."""
    return outer_folds(material.label, material.group, folds=options.folds, seeds=range(options.seeds))


def fit_options(options: EvaluateOptions) -> FitOptions:
    """What the trainer's own functions want to know."""
    return FitOptions("weights", options.inner_folds, options.c, options.c_grid, options.jobs or cpu_count())


def fit_split(material: Material, seed: int, fold: int, train: Index, test: Index, options: EvaluateOptions) -> Split:
    """Choose C, then fit the training side and its inner folds together.  Raises NoDirection, TrainingError."""
    fits = fit_options(options)
    label, group, readouts = material.label, material.group, material.heads
    c = choose_c(readouts, group, train, seed, fits).c
    inner = group_folds(label, group, train, options.inner_folds, seed, what="inner fold")
    tasks = [Task(train, test, c), *(Task(fitted, held, c) for fitted, held in inner)]
    outer, *parts = fit_every_head(readouts, tasks, jobs=fits.jobs)
    place = {int(row): number for number, row in enumerate(train)}
    trajectory = np.full((len(train), outer.logits.shape[1]), np.nan)
    crossed = np.full((len(train), outer.logits.shape[1] - 1), np.nan)
    for (_, held), part in zip(inner, parts, strict=True):
        where = [place[int(row)] for row in held]
        trajectory[where] = part.trajectory()
        crossed[where] = cross(readouts, part, held)
    return Split(seed, fold, train, test, c, outer, trajectory, crossed, cross(readouts, outer, test))


def cross(readouts: Readouts, every: EveryHead, rows: Index) -> Floats:
    """phi_l of layer l + 1's readout of the same head (Def. cross-readout), [r, m - 1]."""
    head = every.selected
    direction, bias = every.of(head)
    dim, layers = direction.shape[1], len(head)
    found = np.empty((len(rows), layers - 1))
    for layer in range(layers - 1):
        columns = slice(int(head[layer]) * dim, (int(head[layer]) + 1) * dim)
        x = readouts.file.layer(layer + 1)[readouts.index[rows], columns].astype(np.float64)
        found[:, layer] = x @ direction[layer] + bias[layer]
    return found


def residual_split(material: Material, split: Split, options: EvaluateOptions) -> tuple[Floats, Floats]:
    """Depth means of the residual-stream readout: test side [n_test], training side out of fold [n_train]."""
    if material.residual is None:
        raise TrainingError("the residual stream was not extracted", param="methods")
    fits = fit_options(options)
    readouts = material.residual
    c = choose_c(readouts, material.group, split.train, split.seed, fits).c
    inner = cross_fit(readouts, material.group, split.train, c, options.inner_folds, (split.seed,), fits)
    fitted = refit(readouts, split.train, split.test, c, fits)
    return depth_mean(fitted.trajectory), depth_mean(inner.unit_norm[0])


def pooled_depth_mean(readouts: Readouts, split: Split, options: EvaluateOptions) -> Floats:
    """Depth means of the test side for another readout of the same rows, at the split's C: [n_test]."""
    if readouts.file.site is Site.ATTENTION_HEAD:
        task = Task(split.train, split.test, split.c)
        return depth_mean(fit_every_head(readouts, [task], jobs=fit_options(options).jobs)[0].trajectory())
    return depth_mean(refit(readouts, split.train, split.test, split.c, fit_options(options)).trajectory)


def kept(path: Path, make: Callable[[], dict[str, NDArray[np.generic]]]) -> dict[str, NDArray[np.generic]]:
    """Arrays of ``path`` (.npz), made where it is not there yet: what a killed run had finished is not done again."""
    if path.exists():
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    made = make()
    buffer = io.BytesIO()
    np.savez(buffer, **made)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, buffer.getvalue())
    return made


def kept_split(
    folder: Path, material: Material, seed: int, fold: int, train: Index, test: Index, options: EvaluateOptions
) -> Split:
    """``fit_split``, or what an earlier run has kept of it."""
    every = [field.name for field in fields(EveryHead)]
    own = ("train_trajectory", "train_crossed", "test_crossed")

    def make() -> dict[str, NDArray[np.generic]]:
        made = fit_split(material, seed, fold, train, test, options)
        return (
            {"c": np.array(made.c)}
            | {name: getattr(made.every, name) for name in every}
            | {name: getattr(made, name) for name in own}
        )

    found = kept(folder / f"seed{seed}-fold{fold}.npz", make)
    return Split(
        seed,
        fold,
        train,
        test,
        float(found["c"]),
        EveryHead(*(found[name] for name in every)),  # type: ignore[arg-type]
        *(found[name] for name in own),  # type: ignore[arg-type]
    )
