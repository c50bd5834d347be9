"""From probes to a risk: choice of C, out-of-fold trajectories, the final classifier.

Depth means of rows that the probes were fitted on are too well separated and would give an over-confident risk.  The
classifier is therefore fitted on out-of-fold depth means, and the probes are then refitted on all rows.  The scale
carries over because every probe has unit norm: depth means of cross-fitted and of refitted probes are distances along
nearly the same directions.  ``scale_shift`` measures the difference, and evaluation.json records it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from probes_store.records import CONTEXT_SIGNALS
from service.errors import NoDirection
from service.fitting.fit import Floats, Index, ProbeFit, Readouts, Task, fit_probes, require
from service.fitting.folds import group_folds
from service.fitting.options import SEVERAL, ClassBalance
from service.fitting.soft_labels import copies_of
from service.risk import depth_mean, risk

_SEARCH_LAYERS = _SEARCH_HEADS = 8


@dataclass(frozen=True)
class FitOptions:
    """The options of the probe fits."""

    balance: ClassBalance
    inner_folds: int
    c: float | None  # None: chosen
    c_grid: tuple[float, ...]
    jobs: int


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """Logits of rows by probes that were fitted without them; the first axis is the seed."""

    unit_norm: Floats  # [seeds, n, m]
    standardized: Floats  # [seeds, n, m] each logit over its own fold's within-class training deviation
    best_head: Floats  # [seeds, n] the logit of the fold's single best head
    several: Floats  # [seeds, len(SEVERAL), n] depth means of several heads a layer, where these were kept


@dataclass(frozen=True)
class Choice:
    """A value of C and the scores it was chosen by."""

    c: float
    auroc: dict[str, float | None]  # grid value -> out-of-fold AUROC of the depth mean; None where a layer was zero


@dataclass(frozen=True, eq=False)
class FinalClassifier:
    """risk = 1 - sigmoid(weight . signals + intercept), signals in raw units."""

    weight: Floats  # [k]
    intercept: float

    def risk(self, signals: Floats) -> Floats:
        """Signals [..., k] -> [...]."""
        return risk(signals, self.weight, self.intercept)


def choose_c(
    readouts: Readouts, group: Index, rows: Index, seed: int, options: FitOptions, *, must: bool = True
) -> Choice:
    """Choose C by grouped cross-validation inside ``rows``: the largest out-of-fold AUROC of the depth mean.

    At most 8 layers and 8 heads, evenly spaced, take part, so that the search costs no more than a few full fits.  Ties
    go to the smaller C; a value that leaves a layer without a direction is excluded.
    Raises NoDirection: every value of the grid is excluded.
    """
    if options.c is not None:
        return Choice(options.c, {})
    if len(options.c_grid) == 1:
        return Choice(options.c_grid[0], {})
    geometry, site = readouts.file.geometry, readouts.file.site
    pairs = group_folds(readouts.label, group, rows, options.inner_folds, seed, what="inner fold")
    tasks = [Task(train, test, c) for c in options.c_grid for train, test in pairs]
    results = fit_probes(
        readouts,
        tasks,
        balance=options.balance,
        jobs=options.jobs,
        layers=_spaced(geometry.num_layers, _SEARCH_LAYERS),
        heads=_spaced(geometry.heads(site), _SEARCH_HEADS),
    )
    table: dict[str, float | None] = {}
    best: tuple[float, float] | None = None
    for place, c in enumerate(options.c_grid):
        fits = results[place * len(pairs) : (place + 1) * len(pairs)]
        table[f"{c:g}"] = None
        if any(isinstance(fit, NoDirection) for fit in fits):
            continue
        score = np.empty(len(readouts.label))
        for (_, test), fit in zip(pairs, require(fits), strict=True):
            score[test] = depth_mean(fit.trajectory)
        quality = readouts.auroc(rows, score[rows])
        table[f"{c:g}"] = quality
        if best is None or quality > best[0] + 1e-12:
            best = (quality, c)
    if best is None:
        if not must:
            return Choice(max(options.c_grid), table)
        require(results)
        raise AssertionError("unreachable: some fit had no direction")
    return Choice(best[1], table)


def cross_fit(
    readouts: Readouts,
    group: Index,
    rows: Index,
    c: float,
    folds: int,
    seeds: Sequence[int],
    options: FitOptions,
    *,
    several: bool = False,
) -> OutOfFold:
    """Out-of-fold logits of ``rows`` [n], in their order, for each seed; 0 where a fold's layer has no direction.

    ``several`` as in ``fit_probes``.

    Raises TrainingError.
    """
    pairs = [
        (place, train, test)
        for place, seed in enumerate(seeds)
        for train, test in group_folds(readouts.label, group, rows, folds, seed, what="cross-fit fold")
    ]
    tasks = [Task(train, test, c) for _, train, test in pairs]
    found = fit_probes(
        readouts, tasks, balance=options.balance, jobs=options.jobs, relax=True, blank=True, several=several
    )
    fits = require(found)
    where = np.full(len(readouts.label), -1)
    where[rows] = np.arange(len(rows))
    unit = np.full((len(seeds), len(rows), readouts.file.geometry.num_layers), np.nan)
    standardized, best_head = unit.copy(), unit[:, :, 0].copy()
    means = np.full((len(seeds), len(SEVERAL), len(rows)), np.nan)
    for (place, _, test), fit in zip(pairs, fits, strict=True):
        unit[place, where[test]] = fit.trajectory
        standardized[place, where[test]] = fit.standardized
        best_head[place, where[test]] = fit.trajectory[:, fit.best_layer]
        means[place][:, where[test]] = fit.several
    return OutOfFold(unit, standardized, best_head, means)


def fit_classifier(signals: Floats, label: NDArray[np.integer], share: Floats | None = None) -> FinalClassifier:
    """Practically unregularised logistic regression: signals [n, k], label [n] (1 factual).

    Signals are standardised for the solver, and the standardisation is folded into weight and intercept.  C = 1e4 only
    matters where the classes are separable and the weights would be infinite.  No class weights: the risk is a
    probability at the training data's share of hallucinations.  ``share`` [n]: soft labels to fit on.
    """
    mean, std = signals.mean(axis=0), signals.std(axis=0)
    std = np.where(std > 0, std, 1.0)
    copies = copies_of(label, share)
    with threadpool_limits(1):  # one order of summation, whatever the number of cores
        model = LogisticRegression(C=1e4, tol=1e-8, max_iter=5000)
        model.fit(((signals - mean) / std)[copies.row], copies.label, sample_weight=copies.weight)
    weight = model.coef_[0] / std
    intercept = float(model.intercept_[0] - weight @ mean)
    return FinalClassifier(weight, intercept)


def stacked(signals: Floats, label: NDArray[np.integer]) -> tuple[Floats, NDArray[np.integer]]:
    """Signals [seeds, n, k] and label [n] -> [seeds n, k] and [seeds n].

    Not averaged over seeds: an average over several probes is less noisy than the one probe that is served, and a
    classifier fitted on it would be over-confident.
    """
    return signals.reshape(-1, signals.shape[-1]), np.tile(label, len(signals))


def signal_matrix(
    trajectory: Floats, first_token: Floats, signals: Sequence[str], context: Floats | None = None
) -> Floats:
    """The classifier's input [..., n, k]: trajectory [..., n, m] scaled, first_token [n, 2], context [n, 2 or 3]."""
    mean = depth_mean(trajectory)
    columns = {
        "depth_mean": mean,
        "log_max_prob": np.broadcast_to(first_token[:, 0], mean.shape),
        "entropy": np.broadcast_to(first_token[:, 1], mean.shape),
    }
    if context is not None:
        told = zip(CONTEXT_SIGNALS, context.T, strict=False)  # the length is read where it tells something
        columns |= {name: np.broadcast_to(column, mean.shape) for name, column in told}
    return np.stack([columns[name] for name in signals], axis=-1)


