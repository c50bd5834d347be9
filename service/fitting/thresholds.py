"""Chooses thresholds: by the cost of a wrong answer, by a target for out-of-fold risks, or with a
guarantee.

A guarantee says: of the groups that have an answer, counted equally, at most a share alpha has a
wrong one, with confidence 1 - delta.  The method is learn-then-test (Angelopoulos et al. 2021) on a
sequence that other data fixes (training's out-of-fold risks).  Only the first answered row of each
group, in a seeded order, counts, so that the rows are independent."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import beta, binom

from service.errors import TrainingError
from service.fitting.decisions import at_threshold, net_benefit
from service.fitting.scores import Floats, Labels

COSTS = (0.25, 0.5, 1.0, 2.0, 4.0)  # values of K that a card shows beside the chosen threshold
LEAST_ANSWERED = (
    20  # rows, mean over seeds, that a target on wrong answers needs among the answered
)
CANDIDATES = 40  # thresholds of a sequence that a guarantee is tested on
_OPEN = 1e-9  # a threshold without a guarantee lies strictly between 0 and 1
_TARGET = re.compile(r"\s*(?:(wrong)\s*<=|(answered)\s*>=)\s*(\d+(?:\.\d*)?|\.\d+)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class WrongCosts:
    """The rule that a wrong answer costs as much as ``k`` withheld right ones.  Raises
    TrainingError for other k."""

    k: float = 1.0

    def __post_init__(self) -> None:
        """Check the value, not its type."""
        if not 0 < self.k < math.inf:
            cure = (
                "give a positive number of withheld right answers, such as 1: answer what is"
                " likelier right than wrong"
            )
            raise TrainingError(f"wrong_costs cannot be {self.k!r}: {cure}", param="wrong_costs")

    @property
    def threshold(self) -> float:
        """Return the risk, between 0 and 1, from which on an answer costs more than it gains."""
        return min(max(1 / (1 + self.k), _OPEN), 1 - _OPEN)


@dataclass(frozen=True, slots=True)
class Target:
    """The rule that at most a share is ``wrong``, or at least a share is ``answered``."""

    measure: Literal["wrong", "answered"]
    share: float  # wrong: of the answered rows; answered: of all rows

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse text such as ``wrong<=0.2`` or ``answered>=0.5``.  Raises TrainingError for any
        other."""
        if match := _TARGET.fullmatch(text):
            share = float(match[3])
            if 0 <= share < 1 if match[1] else 0 < share <= 1:
                return cls("wrong" if match[1] else "answered", share)
        wanted = (
            '"wrong<=SHARE" (from 0, below 1) or "answered>=SHARE" (above 0, up to 1), such as'
            ' "wrong<=0.2"'
        )
        raise TrainingError(
            f"target must be {wanted} with the quotes, not {text!r}", param="target"
        )

    def __str__(self) -> str:
        """Return what ``parse`` reads."""
        return f"{self.measure}{'<=' if self.measure == 'wrong' else '>='}{self.share:g}"


GateRule = WrongCosts | Target


@dataclass(frozen=True, slots=True)
class ChosenThreshold:
    """A threshold, its rule, and the gate's figures on the rows that chose it."""

    threshold: float  # strictly between 0 and 1
    rule: GateRule
    reached: bool  # whether the target is met; always true for a cost
    gate: dict[str, float]  # ``decisions.at_threshold`` of the out-of-fold risks

    def document(self) -> dict[str, Any]:
        """Return the record for evaluation.json."""
        if isinstance(self.rule, WrongCosts):
            return {"rule": "wrong_costs", "wrong_costs": self.rule.k, "threshold": self.threshold}
        return {
            "rule": "target",
            "target": str(self.rule),
            "reached": self.reached,
            "threshold": self.threshold,
        }


