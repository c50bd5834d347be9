"""Ablations: whether the mean of a trajectory suffices, where and how a layer is read (Sec.
exp-ablation, App. mean-vs-median, readout-ablation, pooling, head-uniformity).  A single number is
scored by its AUROC on the test side; several by a practically unregularised logistic regression on
the training side's out-of-fold features, ranked by its log odds.  Ablations of the readout keep the
depth mean and change what it is the mean of: nothing is fitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.evaluation.methods import OURS, RESIDUAL
from hallutracer_research.evaluation.page import Cell, Column
from hallutracer_research.evaluation.results import SetResult, aurocs, spread
from hallutracer_research.evaluation.splits import HeadProbes, Split
from hallutracer_research.paper.diagnostics import features
from hallutracer_research.paper.diagnostics.classes import mean_or_none
from hallutracer_research.paper.diagnostics.features import FIVE, GROUPS, trajectory_features
from hallutracer_research.paper.diagnostics.increments import decompose
from hallutracer_research.paper.tables import Row, specs
from service.errors import TrainingError
from service.fitting.estimator import fit_classifier
from service.fitting.nested_cv import FoldScores
from service.fitting.probes import Floats, Index
from service.fitting.scores import auroc
from service.readout import Pooling, Site
from service.risk import depth_mean

Sides = tuple[Floats, Floats]  # features [n_train, k] and [n_test, k]
Features = Callable[[Split], Sides]


def _sides(make: Callable[[Floats], Floats], split: Split) -> Sides:
    return make(split.train_trajectory), make(split.test_trajectory)


def _statistics(names: Sequence[str], trajectory: Floats) -> Floats:
    values = trajectory_features(trajectory)
    return np.stack([values[name] for name in names], axis=1)


FULL = partial(_sides, features.full_trajectory)  # 2m + 5
FIVE_D = partial(_sides, partial(_statistics, FIVE))
SHAPE = partial(_sides, partial(_statistics, FIVE[1:]))  # all but the mean


def _mean_dominance(result: SetResult, _: list[str]) -> Row:
    return {
        "mean": _feature_auroc(result, "mean"),
        "median": _feature_auroc(result, "median"),
        "mean_and_shape": _classifier_auroc(result, FIVE_D),
        "shape": _classifier_auroc(result, SHAPE),
    }


def _mean_dominance_source(result: SetResult, _: list[str]) -> Row:
    columns = {"source": None, **GROUPS}
    return {
        name: _classifier_auroc(result, partial(_source, columns=some))
        for name, some in columns.items()
    }


def _location(result: SetResult, notes: list[str]) -> Row:
    m = result.splits[0].test_trajectory.shape[1]
    if not features.trimmed_layers(m):
        notes.append(f"10 % of {m} layers is none: the trimmed mean is the mean")
    by_split = [trajectory_features(split.test_trajectory) for split in result.splits]
    correlations = [
        np.corrcoef(of_split["mean"], of_split["median"])[0, 1] for of_split in by_split
    ]
    if not np.isfinite(correlations).all():
        raise TrainingError("the depth mean or the median is the same for all test rows of a fold")
    cells = {name: _feature_auroc(result, name) for name in ("mean", "median", "trimmed_mean")}
    return {**cells, "correlation": float(np.mean(correlations))}


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
    curve = _depth_aurocs(result)
    m = max(curve)
    if smaller := [size for size in features.depth_sizes(m)[1] if size < m]:
        notes.append(
            f"of {m} layers those from 3 to {m - 3} are spaced over: too few for"
            f" {', '.join(map(str, smaller))}"
        )
    return {depth_key(size): spread(values) for size, values in curve.items()}


def _depth_columns(results: Sequence[SetResult]) -> list[Column]:
    layers = [result.splits[0].test_trajectory.shape[1] for result in results]
    sizes = {size for m in layers for size in features.depth_sizes(m)[0]}
    return [
        Column(depth_key(size), f"{size} layer{'s' * (size > 1)}", "percent")
        for size in sorted(sizes)
    ]


def _test_aurocs(
    result: SetResult, score: Callable[[Split], Floats], splits: Sequence[Split] | None = None
) -> list[float]:
    """Return the AUROC of a truth score [n_test] on the test side of each split, all by default."""
    splits = result.splits if splits is None else splits
    return [auroc(result.label[split.test], score(split)) for split in splits]


def _mean_logit(split: Split) -> Floats:
    return depth_mean(split.test_trajectory)


def _logit_scale(result: SetResult, _: list[str]) -> Row:
    def standardized(split: Split) -> Floats:
        layers = np.arange(len(split.probes.scale))
        return depth_mean(split.test_trajectory / split.probes.scale[layers, split.probes.selected])

    plain, even = _test_aurocs(result, _mean_logit), _test_aurocs(result, standardized)
    return {
        "unit_norm": spread(plain),
        "standardized": spread(even),
        "difference": spread(np.subtract(even, plain).tolist()),
    }


MEAN = specs(
    {
        "mean-dominance": _mean_dominance,
        "mean-dominance-source": _mean_dominance_source,
        "location": _location,
        "feature-sets": _feature_sets,
        "depth-subsampling": _depth_subsampling,
        "logit-scale": _logit_scale,
    },
    {"depth-subsampling": _depth_columns},
)


def depth_curve(
    results: Sequence[SetResult],
) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """Return, for Fig. depth-subsampling, set -> (layers included, mean AUROC, its standard
    deviation over splits)."""
    curves = {}
    for result in results:
        curve = _depth_aurocs(result)
        means, stds = zip(*(spread(values).values() for values in curve.values()), strict=True)
        curves[result.title] = (list(curve), list(means), list(stds))
    return curves


def depth_key(size: int) -> str:
    """Return the column of depth subsampling for a number of layers."""
    return f"layers_{size}"


def _depth_aurocs(result: SetResult) -> dict[int, list[float]]:
    """Return number of layers -> AUROC by split."""
    m = result.splits[0].test_trajectory.shape[1]

    def mean_of(size: int, split: Split) -> Floats:
        best = int(split.probes.auroc.max(axis=1).argmax())
        layers = features.depth_layers(m, size, best)
        assert layers is not None, "depth_sizes lists only sizes that have layers"
        return depth_mean(split.test_trajectory[:, layers])

    sizes = features.depth_sizes(m)[0]
    return {size: _test_aurocs(result, partial(mean_of, size)) for size in sizes}


def _feature_auroc(result: SetResult, name: str) -> dict[str, float]:
    return spread(
        _test_aurocs(result, lambda split: trajectory_features(split.test_trajectory)[name])
    )


def classifier_scores(
    splits: Sequence[Split], label: Index, of_split: Features
) -> list[FoldScores]:
    """Score several features together on the test sides: by log odds, as risks round to 0 or 1 far
    out."""
    scores = []
    for split in splits:
        train, test = of_split(split)
        classifier = fit_classifier(train, label[split.train])
        scores.append(FoldScores(split.seed, split.fold, split.test, -(test @ classifier.weight)))
    return scores


def _classifier_auroc(result: SetResult, of_split: Features) -> dict[str, float]:
    scores = classifier_scores(result.splits, result.label, of_split)
    return spread(aurocs(result.label, scores))


def _source(split: Split, columns: Sequence[int] | None = None) -> Sides:
    """Return the 13 features, or some of them; both sides are standardised by the training side."""
    standard = features.Standard.of(split.train_trajectory)

    def side(trajectory: Floats, crossed: Floats) -> Floats:
        parts = decompose(trajectory, crossed)
        values = features.source_features(trajectory, parts.w, parts.k, standard)
        return values if columns is None else values[:, columns]

    of_train = side(split.train_trajectory, split.train_crossed)
    return of_train, side(split.test_trajectory, split.test_crossed)


RANDOM_DRAWS = 50
TOP = 5


def _readout_site(result: SetResult, _: list[str]) -> Row:
    if RESIDUAL not in result.scores:
        raise TrainingError(f"{RESIDUAL} is not among the methods")
    head, residual = (aurocs(result.label, result.scores[name]) for name in (OURS, RESIDUAL))
    difference = np.subtract(residual, head).tolist()
    return {"head": spread(head), "residual": spread(residual), "difference": spread(difference)}


def _readout_position(result: SetResult, notes: list[str]) -> Row:
    folds = result.folds(0)
    last = _test_aurocs(result, _mean_logit, folds)
    cells = {Pooling.LAST_1.value: spread(last)}
    for pooling in Pooling:
        if pooling is Pooling.LAST_1:
            continue
        scores = result.pooled.get((Site.ATTENTION_HEAD, pooling), ())
        if len(scores) != len(folds):
            notes.append(f"{pooling}: scores of {len(scores)} of {len(folds)} folds, left out")
            continue
        pooled = [
            auroc(result.label[split.test], score)
            for split, score in zip(folds, scores, strict=True)
        ]
        cells[pooling.value] = spread(np.subtract(pooled, last).tolist())
    return cells


def _top_heads(result: SetResult, notes: list[str]) -> Row:
    layers, heads = result.splits[0].probes.auroc.shape
    uniform = np.random.default_rng(0).random((RANDOM_DRAWS, layers))

    def lowest(split: Split) -> Index:
        """Return the last rank of each layer, [m], among the heads that have a probe."""
        return np.asarray((split.probes.auroc > 0).sum(axis=1) - 1, np.int64)

    def drawn(draw: Floats, split: Split) -> Floats:
        return _of_rank(split.probes, (draw * (lowest(split) + 1)).astype(np.int64))

    best = _test_aurocs(result, _mean_logit)
    five = _test_aurocs(result, lambda split: _top(split.probes, min(TOP, heads)))
    worst = _test_aurocs(result, lambda split: _of_rank(split.probes, lowest(split)))
    draws = [_test_aurocs(result, partial(drawn, draw)) for draw in uniform]
    if heads < TOP:
        notes.append(f"a layer has {heads} heads: Top-{TOP} takes all of them")
    if zero := sum(int(np.sum(split.probes.auroc <= 0)) for split in result.splits):
        notes.append(
            f"{zero} of {len(result.splits) * layers * heads} probes are all zeros and none of "
            "these heads is taken: the worst and the random one are among the others"
        )
    top_1, random_1 = spread(best), spread(np.mean(list(zip(*draws, strict=True)), axis=0).tolist())
    return {
        "top_1": top_1,
        "top_5": spread(five),
        "bottom_1": spread(worst),
        "random_1": random_1,
        "difference": random_1["mean"] - top_1["mean"],
    }


def _head_distribution(result: SetResult, notes: list[str]) -> Row:
    by_split: list[dict[str, float | None]] = []
    layers, heads = result.splits[0].probes.auroc.shape
    for split in result.splits:
        # A probe that is all zeros scores every row alike: 0.5, and not the 0 that stands for "no
        # probe".
        quality = np.where(split.probes.auroc > 0, split.probes.auroc, 0.5)
        by_split.append(uniformity(quality, split.probes.logits, notes))
    cells: dict[str, Cell] = {"heads": f"{layers}×{heads}"}
    for name in by_split[0]:
        cells[name] = mean_or_none([of_split[name] for of_split in by_split])
    return cells


def uniformity(
    auroc: Floats, scores: NDArray[np.floating], notes: list[str]
) -> dict[str, float | None]:
    """Return how alike the heads of a layer are (App. head-uniformity): training auroc [m, K],
    scores [N, m, K]; layer means.

    auc_cv: standard deviation over mean of the AUROC; switches: share of adjacent layers whose best
    head (ties: lowest) differs; correlation: mean pairwise Pearson's of scores; effective_rank:
    exp(entropy of that matrix's eigenvalues / heads), and its share of the heads.  Heads with
    constant scores are left out of the last three and counted in ``notes``; None where a layer has
    one head, or one whose score varies."""
    m, heads = auroc.shape
    best = np.argmax(auroc, axis=1)
    correlations: list[float] = []
    ranks: list[float] = []
    constant = 0
    for layer in range(m):
        values = scores[:, layer].astype(np.float64)
        kept = values[:, np.ptp(values, axis=0) > 0]
        constant += heads - kept.shape[1]
        if kept.shape[1] < 2:
            continue
        matrix = np.corrcoef(kept, rowvar=False)
        correlations.append(float(matrix[np.triu_indices(len(matrix), 1)].mean()))
        share = np.clip(np.linalg.eigvalsh(matrix), 0.0, None) / len(matrix)
        share = share[share > 0]
        ranks.append(float(np.exp(-np.sum(share * np.log(share)))))
    rank = mean_or_none(ranks)
    if constant:
        notes.append(
            f"{constant} heads have constant scores and are left out of correlation and rank"
        )
    if not ranks:
        notes.append("correlation and rank are left out: no layer has two heads whose scores vary")
    return {
        "auc_cv": float(np.mean(auroc.std(axis=1) / auroc.mean(axis=1))),
        "switches": float(np.mean(best[1:] != best[:-1])) if m > 1 else None,
        "correlation": mean_or_none(correlations),
        "effective_rank": rank,
        "rank_share": rank / heads if rank is not None else None,
    }


READOUT = specs(
    {
        "readout-site": _readout_site,
        "readout-position": _readout_position,
        "top-heads": _top_heads,
        "head-distribution": _head_distribution,
    },
    draws=RANDOM_DRAWS,
)


def _ranked(probes: HeadProbes) -> Index:
    """Return heads of each layer from the best to the worst, ties to the lowest: [m, K]."""
    return np.argsort(-probes.auroc, axis=1, kind="stable")


def _of_rank(probes: HeadProbes, rank: Index) -> Floats:
    """Return the depth mean [n_test] of the head of one rank per layer, [m]."""
    return depth_mean(probes.trajectory(_ranked(probes)[np.arange(len(rank)), rank]))


def _top(probes: HeadProbes, count: int) -> Floats:
    """Return the depth mean [n_test] over the ``count`` best heads of each layer, fewer where fewer
    have a probe."""
    ranked = _ranked(probes)
    layers = []
    for layer, order in enumerate(ranked):
        kept = [head for head in order[:count] if probes.auroc[layer, head] > 0]
        layers.append(probes.logits[:, layer, kept].astype(np.float64).mean(axis=1))
    return depth_mean(np.stack(layers, axis=1))
