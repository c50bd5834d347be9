"""Claims on the mean, the readout and the geometry, judged by the cells of the run's tables.

Margins are the paper's own where it prints one; the rule states them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from service.evaluation.page.report_data import Verdict
from service.evaluation.set_result import SetResult
from service.paper.ablations import depth_key
from service.paper.claim_rules import Finding, Judge, NotTestable, Rows, Rule, points, signed
from service.readout import Pooling

HALF_A_POINT: Final = 0.005  # the paper's margin for "the same" (Sec. exp-ablation)
A_TENTH: Final = 0.001  # of a point: what one printed decimal cannot show
NEAR_CHANCE: Final = 0.55  # a depth mean below this AUROC has no signal to divide among layers, heads or statistics
SHAPE_KEEPS: Final = 2 / 3  # of the mean's distance from chance; the paper's shape statistics keep 0.04 to 0.59 of it
NEAR_ORTHOGONAL: Final = 1.5  # times the expected |cos|; the paper's tables reach 1.3 times
FISHER_LIMIT: Final = 1.04  # the largest R_Fisher in Tab. fisher-gap
K_TELLS: Final = 0.02  # of AUROC above permuted labels; the paper's K are 0.12 above and more
SATURATES_BY: Final = 16  # layers (App. depth-weighting: 12 to 16)
_SIGNAL: Final = f"(where the depth mean's AUROC is {points(NEAR_CHANCE)} or more)"

TABLE_RULES: Final[list[Rule]] = []


def _rule(rule: str) -> Callable[[Judge], Judge]:
    """Add the decorated function to ``TABLE_RULES``, in the order of this file; its docstring is the claim."""

    def add(judge: Judge) -> Judge:
        TABLE_RULES.append(Rule(judge.__doc__ or "", rule, judge))
        return judge

    return add


def number(rows: Rows, table: str, key: str) -> float:
    """One cell of the set's row, the mean where it has a spread.  Raises NotTestable where there is none."""
    cell = rows.get(table, {}).get(key)
    value = cell.get("mean") if isinstance(cell, Mapping) else cell
    if not isinstance(value, int | float):
        raise NotTestable(f"table {table} has no {key}")
    return float(value)


@_rule(
    "5-D gains at most 0.5 points over the mean, and shape alone keeps at most two thirds of the mean's distance "
    f"from 50 {_SIGNAL}"
)
def mean_suffices(_: SetResult, rows: Rows) -> Finding:
    """The mean of the trajectory suffices."""
    mean = _signal(rows)
    five, shape = number(rows, "mean-dominance", "mean_and_shape"), number(rows, "mean-dominance", "shape")
    kept = (shape - 0.5) / (mean - 0.5)
    text = f"mean {points(mean)}, 5-D {points(five)}, shape alone {points(shape)}"
    return Finding(_both(five - mean <= HALF_A_POINT, kept <= SHAPE_KEEPS), text)


@_rule(f"neither gains more than 0.1 points {_SIGNAL}")
def median_no_better(_: SetResult, rows: Rows) -> Finding:
    """The median is no better than the mean, nor is the trimmed mean."""
    mean = _signal(rows)
    median, trimmed = number(rows, "location", "median"), number(rows, "location", "trimmed_mean")
    text = f"mean {points(mean)}, median {points(median)}, trimmed mean {points(trimmed)}"
    return Finding(_verdict(max(median, trimmed) - mean <= A_TENTH), text)


@_rule(f"all layers above one, and no step down by more than 0.5 points, which makes it mixed {_SIGNAL}")
def depth_grows(_: SetResult, rows: Rows) -> Finding:
    """AUROC grows with the number of layers."""
    _signal(rows)
    curve = _curve(rows)
    sizes = sorted(curve)
    if len(sizes) < 2:
        raise NotTestable("one layer has no curve")
    largest = max(curve[a] - curve[b] for a, b in zip(sizes, sizes[1:], strict=False))
    text = ", ".join(f"{points(curve[size])} with {size}" for size in sizes)
    if curve[sizes[-1]] <= curve[sizes[0]]:
        return Finding("not supported", text)
    return Finding("supported" if largest <= HALF_A_POINT else "mixed", text)


@_rule(f"within 0.5 points of all layers from {SATURATES_BY} or fewer on {_SIGNAL}")
def depth_saturates(_: SetResult, rows: Rows) -> Finding:
    """AUROC saturates before all layers are in."""
    _signal(rows)
    curve = _curve(rows)
    full = max(curve)
    between = sorted(size for size in curve if 1 < size < full)
    if len(between) < 2:
        raise NotTestable(f"{full} layers are too few: {len(between) or 'no'} size between one and all of them")
    reached = [
        size for size in between if all(curve[full] - curve[more] <= HALF_A_POINT for more in between if more >= size)
    ]
    text = f"within half a point from {reached[0]} of {full} layers on" if reached else f"not before all {full} layers"
    return Finding(_verdict(bool(reached) and reached[0] <= SATURATES_BY), text)


@_rule(f"it loses at most 0.5 points {_SIGNAL}")
def any_head_will_do(_: SetResult, rows: Rows) -> Finding:
    """A random head of each layer does as well as the best."""
    _signal(rows)
    top, random = number(rows, "top-heads", "top_1"), number(rows, "top-heads", "random_1")
    text = f"random {points(random)} against top-1 {points(top)}"
    return Finding(_verdict(top - random <= HALF_A_POINT), text)


