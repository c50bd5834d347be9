"""Is the promise kept?  Share of calibrations whose threshold lets more than alpha wrong answers pass.

    python -m benchmarks.promise --draws 1000 [--alpha 0.1] [--rows evaluation/sets/NAME/scores.csv]

Simulated clusters first: a risk that is calibrated over all rows, and answers whose luck the rows of a group share
(intraclass correlation ICC of the latent score).  The truth of a threshold, P(wrong | answered) for a random answered
row of a random group that answers, comes from 20,000 further groups.  ``--rows`` are real,
from ``hallutracer evaluate``: each draw takes a third of their groups to fix the sequence, a third to certify, and
all groups are the truth.

Beside the promise: the naive threshold (loosest with an error of at most alpha on the calibration rows), and the same
test with every row as a group of its own.  ``answered`` is the share of rows below the threshold, and ``oracle`` that
of the loosest threshold that is right in truth: what certainty costs is the difference.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from tqdm import tqdm

from service.fitting.presentation import markdown_table
from service.fitting.scores import jeffreys
from service.fitting.thresholds import certify, gate_profile, risk_control, threshold_sequence

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

DELTA = 0.05
DESIGNS = ((60, 8), (30, 20), (400, 8))  # groups x rows of a calibration set
ICCS = (0.0, 0.3, 0.6)
TRUTH_GROUPS = 20_000
MEAN, STRENGTH = -0.7, 1.3  # of the latent score: 34 % wrong, risk with an AUROC of .82


@dataclass(frozen=True, eq=False)
class Rows:
    """n rows of groups."""

    label: Index  # [n] 1 right
    risk: Floats  # [n]
    group: Index  # [n]

    def of(self, groups: Index) -> Rows:
        """The rows of these groups."""
        at = np.isin(self.group, groups)
        return Rows(self.label[at], self.risk[at], self.group[at])


class Truth:
    """P(wrong | answered) of a threshold, and the share of rows that are answered, on many rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._wrong = rows.label == 0
        self._groups = int(rows.group.max()) + 1

    def error(self, threshold: float) -> float:
        """Mean over answering groups of the share of wrong ones among their answered rows."""
        answered = self._rows.risk < threshold
        count = np.bincount(self._rows.group[answered], minlength=self._groups)
        wrong = np.bincount(self._rows.group[answered & self._wrong], minlength=self._groups)
        there = count > 0
        return float((wrong[there] / count[there]).mean()) if there.any() else 0.0

    def loss(self, threshold: float) -> float:
        """Mean over groups of the share of rows that are answered and wrong: what risk control bounds."""
        wrong = np.bincount(self._rows.group[(self._rows.risk < threshold) & self._wrong], minlength=self._groups)
        return float((wrong / np.bincount(self._rows.group, minlength=self._groups)).mean())

    def answered(self, threshold: float) -> float:
        """Share of rows below the threshold."""
        return float((self._rows.risk < threshold).mean())

    def oracle(self, alpha: float) -> float:
        """Share of rows below the loosest threshold of a grid whose error is at most alpha."""
        levels = np.quantile(self._rows.risk, np.linspace(0.005, 1, 200))
        return max((self.answered(level) for level in levels if self.error(level) <= alpha), default=0.0)


def simulated(rng: np.random.Generator, groups: int, size: int, icc: float) -> Rows:
    """Rows whose risk, over all rows, is the probability of a wrong answer."""

    def latent() -> Floats:
        shared = np.repeat(rng.normal(size=groups), size)
        return np.asarray(np.sqrt(icc) * shared + np.sqrt(1 - icc) * rng.normal(size=groups * size))

    score = MEAN + STRENGTH * latent()
    return Rows((score + latent() <= 0).astype(np.int64), norm.cdf(score), np.repeat(np.arange(groups), size))


