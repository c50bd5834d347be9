"""Do 95 % intervals cover?  Share of simulated data sets whose interval holds the truth.

    python -m benchmarks.intervals --draws 500

A data set is n rows of readouts in groups; a linear probe is cross-validated over group-disjoint folds as in the
trainer.  The truth is the mean, over such data sets, of the AUROC that the folds' probes have on 100,000 further rows:
what the published figure estimates, every data set with a refit of its own.  Two probes of different but equally good
readouts are compared as ``evaluate`` compares methods: the interval should leave out zero in 5 % of the data sets.
A percentile bootstrap over groups with the fits held fixed stands beside it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from tqdm import tqdm

from service.fitting.folds import group_folds
from service.fitting.jackknife import TAILS, Interval, Tests, auroc_interval, gain, jeffreys
from service.fitting.markdown import markdown_table
from service.fitting.scores import risk_auroc

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

ICC = 0.4  # of label and readouts, where a group has rows
RESAMPLES = 200  # of the bootstrap beside


@dataclass(frozen=True)
class Design:
    """How a data set is drawn, and how often it is folded."""

    groups: int
    size: int = 1  # rows of a group
    dimensions: int = 20
    strength: float = 1.1  # how far the classes are apart
    folds: int = 5


DESIGNS = (
    Design(300), Design(1000), Design(40, 10), Design(100, 10), Design(300, dimensions=60),
    Design(1000, dimensions=60), Design(300, strength=0.5), Design(40, 10, strength=2.2), Design(300, folds=3),
    Design(300, folds=10),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Drawn:
    """n rows: two readouts that tell equally much."""

    label: Index  # [n]
    group: Index  # [n]
    x: tuple[Floats, Floats]  # [n, d] each


def drawn(rng: np.random.Generator, design: Design, groups: int | None = None) -> Drawn:
    """Label and noise of a group's rows are alike."""
    count = groups or design.groups
    group = np.repeat(np.arange(count), design.size)

    def alike(*shape: int) -> Floats:
        shared = rng.normal(size=(count, *shape))[group]
        icc = ICC if design.size > 1 else 0.0
        return np.asarray(np.sqrt(icc) * shared + np.sqrt(1 - icc) * rng.normal(size=(len(group), *shape)))

    label = (alike() > 0.5).astype(np.int64)  # 31 % are right
    direction = np.eye(design.dimensions)[0] * design.strength
    one, other = (label[:, None] * direction + alike(design.dimensions) for _ in range(2))
    return Drawn(label, group, (one, other))


def evaluated(rows: Drawn, which: int, folds: int, seed: int, further: Drawn) -> tuple[Tests, float]:
    """Each fold's test rows with their risks, and the mean AUROC of the folds' probes on further rows."""
    tests, truth = [], []
    for train, test in group_folds(rows.label, rows.group, np.arange(len(rows.label)), folds, seed):
        probe = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(rows.x[which][train], rows.label[train])
        tests.append((test, -np.asarray(rows.x[which][test] @ probe.coef_[0], np.float64)))
        truth.append(risk_auroc(further.label, -(further.x[which] @ probe.coef_[0])))
    return tests, float(np.mean(truth))


def bootstrapped(rows: Drawn, tests: Tests, rng: np.random.Generator) -> Interval:
    """The percentile bootstrap over groups, fits held fixed."""
    count = int(rows.group.max()) + 1
    means = []
    for _ in range(RESAMPLES):
        weight = np.bincount(rng.integers(0, count, count), minlength=count)[rows.group]
        sides = [(np.repeat(side, weight[side]), np.repeat(risk, weight[side])) for side, risk in tests]
        both = [(rows.label[side], risk) for side, risk in sides if 0 < rows.label[side].sum() < len(side)]
        means.append(np.mean([risk_auroc(label, risk) for label, risk in both]))
    low, high = np.quantile(means, TAILS)
    return Interval(float(low), float(high))


def simulate(draws: int, design: Design, seed: int) -> list[str]:
    """A row of the table."""
    rng = np.random.default_rng([seed, design.groups, design.size, design.dimensions, design.folds])
    further = drawn(rng, design, 100_000 // design.size)
    intervals, beside, truths, left_out = [], [], [], 0
    for number in tqdm(range(draws), described(design), leave=False, mininterval=2):
        rows = drawn(rng, design)
        (one, truth), (other, _) = (evaluated(rows, which, design.folds, number, further) for which in (0, 1))
        intervals.append(auroc_interval(rows.label, rows.group, one))
        beside.append(bootstrapped(rows, one, rng))
        truths.append(truth)
        compared = gain(rows.label, rows.group, one, other)
        left_out += not compared.low <= 0 <= compared.high
    truth = float(np.mean(truths))
    covered, short = (sum(low <= truth <= high for low, high in found) for found in (intervals, beside))
    own = sum(low <= value <= high for (low, high), value in zip(intervals, truths, strict=True))
    width = np.mean([high - low for low, high in intervals])
    return [described(design), f"{truth:.3f}", share(covered, draws), share(own, draws), f"{width:.3f}",
            share(short, draws), share(left_out, draws)]  # fmt: skip


def described(design: Design) -> str:
    """Groups x rows, and what differs from the first design."""
    usual = Design(design.groups, design.size)
    more = [f"{name} {value}" for name, value in vars(design).items() if value != getattr(usual, name)]
    return ", ".join([f"{design.groups} x {design.size}", *more])


def share(count: int, draws: int) -> str:
    """With its 95 % interval (Jeffreys)."""
    low, high = jeffreys(count / draws, draws)
    return f"{count / draws:.3f} [{low:.3f}, {high:.3f}]"


HEADER = ["groups x rows", "true AUROC", "covers the method's mean", "covers its own probes", "mean width",
          "bootstrap covers", "equal methods: zero left out"]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = [simulate(options.draws, design, options.seed) for design in DESIGNS]
    print(f"{options.draws} data sets each; 95 % intervals (Jeffreys) of the shares\n")
    print(markdown_table(HEADER, lines))


if __name__ == "__main__":
    main()
