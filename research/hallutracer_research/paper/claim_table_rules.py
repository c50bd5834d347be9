"""Claims on the mean, the number of layers and how a layer is read, judged by the cells of the run's tables."""

from __future__ import annotations

from typing import Final

from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.paper.ablations import depth_key
from hallutracer_research.paper.claim_rules import (
    HALF_A_POINT,
    NEAR_CHANCE,
    WITH_SIGNAL,
    Finding,
    NotTestable,
    Rows,
    Rule,
    add_to,
    near_chance,
    number,
    points,
    signal,
    signed,
    verdict_of,
)
from service.readout import Pooling

A_TENTH: Final = 0.001  # of a point: what one printed decimal cannot show
MEDIAN_AGREES: Final = 0.99  # Pearson's r (Tab. mean-vs-median)
SATURATES_BY: Final = 16  # layers (App. depth-weighting: 12 to 16)
HEADS_AGREE: Final = 0.65  # mean correlation within a layer (Tab. head_distribution)

TABLE_RULES: Final[list[Rule]] = []
_rule = add_to(TABLE_RULES)


@_rule(f"neither gains more than 0.1 points {WITH_SIGNAL}")
def median_no_better(_: SetResult, rows: Rows) -> Finding:
    """The median is no better than the mean, nor is the trimmed mean."""
    mean = signal(rows)
    median, trimmed = number(rows, "location", "median"), number(rows, "location", "trimmed_mean")
    text = f"mean {points(mean)}, median {points(median)}, trimmed mean {points(trimmed)}"
    return Finding(verdict_of(max(median, trimmed) - mean <= A_TENTH), text)


@_rule(f"their correlation over the rows is above {MEDIAN_AGREES:g}")
def median_is_the_mean(_: SetResult, rows: Rows) -> Finding:
    """Mean and median of the trajectory rank the rows alike."""
    r = number(rows, "location", "correlation")
    return Finding(verdict_of(r > MEDIAN_AGREES), f"r = {r:.3f}")


@_rule(f"all layers above one, and no step down by more than 0.5 points, which makes it mixed {WITH_SIGNAL}")
def depth_grows(_: SetResult, rows: Rows) -> Finding:
    """AUROC grows with the number of layers."""
    signal(rows)
    curve = _curve(rows)
    sizes = sorted(curve)
    if len(sizes) < 2:
        raise NotTestable("one layer has no curve")
    largest = max(curve[a] - curve[b] for a, b in zip(sizes, sizes[1:], strict=False))
    text = ", ".join(f"{points(curve[size])} with {size}" for size in sizes)
    if curve[sizes[-1]] <= curve[sizes[0]]:
        return Finding("not supported", text)
    return Finding("supported" if largest <= HALF_A_POINT else "mixed", text)


@_rule(f"within 0.5 points of all layers from {SATURATES_BY} or fewer on {WITH_SIGNAL}")
def depth_saturates(_: SetResult, rows: Rows) -> Finding:
    """AUROC saturates before all layers are in."""
    signal(rows)
    curve = _curve(rows)
    full = max(curve)
    between = sorted(size for size in curve if 1 < size < full)
    if len(between) < 2:
        raise NotTestable(f"{full} layers are too few: {len(between) or 'no'} size between one and all of them")
    reached = [
        size for size in between if all(curve[full] - curve[more] <= HALF_A_POINT for more in between if more >= size)
    ]
    text = f"within half a point from {reached[0]} of {full} layers on" if reached else f"not before all {full} layers"
    return Finding(verdict_of(bool(reached) and reached[0] <= SATURATES_BY), text)


@_rule(f"it loses at most 0.5 points {WITH_SIGNAL}")
def any_head_will_do(_: SetResult, rows: Rows) -> Finding:
    """A random head of each layer does as well as the best."""
    signal(rows)
    top, random = number(rows, "top-heads", "top_1"), number(rows, "top-heads", "random_1")
    text = f"random {points(random)} against top-1 {points(top)}"
    return Finding(verdict_of(top - random <= HALF_A_POINT), text)


@_rule(f"mean correlation of the probes' scores within a layer at least {HEADS_AGREE:g} {WITH_SIGNAL}")
def heads_redundant(_: SetResult, rows: Rows) -> Finding:
    """The heads of a layer are redundant."""
    signal(rows)
    r = number(rows, "head-distribution", "correlation")
    return Finding(verdict_of(r >= HEADS_AGREE), f"mean correlation {r:.2f}")


@_rule(f"no other pooling gains; mixed up to 0.5 points {WITH_SIGNAL}")
def last_token_best(_: SetResult, rows: Rows) -> Finding:
    """The last prompt token is the best place to read."""
    last = number(rows, "readout-position", "last_1")
    if last < NEAR_CHANCE:
        raise NotTestable(near_chance(last))
    there = [one.value for one in Pooling if rows["readout-position"].get(one.value) is not None]
    gains = {name: number(rows, "readout-position", name) for name in there if name != Pooling.LAST_1.value}
    if not gains:
        raise NotTestable("no other pooling was extracted")
    best = max(gains, key=lambda name: gains[name])
    text = f"last-1 {points(last)}; next best {best.replace('_', '-')}, {signed(gains[best])} points"
    if gains[best] <= 0:
        return Finding("supported", text)
    return Finding("mixed" if gains[best] <= HALF_A_POINT else "not supported", text)


def _curve(rows: Rows) -> dict[int, float]:
    """Layers included -> AUROC."""
    prefix = depth_key(0).removesuffix("0")
    keys = [key for key in rows.get("depth-subsampling", {}) if key.startswith(prefix)]
    return {int(key.removeprefix(prefix)): number(rows, "depth-subsampling", key) for key in keys}
