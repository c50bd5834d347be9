"""Does the interval of a risk hold what other training rows would have said, and are 1 % of fresh prompts outside?

    python -m benchmarks.refits --draws 30

A draw is a training set of n rows in groups, and the trainer's whole way with it: nested cross-validation, choice of C,
refit, classifier, reference, interval.  Each draw's intervals for fresh prompts are compared with the risks that all
the other draws give these prompts: refits on fresh training sets, which share nothing with it.  Nominal is 95 %.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from tqdm import tqdm

from probes_store.records import RefitInterval
from service.data.run_folder import RowsFile
from service.fitting.estimator import DepthMeanProbe, class_statistics, fit_classifier
from service.fitting.folds import OuterFold, outer_folds
from service.fitting.nested_cv import by_row, nested_cv, probe_columns
from service.fitting.probes import Readouts
from service.fitting.uncertainty import fit_interval, fit_reference
from service.judging.uncertainty import distance
from service.readout import Geometry, Probes, Site
from service.risk import depth_mean
from service.trainer.prepare import trajectories
from service.trainer.presentation import markdown_table
from service.trainer.publish import probe_tensors

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

GEOMETRY = Geometry(num_layers=6, num_heads=3, head_dim=16, hidden_size=48)
DESIGNS = ((300, 1), (1000, 1), (40, 10), (100, 10))  # groups x rows
ICC = 0.4  # of the readouts' noise, where a group has rows
FRESH = 4000  # prompts
FOLDS, SEEDS = 5, (0, 1, 2)
OPTIONS = DepthMeanProbe(folds=FOLDS, seeds=SEEDS)


@dataclass(frozen=True, eq=False)
class Said:
    """What one training set's bundle says of the fresh prompts."""

    log_odds: Floats  # [N] of factual
    distance: Floats  # [N]
    elsewhere: Floats  # [N'] distances of prompts of another kind
    half_width: Floats  # [N]


class World:
    """Readouts in groups: a truth direction in some heads of each layer, noise that heads and layers share."""

    def __init__(self, rng: np.random.Generator) -> None:
        m, k, d = GEOMETRY.num_layers, GEOMETRY.num_heads, GEOMETRY.head_dim
        direction = rng.normal(size=(m, k, d))
        self._truth = direction / np.linalg.norm(direction, axis=2, keepdims=True)
        self._truth *= np.linspace(0.1, 0.4, m)[:, None, None] * np.array([0.0, 0.8, 1.0])[:, None]
        self._shared = rng.normal(size=(8, m, k, d)) * 0.4
        self._scale = np.exp(np.linspace(0, 2, m))[:, None, None]
        self._shift = rng.normal(size=(m, k, d)) * 0.8

    def draw(
        self, rng: np.random.Generator, groups: int, size: int, shift: float = 0.0
    ) -> tuple[NDArray[np.float32], Index, Index]:
        """Activations [n, m, width], label [n] and group [n]; ``shift`` moves to prompts of another kind."""
        group = np.repeat(np.arange(groups), size)

        def alike(*shape: int) -> Floats:
            share = ICC if size > 1 else 0.0
            own = rng.normal(size=(len(group), *shape))
            return np.asarray(np.sqrt(share) * rng.normal(size=(groups, *shape))[group] + np.sqrt(1 - share) * own)

        label = (alike() > 0.3).astype(np.int64)
        x = alike(*self._truth.shape) + np.einsum("nq,qmkd->nmkd", alike(8), self._shared) + shift * self._shift
        x = (x + (2 * label - 1)[:, None, None, None] * self._truth) * self._scale
        return x.reshape(len(label), GEOMETRY.num_layers, -1).astype(np.float32), label, group


def on_disk(folder: Path, name: str, x: NDArray[np.float32], label: Index, geometry: Geometry = GEOMETRY) -> Readouts:
    path = folder / name
    np.ascontiguousarray(x.transpose(1, 0, 2), "<f4").tofile(path)
    return Readouts(RowsFile(path, geometry, Site.ATTENTION_HEAD, len(x)), np.arange(len(x)), label)


