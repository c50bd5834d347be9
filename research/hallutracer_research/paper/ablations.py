"""Does the mean of a trajectory suffice?  Ablations over its statistics (Sec. exp-ablation, App. mean-vs-median).

A single truth-like number is scored by its AUROC on the test side.  Several features are combined by a practically
unregularised logistic regression, fitted on the training side's out-of-fold features, and ranked on the test side by
its log odds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.evaluation.main_table import spread
from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.evaluation.splits import Split
from hallutracer_research.evaluation.tables import Column
from hallutracer_research.paper.diagnostics.features import (
    FIVE,
    GROUPS,
    Standard,
    depth_layers,
    depth_sizes,
    full_trajectory,
    source_features,
    trajectory_features,
    trimmed_layers,
)
from hallutracer_research.paper.diagnostics.increments import decompose
from hallutracer_research.paper.table_spec import OVER_SPLITS, Row, TableSpec
from service.errors import TrainingError
from service.fitting.estimator import fit_classifier
from service.fitting.nested_cv import FoldScores
from service.fitting.probes import Floats
from service.fitting.scores import auroc, risk_auroc
from service.risk import depth_mean

_SHAPE: Final = tuple(name for name in FIVE if name != "mean")
_CLASSIFIER: Final = (
    "Several features: a logistic regression on the training side's out-of-fold features, ranked on the test side."
)
_COMBINED: Final = "tab:ablation_combined", ("mean", "median", "mean_and_shape", "shape"), ("source", *GROUPS)
Sides = tuple[Floats, Floats]  # features [n_train, k] and [n_test, k]
Features = Callable[[Split], Sides]


def _statistics(split: Split, names: Sequence[str]) -> Sides:
    train, test = (trajectory_features(values) for values in (split.train_trajectory, split.test_trajectory))
    return np.stack([train[name] for name in names], axis=1), np.stack([test[name] for name in names], axis=1)


def _full(split: Split) -> Sides:
    return full_trajectory(split.train_trajectory), full_trajectory(split.test_trajectory)


FIVE_D: Final = partial(_statistics, names=FIVE)
SHAPE: Final = partial(_statistics, names=_SHAPE)  # the five without the mean
FULL: Final = _full  # 2m + 5


def _mean_dominance(result: SetResult, _: list[str]) -> Row:
    return {
        "mean": _feature_auroc(result, "mean"),
        "median": _feature_auroc(result, "median"),
        "mean_and_shape": _classifier_auroc(result, FIVE_D),
        "shape": _classifier_auroc(result, SHAPE),
    }


def _mean_dominance_source(result: SetResult, _: list[str]) -> Row:
    return {"source": _classifier_auroc(result, _source)} | {
        name: _classifier_auroc(result, lambda split, columns=columns: _source(split, columns))  # type: ignore[misc]
        for name, columns in GROUPS.items()
    }


def _location(result: SetResult, notes: list[str]) -> Row:
    m = result.splits[0].test_trajectory.shape[1]
    if not trimmed_layers(m):
        notes.append(f"10 % of {m} layers is none: the trimmed mean is the mean")
    features = [trajectory_features(split.test_trajectory) for split in result.splits]
    correlations = [np.corrcoef(of_split["mean"], of_split["median"])[0, 1] for of_split in features]
    if not np.isfinite(correlations).all():
        raise TrainingError("the depth mean or the median is the same for all test rows of a fold")
    aurocs = {name: _feature_auroc(result, name) for name in ("mean", "median", "trimmed_mean")}
    return {**aurocs, "correlation": float(np.mean(correlations))}


def _feature_sets(result: SetResult, notes: list[str]) -> Row:
    source = None
    try:
        source = _classifier_auroc(result, _source)
    except TrainingError as error:
        notes.append(f"13-D is left out: {error}")
    return {
        "trajectory": _classifier_auroc(result, FIVE_D),
        "source": source,
        "full": _classifier_auroc(result, FULL),
    }


def _depth_subsampling(result: SetResult, notes: list[str]) -> Row:
    sizes, aurocs = _depth(result)
    m = max(sizes)
    if smaller := [size for size in depth_sizes(m)[1] if size < m]:
        notes.append(
            f"of {m} layers those from 3 to {m - 3} are spaced over: too few for {', '.join(map(str, smaller))}"
        )
    return {depth_key(size): spread(values) for size, values in aurocs.items()}


def _depth_columns(results: Sequence[SetResult]) -> list[Column]:
    sizes = sorted({size for result in results for size in depth_sizes(result.splits[0].test_trajectory.shape[1])[0]})
    return [Column(depth_key(size), f"{size} layer{'s' * (size > 1)}", "percent", 3) for size in sizes]


def _logit_scale(result: SetResult, _: list[str]) -> Row:
    plain: list[float] = []
    even: list[float] = []
    for split in result.splits:
        scale = split.probes.scale[np.arange(len(split.probes.scale)), split.probes.selected]
        for aurocs, trajectory in ((plain, split.test_trajectory), (even, split.test_trajectory / scale)):
            aurocs.append(auroc(result.label[split.test], depth_mean(trajectory)))
    difference = [b - a for a, b in zip(plain, even, strict=True)]
    return {"unit_norm": spread(plain), "standardized": spread(even), "difference": spread(difference)}


MEAN_DOMINANCE: Final = TableSpec(
    "mean-dominance", "Mean dominance: trajectory statistics", _COMBINED[0], _COMBINED[1],
    f"AUROC in percent, {OVER_SPLITS}. {_CLASSIFIER}", _mean_dominance,
)  # fmt: skip
MEAN_DOMINANCE_SOURCE: Final = TableSpec(
    "mean-dominance-source", "Mean dominance: source features", _COMBINED[0], _COMBINED[2],
    f"AUROC in percent, {OVER_SPLITS}. {_CLASSIFIER}", _mean_dominance_source,
    ("The paper names three of the 13 features and does not define them: rho, friction, condition number.",),
)  # fmt: skip
LOCATION: Final = TableSpec(
    "location", "Mean, median, trimmed mean", "tab:mean-vs-median", ("mean", "median", "trimmed_mean", "correlation"),
    f"AUROC in percent of each location estimator over depth, {OVER_SPLITS}; correlation of mean and "
    "median, mean over splits.",
    _location,
)  # fmt: skip
FEATURE_SETS: Final = TableSpec(
    "feature-sets", "Trajectory statistics, source features, full trajectory", "tab:ablation-12d-22d",
    (
        Column("trajectory", "5-D", "percent", 3), Column("source", "13-D", "percent", 3),
        Column("full", "2m + 5", "percent", 3),
    ),
    f"AUROC in percent, {OVER_SPLITS}. {_CLASSIFIER}", _feature_sets,
)  # fmt: skip
DEPTH_SUBSAMPLING: Final = TableSpec(  # the numbers of Fig. depth-subsampling (App. depth-weighting)
    "depth-subsampling", "Depth subsampling", "", _depth_columns,
    f"AUROC in percent of the mean of a few layers, evenly spaced over depth, {OVER_SPLITS}. One "
    "layer: the best by AUROC on the training side. The last column takes every layer.",
    _depth_subsampling,
)  # fmt: skip
LOGIT_SCALE: Final = TableSpec(
    # Ours: head outputs grow with depth, so the plain mean weighs layers by their scale; the table shows the cost.
    "logit-scale", "Scale of the truth logits", "",
    (
        Column("unit_norm", "Unit norm", "percent", 3), Column("standardized", "Standardised", "percent", 3),
        Column("difference", "Difference, points", "percent", 3),
    ),
    f"AUROC in percent of the depth mean, {OVER_SPLITS}: logits of unit-norm probes as in the paper, "
    "and each layer's logits divided by their within-class standard deviation on the training side.",
    _logit_scale,
)  # fmt: skip
MEAN: Final = (MEAN_DOMINANCE, MEAN_DOMINANCE_SOURCE, LOCATION, FEATURE_SETS, DEPTH_SUBSAMPLING, LOGIT_SCALE)


def depth_curve(results: Sequence[SetResult]) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """Fig. depth-subsampling: set -> (layers included, mean AUROC, its standard deviation over splits)."""
    curves = {}
    for result in results:
        sizes, aurocs = _depth(result)
        cells = [spread(aurocs[size]) for size in sizes]
        curves[result.title] = (list(sizes), [cell["mean"] for cell in cells], [cell["std"] for cell in cells])
    return curves


def depth_key(size: int) -> str:
    """The column of ``DEPTH_SUBSAMPLING`` for a number of layers."""
    return f"layers_{size}"


def _depth(result: SetResult) -> tuple[tuple[int, ...], dict[int, list[float]]]:
    """Numbers of layers, and AUROC by split for each."""
    m = result.splits[0].test_trajectory.shape[1]
    sizes = depth_sizes(m)[0]
    aurocs: dict[int, list[float]] = {size: [] for size in sizes}
    for split in result.splits:
        best = int(split.probes.auroc.max(axis=1).argmax())
        trajectory = split.test_trajectory
        for size in sizes:
            layers = depth_layers(m, size, best)
            assert layers is not None, "depth_sizes lists only sizes that have layers"
            aurocs[size].append(auroc(result.label[split.test], depth_mean(trajectory[:, layers])))
    return sizes, aurocs


def _feature_auroc(result: SetResult, name: str) -> dict[str, float]:
    """AUROC of one truth-like number."""
    return spread(
        [auroc(result.label[split.test], trajectory_features(split.test_trajectory)[name]) for split in result.splits]
    )


def classifier_scores(splits: Sequence[Split], label: NDArray[np.int64], features: Features) -> list[FoldScores]:
    """Several features together, scored on the test sides: by log odds, as risks round to 0 or 1 far out."""
    scores = []
    for split in splits:
        train, test = features(split)
        classifier = fit_classifier(train, label[split.train])
        scores.append(FoldScores(split.seed, split.fold, split.test, -(test @ classifier.weight)))
    return scores


def _classifier_auroc(result: SetResult, features: Features) -> dict[str, float]:
    scores = classifier_scores(result.splits, result.label, features)
    return spread([risk_auroc(result.label[fold.test], fold.score) for fold in scores])


def _source(split: Split, columns: Sequence[int] | None = None) -> Sides:
    """The 13 features, or some of them; both sides are standardised by the training side."""
    standard = Standard.of(split.train_trajectory)

    def features(trajectory: Floats, crossed: Floats) -> Floats:
        parts = decompose(trajectory, crossed)
        values = source_features(trajectory, parts.w, parts.k, standard)[0]
        return values if columns is None else values[:, list(columns)]

    return features(split.train_trajectory, split.train_crossed), features(split.test_trajectory, split.test_crossed)
