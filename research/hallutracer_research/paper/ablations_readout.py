"""Where and how a layer is read: site, position, heads (App. readout-ablation, pooling, head-uniformity).

All of them keep the depth mean and change what it is the mean of.  Nothing is fitted here: the scores are in the run.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.evaluation.head_probes import HeadProbes
from hallutracer_research.evaluation.main_table import spread
from hallutracer_research.evaluation.options import OURS, RESIDUAL
from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.paper.diagnostics.classes import mean_or_none
from hallutracer_research.paper.diagnostics.uniformity import uniformity
from hallutracer_research.paper.table_spec import OVER_SPLITS, Row, TableSpec
from service.errors import TrainingError
from service.fitting.probes import Floats
from service.fitting.scores import auroc, risk_auroc
from service.readout import Pooling, Site
from service.risk import depth_mean

RANDOM_DRAWS: Final = 50
TOP: Final = 5


def _readout_site(result: SetResult, _: list[str]) -> Row:
    if RESIDUAL not in result.scores:
        raise TrainingError(f"{RESIDUAL} is not among the methods")
    head, residual = (
        [risk_auroc(result.label[split.test], split.score) for split in result.scores[name]]
        for name in (OURS, RESIDUAL)
    )
    difference = [b - a for a, b in zip(head, residual, strict=True)]
    return {"head": spread(head), "residual": spread(residual), "difference": spread(difference)}


def _readout_position(result: SetResult, notes: list[str]) -> Row:
    folds = result.folds(0)
    last = [auroc(result.label[split.test], depth_mean(split.test_trajectory)) for split in folds]
    cells = {Pooling.LAST_1.value: spread(last)}
    for pooling in Pooling:
        if pooling is Pooling.LAST_1:
            continue
        scores = result.pooled.get((Site.ATTENTION_HEAD, pooling), ())
        if len(scores) != len(folds):
            notes.append(f"{pooling}: scores of {len(scores)} of {len(folds)} folds, left out")
            continue
        aurocs = [auroc(result.label[split.test], score) for split, score in zip(folds, scores, strict=True)]
        cells[pooling.value] = spread([b - a for a, b in zip(last, aurocs, strict=True)])
    return cells


def _top_heads(result: SetResult, notes: list[str]) -> Row:
    best, five, worst, draws = [], [], [], []
    layers, heads = result.splits[0].probes.auroc.shape
    uniform = np.random.default_rng(0).random((RANDOM_DRAWS, layers))
    zero = 0
    for split in result.splits:
        probes, label = split.probes, result.label[split.test]
        fitted = probes.auroc > 0
        zero += int(np.sum(~fitted))
        last = fitted.sum(axis=1) - 1  # of the heads with a probe, in order of quality
        best.append(auroc(label, _of_rank(probes, np.zeros_like(last))))
        five.append(auroc(label, _top(probes, min(TOP, heads))))
        worst.append(auroc(label, _of_rank(probes, last)))
        draws.append([auroc(label, _of_rank(probes, (draw * (last + 1)).astype(np.int64))) for draw in uniform])
    if heads < TOP:
        notes.append(f"a layer has {heads} heads: Top-{TOP} takes all of them")
    if zero:
        notes.append(
            f"{zero} of {len(result.splits) * layers * heads} probes are all zeros and none of "
            "these heads is taken: the worst and the random one are among the others"
        )
    top_1, random_1 = spread(best), spread(np.mean(draws, axis=0).tolist())
    return {
        "top_1": top_1,
        "top_5": spread(five),
        "bottom_1": spread(worst),
        "random_1": random_1,
        "difference": random_1["mean"] - top_1["mean"],
    }


def _head_distribution(result: SetResult, notes: list[str]) -> Row:
    by_split = []
    for split in result.splits:
        probes = split.probes
        # A probe that is all zeros scores every row alike: 0.5, and not the 0 that stands for "no probe".
        quality = np.where(probes.auroc > 0, probes.auroc, 0.5)
        by_split.append(uniformity(quality, lambda layer, probes=probes: probes.logits[:, layer]))  # type: ignore[misc]
        notes += by_split[-1].notes
    return {
        "heads": f"{by_split[0].layers}×{by_split[0].heads}",
        "auc_cv": mean_or_none([split.auc_cv for split in by_split]),
        "switches": mean_or_none([split.switch_rate for split in by_split]),
        "correlation": mean_or_none([split.correlation for split in by_split]),
        "effective_rank": mean_or_none([split.effective_rank for split in by_split]),
        "rank_share": mean_or_none([split.rank_share for split in by_split]),
    }


READOUT_SITE: Final = TableSpec(
    "readout-site", "Readout site", "tab:readout_ablation", ("head", "residual", "difference"),
    f"AUROC of the depth mean, {OVER_SPLITS}: selected attention heads (L1) against the residual stream (L2, no "
    "heads).",
    _readout_site,
)  # fmt: skip
READOUT_POSITION: Final = TableSpec(
    "readout-position", "Readout position", "tab:ablation_pooling", tuple(pooling.value for pooling in Pooling),
    "AUROC in percent of the depth mean at the last prompt token, and how many points that of each pooling differs "
    "from it; mean ± standard deviation over folds.",
    _readout_position,
    ("Folds of the first seed only; every pooling has its own probes and heads, at the C chosen for last-1.",),
)  # fmt: skip
TOP_HEADS: Final = TableSpec(
    "top-heads", "Head selection", "tab:topk_heads", ("top_1", "top_5", "bottom_1", "random_1", "difference"),
    f"AUROC in percent of the depth mean, {OVER_SPLITS}; for Random-1 over {RANDOM_DRAWS} draws of a head for each "
    "layer, each the mean over splits.",
    _top_heads,
    ("Heads are ranked by AUROC on the training side; a layer's logit is the mean of its heads' unit-norm logits.",),
)  # fmt: skip
HEAD_DISTRIBUTION: Final = TableSpec(
    "head-distribution", "Head signal uniformity", "tab:head_distribution",
    ("heads", "auc_cv", "switches", "correlation", "effective_rank", "rank_share"),
    "Coefficient of variation of per-head AUROC within a layer; share of neighbouring layers between which the best "
    "head changes; mean correlation of probe scores within a layer; effective rank of that correlation matrix, and its "
    "share of the number of heads.",
    _head_distribution,
    ("AUROC on the training side, correlations of the logits on the test side; means over folds and seeds.",),
)  # fmt: skip
READOUT: Final = (READOUT_SITE, READOUT_POSITION, TOP_HEADS, HEAD_DISTRIBUTION)


def _ranked(probes: HeadProbes) -> NDArray[np.int64]:
    """Heads of each layer from the best to the worst, ties to the lowest: [m, K]."""
    return np.argsort(-probes.auroc, axis=1, kind="stable")


def _of_rank(probes: HeadProbes, rank: NDArray[np.int64]) -> Floats:
    """Depth mean [n_test] of the head of one rank per layer, [m]."""
    return depth_mean(probes.trajectory(np.take_along_axis(_ranked(probes), rank[:, None], axis=1)[:, 0]))


def _top(probes: HeadProbes, count: int) -> Floats:
    """Depth mean [n_test] over the ``count`` best heads of each layer, fewer where fewer have a probe."""
    ranked = _ranked(probes)
    layers = []
    for layer, order in enumerate(ranked):
        kept = [head for head in order[:count] if probes.auroc[layer, head] > 0]
        layers.append(probes.logits[:, layer, kept].astype(np.float64).mean(axis=1))
    return depth_mean(np.stack(layers, axis=1))
