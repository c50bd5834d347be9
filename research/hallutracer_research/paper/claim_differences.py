"""Claims that one score's AUROC is above, near or far below another's on the same rows.

All are judged by the 95 % interval of the difference of mean AUROCs over test sides (``fitting.scores``): a claim is
supported where the whole interval agrees with it, not supported where the whole interval contradicts it, and mixed
where the interval has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from hallutracer_research.evaluation.main_table import measured
from hallutracer_research.evaluation.options import OURS, RESIDUAL
from hallutracer_research.evaluation.page.report_data import Verdict
from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.paper.ablations import FIVE_D, FULL, SHAPE, Features, classifier_scores
from hallutracer_research.paper.claim_rules import (
    HALF_A_POINT,
    WITH_SIGNAL,
    Finding,
    NotTestable,
    Rows,
    Rule,
    add_to,
    number,
    points,
    signal,
    signed,
)
from service.fitting.nested_cv import FoldScores, test_sides
from service.fitting.scores import gain

BEST_HEAD: Final = ("iti",)
OTHERS: Final = ("fact-probe", "iris")
FREE: Final = ("first-token-max-prob", "first-token-entropy", "prompt-length")
SHAPE_FALLS: Final = 0.19  # "removing it collapses AUROC by more than 19 pp" (Sec. exp-ablation)
_AHEAD: Final = (
    "supported where the 95 % interval of the AUROC difference is above zero, not supported where it is below, mixed "
    "where it holds zero"
)


class Interval(NamedTuple):
    """A difference of two mean AUROCs, and the ends of its 95 % interval."""

    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{signed(self.difference)} points [{signed(self.low)}, {signed(self.high)}]"


def above(interval: Interval, bar: float) -> Verdict:
    """Is the difference more than ``bar``?"""
    if interval.low > bar:
        return "supported"
    return "not supported" if interval.high < bar else "mixed"


def within(interval: Interval, margin: float) -> Verdict:
    """Is the difference at most ``margin`` either way?"""
    if -margin <= interval.low and interval.high <= margin:
        return "supported"
    return "not supported" if interval.low > margin or interval.high < -margin else "mixed"


def interval_of(result: SetResult, one: Sequence[FoldScores], other: Sequence[FoldScores]) -> Interval:
    """AUROC of one score minus that of the other; both must have the same test sides."""
    found = gain(result.label, result.group, test_sides(one), test_sides(other))
    return Interval(found.difference, found.low, found.high)


def ahead_of(names: Sequence[str], result: SetResult, _: Rows) -> Finding:
    """Ours against the best of ``names`` by mean AUROC."""
    there = [name for name in names if name in result.scores]
    if not there:
        raise NotTestable(f"{' and '.join(names)} did not take part")
    aurocs = {name: measured(result.label, result.scores[name])["auroc"]["mean"] for name in (OURS, *there)}
    best = max(there, key=lambda name: aurocs[name])
    known = result.comparison
    if known is not None and known.runner_up == best:
        interval = Interval(known.difference, known.low, known.high)
    else:
        interval = interval_of(result, result.scores[OURS], result.scores[best])
    verdict = above(interval, 0.0)
    text = f"{points(aurocs[OURS])} against {points(aurocs[best])} ({best}), {interval}"
    return Finding(verdict, f"{text}, not distinguishable from none" if verdict == "mixed" else text)


DIFFERENCE_RULES: Final[list[Rule]] = [
    Rule("The depth mean beats the best single head (ITI).", _AHEAD, partial(ahead_of, BEST_HEAD)),
    Rule(
        "The depth mean beats the other probes of internal states (Fact-Probe, IRIS).",
        f"{_AHEAD}; against the better of the two",
        partial(ahead_of, OTHERS),
    ),
    Rule(
        "Before the first token, the depth mean knows the risk better than what costs nothing: first-token "
        "probability, entropy, prompt length.",
        f"{_AHEAD}; against the best of the three",
        partial(ahead_of, FREE),
    ),
]
_rule = add_to(DIFFERENCE_RULES)


@_rule(
    "the 95 % interval of 5-D minus mean ends at 0.5 points or below; not supported where it begins above, mixed where "
    f"it holds 0.5 {WITH_SIGNAL}"
)
def mean_suffices(result: SetResult, rows: Rows) -> Finding:
    """The mean of the trajectory suffices."""
    mean, five = signal(rows), number(rows, "mean-dominance", "mean_and_shape")
    gain = interval_of(result, _first_seed(result, FIVE_D), result.scores[OURS])
    loss = Interval(-gain.difference, -gain.high, -gain.low)
    return Finding(above(loss, -HALF_A_POINT), f"mean {points(mean)}, 5-D {points(five)}, {gain}")


@_rule(
    f"5-D loses more than {100 * SHAPE_FALLS:g} points without the mean: supported where the 95 % interval of the loss "
    f"is above {100 * SHAPE_FALLS:g}, not supported where it is below, mixed where it holds {100 * SHAPE_FALLS:g} "
    f"(where 5-D's AUROC is {points(0.5 + SHAPE_FALLS)} or more: below, a fall to chance is smaller)"
)
def shape_falls(result: SetResult, rows: Rows) -> Finding:
    """Without the mean, the shape of the trajectory knows little."""
    five, shape = (number(rows, "mean-dominance", key) for key in ("mean_and_shape", "shape"))
    if five < 0.5 + SHAPE_FALLS:
        raise NotTestable(f"5-D is {points(five)}: even a fall to chance is less than {100 * SHAPE_FALLS:g} points")
    loss = interval_of(result, _first_seed(result, FIVE_D), _first_seed(result, SHAPE))
    text = f"5-D {points(five)}, shape alone {points(shape)}, {loss}"
    return Finding(above(loss, SHAPE_FALLS), text)


@_rule(
    "the 95 % interval of 5-D minus 2m + 5 begins above −0.5 points; not supported where it ends below, mixed where it "
    f"holds −0.5 {WITH_SIGNAL}"
)
def five_no_worse(result: SetResult, rows: Rows) -> Finding:
    """The five statistics are no worse than the full trajectory with its 2m + 5 features."""
    signal(rows)
    five, full = (number(rows, "feature-sets", key) for key in ("trajectory", "full"))
    interval = interval_of(result, _first_seed(result, FIVE_D), _first_seed(result, FULL))
    return Finding(above(interval, -HALF_A_POINT), f"5-D {points(five)}, 2m + 5 {points(full)}, {interval}")


@_rule(
    "the 95 % interval of the difference of their depth means' AUROC lies within ±0.5 points; not supported where it "
    f"lies wholly outside, mixed otherwise {WITH_SIGNAL}"
)
def sites_equivalent(result: SetResult, rows: Rows) -> Finding:
    """Heads and residual stream are equivalent readouts."""
    if RESIDUAL not in result.scores:
        raise NotTestable(f"{RESIDUAL} did not take part")
    signal(rows)
    head, residual = (number(rows, "readout-site", key) for key in ("head", "residual"))
    interval = interval_of(result, result.scores[RESIDUAL], result.scores[OURS])
    text = f"heads {points(head)}, residual stream {points(residual)}, {interval}"
    return Finding(within(interval, HALF_A_POINT), text)


def _first_seed(result: SetResult, features: Features) -> list[FoldScores]:
    return classifier_scores(result.folds(0), result.label, features)
