"""Which recalibration? Every candidate's log loss on labelled rows that it was not fitted on, and the simplest that is
as good as the best.

Folds are group-disjoint, so a map is always judged on groups that it has not seen.  The simplest candidate whose loss
is within one standard error of the best one's is taken; errors and intervals are by jackknife over groups, and the
error is of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from probes_store.records import EDGE, Method, Recalibration
from service.fitting.folds import group_folds
from service.fitting.jackknife import Interval, standard_error, t_interval
from service.fitting.risk_maps import FITS
from service.fitting.scores import equal_mass_bins

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]
Fit = Callable[[Labels, Floats], Recalibration | None]
Name = Method | Literal["identity"]

FOLDS = 5
SEEDS = (0, 1, 2)  # shuffles of the folds; losses are averaged over them
ROUNDING = 1e-9  # of a loss: less is no difference


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to recalibrate, and how it did on rows that it was not fitted on."""

    name: Name
    map: Recalibration | None  # fitted on all rows; None: the risk as it is
    held_out: Floats  # [seeds, n] risks by maps that were fitted without the row's group
    loss: Floats  # [n] negative log likelihood in nats, mean over seeds
    log_loss: float
    log_loss_interval: Interval
    gain: float  # in log loss, over the risk as it is
    gain_interval: Interval
    error: float  # debiased calibration error
    error_interval: Interval


@dataclass(frozen=True, eq=False)
class Choice:
    """All candidates, from simple to flexible, and the one that was taken."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    best: Candidate  # of the least loss
    left_out: tuple[str, ...]  # candidates without a fit that keeps the order of risks

    @property
    def before(self) -> Candidate:
        """The risk as it is."""
        return self.candidates[0]


def choose_map(
    label: Labels, risk: Floats, group: NDArray[np.integer], prior_shift: Fit | None = None, seed: int = 0
) -> Choice:
    """Judge every candidate on labelled rows: label, risk, group [n].

    ``prior_shift`` fits a map from the traffic and the labelled rows it is given.
    Raises TrainingError where a fold would lack a class.
    """
    fits: dict[Method, Fit] = {} if prior_shift is None else {"prior_shift": prior_shift}
    fits.update(FITS)
    rows = np.arange(len(label))
    folds = [group_folds(label, group, rows, FOLDS, shuffle + seed) for shuffle in SEEDS]
    found: dict[Name, tuple[Recalibration | None, Floats]] = {"identity": (None, np.tile(risk, (len(SEEDS), 1)))}
    for name, fit in fits.items():
        whole, held_out = fit(label, risk), _held_out(fit, label, risk, folds)
        if whole is not None and held_out is not None:
            found[name] = (whole, held_out)
    before = _loss(label, found["identity"][1])
    candidates = tuple(_judged(name, *parts, label, before, group) for name, parts in found.items())
    best = min(candidates, key=lambda one: one.log_loss)
    chosen = next(one for one in candidates if one.log_loss - best.log_loss <= _error(one.loss - best.loss, group))
    return Choice(candidates, chosen, best, tuple(name for name in fits if name not in found))


def _held_out(
    fit: Fit,
    label: Labels,
    risk: Floats,
    folds: Sequence[Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]],
) -> Floats | None:
    """Risks by maps that were fitted without the row's group, [seeds, n]; None where a fold has no map."""
    table = np.empty((len(folds), len(label)))
    for place, pairs in enumerate(folds):
        for train, test in pairs:
            made = fit(label[train], risk[train])
            if made is None:
                return None
            table[place, test] = made(risk[test])
    return table


def _loss(label: Labels, risks: Floats) -> Floats:
    """-log P(what happened), mean over seeds: risks [seeds, n] -> [n]."""
    inside = np.clip(risks, EDGE, 1 - EDGE)
    return np.asarray(np.where(np.asarray(label) == 0, -np.log(inside), -np.log1p(-inside)).mean(axis=0))


def _judged(
    name: Name,
    made: Recalibration | None,
    held_out: Floats,
    label: Labels,
    before: Floats,
    group: NDArray[np.integer],
) -> Candidate:
    loss = _loss(label, held_out)
    folds = None if made is None else FOLDS
    squared, without = squared_calibration_error(label, held_out[0], group)
    ends = t_interval(squared, without, folds)
    return Candidate(
        name=name,
        map=made,
        held_out=held_out,
        loss=loss,
        log_loss=float(loss.mean()),
        log_loss_interval=t_interval(float(loss.mean()), _means_without(loss, group), folds),
        gain=float((before - loss).mean()),
        gain_interval=t_interval(float((before - loss).mean()), _means_without(before - loss, group), folds),
        error=float(np.sqrt(max(0.0, squared))),
        error_interval=Interval(*(float(np.sqrt(max(0.0, end))) for end in ends)),
    )


def squared_calibration_error(
    label: Labels, risk: Floats, group: NDArray[np.integer]
) -> tuple[float, NDArray[np.float64]]:
    """The square of ``scores.debiased_calibration_error``, not held above 0: of all rows, and without each group [G].

    Bins are those of all rows: label, risk, group [n].
    """
    bins, member = equal_mass_bins(risk), np.unique(group, return_inverse=True)[1]
    shape = (int(member.max()) + 1, int(bins.max()) + 1)
    place = member * shape[1] + bins
    parts = np.ones(len(bins)), (np.asarray(label) == 0).astype(np.float64), np.asarray(risk, np.float64)
    sums = np.stack([np.bincount(place, part, shape[0] * shape[1]).reshape(shape) for part in parts])  # [3, G, bins]
    whole = sums.sum(axis=1, keepdims=True)
    size, wrong, total = np.concatenate([whole, whole - sums], axis=1).round(9)  # [1 + G, bins]
    kept = size > 1
    safe = np.where(kept, size, 2.0)
    observed, predicted = wrong / safe, total / safe
    squared = (predicted - observed) ** 2 - observed * (1 - observed) / (safe - 1)
    found = (kept * size * squared).sum(axis=1) / np.maximum((kept * size).sum(axis=1), 1.0)
    return float(found[0]), found[1:]


def _means_without(values: Floats, group: NDArray[np.integer]) -> NDArray[np.float64]:
    """The mean without each group: values, group [n] -> [G]."""
    member = np.unique(group, return_inverse=True)[1]
    return np.asarray((values.sum() - np.bincount(member, values)) / (len(values) - np.bincount(member)))


def _error(values: Floats, group: NDArray[np.integer]) -> float:
    """Standard error of the mean over groups."""
    return standard_error(_means_without(values, group)) + ROUNDING
