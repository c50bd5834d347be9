"""A threshold with a promise: of the groups that pass, counted equally, at most a share alpha is wrong.

It holds with confidence 1 - delta.

Learn-then-test (Angelopoulos et al. 2021) with fixed-sequence testing.  The promise is about a random answered question
of a random group that has one: rows of a group depend on each other, so of each group only its first answered row in a
seeded order counts, and those rows are independent.  The sequence of thresholds is fixed by other data (training's
out-of-fold risks) before the calibration rows are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]

CANDIDATES = 40  # thresholds of a sequence


@dataclass(frozen=True)
class Step:
    """One threshold that was tested."""

    threshold: float
    groups: int  # with an answered row
    wrong: int  # of their first answered rows
    rows: int  # answered, all of them
    wrong_rows: int  # of these; no promise is about them, since a large group counts as often as it has rows
    p_value: float  # of "the share of wrong ones is above alpha"


@dataclass(frozen=True)
class Promise:
    """The loosest threshold that passed, None where none did; ``steps`` are all that were tested, in order."""

    alpha: float
    delta: float
    steps: tuple[Step, ...]

    @property
    def passed(self) -> Step | None:
        """The last step whose p-value is at most delta; those after it were not tested, or failed."""
        found = [step for step in self.steps if step.p_value <= self.delta]
        return found[-1] if found else None

    @property
    def threshold(self) -> float | None:
        """Risks below it may pass; None: nothing may."""
        return None if self.passed is None else self.passed.threshold

    @property
    def least_alpha(self) -> float:
        """The smallest alpha that the first step would have passed at: its Clopper-Pearson bound at delta."""
        first = self.steps[0]
        return upper_bound(first.wrong, first.groups, self.delta)

    @property
    def groups_wanted(self) -> int:
        """Answering groups that the first step needed at its observed share of wrong ones, at least."""
        first = self.steps[0]
        share = first.wrong / first.groups if first.groups else 0.0
        if share >= self.alpha:
            return -1  # no number would do: its share of wrong ones is not below alpha
        count = least_groups(self.alpha, self.delta)
        while binom.cdf(math.floor(share * count), count, self.alpha) > self.delta:
            count = math.ceil(count * 1.05)
        return count


def least_groups(alpha: float, delta: float) -> int:
    """Answering groups without which no threshold can pass, even if none is wrong: ln delta / ln(1 - alpha)."""
    return math.ceil(math.log(delta) / math.log1p(-alpha))


def upper_bound(wrong: int, groups: int, delta: float) -> float:
    """Clopper and Pearson's upper bound of a share, at confidence 1 - delta."""
    return 1.0 if wrong >= groups else float(beta.ppf(1 - delta, wrong + 1, groups - wrong))


def first_answered(
    label: Labels, risk: Floats, group: NDArray[np.integer], threshold: float, order: NDArray[np.integer]
) -> tuple[int, int]:
    """Groups with a risk below ``threshold``, and those whose first such row in ``order`` [n] is wrong."""
    answered = order[np.asarray(risk)[order] < threshold]
    first = answered[np.unique(np.asarray(group)[answered], return_index=True)[1]]
    return len(first), int((np.asarray(label)[first] == 0).sum())


@dataclass(frozen=True)
class Profile:
    """What each of some thresholds would answer and get wrong in rows that are not those of the calibration."""

    total: int  # groups
    thresholds: tuple[float, ...]  # from strict to loose, above 0 and at most 1
    groups: tuple[int, ...]  # with an answered row
    wrong: tuple[int, ...]  # of their first answered rows


def profile(label: Labels, risk: Floats, group: NDArray[np.integer]) -> Profile:
    """The profile of quantiles of risk [n], and of 1; label, group [n]."""
    levels = np.quantile(risk, np.linspace(0, 1, 4 * CANDIDATES + 1)[1:], method="higher").round(6)
    levels = np.unique(np.append(levels[(levels > 0) & (levels < 1)], 1.0))
    order = np.random.default_rng(0).permutation(len(risk))
    found = [first_answered(label, risk, group, float(level), order) for level in levels]
    groups, wrong = zip(*found, strict=True)
    return Profile(len(np.unique(group)), tuple(levels.tolist()), groups, wrong)


def sequence_of(profile: Profile, alpha: float, delta: float, calibration_groups: int) -> list[float]:
    """Thresholds from strict to loose.

    It begins where the profile makes a test on ``calibration_groups`` groups surest to pass: a stricter threshold has
    fewer wrong answers and fewer answering groups to show it by.  A sequence that begins too loose ends at once.
    """
    levels, answering = profile.thresholds, np.array(profile.groups) / profile.total * calibration_groups
    share = (np.array(profile.wrong) + 0.5) / (np.array(profile.groups) + 1)  # never 0: the profile is a sample, too
    enough = answering >= least_groups(alpha, delta)
    if not enough.any():
        return [levels[-1]]
    start = int(np.where(enough, (alpha - share) * np.sqrt(answering), -np.inf).argmax())  # a binomial test's z, scaled
    chosen = np.unique(np.linspace(start, len(levels) - 1, CANDIDATES).round().astype(int))
    return [levels[place] for place in chosen]


def sequence(
    label: Labels, risk: Floats, group: NDArray[np.integer], alpha: float, delta: float, calibration_groups: int
) -> list[float]:
    """``sequence_of`` the profile of training's out-of-fold risks: label, risk, group [n]."""
    return sequence_of(profile(label, risk, group), alpha, delta, calibration_groups)


def calibrate(
    label: Labels,
    risk: Floats,
    group: NDArray[np.integer],
    thresholds: Sequence[float],
    alpha: float,
    delta: float,
    seed: int = 0,
) -> Promise:
    """Test ``thresholds`` in their order on calibration rows that took part in nothing else; stop at the first failure.

    label, risk, group [n].  P(the passed threshold's true share is above alpha) is at most delta over calibration sets.
    """
    order = np.random.default_rng(seed).permutation(len(risk))
    steps = []
    for threshold in thresholds:
        groups, wrong = first_answered(label, risk, group, threshold, order)
        p = float(binom.cdf(wrong, groups, alpha)) if groups else 1.0
        answered = np.asarray(risk) < threshold
        wrong_rows = int((np.asarray(label)[answered] == 0).sum())
        steps.append(Step(threshold, groups, wrong, int(answered.sum()), wrong_rows, p))
        if p > delta:
            break
    return Promise(alpha, delta, tuple(steps))


def risk_control(label: Labels, risk: Floats, group: NDArray[np.integer], alpha: float) -> float | None:
    """The loosest threshold with E[answered and wrong] <= alpha for a row of a new group (conformal risk control).

    The loss of a group is the share of its rows that are answered and wrong, at most 1: the largest threshold with
    (sum of losses + 1) / (groups + 1) <= alpha, None where there is none.  Angelopoulos et al. 2022.
    """
    names, member = np.unique(group, return_inverse=True)
    size = np.bincount(member)
    wrong = np.asarray(label) == 0
    order = np.argsort(risk, kind="stable")
    ranked = np.asarray(risk, np.float64)[order]
    loss = np.cumsum(wrong[order] / size[member][order])  # summed over groups, once the rows up to here are answered
    levels = np.unique(np.append(ranked, 1.0))
    answered = np.searchsorted(ranked, levels, "left")
    losses = np.where(answered > 0, loss[np.maximum(answered, 1) - 1], 0.0)
    fine = (losses + 1) / (len(names) + 1) <= alpha
    return float(levels[fine][-1]) if fine.any() else None