def trained(
    train: Readouts, group: Index, fresh: Readouts, elsewhere: Readouts | None, options: DepthMeanProbe = OPTIONS
) -> Said:
    label, blank = train.label, np.zeros((len(train.label), 2))

    def fold_risk(fold: OuterFold) -> dict[str, Floats]:
        _, columns = probe_columns(train, group, blank, fold.train, fold.test, fold.seed, options)
        of_train, of_test = dict(columns)["depth_mean_unit_norm"]
        return {"own": fit_classifier(of_train, label[fold.train]).risk(of_test)}

    scores = nested_cv(outer_folds(label, group, folds=FOLDS, seeds=SEEDS), fold_risk)
    probe = clone(options).fit_readouts(train, group).fit_risk(label)
    crossed, classifier, final = probe.out_of_fold_, probe.classifier_, probe.probes_
    reference = fit_reference(crossed, label, group, FOLDS, SEEDS)
    tensors = probe_tensors(final, np.ones(len(final.head)), *class_statistics(crossed, label), reference=reference)
    probes = Probes.of(Site.ATTENTION_HEAD, tensors)
    interval = fit_interval(by_row(scores["own"], len(label)), reference, FOLDS)
    assert interval is not None
    trajectory = trajectories(fresh, [probes])
    away = distance(trajectory, reference.mean, reference.whitening)
    far = np.empty(0)
    if elsewhere is not None:
        far = distance(trajectories(elsewhere, [probes]), reference.mean, reference.whitening)
    log_odds = depth_mean(trajectory) * classifier.weight[0] + classifier.intercept
    return Said(log_odds, away, far, half_widths(interval, log_odds, away))


def half_widths(interval: RefitInterval, log_odds: Floats, away: Floats) -> Floats:
    return np.array([interval.half_width(*pair) for pair in zip(log_odds.tolist(), away.tolist(), strict=True)])


def simulated(draws: int, groups: int, size: int, seed: int, options: DepthMeanProbe = OPTIONS) -> Iterator[Said]:
    """Draws of one design; world and fresh prompts stay."""
    rng = np.random.default_rng([seed, groups, size])
    world = World(rng)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fresh = on_disk(folder, "fresh", *world.draw(rng, FRESH // size, size)[:2])
        elsewhere = on_disk(folder, "elsewhere", *world.draw(rng, 500, 1, shift=3.0)[:2])
        for _ in tqdm(range(draws), f"{groups} x {size}", leave=False, mininterval=5):
            x, label, group = world.draw(rng, groups, size)
            yield trained(on_disk(folder, "train", x, label), group, fresh, elsewhere, options)


def table_row(name: str, said: list[Said]) -> list[str]:
    """Coverage over all ordered pairs of draws, by draw, by risk; shares outside; widths."""
    z, half = np.stack([one.log_odds for one in said]), np.stack([one.half_width for one in said])
    draws = len(said)
    held = np.stack([np.abs(np.delete(z, own, 0) - z[own]) <= half[own] for own in range(draws)])  # [draw, other, N]
    by_draw = held.mean(axis=(1, 2))
    order = np.argsort(z.mean(axis=0))
    thirds = [held[:, :, part].mean() for part in np.array_split(order, 3)]
    outside = np.array([(one.distance >= 1).mean() for one in said])
    inside_risk = 1 / (1 + np.exp(z))
    width = 1 / (1 + np.exp(z - half)) - 1 / (1 + np.exp(z + half))
    elsewhere = f"{np.mean([(one.elsewhere >= 1).mean() for one in said]):.2f}" if len(said[0].elsewhere) else "-"
    return [
        name,
        f"{held.mean():.3f} ± {1.96 * by_draw.std(ddof=1) / np.sqrt(draws):.3f}",
        f"{np.quantile(by_draw, 0.1):.3f}",
        " / ".join(f"{share:.3f}" for share in thirds[::-1]),
        f"{width.mean():.3f}",
        f"{inside_risk.std(axis=0, ddof=1).mean():.3f}",
        f"{outside.mean():.4f} ({np.quantile(outside, 0.1):.4f} to {np.quantile(outside, 0.9):.4f})",
        elsewhere,
    ]  # fmt: skip


HEADER = ["training rows", "refits inside", "worst tenth of draws", "low / middle / high risk", "mean width",
          "deviation of refits", "fresh prompts outside (tenths of draws)", "other kind outside"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = [
        table_row(f"{groups} x {size}", list(simulated(options.draws, groups, size, options.seed)))
        for groups, size in DESIGNS
    ]
    print(f"{options.draws} training sets each\n")
    print(markdown_table(HEADER, lines))


if __name__ == "__main__":
    main()
