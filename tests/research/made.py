"""Made rows, fits and trajectories with a signal of known place and strength."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hallutracer_research.evaluation.methods import OURS, RESIDUAL
from hallutracer_research.evaluation.methods.base import (
    AnswerReadings,
    BehindAnswers,
    Fold,
    MethodInputs,
    OtherPositions,
)
from hallutracer_research.evaluation.options import EvaluateOptions, EvaluationSource
from hallutracer_research.evaluation.prepare import PreparedSet
from hallutracer_research.evaluation.results import SetResult
from hallutracer_research.evaluation.splits import (
    HeadProbes,
    Split,
    chosen_depth_mean,
    fit_split,
    outer_splits,
)
from service.data.run_folder import RowsFile
from service.fitting.nested_cv import FoldScores
from service.fitting.probes import Readouts
from service.readout import Geometry, Pooling, Site
from service.risk import depth_mean

NOTHING: Any = None


# A fitted set: every head of every layer reads one common level, so that the mean suffices.
FITTED = Geometry(num_layers=8, num_heads=3, head_dim=8, hidden_size=12)
OPTIONS = EvaluateOptions(
    sources=(EvaluationSource("made", None),),
    out=Path("unused"),
    seeds=2,
    folds=3,
    inner_folds=2,
    c=0.3,
    jobs=1,
)
COUNT = 240
LABEL = np.arange(400) // 2 % 2  # of scripted results


def level_inputs(folder: Path, *, strength: float = 0.35) -> MethodInputs:
    """Groups of two rows; a_l = noise + (class + own level) x direction of the head, on a scale
    that grows by layer."""
    rng = np.random.default_rng(0)
    group = np.arange(COUNT) // 2
    label = (rng.random(COUNT // 2) < 0.5).astype(np.int64)[group]
    level = strength * (2 * label - 1) + 0.3 * rng.standard_normal(COUNT)
    sites = {}
    for site in Site:
        shape = FITTED.num_layers, FITTED.heads(site), FITTED.dim(site)
        direction = rng.standard_normal(shape)
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
        rows = (
            rng.standard_normal((shape[0], COUNT, *shape[1:]))
            + level[None, :, None, None] * direction[:, None]
        )
        rows *= np.arange(1, shape[0] + 1)[:, None, None, None]
        by_row = rows.reshape(shape[0], COUNT, -1).swapaxes(0, 1)
        sites[site] = readouts(folder, by_row, label, site, FITTED)
    return MethodInputs(
        label=label,
        group=group,
        heads=sites[Site.ATTENTION_HEAD],
        residual=sites[Site.RESIDUAL_STREAM],
        first_token=rng.standard_normal((COUNT, 2)),
        prompt_tokens=rng.integers(5, 40, COUNT),
        text=("why?",) * COUNT,
        kind=np.full(COUNT, ""),
    )


def fitted_result(folder: Path) -> SetResult:
    """Real fits of our method and of the residual stream; the best head and noise for the other
    methods."""
    inputs = level_inputs(folder)
    splits = [fit_split(inputs, outer, OPTIONS) for outer in outer_splits(inputs, OPTIONS)]
    rng = np.random.default_rng(1)
    by_split = {
        OURS: [-depth_mean(split.test_trajectory) for split in splits],
        RESIDUAL: [
            -chosen_depth_mean(inputs.residual, split.fold_of(inputs), OPTIONS) for split in splits
        ],
        "iti": [
            -split.test_trajectory[:, split.probes.auroc.max(axis=1).argmax()] for split in splits
        ],
    }
    for reference in ("first-token-max-prob", "prompt-length"):
        by_split[reference] = [rng.standard_normal(len(split.test)) for split in splits]
    scores = {name: list(map(fold_scores, splits, values)) for name, values in by_split.items()}
    means = [depth_mean(split.test_trajectory) for split in splits if split.seed == 0]
    pooled: dict[tuple[Site, Pooling], list[np.ndarray]] = {}
    for pooling in Pooling:
        if pooling is not Pooling.LAST_1:
            noisy = [mean + 10.0 * rng.standard_normal(len(mean)) for mean in means]
            pooled[Site.ATTENTION_HEAD, pooling] = noisy
    return SetResult(prepared(inputs, "made"), splits, scores, None, pooled)


def prepared(inputs: MethodInputs, name: str) -> PreparedSet:
    rows = SimpleNamespace(name=name)
    return PreparedSet(rows, inputs, {}, NOTHING, np.arange(len(inputs.label)), {})


def fold_scores(split: Split, score: np.ndarray) -> FoldScores:
    return FoldScores(split.seed, split.fold, split.test, score)


def scripted_result(
    logits: np.ndarray,
    label: np.ndarray = LABEL,
    *,
    quality: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    name: str = "scripted",
) -> SetResult:
    """A run whose every head's logits [n, m, K] are what they are; two folds of one seed, no
    readouts behind them.  The training side's trajectories are those of head 0.  quality, scale
    [m, K]: training AUROC, within-class spread."""
    count, layers, heads = logits.shape
    quality = np.full((layers, heads), 0.7) if quality is None else quality
    scale = np.ones((layers, heads)) if scale is None else scale
    sides = [np.arange(count)[place::2] for place in (0, 1)]
    splits = []
    for fold, test in enumerate(sides):
        train = sides[1 - fold]
        probes = HeadProbes(
            np.full((layers, heads, 2), 0.5**0.5),
            np.zeros((layers, heads)),
            scale,
            quality,
            logits[test].astype("f4"),
        )
        crossed = [
            logits[rows, :-1, 0] + 0.5 * np.sin(np.arange(layers - 1)) for rows in (train, test)
        ]
        splits.append(Split(0, fold, train, test, 1.0, probes, logits[train, :, 0], *crossed))
    scores = {OURS: [fold_scores(split, -depth_mean(split.test_trajectory)) for split in splits]}
    inputs = MethodInputs(
        label, np.arange(count), NOTHING, NOTHING, np.zeros((count, 2)), np.zeros(count, np.int64)
    )
    return SetResult(prepared(inputs, name), splits, scores, None)


def blind_logits(layers: int, heads: int = 1, seed: int = 0) -> np.ndarray:
    """Logits [rows, layers, heads] that know nothing of ``LABEL``."""
    return np.random.default_rng(seed).standard_normal((len(LABEL), layers, heads))


# Inputs of methods: a strong head at ``BEST``, a weaker one elsewhere, a residual stream that knows
# a little at WIDE.
GEOMETRY = Geometry(num_layers=6, num_heads=3, head_dim=5, hidden_size=8)
BEST = (4, 1)  # layer and head with the strongest signal
WIDE = (1, 2, 3, 4, 5)  # layers of the residual stream


def noise(
    rng: np.random.Generator, count: int, site: Site, geometry: Geometry = GEOMETRY
) -> np.ndarray:
    """Rows [n, m, width] without any signal, on scales and offsets that standardisation must
    undo."""
    width = geometry.width(site)
    scale = 10.0 ** rng.uniform(-1, 1, (geometry.num_layers, width))
    return (
        rng.standard_normal((count, geometry.num_layers, width)) * scale
        + rng.uniform(-5, 5, scale.shape) * scale
    )


def plant(rows: np.ndarray, label: np.ndarray, layer: int, column: int, strength: float) -> None:
    """Move one column apart by ``strength`` of its deviations, in place."""
    rows[:, layer, column] += strength * rows[:, layer, column].std() * (2 * label - 1)


def readouts(
    folder: Path, rows: np.ndarray, label: np.ndarray, site: Site, geometry: Geometry = GEOMETRY
) -> Readouts:
    """Rows [n, m, width] on disk, behind three rows that carry no label."""
    path = folder / f"{site}.f32"
    padded = np.concatenate([np.full((3, *rows.shape[1:]), 1e30), rows])
    np.ascontiguousarray(padded.transpose(1, 0, 2), "<f4").tofile(path)
    return Readouts(RowsFile(path, geometry, site, len(padded)), np.arange(3, len(padded)), label)


def method_inputs(
    folder: Path, count: int = 240, seed: int = 0, strength: float = 0.8
) -> MethodInputs:
    """Groups of two rows, whose text, kind, numbers and answers know a little of the label, too."""
    rng = np.random.default_rng(seed)
    group = np.arange(count) // 2
    label = (rng.random(count // 2) < 0.6).astype(np.int64)[group]
    heads, residual = (
        noise(rng, count, site) for site in (Site.ATTENTION_HEAD, Site.RESIDUAL_STREAM)
    )
    plant(heads, label, BEST[0], BEST[1] * GEOMETRY.head_dim + 2, strength)
    plant(heads, label, 2, 0, strength / 2)
    plant(heads, label, GEOMETRY.num_layers - 1, 7, strength / 2)
    for layer in WIDE:
        plant(residual, label, layer, layer, strength * 0.75)
    words = np.random.default_rng(seed + 1)
    more = np.random.default_rng(seed + 3)
    known = more.standard_normal((count, 4)) + np.array([1.2, -1.2, 1.2, -1.2]) * label[:, None]
    embedding = more.standard_normal((count, 7)) + 1.5 * label[:, None] * (np.arange(7) == 3)
    own = noise(more, count, Site.RESIDUAL_STREAM)
    for layer in WIDE:
        plant(own, label, layer, layer + 1, strength * 0.75)
    (folder / "behind").mkdir(exist_ok=True)
    read = readouts(folder, heads, label, Site.ATTENTION_HEAD)
    return MethodInputs(
        label=label,
        group=group,
        heads=read,
        residual=readouts(folder, residual, label, Site.RESIDUAL_STREAM),
        first_token=np.stack(
            [-rng.exponential(size=count) - (1 - label), rng.exponential(size=count) - label],
            axis=1,
        ),
        prompt_tokens=rng.integers(5, 40, count) + 10 * label,
        text=tuple(_text(words, bool(one)) for one in label),
        kind=np.where(words.random(count) < 0.2, 1 - label, label).astype(np.str_),
        halluguard=rng.standard_normal(count) + label,
        answers=replace(
            _answers(np.random.default_rng(seed + 2), label, residual), content=known[:, :2]
        ),
        positions=OtherPositions(
            _tokens(more, label),
            *[read] * 3,
            first_token=known[:, 2:],
            scaffold=np.full(count, 3),
        ),
        behind=BehindAnswers(
            *[read] * 3,
            readouts(folder / "behind", own, label, Site.RESIDUAL_STREAM),
            tokens=heads[:, None].astype(np.float16),
            answer_tokens=np.full(count, 1),
            question=np.full(count, 4),
        ),
        embedding=embedding.astype(np.float32),
    )


def _answers(rng: np.random.Generator, label: np.ndarray, residual: np.ndarray) -> AnswerReadings:
    """Each number knows a little of the label; the entropies follow one column of the residual
    stream, too."""
    signs = {"log_prob": 1, "true": 1, "true_examples": 1, "entropy_weighted": -1, "eigenscore": -1}
    known = {
        name: rng.standard_normal(len(label)) + sign * 1.2 * label for name, sign in signs.items()
    }
    states = rng.standard_normal((len(label), 2 * GEOMETRY.hidden_size)).astype(np.float32) * 3 + 5
    states[:, 4] += 6 * label
    entropy = np.round(
        -sum(residual[:, layer, layer] / residual[:, layer, layer].std() for layer in WIDE), 1
    )
    right = np.clip(rng.integers(0, 11, len(label)) / 20 + 0.5 * label, 0, 1)
    return AnswerReadings(
        states=states, true_tokens=np.full(len(label), 30.0), entropy=entropy, right=right, **known
    )


def _tokens(rng: np.random.Generator, label: np.ndarray) -> np.ndarray:
    """States [n, 3, 9, 6] of up to nine tokens: at the second layer one token knows the label and
    says that it does."""
    states = rng.standard_normal((len(label), 3, 9, 6)) + 2.0
    place = rng.integers(3, 9, len(label))
    states[np.arange(len(label)), 1, place, 0] += 6.0
    states[np.arange(len(label)), 1, place, 1] += 3.0 * (2 * label - 1)
    shorter = np.arange(9) < rng.integers(0, 3, len(label))[:, None]
    return np.where(shorter[:, None, :, None], 0.0, states).astype(np.float16)


def _text(rng: np.random.Generator, factual: bool) -> str:
    """A question with one word that its class uses more often."""
    hint = "moon" if (rng.random() < 0.85) == factual else "salt"
    return " ".join(
        rng.choice(["who", "what", "where", "king", "river", "song", "year", hint], 6).tolist()
        + [hint]
    )


def relabelled(data: MethodInputs, label: np.ndarray) -> MethodInputs:
    """The same rows with these labels."""
    heads, residual = (replace(rows, label=label) for rows in (data.heads, data.residual))
    behind = data.behind
    if behind is not None:
        behind = replace(behind, residual=replace(behind.residual, label=label))
    return replace(data, label=label, heads=heads, residual=residual, behind=behind)


def turned(data: MethodInputs, rows: np.ndarray) -> MethodInputs:
    """The same rows, these with the other label."""
    label = data.label.copy()
    label[rows] = 1 - label[rows]
    return relabelled(data, label)


def sides(data: MethodInputs) -> tuple[np.ndarray, np.ndarray]:
    """The last third is the test side; groups stay whole."""
    cut = len(data.label) * 2 // 3 // 2 * 2
    return np.arange(cut), np.arange(cut, len(data.label))


def fold(data: MethodInputs, seed: int = 0) -> Fold:
    """These sides, fitted in this process."""
    return Fold(data, *sides(data), seed, jobs=1)


def random_intercepts(
    n: int,
    m: int,
    *,
    alpha: float = 1.0,
    epsilon: float = 1.0,
    gap: ArrayLike = 0.8,
    share: float = 0.5,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """L_l = alpha_i + gap_l label + eps_il with standard deviations alpha, epsilon: trajectory
    [n, m], label [n]."""
    rng = np.random.default_rng(seed)
    label = (np.arange(n) < share * n).astype(np.int64)
    level = alpha * rng.standard_normal((n, 1)) + epsilon * rng.standard_normal((n, m))
    return level + np.asarray(gap) * label[:, None], label


def unit_rows(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))
