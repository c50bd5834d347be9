"""Where and how a layer is read: site, position, heads (App. readout-ablation, pooling, head-uniformity).

All of them keep the depth mean and change what it is the mean of.  Fits no probe: the scores are in the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.errors import TrainingError
from service.evaluation.every_head import EveryHead
from service.evaluation.options import OURS, RESIDUAL
from service.evaluation.set_run import SetRun
from service.evaluation.tables import Table
from service.fitting.fit import Floats
from service.fitting.scores import auroc, risk_auroc
from service.paper.cells import OVER_SPLITS, Row, by_set, published_columns, spread
from service.paper.diagnostics.classes import mean_or_none
from service.paper.diagnostics.uniformity import Uniformity, uniformity
from service.readout import Pooling, Site
from service.risk import depth_mean

RANDOM_DRAWS: Final = 50
TOP: Final = 5


def readout_site(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. readout_ablation: depth mean of selected heads against that of the residual stream."""

    def row(run: SetRun, _: list[str]) -> Row:
        if RESIDUAL not in run.runs:
            raise TrainingError(f"{RESIDUAL} is not among the methods")
        head, residual = (
            [risk_auroc(run.label[one.test], one.score) for one in run.runs[name]] for name in (OURS, RESIDUAL)
        )
        differences = [b - a for a, b in zip(head, residual, strict=True)]
        return {"head": spread(head), "residual": spread(residual), "difference": spread(differences)}

    notes: list[str] = []
    return [
        Table(
            name="readout-site",
            title="Readout site",
            columns=published_columns("tab:readout_ablation", "head", "residual", "difference"),
            rows=by_set(runs, row, notes),
            label="tab:readout_ablation",
            caption=f"AUROC of the depth mean, {OVER_SPLITS}: selected attention heads (L1) against the residual "
            "stream (L2, no heads).",
            notes=notes,
        )
    ]


