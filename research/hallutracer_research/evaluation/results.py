"""What was found on one data set: each method's scores, its measures, and the comparison with the
best baseline. AUROC does not depend on which class is positive.  AUPRC does, and the paper does not
say which it takes, so both are given.  Scores of different folds have different scales: where rows
of several folds are ranked together, each fold's scores are first replaced by their relative ranks
within the fold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata

from hallutracer_research.evaluation.methods import OURS
from hallutracer_research.evaluation.options import Cost
from hallutracer_research.evaluation.prepare import PreparedSet
from hallutracer_research.evaluation.splits import Split
from service.errors import TrainingError
from service.fitting.estimator import fit_classifier
from service.fitting.nested_cv import FoldScores, test_sides
from service.fitting.probes import Floats, Index, Labels
from service.fitting.scores import Gain, auprc, auroc_interval, gain, mean_auroc, risk_auroc
from service.readout import Pooling, Site
from service.risk import depth_mean

Measures = dict[str, dict[str, float]]  # measure -> mean and std; of the AUROC also low and high
MEASURES = ("auroc", "auprc_hallucinated", "auprc_factual")
# Candidates for the runner-up: the paper's baselines that read the model's states before an answer.
BASELINES = ("iti", "fact-probe", "iris")


class MethodComparison(NamedTuple):
    """Ours against the best of the ``BASELINES``."""

    runner_up: str
    gain: Gain  # of the mean AUROC over all test sides; its p-value is over groups
    p_delong: float | None  # median over seeds; None where it is not defined


@dataclass(frozen=True, eq=False)
class SetResult:
    """One data set, all splits.  Lists by split are in the order of ``splits`` (seeds in order,
    folds within)."""

    prepared: PreparedSet
    splits: Sequence[Split]
    scores: Mapping[str, Sequence[FoldScores]]  # method -> scores by split
    comparison: MethodComparison | None
    # depth means [n_test]
    pooled: Mapping[tuple[Site, Pooling], Sequence[Floats]] = field(default_factory=dict)
    costs: Mapping[str, Cost] = field(default_factory=dict)  # by method
    failed: Mapping[str, str] = field(default_factory=dict)  # rival -> why it has no scores

    @property
    def title(self) -> str:
        """The set's name in the tables."""
        return self.prepared.rows.name

    @property
    def label(self) -> Index:
        """[n] 1 factual."""
        return self.prepared.inputs.label

    @property
    def group(self) -> Index:
        """[n]."""
        return self.prepared.inputs.group

    def folds(self, seed: int = 0) -> list[Split]:
        """Return one seed's splits: every row is in exactly one test side."""
        return [split for split in self.splits if split.seed == seed]

    def trajectory(self, seed: int = 0) -> Floats:
        """Return out-of-fold trajectories of all rows, [n, m]: each by its fold's probes, unit
        norm."""
        return self.by_row(lambda split: split.test_trajectory, seed)

    def by_row(self, of_split: Callable[[Split], Floats], seed: int = 0) -> Floats:
        """Return what ``of_split`` gives for the test sides of one seed, [n_test, ...], of all
        rows, [n, ...]."""
        folds = self.folds(seed)
        order = np.argsort(np.concatenate([split.test for split in folds]))
        return np.concatenate([of_split(split) for split in folds])[order]

    def measures(self) -> dict[str, Measures]:
        """Return each method's measures; of the AUROC also the ends of its interval."""
        table = {}
        for method, scores in self.scores.items():
            table[method] = measures = measured(self.label, scores)
            tests = test_sides(scores)
            measures["auroc"] |= auroc_interval(self.label, self.group, tests)._asdict()
            if self.kinds is not None:
                inside = auroc_interval(self.label, self.group, tests, self.kinds)
                mean = mean_auroc(self.label, tests, self.kinds)
                measures["within"] = {"mean": mean, **inside._asdict()}
        return table

    @cached_property
    def calibrated(self) -> Floats:
        """[n] risks by the depth mean: each row's by the fold of the first seed that tested it."""

        def risk(split: Split) -> Floats:
            mean = depth_mean(split.train_trajectory)[:, None]
            classifier = fit_classifier(mean, self.label[split.train])
            return classifier.risk(depth_mean(split.test_trajectory)[:, None])

        return self.by_row(risk)

    @cached_property
    def kinds(self) -> Index | None:
        """[n] of each row; None where the rows name fewer than two, or no test side has both
        classes of one."""
        names, kind = np.unique(self.prepared.inputs.kind, return_inverse=True)
        if len(names) < 2 or not np.isfinite(
            mean_auroc(self.label, test_sides(self.scores[OURS]), kind)
        ):
            return None
        return np.asarray(kind, np.int64)


