"""Everything that was fitted on one data set: what the tables are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.evaluation.cost import Cost
from hallutracer_research.evaluation.main_table import Comparison
from hallutracer_research.evaluation.prepare import PreparedSet
from hallutracer_research.evaluation.splits import Split
from service.fitting.nested_cv import FoldScores
from service.fitting.probes import Floats, Index
from service.readout import Pooling, Site


@dataclass(frozen=True, eq=False)
class SetResult:
    """One data set, all splits.  Lists by split are in the order of ``splits`` (seeds in order, folds within)."""

    prepared: PreparedSet
    splits: Sequence[Split]
    scores: Mapping[str, Sequence[FoldScores]]  # method -> scores by split
    comparison: Comparison | None
    pooled: Mapping[tuple[Site, Pooling], Sequence[Floats]] = field(default_factory=dict)  # depth means [n_test]
    costs: Mapping[str, Cost] = field(default_factory=dict)  # by method
    failed: Mapping[str, str] = field(default_factory=dict)  # rival -> why it has no scores

    @property
    def title(self) -> str:
        """The set's name in the tables."""
        return self.prepared.rows.name

    @property
    def label(self) -> NDArray[np.int64]:
        """[n] 1 factual."""
        return self.prepared.inputs.label

    @property
    def group(self) -> Index:
        """[n]."""
        return self.prepared.inputs.group

    def folds(self, seed: int = 0) -> list[Split]:
        """One seed's splits: every row is in exactly one test side."""
        return [split for split in self.splits if split.seed == seed]

    def trajectory(self, seed: int = 0) -> Floats:
        """Out-of-fold trajectories of all rows, [n, m]: each by its fold's probes, unit norm."""
        folds = self.folds(seed)
        trajectory = np.full((len(self.label), folds[0].test_trajectory.shape[1]), np.nan)
        for split in folds:
            trajectory[split.test] = split.test_trajectory
        return trajectory