def readout_position(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. ablation_pooling: the readout at t* (last-1), and the difference of the other seven poolings to it."""

    def row(run: SetRun, notes: list[str]) -> Row:
        folds = run.folds(0)
        last = [auroc(run.label[split.test], depth_mean(split.test_trajectory)) for split in folds]
        cells: dict[str, dict[str, float]] = {Pooling.LAST_1.value: spread(last)}
        for pooling in Pooling:
            scores = run.pooled.get((Site.ATTENTION_HEAD, pooling), ())
            if pooling is Pooling.LAST_1:
                continue
            if len(scores) != len(folds):
                notes.append(f"{pooling}: scores of {len(scores)} of {len(folds)} folds, left out")
                continue
            found = [auroc(run.label[split.test], score) for split, score in zip(folds, scores, strict=True)]
            cells[pooling.value] = spread([b - a for a, b in zip(last, found, strict=True)])
        return cells

    notes = ["Folds of the first seed only; every pooling has its own probes and heads, at the C chosen for last-1."]
    return [
        Table(
            name="readout-position",
            title="Readout position",
            columns=published_columns("tab:ablation_pooling", *(pooling.value for pooling in Pooling)),
            rows=by_set(runs, row, notes),
            label="tab:ablation_pooling",
            caption="AUROC in percent of the depth mean at the last prompt token, and how many points that of each "
            "pooling differs from it; mean ± standard deviation over folds.",
            notes=notes,
        )
    ]


def top_heads(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. topk_heads: depth mean over the K best heads of each layer, the worst, or a random one."""

    def row(run: SetRun, notes: list[str]) -> Row:
        one, five, worst, draws = [], [], [], []
        heads = run.splits[0].every.auroc.shape[1]
        uniform = np.random.default_rng(0).random((RANDOM_DRAWS, run.splits[0].every.auroc.shape[0]))
        zero = 0
        for split in run.splits:
            every, label = split.every, run.label[split.test]
            found = every.auroc > 0
            zero += int(np.sum(~found))
            last = found.sum(axis=1) - 1  # of the heads with a probe, in order of quality
            one.append(auroc(label, _of_rank(every, np.zeros_like(last))))
            five.append(auroc(label, _top(every, min(TOP, heads))))
            worst.append(auroc(label, _of_rank(every, last)))
            draws.append([auroc(label, _of_rank(every, (draw * (last + 1)).astype(np.int64))) for draw in uniform])
        if heads < TOP:
            notes.append(f"a layer has {heads} heads: Top-{TOP} takes all of them")
        if zero:
            notes.append(
                f"{zero} of {len(run.splits) * run.splits[0].every.auroc.size} probes are all zeros and none of "
                "these heads is taken: the worst and the random one are among the others"
            )
        random = spread(np.mean(draws, axis=0).tolist())
        top_1 = spread(one)
        return {
            "top_1": top_1,
            "top_5": spread(five),
            "bottom_1": spread(worst),
            "random_1": random,
            "difference": random["mean"] - top_1["mean"],
        }

    notes = [
        "Heads are ranked by AUROC on the training side; a layer's logit is the mean of its heads' unit-norm logits."
    ]
    return [
        Table(
            name="top-heads",
            title="Head selection",
            columns=published_columns("tab:topk_heads", "top_1", "top_5", "bottom_1", "random_1", "difference"),
            rows=by_set(runs, row, notes),
            label="tab:topk_heads",
            caption=f"AUROC in percent of the depth mean, {OVER_SPLITS}; for Random-1 over {RANDOM_DRAWS} draws of a "
            "head for each layer, each the mean over splits.",
            notes=notes,
        )
    ]


def head_distribution(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. head_distribution: how alike the heads of a layer are (``diagnostics.uniformity``), mean over splits."""

    def row(run: SetRun, notes: list[str]) -> Row:
        found: list[Uniformity] = []
        for split in run.splits:
            every = split.every
            # A probe that is all zeros scores every row alike: 0.5, and not the 0 that stands for "no probe".
            quality = np.where(every.auroc > 0, every.auroc, 0.5)
            found.append(uniformity(quality, lambda layer, every=every: every.logits[:, layer]))  # type: ignore[misc]
        for one in found:
            notes += one.notes
        return {
            "heads": f"{found[0].layers}×{found[0].heads}",
            "auc_cv": _mean([one.auc_cv for one in found]),
            "switches": _mean([one.switch_rate for one in found]),
            "correlation": _mean([one.correlation for one in found]),
            "effective_rank": _mean([one.effective_rank for one in found]),
            "rank_share": _mean([one.rank_share for one in found]),
        }

    notes = ["AUROC on the training side, correlations of the logits on the test side; means over folds and seeds."]
    keys = ("heads", "auc_cv", "switches", "correlation", "effective_rank", "rank_share")
    return [
        Table(
            name="head-distribution",
            title="Head signal uniformity",
            columns=published_columns("tab:head_distribution", *keys),
            rows=by_set(runs, row, notes),
            label="tab:head_distribution",
            caption="Coefficient of variation of per-head AUROC within a layer; share of neighbouring layers between "
            "which the best head changes; mean correlation of probe scores within a layer; effective rank of that "
            "correlation matrix, and its share of the number of heads.",
            notes=notes,
        )
    ]


def _ranked(every: EveryHead) -> NDArray[np.int64]:
    """Heads of each layer from the best to the worst, ties to the lowest: [m, K]."""
    return np.argsort(-every.auroc, axis=1, kind="stable")


def _of_rank(every: EveryHead, rank: NDArray[np.int64]) -> Floats:
    """Depth mean [n_test] of the head of one rank per layer, [m]."""
    return depth_mean(every.trajectory(np.take_along_axis(_ranked(every), rank[:, None], axis=1)[:, 0]))


def _top(every: EveryHead, count: int) -> Floats:
    """Depth mean [n_test] over the ``count`` best heads of each layer, fewer where fewer have a probe."""
    ranked = _ranked(every)
    layers = []
    for layer, order in enumerate(ranked):
        kept = [head for head in order[:count] if every.auroc[layer, head] > 0]
        layers.append(every.logits[:, layer, kept].astype(np.float64).mean(axis=1))
    return depth_mean(np.stack(layers, axis=1))


def _mean(values: Sequence[float | None]) -> float | None:
    return mean_or_none([np.nan if value is None else value for value in values])
