"""Does the mean of a trajectory suffice?  Ablations over what is made of it (Sec. exp-ablation, App. mean-vs-median).

A scalar needs no classifier: a truth-like one rises with factuality, and its AUROC on the test side is what is given.
Several features are weighed by a practically unregularised logistic regression on the training side's out-of-fold
features, and ranked on the test side by its log odds.  Fits no probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from service.errors import TrainingError
from service.evaluation.set_run import SetRun
from service.evaluation.splits import Split
from service.evaluation.tables import Column, Table
from service.fitting.calibration import fit_classifier
from service.fitting.fit import Floats
from service.fitting.scores import auroc
from service.paper.ablations_depth import depth_curve, depth_subsampling
from service.paper.ablations_readout import head_distribution, readout_position, readout_site, top_heads
from service.paper.cells import OVER_SPLITS, SET, Maker, Row, by_set, published_columns, spread
from service.paper.diagnostics.features import (
    FIVE,
    GROUPS,
    Standard,
    full_trajectory,
    source_features,
    trajectory_features,
    trimmed_layers,
)
from service.paper.diagnostics.increments import decompose
from service.risk import depth_mean

__all__ = [
    "MEAN", "READOUT", "depth_curve", "depth_subsampling", "feature_sets", "location", "logit_scale", "mean_dominance",
]  # fmt: skip

_SHAPE: Final = tuple(name for name in FIVE if name != "mean")
_CLASSIFIER: Final = (
    "Several features: a logistic regression on the training side's out-of-fold features, ranked on the test side."
)
Sides = tuple[Floats, Floats]  # features [n_train, k] and [n_test, k]


def mean_dominance(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. ablation_combined: (a) mean, median, mean + shape (5-D), shape (4-D); (b) 13 source features, by group."""

    def trajectory(run: SetRun, _: list[str]) -> Row:
        return {
            "mean": _scalar(run, lambda values: values["mean"]),
            "median": _scalar(run, lambda values: values["median"]),
            "mean_and_shape": _fitted(run, lambda split: _statistics(split, FIVE)),
            "shape": _fitted(run, lambda split: _statistics(split, _SHAPE)),
        }

    def source(run: SetRun, _: list[str]) -> Row:
        return {"source": _fitted(run, _source)} | {
            name: _fitted(run, lambda split, group=group: _columns(_source(split), group))  # type: ignore[misc]
            for name, group in GROUPS.items()
        }

    label, caption = "tab:ablation_combined", f"AUROC in percent, {OVER_SPLITS}. {_CLASSIFIER}"
    notes: list[str] = []
    undefined = ["The paper names three of the 13 features and does not define them: rho, friction, condition number."]
    first = ("mean", "median", "mean_and_shape", "shape")
    return [
        Table("mean-dominance", "Mean dominance: trajectory statistics", published_columns(label, *first),
              by_set(runs, trajectory, notes), label, caption, notes),
        Table("mean-dominance-source", "Mean dominance: source features", published_columns(label, "source", *GROUPS),
              by_set(runs, source, undefined), label, caption, undefined),
    ]  # fmt: skip


