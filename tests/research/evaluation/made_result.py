"""A fitted set made from planted rows: every head of every layer reads one common level, so that the mean suffices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.options import OURS, RESIDUAL, EvaluateOptions, EvaluationSource
from hallutracer_research.evaluation.prepare import PreparedSet
from hallutracer_research.evaluation.results import SetResult
from hallutracer_research.evaluation.splits import HeadProbes, Split, fit_split, outer_splits, residual_depth_mean
from hallutracer_research.evaluation.tables import Table
from service.data.run_folder import RowsFile
from service.fitting.nested_cv import FoldScores
from service.fitting.probes import Readouts
from service.readout import Geometry, Pooling, Site
from service.risk import depth_mean

GEOMETRY = Geometry(num_layers=8, num_heads=3, head_dim=8, hidden_size=12)
OPTIONS = EvaluateOptions(
    sources=(EvaluationSource("made", None),), out=Path("unused"), seeds=2, folds=3, inner_folds=2, c=0.3, jobs=1
)
COUNT = 240
LABEL = np.arange(400) // 2 % 2  # of scripted results


def made_inputs(folder: Path, *, name: str, seed: int, strength: float = 0.35, share: float = 0.5) -> MethodInputs:
    """Groups of two rows; a_l = noise + (class + own level) x direction of the head, on a scale that grows by layer."""
    rng = np.random.default_rng(seed)
    group = np.arange(COUNT) // 2
    label = (rng.random(COUNT // 2) < share).astype(np.int64)[group]
    level = strength * (2 * label - 1) + 0.3 * rng.standard_normal(COUNT)
    sites = {}
    for site in Site:
        heads, dim = GEOMETRY.heads(site), GEOMETRY.dim(site)
        direction = rng.standard_normal((GEOMETRY.num_layers, heads, dim))
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
        rows = rng.standard_normal((GEOMETRY.num_layers, COUNT, heads, dim))
        rows += level[None, :, None, None] * direction[:, None]
        rows *= np.arange(1, GEOMETRY.num_layers + 1)[:, None, None, None]
        path = folder / f"{name}-{site}.f32"
        rows.reshape(GEOMETRY.num_layers, COUNT, -1).astype("<f4").tofile(path)
        sites[site] = Readouts(RowsFile(path, GEOMETRY, site, COUNT), np.arange(COUNT), label)
    return MethodInputs(
        label=label, group=group, heads=sites[Site.ATTENTION_HEAD], residual=sites[Site.RESIDUAL_STREAM],
        first_token=rng.standard_normal((COUNT, 2)), prompt_tokens=rng.integers(5, 40, COUNT), text=("why?",) * COUNT,
        kind=np.full(COUNT, ""),
    )  # fmt: skip


def made_result(
    folder: Path, *, name: str = "made", seed: int = 0, strength: float = 0.35, share: float = 0.5
) -> SetResult:
    """Real fits of our method and of the residual stream; the best head and noise for the other methods."""
    inputs = made_inputs(folder, name=name, seed=seed, strength=strength, share=share)
    splits = [fit_split(inputs, *one, OPTIONS) for one in outer_splits(inputs, OPTIONS)]
    rng = np.random.default_rng(1)
    scores = {
        OURS: [fold_scores(split, -depth_mean(split.test_trajectory)) for split in splits],
        RESIDUAL: [fold_scores(split, -residual_depth_mean(inputs, split, OPTIONS)) for split in splits],
        "iti": [
            fold_scores(split, -split.test_trajectory[:, split.probes.auroc.max(axis=1).argmax()]) for split in splits
        ],
    }
    for reference in ("first-token-max-prob", "prompt-length"):
        scores[reference] = [fold_scores(split, rng.standard_normal(len(split.test))) for split in splits]
    folds = [split for split in splits if split.seed == 0]
    pooled: dict[tuple[Site, Pooling], list[np.ndarray]] = {
        (Site.ATTENTION_HEAD, pooling): [
            depth_mean(split.test_trajectory) + 10.0 * rng.standard_normal(len(split.test)) for split in folds
        ]
        for pooling in Pooling
        if pooling is not Pooling.LAST_1
    }
    return SetResult(prepared(inputs, name), splits, scores, None, pooled)


def prepared(inputs: MethodInputs, name: str) -> PreparedSet:
    rows = cast(Any, SimpleNamespace(name=name))
    nothing = cast(Any, None)
    return PreparedSet(rows, inputs, {}, nothing, np.arange(COUNT), {})


def fold_scores(split: Split, score: np.ndarray) -> FoldScores:
    return FoldScores(split.seed, split.fold, split.test, score)


def scripted_result(
    logits: np.ndarray,
    label: np.ndarray,
    *,
    quality: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    name: str = "scripted",
) -> SetResult:
    """A run whose every head's logits [n, m, K] are what they are; two folds of one seed, no readouts behind them.

    The training side's trajectories are those of head 0.  quality, scale [m, K]: training AUROC, within-class spread.
    """
    count, layers, heads = logits.shape
    quality = np.full((layers, heads), 0.7) if quality is None else quality
    scale = np.ones((layers, heads)) if scale is None else scale
    sides = [np.arange(count)[place::2] for place in (0, 1)]
    splits = []
    for fold, test in enumerate(sides):
        train = sides[1 - fold]
        probes = HeadProbes(
            np.full((layers, heads, 2), 0.5**0.5), np.zeros((layers, heads)), scale, quality, logits[test].astype("f4")
        )
        crossed = [logits[rows, :-1, 0] + 0.5 * np.sin(np.arange(layers - 1)) for rows in (train, test)]
        splits.append(Split(0, fold, train, test, 1.0, probes, logits[train, :, 0], crossed[0], crossed[1]))
    scores = {OURS: [fold_scores(split, -depth_mean(split.test_trajectory)) for split in splits]}
    nothing = cast(Any, None)
    inputs = MethodInputs(label, np.arange(count), nothing, nothing, np.zeros((count, 2)), np.zeros(count, np.int64))
    return SetResult(prepared(inputs, name), splits, scores, None)


def noise(layers: int, heads: int = 1, spread: float = 1.0, seed: int = 0) -> np.ndarray:
    """Logits [rows, layers, heads] that know nothing of ``LABEL``."""
    return spread * np.random.default_rng(seed).standard_normal((len(LABEL), layers, heads))


def row(table: Table) -> Mapping[str, Any]:
    return table.rows[0]
