"""Everything that was fitted on one set: what the tables are made of.  Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.evaluation.gather import Gathered
from service.evaluation.main_table import Comparison, Run
from service.evaluation.splits import Split
from service.fitting.fit import Floats, Index
from service.readout import Pooling, Site


@dataclass(frozen=True, eq=False)
class SetRun:
    """One set, all splits.  Lists by split are in the order of ``splits`` (seeds in order, folds within)."""

    gathered: Gathered
    splits: Sequence[Split]
    runs: Mapping[str, Sequence[Run]]  # method -> scores by split
    comparison: Comparison | None
    pooled: Mapping[tuple[Site, Pooling], Sequence[Floats]] = field(default_factory=dict)  # depth means [n_test]

    @property
    def title(self) -> str:
        """What tables call the set."""
        return self.gathered.rows.name

    @property
    def label(self) -> NDArray[np.int64]:
        """[n] 1 factual."""
        return self.gathered.material.label

    @property
    def group(self) -> Index:
        """[n]."""
        return self.gathered.material.group

    def folds(self, seed: int = 0) -> list[Split]:
        """One seed's splits: every row is in exactly one test side."""
        return [split for split in self.splits if split.seed == seed]

    def trajectory(self, seed: int = 0) -> Floats:
        """Out-of-fold trajectories of all rows, [n, m]: each by its fold's probes, unit norm."""
        folds = self.folds(seed)
        found = np.full((len(self.label), folds[0].test_trajectory.shape[1]), np.nan)
        for split in folds:
            found[split.test] = split.test_trajectory
        return found
