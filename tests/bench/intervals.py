"""Do 95 % intervals cover?  Share of simulated data sets whose interval holds the truth.

    python -m tests.bench.intervals --draws 500

A data set is n rows of readouts in groups; a linear probe is cross-validated over group-disjoint folds as in the
trainer.  The truth is the mean, over such data sets, of the AUROC that the folds' probes have on 100,000 further rows:
what the published figure estimates.  Two probes of different but equally good readouts are compared as ``evaluate``
compares methods: there the interval should leave out zero in 5 % of the data sets.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, rankdata
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from tqdm import tqdm

from service.evaluation.main_table import RESAMPLES
from service.evaluation.significance import paired_bootstrap
from service.fitting.folds import group_folds
from service.fitting.group_statistics import auroc_interval
from service.fitting.markdown import markdown_table
from service.fitting.scores import risk_auroc

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

DESIGNS = ((300, 1), (1000, 1), (40, 10), (100, 10))  # groups x rows
ICC = 0.4  # of label and readouts, where a group has rows
DIMENSIONS, STRENGTH, FOLDS = 20, 1.1, 5


@dataclass(frozen=True, eq=False)
class Drawn:
    """n rows: two readouts that tell equally much."""

    label: Index  # [n]
    group: Index  # [n]
    x: tuple[Floats, Floats]  # [n, d] each


def drawn(rng: np.random.Generator, groups: int, size: int) -> Drawn:
    """Label and noise of a group's rows are alike."""
    group = np.repeat(np.arange(groups), size)

    def alike(*shape: int) -> Floats:
        shared = rng.normal(size=(groups, *shape))[group]
        icc = ICC if size > 1 else 0.0
        return np.asarray(np.sqrt(icc) * shared + np.sqrt(1 - icc) * rng.normal(size=(len(group), *shape)))

    label = (alike() > 0.5).astype(np.int64)  # 31 % are right
    direction = np.eye(DIMENSIONS)[0] * STRENGTH
    one, other = (label[:, None] * direction + alike(DIMENSIONS) for _ in range(2))
    return Drawn(label, group, (one, other))


def evaluated(rows: Drawn, which: int, seed: int, further: Drawn) -> tuple[list[tuple[Index, Floats]], float]:
    """Each fold's test rows with their risks, and the mean AUROC of the folds' probes on further rows."""
    every = np.arange(len(rows.label))
    tests, truth = [], []
    for train, test in group_folds(rows.label, rows.group, every, FOLDS, seed):
        probe = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(rows.x[which][train], rows.label[train])
        tests.append((test, -np.asarray(rows.x[which][test] @ probe.coef_[0], np.float64)))
        truth.append(risk_auroc(further.label, -(further.x[which] @ probe.coef_[0])))
    return tests, float(np.mean(truth))


def ranks(count: int, tests: list[tuple[Index, Floats]]) -> Floats:
    """Relative ranks within the fold, [n]."""
    found = np.empty(count)
    for test, risk in tests:
        found[test] = rankdata(risk) / (len(risk) + 1)
    return found


def simulate(draws: int, groups: int, size: int, seed: int) -> list[str]:
    """A row of the table."""
    rng = np.random.default_rng([seed, groups, size])
    further = drawn(rng, 100_000 // size, size)
    intervals, truths, left_out, width = [], [], 0, []
    for number in tqdm(range(draws), f"{groups} x {size}", leave=False, mininterval=2):
        rows = drawn(rng, groups, size)
        both = [evaluated(rows, which, number, further) for which in (0, 1)]
        interval = auroc_interval(rows.label, rows.group, both[0][0], number)
        intervals.append(interval)
        truths.append(both[0][1])
        width.append(interval.high - interval.low)
        one, other = (ranks(len(rows.label), tests) for tests, _ in both)
        compared = paired_bootstrap(rows.label, one, other, rows.group, RESAMPLES, number)
        left_out += not compared.low <= 0 <= compared.high
    truth = float(np.mean(truths))
    covered = sum(low <= truth <= high for low, high in intervals)
    own = sum(low <= value <= high for (low, high), value in zip(intervals, truths, strict=True))
    return [f"{groups} x {size}", f"{truth:.3f}", share(covered, draws), share(own, draws), f"{np.mean(width):.3f}",
            share(left_out, draws)]  # fmt: skip


def share(count: int, draws: int) -> str:
    """With its 95 % interval (Jeffreys)."""
    low, high = np.asarray(beta.ppf([0.025, 0.975], [count + 0.5] * 2, [draws - count + 0.5] * 2)).tolist()
    return f"{count / draws:.3f} [{low:.3f}, {high:.3f}]"


HEADER = ["groups x rows", "true AUROC", "covers the method's mean", "covers its own probes", "mean width",
          "equal methods: zero left out"]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = [simulate(options.draws, groups, size, options.seed) for groups, size in DESIGNS]
    print(f"{options.draws} data sets each; 95 % intervals (Jeffreys) of the shares\n")
    print(markdown_table(HEADER, lines))


if __name__ == "__main__":
    main()