def thresholds(fixed: Rows, cal: Rows, alpha: float) -> dict[str, float]:
    """What each way makes of one calibration set; 0 answers nothing."""
    alone = np.arange(len(cal.label))
    found: dict[str, float] = {}
    for name, group, of_fixed in (("promise", cal.group, fixed.group), ("rows", alone, np.arange(len(fixed.label)))):
        steps = threshold_sequence(gate_profile(fixed.label, fixed.risk, of_fixed), alpha, DELTA, len(np.unique(group)))
        found[name] = certify(cal.label, cal.risk, group, steps, alpha, DELTA).threshold or 0.0
    order = np.argsort(cal.risk)
    share = np.cumsum(cal.label[order] == 0) / np.arange(1, len(order) + 1)
    fine = np.flatnonzero(share <= alpha)
    found["naive"] = float(np.nextafter(cal.risk[order][fine[-1]], 2)) if len(fine) else 0.0
    found["control"] = risk_control(cal.label, cal.risk, cal.group, alpha) or 0.0
    return found


def simulate(draws: int, design: tuple[int, int], icc: float, alpha: float, seed: int) -> list[str]:
    """A row of the table."""
    rng = np.random.default_rng([seed, *design, round(10 * icc)])
    truth = Truth(simulated(rng, TRUTH_GROUPS, design[1], icc))
    title = f"{design[0]} x {design[1]}, ICC {icc:g}"

    def draw() -> tuple[Rows, Rows]:
        return simulated(rng, *design, icc), simulated(rng, *design, icc)

    return tabulate(title, draws, draw, truth, alpha)


def resample(draws: int, rows: Rows, title: str, alpha: float, seed: int) -> list[str]:
    """A row of the table from real rows: thirds of the groups, drawn without replacement."""
    rng = np.random.default_rng(seed)
    names = np.unique(rows.group)
    third = len(names) // 3

    def draw() -> tuple[Rows, Rows]:
        order = rng.permutation(names)
        return rows.of(order[:third]), rows.of(order[third : 2 * third])

    return tabulate(f"{title}: {third:,} of {len(names):,} groups", draws, draw, Truth(rows), alpha)


def tabulate(title: str, draws: int, draw: Callable[[], tuple[Rows, Rows]], truth: Truth, alpha: float) -> list[str]:
    """Violations of each way, share answered, and the mean loss of risk control."""
    errors: dict[str, list[float]] = {}
    answered: dict[str, list[float]] = {}
    losses: list[float] = []
    for _ in tqdm(range(draws), title, leave=False, mininterval=2):
        found = thresholds(*draw(), alpha)
        losses.append(truth.loss(found.pop("control")))
        for name, threshold in found.items():
            errors.setdefault(name, []).append(truth.error(threshold))
            answered.setdefault(name, []).append(truth.answered(threshold))

    def violated(name: str) -> str:
        count = sum(error > alpha for error in errors[name])
        low, high = jeffreys(count / draws, draws)
        return f"{count / draws:.3f} [{low:.3f}, {high:.3f}]"

    def mean(name: str) -> str:
        return f"{np.mean(answered[name]):.2f}"

    nothing = np.mean([share == 0 for share in answered["promise"]])
    return [title, violated("promise"), violated("naive"), violated("rows"), mean("promise"), f"{nothing:.2f}",
            mean("naive"), f"{truth.oracle(alpha):.2f}", f"{np.mean(losses):.3f}"]  # fmt: skip


HEADER = ["calibration set", "promise broken", "naive: error above alpha", "rows as groups: error above alpha",
          "promise: answered", "promise: no threshold", "naive: answered", "oracle: answered",
          "risk control: answered and wrong"]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--rows", type=Path, nargs="*", default=[], help="scores.csv of hallutracer evaluate")
    parser.add_argument("--only-rows", action="store_true", help="no simulated clusters")
    options = parser.parse_args()
    lines = []
    if not options.only_rows:
        lines = [
            simulate(options.draws, design, icc, options.alpha, options.seed) for design in DESIGNS for icc in ICCS
        ]
    for path in options.rows:
        with path.open(newline="") as file:
            table = [(int(row["label"]), float(row["hallutracer"]), int(row["group"])) for row in csv.DictReader(file)]
        label, risk, group = (np.array(column) for column in zip(*table, strict=True))
        rows = Rows(label, risk, np.unique(group, return_inverse=True)[1].astype(np.int64))
        lines.append(resample(options.draws, rows, path.parent.name, options.alpha, options.seed))
    print(f"alpha {options.alpha:g}, delta {DELTA}, {options.draws} draws; 95 % intervals (Jeffreys)\n")
    print(markdown_table(HEADER, lines))


if __name__ == "__main__":
    main()