def location(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. mean-vs-median: mean, median, 10 % trimmed mean; Pearson's r of mean and median on the test rows."""

    def row(run: SetRun, notes: list[str]) -> Row:
        m = run.splits[0].test_trajectory.shape[1]
        if not trimmed_layers(m):
            notes.append(f"10 % of {m} layers is none: the trimmed mean is the mean")
        pairs = [_features(split) for split in run.splits]
        correlations = [np.corrcoef(one["mean"], one["median"])[0, 1] for one in pairs]
        if not np.isfinite(correlations).all():
            raise TrainingError("the depth mean or the median is the same for all test rows of a fold")
        return {
            "mean": _scalar(run, lambda values: values["mean"]),
            "median": _scalar(run, lambda values: values["median"]),
            "trimmed_mean": _scalar(run, lambda values: values["trimmed_mean"]),
            "correlation": float(np.mean(correlations)),
        }

    notes: list[str] = []
    return [
        Table(
            name="location",
            title="Mean, median, trimmed mean",
            columns=published_columns("tab:mean-vs-median", "mean", "median", "trimmed_mean", "correlation"),
            rows=by_set(runs, row, notes),
            label="tab:mean-vs-median",
            caption=f"AUROC in percent of each location estimator over depth, {OVER_SPLITS}; correlation of mean and "
            "median, mean over splits.",
            notes=notes,
        )
    ]


def feature_sets(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. ablation-12d-22d: trajectory statistics (5-D), source features (13-D), full trajectory (2m + 5)."""

    def row(run: SetRun, notes: list[str]) -> Row:
        source = None
        try:
            source = _fitted(run, _source)
        except TrainingError as error:
            notes.append(f"13-D is left out: {error}")
        return {
            "trajectory": _fitted(run, lambda split: _statistics(split, FIVE)),
            "source": source,
            "full": _fitted(run, lambda s: (full_trajectory(s.train_trajectory), full_trajectory(s.test_trajectory))),
        }

    notes: list[str] = []
    return [
        Table(
            name="feature-sets",
            title="Trajectory statistics, source features, full trajectory",
            columns=[
                SET,
                Column("trajectory", "5-D", "percent", 3),
                Column("source", "13-D", "percent", 3),
                Column("full", "2m + 5", "percent", 3),
            ],
            rows=by_set(runs, row, notes),
            label="tab:ablation-12d-22d",
            caption=f"AUROC in percent, {OVER_SPLITS}. {_CLASSIFIER}",
            notes=notes,
        )
    ]


def logit_scale(runs: Sequence[SetRun]) -> list[Table]:
    """Ours: the paper's mean of unit-norm logits, and of logits over their within-class training deviations.

    Head outputs grow with depth, so that the plain mean weighs layers by an accident of scale; this is what it costs.
    """

    def row(run: SetRun, _: list[str]) -> Row:
        plain: list[float] = []
        even: list[float] = []
        for split in run.splits:
            scale = split.every.scale[np.arange(len(split.every.scale)), split.every.selected]
            for found, trajectory in ((plain, split.test_trajectory), (even, split.test_trajectory / scale)):
                found.append(auroc(run.label[split.test], depth_mean(trajectory)))
        return {
            "unit_norm": spread(plain),
            "standardized": spread(even),
            "difference": spread([b - a for a, b in zip(plain, even, strict=True)]),
        }

    notes: list[str] = []
    return [
        Table(
            name="logit-scale",
            title="Scale of the truth logits",
            columns=[
                SET,
                Column("unit_norm", "Unit norm", "percent", 3),
                Column("standardized", "Standardised", "percent", 3),
                Column("difference", "Difference, points", "percent", 3),
            ],
            rows=by_set(runs, row, notes),
            caption=f"AUROC in percent of the depth mean, {OVER_SPLITS}: logits of unit-norm probes as in the paper, "
            "and each layer's logits divided by their within-class standard deviation on the training side.",
            notes=notes,
        )
    ]


MEAN: Final[tuple[Maker, ...]] = (mean_dominance, location, feature_sets, depth_subsampling, logit_scale)
READOUT: Final[tuple[Maker, ...]] = (readout_site, readout_position, top_heads, head_distribution)


def _features(split: Split) -> dict[str, Floats]:
    return trajectory_features(split.test_trajectory)


def _scalar(run: SetRun, pick: Callable[[dict[str, Floats]], Floats]) -> dict[str, float]:
    """AUROC of one truth-like number."""
    return spread([auroc(run.label[split.test], pick(_features(split))) for split in run.splits])


def _fitted(run: SetRun, sides: Callable[[Split], Sides]) -> dict[str, float]:
    """AUROC of several features together.  By log odds and not by risk, which rounds to 0 or 1 far out."""
    found = []
    for split in run.splits:
        train, test = sides(split)
        classifier = fit_classifier(train, run.label[split.train])
        found.append(auroc(run.label[split.test], test @ classifier.weight))
    return spread(found)


def _statistics(split: Split, names: Sequence[str]) -> Sides:
    train, test = (trajectory_features(values) for values in (split.train_trajectory, split.test_trajectory))
    return np.stack([train[name] for name in names], axis=1), np.stack([test[name] for name in names], axis=1)


def _source(split: Split) -> Sides:
    """The 13 features; both sides are standardised by the training side."""
    standard = Standard.of(split.train_trajectory)
    found = []
    for trajectory, crossed in (
        (split.train_trajectory, split.train_crossed),
        (split.test_trajectory, split.test_crossed),
    ):
        parts = decompose(trajectory, crossed)
        found.append(source_features(trajectory, parts.w, parts.k, standard)[0])
    return found[0], found[1]


def _columns(sides: Sides, columns: Sequence[int]) -> Sides:
    return sides[0][:, list(columns)], sides[1][:, list(columns)]