def choose_threshold(rule: GateRule, label: Labels, risk: Floats) -> ChosenThreshold:
    """Return the threshold by ``rule``: label [n], out-of-fold risk [seeds, n].

    A cost K gives 1 / (1 + K): with a calibrated risk an answer pays if risk * K < 1 - risk.  A
    target on wrong answers gives the largest threshold that meets it with ``LEAST_ANSWERED`` rows
    answered; if none does, the one with the lowest share of wrong, of equals the largest.  A target
    on answers gives the smallest threshold that meets it. Of thresholds that answer the same rows,
    the one half-way between two risks is taken.  Raises TrainingError for a target on wrong answers
    if no threshold answers ``LEAST_ANSWERED`` rows."""
    threshold, reached = (
        (rule.threshold, True) if isinstance(rule, WrongCosts) else _for_target(rule, label, risk)
    )
    return ChosenThreshold(threshold, rule, reached, at_threshold(label, risk, threshold))


def by_wrong_costs(label: Labels, risk: Floats) -> list[dict[str, float]]:
    """Return gate and net benefit of the threshold for each of ``COSTS``: label [n], risk
    [seeds, n]."""
    thresholds = {k: WrongCosts(k).threshold for k in COSTS}
    return [
        {"wrong_costs": k, "threshold": at}
        | at_threshold(label, risk, at)
        | net_benefit(label, risk, k)
        for k, at in thresholds.items()
    ]


def _for_target(target: Target, label: Labels, risk: Floats) -> tuple[float, bool]:
    values = np.asarray(risk, np.float64).ravel()
    order, levels = np.argsort(values, kind="stable"), np.unique(values)
    wrong = np.r_[0, np.cumsum(np.broadcast_to(np.asarray(label) == 0, risk.shape).ravel()[order])]
    cuts = np.clip(
        (levels + np.r_[levels[1:], 1.0]) / 2, _OPEN, 1 - _OPEN
    )  # one behind each distinct risk
    answered = np.searchsorted(values[order], cuts, side="left")
    if target.measure == "answered":
        fine = np.flatnonzero(answered / risk.size >= target.share)
        return float(cuts[fine[0] if len(fine) else -1]), len(fine) > 0
    enough = answered >= LEAST_ANSWERED * len(risk)
    if not enough.any():
        problem = (
            f"the target {target} needs {LEAST_ANSWERED} answered rows, and there are {len(label)}"
            " labelled ones"
        )
        raise TrainingError(
            f"{problem}: add rows, or choose the threshold with --wrong-costs", param="target"
        )
    cuts, share = cuts[enough], (wrong[answered] / np.maximum(answered, 1))[enough]
    reached = bool(share.min() <= target.share)
    return (
        float(cuts[np.flatnonzero(share <= (target.share if reached else share.min()))[-1]]),
        reached,
    )


# --- a guarantee ---


@dataclass(frozen=True)
class GuaranteeStep:
    """One tested threshold."""

    threshold: float
    groups: int  # groups with an answered row
    wrong: int  # wrong ones of their first answered rows
    rows: int  # all answered rows
    # wrong ones of these; the guarantee does not cover them, since large groups weigh more here
    wrong_rows: int
    p_value: float  # for the hypothesis that the share of wrong ones is above alpha


@dataclass(frozen=True)
class GuaranteeTest:
    """A test of a sequence of thresholds; ``steps`` are those that were tested, in order."""

    alpha: float
    delta: float
    steps: tuple[GuaranteeStep, ...]

    @property
    def passed(self) -> GuaranteeStep | None:
        """Return the last step whose p-value is at most delta, the loosest threshold that passed;
        None if none did."""
        return next((step for step in reversed(self.steps) if step.p_value <= self.delta), None)

    @property
    def threshold(self) -> float | None:
        """Return the threshold that passed; None if none did, so that nothing may be answered."""
        return None if self.passed is None else self.passed.threshold

    @property
    def least_alpha(self) -> float:
        """Return the smallest alpha at which the first step passes: Clopper and Pearson's bound at
        delta."""
        right = self.steps[0].groups - self.steps[0].wrong
        return float(beta.ppf(1 - self.delta, self.steps[0].wrong + 1, right)) if right > 0 else 1.0

    @property
    def groups_wanted(self) -> int:
        """Return how many answering groups the first step needs at its share of wrong; -1 if no
        number is enough."""
        first = self.steps[0]
        share = first.wrong / first.groups if first.groups else 0.0
        if share >= self.alpha:
            return -1
        count = least_groups(self.alpha, self.delta)
        while binom.cdf(math.floor(share * count), count, self.alpha) > self.delta:
            count = math.ceil(count * 1.05)
        return count