def measured(label: Index, splits: Sequence[FoldScores]) -> Measures:
    """Return mean and standard deviation of each measure over folds and seeds."""
    sides = [(label[split.test], split.score) for split in splits]
    return {
        "auroc": spread(aurocs(label, splits)),
        "auprc_hallucinated": spread([auprc(*side, positive=0) for side in sides]),
        "auprc_factual": spread([auprc(*side, positive=1) for side in sides]),
    }


def aurocs(label: Index, splits: Sequence[FoldScores]) -> list[float]:
    """Return the AUROC of each test side: label [n]."""
    return [risk_auroc(label[split.test], split.score) for split in splits]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean and standard deviation of one number by split, as a table's cell."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}


def pooled_ranks(count: int, splits: Sequence[FoldScores], seed: int = 0) -> Floats:
    """Return one seed's scores of all rows as relative ranks within their fold, [n]."""
    ranks = np.full(count, np.nan)
    for split in splits:
        if split.seed == seed:
            ranks[split.test] = rankdata(split.score) / (len(split.score) + 1)
    return ranks


def compare(
    label: Index, group: Index, scores: Mapping[str, Sequence[FoldScores]]
) -> MethodComparison | None:
    """Return the comparison; None where no baseline was evaluated."""
    quality = {
        name: float(np.mean(aurocs(label, scores[name]))) for name in scores if name in BASELINES
    }
    if not quality:
        return None
    best = max(quality, key=lambda name: quality[name])
    p_values = []
    for seed in sorted({split.seed for split in scores[OURS]}):
        ours, theirs = (pooled_ranks(len(label), scores[name], seed) for name in (OURS, best))
        if (p := delong(label, ours, theirs).p_value) is not None:
            p_values.append(p)
    difference = gain(label, group, test_sides(scores[OURS]), test_sides(scores[best]))
    return MethodComparison(best, difference, float(np.median(p_values)) if p_values else None)


class DeLong(NamedTuple):
    """Two correlated AUROCs.  ``z`` and ``p_value`` are None where the variance is undefined: see
    ``delong``."""

    auc_a: float
    auc_b: float
    z: float | None
    p_value: float | None  # two-sided


def delong(label: Labels, risk_a: NDArray[np.floating], risk_b: NDArray[np.floating]) -> DeLong:
    """Return DeLong's test for two AUROCs on the same rows, by midranks in O(n log n) (Sun and Xu
    2014).  label [n], risks [n].  It takes rows for independent: where they come in groups its
    p-values are too small, and ``fitting.scores.gain`` is the one to report.  Equal rankings give z
    = 0 and p = 1.  z and p are None where a class has a single row, or where the AUROCs differ but
    neither varies (both rank every pair of rows alike, one of them for the worse).  Raises
    TrainingError: a class is missing, lengths differ or a risk is not finite."""
    values = np.asarray(label)
    for name, risk in (("risk_a", risk_a), ("risk_b", risk_b)):
        if np.shape(risk) != values.shape or values.ndim != 1:
            raise TrainingError(
                f"{name} has shape {np.shape(risk)}, label {values.shape}; both must be [n]"
            )
        if not np.all(np.isfinite(risk)):
            row = int(np.flatnonzero(~np.isfinite(risk))[0])
            raise TrainingError(f"{name} is not finite at row {row}; every row needs a risk")
    if set(values.tolist()) != {0, 1}:
        raise TrainingError(
            "label must hold 1 (factual) and 0 (hallucinated), both of them and nothing else"
        )
    (bad_a, good_a), (bad_b, good_b) = (
        _components(values == 0, np.asarray(risk)) for risk in (risk_a, risk_b)
    )
    auc_a, auc_b = float(bad_a.mean()), float(bad_b.mean())
    if min(len(bad_a), len(good_a)) < 2:
        return DeLong(auc_a, auc_b, None, None)
    # The variance of the difference from the differences themselves: exactly zero where the
    # rankings agree.
    differences = bad_a - bad_b, good_a - good_b
    variance = sum(np.var(of_class, ddof=1) / len(of_class) for of_class in differences)
    # What rounding leaves of zero; the smallest real one, a single pair swapped, is far above.
    if variance < 1e-28:
        equal = abs(auc_a - auc_b) < 1e-12
        return DeLong(auc_a, auc_b, *((0.0, 1.0) if equal else (None, None)))
    z = (auc_a - auc_b) / float(np.sqrt(variance))
    return DeLong(auc_a, auc_b, z, float(2.0 * norm.sf(abs(z))))


def _components(
    hallucinated: NDArray[np.bool_], risk: NDArray[np.floating]
) -> tuple[Floats, Floats]:
    """Return the structural components: for each hallucinated row the share of factual ones below
    it, for each factual row the share of hallucinated ones above it; ties count half.  The mean of
    either is the AUROC."""
    bad, good = risk[hallucinated], risk[~hallucinated]
    together = rankdata(np.concatenate([bad, good]))
    of_bad = (together[: len(bad)] - rankdata(bad)) / len(good)
    return of_bad, 1.0 - (together[len(bad) :] - rankdata(good)) / len(bad)