def class_statistics(trajectory: Floats, label: NDArray[np.integer]) -> tuple[Floats, Floats]:
    """Mean and deviation by class of trajectories [seeds, n, m], each [2, m]; row 0 hallucinated, row 1 factual."""
    by_class = [trajectory[:, label == value].reshape(-1, trajectory.shape[-1]) for value in (0, 1)]
    return np.stack([rows.mean(axis=0) for rows in by_class]), np.stack([rows.std(axis=0) for rows in by_class])


def scale_shift(out_of_fold: Floats, refit: Floats, label: NDArray[np.integer]) -> dict[str, dict[str, float]]:
    """Mean and deviation by class of cross-fitted depth means [seeds, n] and of refitted ones [n].

    The refitted ones are in-sample, so their class means lie further apart.  The classifier's scale and offset depend
    on the within-class deviations and on the midpoint between the classes.
    """
    table = {}
    for name, value in (("hallucinated", 0), ("factual", 1)):
        crossed, again = out_of_fold[:, label == value], refit[label == value]
        table[name] = {
            "cross_fitted_mean": float(crossed.mean()),
            "refitted_mean": float(again.mean()),
            "cross_fitted_std": float(crossed.std()),
            "refitted_std": float(again.std()),
        }
    return table


def refit(
    readouts: Readouts,
    rows: Index,
    test: Index,
    c: float,
    options: FitOptions,
    *,
    blank: bool = False,
    several: bool = False,
) -> ProbeFit:
    """Probes on all of ``rows``, with the logits of ``test``; ``blank`` and ``several`` as in ``fit_probes``.

    Raises NoDirection: a layer has no direction and may not be blank.
    """
    balance, jobs = options.balance, options.jobs
    found = fit_probes(
        readouts, [Task(rows, test, c)], balance=balance, jobs=jobs, relax=True, blank=blank, several=several
    )
    return require(found)[0]


def _spaced(count: int, most: int) -> list[int]:
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})