@dataclass(frozen=True)
class GateProfile:
    """The answered and wrong groups at each of some thresholds, in rows that are not those of the
    calibration."""

    total: int  # number of groups
    thresholds: tuple[float, ...]  # from strict to loose, above 0 and at most 1
    groups: tuple[int, ...]  # groups with an answered row
    wrong: tuple[int, ...]  # wrong ones of their first answered rows


def least_groups(alpha: float, delta: float) -> int:
    """Return how many answering groups a threshold needs to pass, even if none is wrong."""
    return math.ceil(math.log(delta) / math.log1p(-alpha))


def first_answered(
    label: Labels, risk: Floats, group: Labels, threshold: float, order: Labels
) -> tuple[int, int]:
    """Return how many groups have a risk below ``threshold``, and in how many the first such row is
    wrong.

    The order of rows is ``order`` [n]."""
    answered = order[np.asarray(risk)[order] < threshold]
    first = answered[np.unique(np.asarray(group)[answered], return_index=True)[1]]
    return len(first), int((np.asarray(label)[first] == 0).sum())


def gate_profile(label: Labels, risk: Floats, group: Labels) -> GateProfile:
    """Return the profile at quantiles of risk [n], and at 1; label, group [n]."""
    levels = np.quantile(risk, np.linspace(0, 1, 4 * CANDIDATES + 1)[1:], method="higher").round(6)
    levels = np.unique(np.append(levels[(levels > 0) & (levels < 1)], 1.0))
    order = np.random.default_rng(0).permutation(len(risk))
    groups, wrong = zip(
        *(first_answered(label, risk, group, float(level), order) for level in levels), strict=True
    )
    return GateProfile(len(np.unique(group)), tuple(levels.tolist()), groups, wrong)


def threshold_sequence(
    profile: GateProfile, alpha: float, delta: float, calibration_groups: int
) -> list[float]:
    """Return thresholds from strict to loose; the first is the most likely to pass on so many
    calibration groups.

    A stricter threshold has too few groups to prove its few wrong answers; a looser start may fail
    at once.  The last threshold is the loosest whose share of wrong is at most alpha in the
    profile: a looser one could pass only on rows that are easier than the profile's, and rows above
        the last threshold need no label."""
    levels = profile.thresholds
    answering = np.array(profile.groups) / profile.total * calibration_groups
    share = (np.array(profile.wrong) + 0.5) / (
        np.array(profile.groups) + 1
    )  # never 0, since the profile is a sample
    enough = answering >= least_groups(alpha, delta)
    if not enough.any():
        return [levels[-1]]
    start = int(
        np.where(enough, (alpha - share) * np.sqrt(answering), -np.inf).argmax()
    )  # a binomial test's z, scaled
    allowed = np.flatnonzero(share <= alpha)
    last = max(start, int(allowed[-1]) if len(allowed) else start)
    chosen = np.unique(np.linspace(start, last, CANDIDATES).round().astype(int))
    return [levels[number] for number in chosen]


def certify(
    label: Labels,
    risk: Floats,
    group: Labels,
    thresholds: Sequence[float],
    alpha: float,
    delta: float,
    seed: int = 0,
) -> GuaranteeTest:
    """Test ``thresholds`` in order, up to the first failure, on calibration rows that were used for
    nothing else.

    P(the true share of the passed threshold is above alpha) is at most delta over calibration
    sets.  label, risk, group [n]."""
    order = np.random.default_rng(seed).permutation(len(risk))
    steps = []
    for threshold in thresholds:
        groups, wrong = first_answered(label, risk, group, threshold, order)
        answered = np.asarray(risk) < threshold
        rows, wrong_rows = int(answered.sum()), int((np.asarray(label)[answered] == 0).sum())
        p = float(binom.cdf(wrong, groups, alpha)) if groups else 1.0
        steps.append(GuaranteeStep(threshold, groups, wrong, rows, wrong_rows, p))
        if p > delta:
            break
    return GuaranteeTest(alpha, delta, tuple(steps))
