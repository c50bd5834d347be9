"""Fits the width of a risk's interval over other training sets, and the reference of training's
trajectories.

The interval is a delete-a-group jackknife.  Each seed of the nested cross-validation gives every
row a risk by a whole fit on the other folds' rows.  Two such fits each lack a random share 1 / K of
the groups, so the variance between them is 1 / (K - 1) of that between fits on other training sets
(Shao and Wu 1989, Ann. Statist. 17(3), 1176-1197)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from sklearn.covariance import ledoit_wolf

from probes_store.records import RefitInterval
from service.fitting.folds import group_folds
from service.fitting.probes import Floats, Index
from service.judging.uncertainty import distance

OUTSIDE_SHARE = 0.01  # share of new prompts like the training rows that lie outside
LEVEL = 0.95
_TINY = 1e-12  # a risk's distance from 0 and 1


@dataclass(frozen=True, eq=False)
class TrajectoryReference:
    """The centre and spread of training's trajectories; a distance of 1 is the cutoff."""

    mean: Floats  # [M], M = (1 + A) m logits of a prompt
    whitening: Floats  # [M, M]
    distance: (
        Floats  # [seeds, n] distances of the labelled training rows, by folds that never saw them
    )
    unlabelled: int = 0  # number of prompts without a label that also determine the cutoff

    @property
    def rows(self) -> int:
        """Return the number of rows whose distances determine the cutoff."""
        return int(self.distance.shape[1]) + self.unlabelled

    @property
    def share(self) -> float:
        """Return the expected share of new prompts like the training rows beyond the cutoff."""
        return max(OUTSIDE_SHARE, 1 / (self.rows + 1))  # few rows cannot determine a small quantile


def fit_reference(
    trajectory: Floats,
    label: NDArray[np.integer],
    group: Index,
    folds: int,
    seeds: Sequence[int],
    unlabelled: tuple[Floats, Index] | None = None,
) -> TrajectoryReference:
    """Return the reference for out-of-fold logits [seeds, n, M] and the folds that they come from:
    label, group [n].

    ``unlabelled`` are logits [k, M] and groups [k] of prompts without a label, which belong to
    training, too."""
    more, more_group = (
        (np.empty((0, trajectory.shape[-1])), np.empty(0, np.int64))
        if unlabelled is None
        else unlabelled
    )
    fold_of = np.unique(more_group, return_inverse=True)[1] % folds
    away, further = np.empty(trajectory.shape[:2]), np.empty((len(seeds), len(more)))
    for number, (seed, rows) in enumerate(zip(seeds, trajectory, strict=True)):
        pairs = group_folds(label, group, np.arange(len(label)), folds, seed, what="cross-fit fold")
        for fold, (train, test) in enumerate(pairs):
            fitted = _whitened(np.concatenate([rows[train], more[fold_of != fold]]))
            away[number, test] = distance(rows[test], *fitted)
            further[number, fold_of == fold] = distance(more[fold_of == fold], *fitted)
    # The cutoff that a share OUTSIDE_SHARE of new rows exceeds, with the rank of split conformal
    # prediction.
    every = np.concatenate([away, further], axis=1)
    rank = min(every.shape[1], int(np.ceil((every.shape[1] + 1) * (1 - OUTSIDE_SHARE))))
    cutoff = float(np.sort(every.ravel())[len(every) * rank - 1])
    mean, whitening = _whitened(np.concatenate([trajectory[0], more]))
    return TrajectoryReference(mean, whitening / cutoff, away / cutoff, len(more))


def _whitened(rows: Floats) -> tuple[Floats, Floats]:
    """Return mean [m] and whitening [m, m] of trajectories [n, m]; a constant layer is left out.

    The trajectories are standardised first, because the shrinkage pulls variances to one."""
    mean, std = rows.mean(axis=0), rows.std(axis=0)
    varies = std > _TINY
    inverse = np.where(varies, 1.0 / np.where(varies, std, 1.0), 0.0)
    covariance, _ = ledoit_wolf((rows - mean) * inverse)
    precision = np.linalg.inv(covariance + np.diag((~varies).astype(np.float64)))
    return mean, np.linalg.cholesky(precision).T * inverse


def fit_interval(risk: Floats, reference: TrajectoryReference, folds: int) -> RefitInterval | None:
    """Return the interval by risks [seeds, n] of the nested folds' fits; None for one seed, which
    has no variance."""
    if (seeds := len(risk)) < 2:
        return None
    log_odds = -np.log(np.clip(risk, _TINY, 1 - _TINY) / np.clip(1 - risk, _TINY, 1 - _TINY))
    shape = log_odds.mean(axis=0)
    centre = float(shape.mean())
    columns = np.stack(
        [np.ones(len(shape)), (shape - centre) ** 2, reference.distance.mean(axis=0) ** 2], axis=1
    )
    variance = (folds - 1) * log_odds.var(axis=0, ddof=1)
    # A sample variance has a deviation in proportion to its mean, so weight rows by their fitted
    # values, five times.
    fitted = np.full(len(variance), max(float(variance.mean()), _TINY))
    for _ in range(5):
        weight, _ = nnls(columns / fitted[:, None], variance / fitted)
        fitted = np.maximum(columns @ weight, _TINY + 1e-3 * float(variance.mean()))
    wide = np.sqrt(np.maximum(columns @ weight, _TINY))
    between = np.concatenate(
        [np.abs(log_odds[a] - log_odds[b]) / wide for a, b in combinations(range(seeds), 2)]
    )
    stretch = (folds - 1) * float(np.quantile(between, LEVEL)) ** 2
    base, by_log_odds, by_distance = (stretch * weight).tolist()
    return RefitInterval(LEVEL, seeds * folds, centre, base, by_log_odds, by_distance)