@_rule(
    f"mean |cos| at most {NEAR_ORTHOGONAL:g} times √(2/(πd)), for selected heads and for one fixed head; one of "
    "the two is mixed"
)
def near_orthogonal(_: SetResult, rows: Rows) -> Finding:
    """Probes of neighbouring layers are nearly orthogonal."""
    cosines = {"selected heads": number(rows, "geometry", "adjacent_cos")}
    expected = number(rows, "geometry", "expected_cos")
    if rows.get("isotropy", {}).get("adjacent_cos") is not None:
        cosines["one fixed head"] = number(rows, "isotropy", "adjacent_cos")
    text = ", ".join(f"|cos| {cosine:.3f} ({heads})" for heads, cosine in cosines.items())
    held = [cosine <= NEAR_ORTHOGONAL * expected for cosine in cosines.values()]
    return Finding(_both(held[0], held[-1]), f"{text} against {expected:.3f} by chance")


@_rule("its share of the readouts' variance is at most 1/d, a random direction's")
def low_energy(_: SetResult, rows: Rows) -> Finding:
    """The probe lies in a direction of low energy."""
    energy, even = number(rows, "geometry", "energy"), number(rows, "geometry", "random_energy")
    return Finding(_verdict(energy <= even), f"{energy:.2%} of the variance against 1/d = {even:.2%}")


@_rule(
    f"R_Fisher at most {FISHER_LIMIT:g}, unbiased where the rows allow it: in sample it is above 1 even where the "
    f"mean is optimal {_SIGNAL}"
)
def fisher_gap_small(_: SetResult, rows: Rows) -> Finding:
    """The Fisher-optimal weights gain only 2-4 % over the mean."""
    _signal(rows)
    plain = number(rows, "fisher", "r_fisher")
    unbiased = rows["fisher"].get("r_fisher_unbiased")
    if isinstance(unbiased, float):
        text = f"{unbiased - 1:+.1%} without optimism, {plain - 1:+.1%} in sample".replace("-", "−")
        return Finding(_verdict(unbiased <= FISHER_LIMIT), text)
    if number(rows, "fisher", "shrinkage") > 0:
        raise NotTestable(f"the covariance is singular; shrunk, the gap is {plain - 1:.1%}")
    if plain <= FISHER_LIMIT:  # optimism only enlarges it
        return Finding("supported", f"{plain - 1:.1%} in sample")
    raise NotTestable(f"{plain - 1:.1%} in sample, and too few rows to tell a gain from noise")


@_rule(f"no other pooling gains; mixed up to 0.5 points {_SIGNAL}")
def last_token_best(_: SetResult, rows: Rows) -> Finding:
    """The last prompt token is the best place to read."""
    last = number(rows, "readout-position", "last_1")
    if last < NEAR_CHANCE:
        raise NotTestable(_near_chance(last))
    there = [one.value for one in Pooling if rows["readout-position"].get(one.value) is not None]
    gains = {name: number(rows, "readout-position", name) for name in there if name != Pooling.LAST_1.value}
    if not gains:
        raise NotTestable("no other pooling was extracted")
    best = max(gains, key=lambda name: gains[name])
    text = f"last-1 {points(last)}; next best {best.replace('_', '-')}, {signed(gains[best])} points"
    if gains[best] <= 0:
        return Finding("supported", text)
    return Finding("mixed" if gains[best] <= HALF_A_POINT else "not supported", text)


@_rule(f"their depth means differ by at most 0.5 points of AUROC {_SIGNAL}")
def sites_equivalent(_: SetResult, rows: Rows) -> Finding:
    """Heads and residual stream are equivalent readouts."""
    _signal(rows)
    head, residual = number(rows, "readout-site", "head"), number(rows, "readout-site", "residual")
    text = f"heads {points(head)}, residual stream {points(residual)}"
    return Finding(_verdict(abs(residual - head) <= HALF_A_POINT), text)


@_rule(
    "more than half of K's gap above permuted labels, and no other part more; one of the two is mixed (where K is "
    f"{100 * K_TELLS:g} points or more above them)"
)
def probe_part_of_k(_: SetResult, rows: Rows) -> Finding:
    """The probe part carries most of what the readout change K tells."""
    above = number(rows, "k-split", "signal_k") - number(rows, "k-split", "null")
    if above < K_TELLS:
        raise NotTestable(f"the readout change K tells too little to divide ({signed(above)} points of AUROC)")
    gaps = {name: number(rows, "k-split", f"gap_{name}") for name in ("probe", "metric", "head")}
    text = ", ".join(f"{name} {gap:.0%}" for name, gap in gaps.items()).replace("-", "−") + " of K's"
    return Finding(_both(gaps["probe"] > 0.5, gaps["probe"] >= max(gaps.values())), text)


def _signal(rows: Rows) -> float:
    """AUROC of the depth mean.  Raises NotTestable where it is near chance."""
    mean = number(rows, "mean-dominance", "mean")
    if mean < NEAR_CHANCE:
        raise NotTestable(_near_chance(mean))
    return mean


def _near_chance(mean: float) -> str:
    return f"the depth mean is near chance ({points(mean)})"


def _curve(rows: Rows) -> dict[int, float]:
    """Layers included -> AUROC."""
    prefix = depth_key(0).removesuffix("0")
    keys = [key for key in rows.get("depth-subsampling", {}) if key.startswith(prefix)]
    return {int(key.removeprefix(prefix)): number(rows, "depth-subsampling", key) for key in keys}


def _verdict(held: bool) -> Verdict:
    return "supported" if held else "not supported"


def _both(first: bool, second: bool) -> Verdict:
    return _verdict(first) if first == second else "mixed"
