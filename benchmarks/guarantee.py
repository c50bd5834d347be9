"""What a guaranteed threshold answers, and how often its promise breaks, by how the same number of
labels is spent.

    python -m benchmarks.guarantee --bundle qwen2.5-coder-1.5b:1 \\
        --rows docs/qwen2.5-coder-1.5b-rows.jsonl.gz

The population is the bundle's training rows with their out-of-fold risks, of which groups are drawn
with replacement: those of a calibration, and those of the training rows whose profile fixes the
thresholds, one of 20 such draws.
``random``: rows are drawn, labelled, and tested at thresholds up to 1.  ``first``: as many labels
go to rows below the loosest threshold, of as many rows as that takes.  ``two strata``: that, apart
for rows with and without a passage (by the form of their messages), at half of delta each."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from probes_store.store import SHIPPED, Store
from service.fitting.thresholds import (
    CANDIDATES,
    GateProfile,
    certify,
    first_answered,
    gate_profile,
    threshold_sequence,
)
from service.judging.guarantee import shape_of
from service.trainer.presentation import markdown_table
from service.trainer.publish import read_risks

Index = NDArray[np.int64]
PROFILES = 20


class Population:
    """Rows to draw calibrations from."""

    def __init__(self, label: Index, risk: NDArray[np.float64], group: Index) -> None:
        """Take label, risk and group of each row: [n]."""
        self.label = label
        self.risk = risk
        self.group = group
        self.members = [np.flatnonzero(group == name) for name in np.unique(group)]
        draw, self.profiles = np.random.default_rng(2), list[GateProfile]()
        for _ in range(PROFILES):  # training saw a sample, too
            place, name = self.drawn(draw, len(label))
            self.profiles.append(gate_profile(label[place], risk[place], name))
        self.order = np.random.default_rng(1).permutation(len(label))

    def share_wrong(self, threshold: float) -> float:
        """Return the true share of wrong among answering groups."""
        groups, wrong = first_answered(self.label, self.risk, self.group, threshold, self.order)
        return wrong / groups if groups else 0.0

    def drawn(self, draw: np.random.Generator, rows: int) -> tuple[Index, Index]:
        """Return some ``rows`` rows, whole groups with replacement, and their new groups."""
        members = [
            self.members[place] for place in draw.integers(len(self.members), size=rows).tolist()
        ]
        names = np.repeat(np.arange(rows), [len(member) for member in members])
        return np.concatenate(members)[:rows], names[:rows]

    def first(
        self, draw: np.random.Generator, labels: int, alpha: float, delta: float, seed: int
    ) -> float:
        """Return the threshold by so many labels below the loosest one; 0: none passed."""
        profile = self.profiles[seed % PROFILES]
        loosest = threshold_sequence(profile, alpha, delta, labels)[-1]
        rows = round(labels / max(float(np.mean(self.risk < loosest)), 1e-3))
        place, group = self.drawn(draw, rows)
        sequence = threshold_sequence(profile, alpha, delta, len(np.unique(group)))
        below = np.flatnonzero(self.risk[place] < sequence[-1])[:labels]
        return self._certified(place[below], group[below], sequence, alpha, delta, seed)

    def random(
        self, draw: np.random.Generator, labels: int, alpha: float, delta: float, seed: int
    ) -> float:
        """Return the threshold by so many labels of rows as they come; 0: none passed."""
        place, group = self.drawn(draw, labels)
        sequence = up_to_one(self.profiles[seed % PROFILES], alpha, delta, len(np.unique(group)))
        return self._certified(place, group, sequence, alpha, delta, seed)

    def _certified(
        self,
        place: Index,
        group: Index,
        sequence: Sequence[float],
        alpha: float,
        delta: float,
        seed: int,
    ) -> float:
        test = certify(self.label[place], self.risk[place], group, sequence, alpha, delta, seed)
        return 0.0 if test.threshold is None else test.threshold


def up_to_one(profile: GateProfile, alpha: float, delta: float, groups: int) -> list[float]:
    """Return the sequence that does not end where the profile is wrong too often."""
    begins = threshold_sequence(profile, alpha, delta, groups)[0]
    later = [level for level in profile.thresholds if level >= begins]
    return [
        later[place]
        for place in np.unique(np.linspace(0, len(later) - 1, CANDIDATES).round().astype(int))
    ]


def compared(
    parts: Sequence[Population],
    whole: Population,
    alpha: float,
    labels: int,
    delta: float,
    draws: int,
) -> list[str]:
    """Return a row of the table: answered (without any threshold; broken) of each design."""
    draw, total = np.random.default_rng([int(alpha * 100), labels]), len(whole.risk)
    cells = [f"{alpha:g}, {labels}"]
    for name in ("random", "first"):
        found = np.array(
            [getattr(whole, name)(draw, labels, alpha, delta, seed) for seed in range(draws)]
        )
        answered = np.mean([np.mean(whole.risk < at) for at in found])
        broken = np.mean([at > 0 and whole.share_wrong(at) > alpha for at in found])
        cells.append(f"{answered:.3f} ({np.mean(found == 0):.0%}; {broken:.1%})")
    sums, broke = np.zeros(draws), np.zeros(draws, bool)
    each = []
    for part in parts:
        own = round(labels * len(part.risk) / total)
        found = np.array([part.first(draw, own, alpha, delta / 2, seed) for seed in range(draws)])
        answered = np.array([np.mean(part.risk < at) for at in found])
        sums += answered * len(part.risk) / total
        broke |= np.array([at > 0 and part.share_wrong(at) > alpha for at in found])
        each.append(f"{answered.mean():.3f}")
    cells.append(
        f"{sums.mean():.3f} = {' / '.join(each)} ({np.mean(sums == 0):.0%}; {broke.mean():.1%})"
    )
    return cells


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", default="qwen2.5-coder-1.5b:1")
    parser.add_argument("--rows", type=Path, default=Path("docs/qwen2.5-coder-1.5b-rows.jsonl.gz"))
    parser.add_argument("--delta", type=float, default=0.05)
    parser.add_argument("--draws", type=int, default=300)
    options = parser.parse_args()
    risk, label, group = read_risks(
        Store(SHIPPED).load(options.bundle).evaluation()["out_of_fold"]["risks"]
    )
    with gzip.open(options.rows, "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row.get("applies", True)]
    given = np.array([row["label"] in (1, "factual") for row in rows])
    if len(given) != len(label) or (given != (label == 1)).any():
        raise SystemExit(f"{options.rows} has not the rows of {options.bundle}, in their order")
    passage = np.array([shape_of(row["messages"]).passage for row in rows])
    whole = Population(label, risk, group)
    parts = [
        Population(label[inside], risk[inside], group[inside]) for inside in (passage, ~passage)
    ]
    table = [
        compared(parts, whole, alpha, labels, options.delta, options.draws)
        for alpha, labels in (
            (0.1, 1000),
            (0.2, 200),
            (0.2, 400),
            (0.2, 1000),
            (0.3, 200),
            (0.3, 400),
            (0.3, 1000),
        )
    ]
    print(
        markdown_table(
            ["alpha, labels", "random", "first", "two strata: passage / none"], table, range(1, 4)
        )
    )
    print(
        f"{len(label)} rows, {passage.mean():.1%} with a passage; {options.draws} draws; answered"
        " (none; broken)"
    )


if __name__ == "__main__":
    main()
