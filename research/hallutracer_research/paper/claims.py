"""The paper's claims against this run: each with its numbers, and a verdict by a written rule.

A claim is judged on each set: supported where it is on all that can test it, mixed where they
differ.  A threshold is the paper's own where it prints one.  Differences of AUROC are judged by the
95 % interval of the difference of mean AUROCs over test sides (``fitting.scores``): supported where
all of it agrees, not supported where all contradicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from hallutracer_research.evaluation.methods import OURS, RESIDUAL
from hallutracer_research.evaluation.page import Cell, Claim, Table, Verdict
from hallutracer_research.evaluation.results import SetResult, measured
from hallutracer_research.paper.ablations import (
    FIVE_D,
    FULL,
    SHAPE,
    Features,
    classifier_scores,
    depth_key,
)
from service.errors import TrainingError
from service.fitting.nested_cv import FoldScores, test_sides
from service.fitting.scores import gain
from service.readout import Pooling

Rows = Mapping[str, Mapping[str, Cell]]  # table name -> one set's row
HALF_A_POINT: Final = 0.005  # the paper's margin for "the same" (Sec. exp-ablation)
NEAR_CHANCE: Final = (
    0.55  # a depth mean below this AUROC has no signal to divide among layers, heads or statistics
)
NEAR_ORTHOGONAL: Final = 1.5  # times the expected |cos|; the paper's tables reach 1.3 times
FISHER_LIMIT: Final = 1.04  # the largest R_Fisher in Tab. fisher-gap
SHIFT_LIMIT: Final = 0.09  # of Tr(Sigma) (Sec. exp-geometry)
ETA_LIMIT: Final = 0.01  # of eta from 1 (App. snr-empirical)
WIDER_FROM: Final = 0.9  # of the middle layers (Rem. heteroscedastic)
K_TELLS: Final = 0.02  # of AUROC above permuted labels; the paper's K are 0.12 above and more
A_TENTH: Final = 0.001  # of a point: what one printed decimal cannot show
MEDIAN_AGREES: Final = 0.99  # Pearson's r (Tab. mean-vs-median)
SATURATES_BY: Final = 16  # layers (App. depth-weighting: 12 to 16)
HEADS_AGREE: Final = 0.65  # mean correlation within a layer (Tab. head_distribution)


class NotTestable(Exception):
    """This set, or this run, cannot test the claim; the message gives the reason."""


class ClaimFinding(NamedTuple):
    """One claim on one set."""

    verdict: Verdict
    text: str


Judge = Callable[[SetResult, Rows], ClaimFinding]
"""(set, its table rows) -> finding.  Raises NotTestable."""


class ClaimRule(NamedTuple):
    """A claim, the rule in words, and the rule as code."""

    claim: str
    rule: str
    judge: Judge


class DifferenceInterval(NamedTuple):
    """A difference of two mean AUROCs, and the ends of its 95 % interval."""

    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{signed(self.difference)} points [{signed(self.low)}, {signed(self.high)}]"


RULES: Final[list[ClaimRule]] = []


def _rule(words: str) -> Callable[[Judge], Judge]:
    """Append the decorated function to ``RULES``: its docstring is the claim, ``words`` the
    rule."""

    def add(judge: Judge) -> Judge:
        RULES.append(ClaimRule(judge.__doc__ or "", words, judge))
        return judge

    return add


def number(rows: Rows, table: str, key: str) -> float:
    """Return one cell of the set's row, the mean where it has a spread.  Raises NotTestable where
    there is none."""
    cell = rows.get(table, {}).get(key)
    value = cell.get("mean") if isinstance(cell, Mapping) else cell
    if not isinstance(value, int | float):
        raise NotTestable(f"table {table} has no {key}")
    return float(value)


def signal(rows: Rows, table: str = "mean-dominance", key: str = "mean") -> float:
    """Return the AUROC of the depth mean.  Raises NotTestable where it is near chance."""
    if (mean := number(rows, table, key)) < NEAR_CHANCE:
        raise NotTestable(f"the depth mean is near chance ({points(mean)})")
    return mean


def verdict_of(first: bool, second: bool | None = None) -> Verdict:
    """Return the verdict of a rule that holds or does not, or of a rule of two parts: mixed where
    one holds."""
    if second is not None and first != second:
        return "mixed"
    return "supported" if first else "not supported"


def points(share: float) -> str:
    """Return a share of 1 in percent, one decimal."""
    return f"{100 * share:.1f}"


def signed(share: float) -> str:
    """Return a difference of shares in points."""
    return f"{100 * share:+.1f}".replace("-", "−")


WITH_SIGNAL: Final = f"(where the depth mean's AUROC is {points(NEAR_CHANCE)} or more)"
SHAPE_FALLS: Final = 0.19  # "removing it collapses AUROC by more than 19 pp" (Sec. exp-ablation)


def above(interval: DifferenceInterval, bar: float) -> Verdict:
    """Return whether the difference is more than ``bar``."""
    if interval.low > bar:
        return "supported"
    return "not supported" if interval.high < bar else "mixed"


def within(interval: DifferenceInterval, margin: float) -> Verdict:
    """Return whether the difference is at most ``margin`` either way."""
    if -margin <= interval.low and interval.high <= margin:
        return "supported"
    return "not supported" if interval.low > margin or interval.high < -margin else "mixed"


def interval_of(
    result: SetResult, one: Sequence[FoldScores], other: Sequence[FoldScores]
) -> DifferenceInterval:
    """Return one score's AUROC minus the other's; both must have the same test sides."""
    found = gain(result.label, result.group, test_sides(one), test_sides(other))
    return DifferenceInterval(found.difference, found.low, found.high)


def ahead_of(names: Sequence[str], result: SetResult, _: Rows) -> ClaimFinding:
    """Judge ours against the best of ``names`` by mean AUROC."""
    there = [name for name in names if name in result.scores]
    if not there:
        raise NotTestable(f"{' and '.join(names)} did not take part")
    aurocs = {
        name: measured(result.label, result.scores[name])["auroc"]["mean"]
        for name in (OURS, *there)
    }
    best = max(there, key=lambda name: aurocs[name])
    interval = interval_of(result, result.scores[OURS], result.scores[best])
    verdict = above(interval, 0.0)
    text = f"{points(aurocs[OURS])} against {points(aurocs[best])} ({best}), {interval}"
    return ClaimFinding(
        verdict, f"{text}, not distinguishable from none" if verdict == "mixed" else text
    )


for _claim, _more, *_names in (
    ("The depth mean beats the best single head (ITI).", "", "iti"),
    (
        "The depth mean beats the other probes of internal states (Fact-Probe, IRIS).",
        "; against the better of the two",
        "fact-probe",
        "iris",
    ),
    (
        (
            "Before the first token, the depth mean knows the risk better than what costs nothing:"
            " first-token probability, entropy, prompt length."
        ),
        "; against the best of the three",
        "first-token-max-prob",
        "first-token-entropy",
        "prompt-length",
    ),
):
    _words = (
        "supported where the 95 % interval of the AUROC difference is above zero, not supported"
        f" where it is below, mixed where it holds zero{_more}"
    )
    RULES.append(ClaimRule(_claim, _words, partial(ahead_of, _names)))


@_rule(
    "the 95 % interval of 5-D minus mean ends at 0.5 points or below; not supported where it"
    f" begins above, mixed where it holds 0.5 {WITH_SIGNAL}"
)
def mean_suffices(result: SetResult, rows: Rows) -> ClaimFinding:
    """The mean of the trajectory suffices."""
    mean, five = signal(rows), number(rows, "mean-dominance", "mean_and_shape")
    gain = interval_of(result, _first_seed(result, FIVE_D), result.scores[OURS])
    loss = DifferenceInterval(-gain.difference, -gain.high, -gain.low)
    return ClaimFinding(
        above(loss, -HALF_A_POINT), f"mean {points(mean)}, 5-D {points(five)}, {gain}"
    )


@_rule(
    f"5-D loses more than {100 * SHAPE_FALLS:g} points without the mean: supported where the 95 %"
    f" interval of the loss is above {100 * SHAPE_FALLS:g}, not supported where it is below, mixed"
    f" where it holds {100 * SHAPE_FALLS:g} (where 5-D's AUROC is {points(0.5 + SHAPE_FALLS)} or"
    " more: below, a fall to chance is smaller)"
)
def shape_falls(result: SetResult, rows: Rows) -> ClaimFinding:
    """Without the mean, the shape of the trajectory knows little."""
    five, shape = (number(rows, "mean-dominance", key) for key in ("mean_and_shape", "shape"))
    if five < 0.5 + SHAPE_FALLS:
        raise NotTestable(
            f"5-D is {points(five)}: even a fall to chance is less than {100 * SHAPE_FALLS:g}"
            " points"
        )
    loss = interval_of(result, _first_seed(result, FIVE_D), _first_seed(result, SHAPE))
    return ClaimFinding(
        above(loss, SHAPE_FALLS), f"5-D {points(five)}, shape alone {points(shape)}, {loss}"
    )


@_rule(
    "the 95 % interval of 5-D minus 2m + 5 begins above −0.5 points; not supported where it ends"
    f" below, mixed where it holds −0.5 {WITH_SIGNAL}"
)
def five_no_worse(result: SetResult, rows: Rows) -> ClaimFinding:
    """The five statistics are no worse than the full trajectory with its 2m + 5 features."""
    signal(rows)
    five, full = (number(rows, "feature-sets", key) for key in ("trajectory", "full"))
    interval = interval_of(result, _first_seed(result, FIVE_D), _first_seed(result, FULL))
    return ClaimFinding(
        above(interval, -HALF_A_POINT), f"5-D {points(five)}, 2m + 5 {points(full)}, {interval}"
    )


@_rule(
    "the 95 % interval of the difference of their depth means' AUROC lies within ±0.5 points; not"
    f" supported where it lies wholly outside, mixed otherwise {WITH_SIGNAL}"
)
def sites_equivalent(result: SetResult, rows: Rows) -> ClaimFinding:
    """Heads and residual stream are equivalent readouts."""
    if RESIDUAL not in result.scores:
        raise NotTestable(f"{RESIDUAL} did not take part")
    signal(rows)
    head, residual = (number(rows, "readout-site", key) for key in ("head", "residual"))
    interval = interval_of(result, result.scores[RESIDUAL], result.scores[OURS])
    text = f"heads {points(head)}, residual stream {points(residual)}, {interval}"
    return ClaimFinding(within(interval, HALF_A_POINT), text)


def _first_seed(result: SetResult, features: Features) -> list[FoldScores]:
    return classifier_scores(result.folds(0), result.label, features)


@_rule(f"neither gains more than 0.1 points {WITH_SIGNAL}")
def median_no_better(_: SetResult, rows: Rows) -> ClaimFinding:
    """The median is no better than the mean, nor is the trimmed mean."""
    mean = signal(rows)
    median, trimmed = number(rows, "location", "median"), number(rows, "location", "trimmed_mean")
    text = f"mean {points(mean)}, median {points(median)}, trimmed mean {points(trimmed)}"
    return ClaimFinding(verdict_of(max(median, trimmed) - mean <= A_TENTH), text)


@_rule(f"their correlation over the rows is above {MEDIAN_AGREES:g}")
def median_is_the_mean(_: SetResult, rows: Rows) -> ClaimFinding:
    """Mean and median of the trajectory rank the rows alike."""
    r = number(rows, "location", "correlation")
    return ClaimFinding(verdict_of(r > MEDIAN_AGREES), f"r = {r:.3f}")


@_rule(
    "all layers above one, and no step down by more than 0.5 points, which makes it mixed"
    f" {WITH_SIGNAL}"
)
def depth_grows(_: SetResult, rows: Rows) -> ClaimFinding:
    """AUROC grows with the number of layers."""
    signal(rows)
    curve = _curve(rows)
    sizes = sorted(curve)
    if len(sizes) < 2:
        raise NotTestable("one layer has no curve")
    largest = max(curve[a] - curve[b] for a, b in zip(sizes, sizes[1:], strict=False))
    text = ", ".join(f"{points(curve[size])} with {size}" for size in sizes)
    grows = curve[sizes[-1]] > curve[sizes[0]]
    return ClaimFinding(verdict_of(grows, grows and largest <= HALF_A_POINT), text)


@_rule(f"within 0.5 points of all layers from {SATURATES_BY} or fewer on {WITH_SIGNAL}")
def depth_saturates(_: SetResult, rows: Rows) -> ClaimFinding:
    """AUROC saturates before all layers are in."""
    signal(rows)
    curve = _curve(rows)
    full = max(curve)
    between = sorted(size for size in curve if 1 < size < full)
    if len(between) < 2:
        raise NotTestable(
            f"{full} layers are too few: {len(between) or 'no'} size between one and all of them"
        )
    reached: list[int] = []
    for size in reversed(between):
        if curve[full] - curve[size] > HALF_A_POINT:
            break
        reached.insert(0, size)
    text = (
        f"within half a point from {reached[0]} of {full} layers on"
        if reached
        else f"not before all {full} layers"
    )
    return ClaimFinding(verdict_of(bool(reached) and reached[0] <= SATURATES_BY), text)


@_rule(f"it loses at most 0.5 points {WITH_SIGNAL}")
def any_head_will_do(_: SetResult, rows: Rows) -> ClaimFinding:
    """A random head of each layer does as well as the best."""
    signal(rows)
    top, drawn = number(rows, "top-heads", "top_1"), number(rows, "top-heads", "random_1")
    return ClaimFinding(
        verdict_of(top - drawn <= HALF_A_POINT),
        f"random {points(drawn)} against top-1 {points(top)}",
    )


@_rule(
    f"mean correlation of the probes' scores within a layer at least {HEADS_AGREE:g} {WITH_SIGNAL}"
)
def heads_redundant(_: SetResult, rows: Rows) -> ClaimFinding:
    """The heads of a layer are redundant."""
    signal(rows)
    r = number(rows, "head-distribution", "correlation")
    return ClaimFinding(verdict_of(r >= HEADS_AGREE), f"mean correlation {r:.2f}")


@_rule(f"no other pooling gains; mixed up to 0.5 points {WITH_SIGNAL}")
def last_token_best(_: SetResult, rows: Rows) -> ClaimFinding:
    """The last prompt token is the best place to read."""
    last = signal(rows, "readout-position", "last_1")
    there = [one.value for one in Pooling if rows["readout-position"].get(one.value) is not None]
    gains = {
        name: number(rows, "readout-position", name)
        for name in there
        if name != Pooling.LAST_1.value
    }
    if not gains:
        raise NotTestable("no other pooling was extracted")
    best = max(gains, key=lambda name: gains[name])
    text = (
        f"last-1 {points(last)}; next best {best.replace('_', '-')}, {signed(gains[best])} points"
    )
    return ClaimFinding(verdict_of(gains[best] <= 0, gains[best] <= HALF_A_POINT), text)


def _curve(rows: Rows) -> dict[int, float]:
    prefix = depth_key(0).removesuffix("0")
    keys = [key for key in rows.get("depth-subsampling", {}) if key.startswith(prefix)]
    return {int(key.removeprefix(prefix)): number(rows, "depth-subsampling", key) for key in keys}


@_rule(
    f"mean |cos| at most {NEAR_ORTHOGONAL:g} times √(2/(πd)), for selected heads and for one fixed"
    " head; one of the two is mixed"
)
def near_orthogonal(_: SetResult, rows: Rows) -> ClaimFinding:
    """Probes of neighbouring layers are nearly orthogonal."""
    cosines = {"selected heads": number(rows, "geometry", "adjacent_cos")}
    expected = number(rows, "geometry", "expected_cos")
    if rows.get("isotropy", {}).get("adjacent_cos") is not None:
        cosines["one fixed head"] = number(rows, "isotropy", "adjacent_cos")
    text = ", ".join(f"|cos| {cosine:.3f} ({heads})" for heads, cosine in cosines.items())
    held = [cosine <= NEAR_ORTHOGONAL * expected for cosine in cosines.values()]
    return ClaimFinding(verdict_of(held[0], held[-1]), f"{text} against {expected:.3f} by chance")


@_rule("its share of the readouts' variance is at most 1/d, a random direction's")
def low_energy(_: SetResult, rows: Rows) -> ClaimFinding:
    """The probe lies in a direction of low energy."""
    energy, even = number(rows, "geometry", "energy"), number(rows, "geometry", "random_energy")
    return ClaimFinding(
        verdict_of(energy <= even), f"{energy:.2%} of the variance against 1/d = {even:.2%}"
    )


@_rule(f"bias-corrected energy ratio T_CQ / Tr(Σ) below {SHIFT_LIMIT:.0%} {WITH_SIGNAL}")
def shift_small(_: SetResult, rows: Rows) -> ClaimFinding:
    """Without any probe, the classes' separation is of low energy."""
    signal(rows)
    ratio = number(rows, "geometry", "energy_ratio")
    return ClaimFinding(
        verdict_of(ratio < SHIFT_LIMIT), f"{ratio:.1%} of the variance".replace("-", "−")
    )


@_rule(
    f"R_Fisher at most {FISHER_LIMIT:g}, unbiased where the rows allow it: in sample it is above 1"
    f" even where the mean is optimal {WITH_SIGNAL}"
)
def fisher_gap_small(_: SetResult, rows: Rows) -> ClaimFinding:
    """The Fisher-optimal weights gain only 2-4 % over the mean."""
    signal(rows)
    plain = number(rows, "fisher", "r_fisher")
    unbiased = rows["fisher"].get("r_fisher_unbiased")
    if isinstance(unbiased, float):
        text = f"{unbiased - 1:+.1%} without optimism, {plain - 1:+.1%} in sample".replace("-", "−")
        return ClaimFinding(verdict_of(unbiased <= FISHER_LIMIT), text)
    if number(rows, "fisher", "shrinkage") > 0:
        raise NotTestable(f"the covariance is singular; shrunk, the gap is {plain - 1:.1%}")
    if plain <= FISHER_LIMIT:  # optimism only enlarges it
        return ClaimFinding("supported", f"{plain - 1:.1%} in sample")
    raise NotTestable(f"{plain - 1:.1%} in sample, and too few rows to tell a gain from noise")


@_rule(
    f"|η − 1| below {ETA_LIMIT:g} (where the classes' shares differ by {100 * ETA_LIMIT:g} points"
    " or more: below, η is that close to 1 by algebra)"
)
def snr_predicted(result: SetResult, rows: Rows) -> ClaimFinding:
    """The covariance of the layers predicts the signal-to-noise ratio of slope against mean."""
    eta = number(rows, "snr", "eta")
    # One ratio weighs the classes' variances by size, the other evenly: each pair is within 1 +- u,
    # so that eta^2 lies in [(1 - u) / (1 + u), (1 + u) / (1 - u)] whatever the rows are.
    uneven = abs(2.0 * float(np.mean(result.label)) - 1.0)
    if uneven < ETA_LIMIT:
        raise NotTestable(f"η = {eta:.3f} is no test: the classes are of one size")
    return ClaimFinding(verdict_of(abs(eta - 1.0) < ETA_LIMIT), f"η = {eta:.3f}")


@_rule(
    f"its increments along the probe have the larger variance in {WIDER_FROM:.0%} of the middle"
    " layers or more"
)
def factual_varies_more(_: SetResult, rows: Rows) -> ClaimFinding:
    """The factual class varies more along the probe than the hallucinated one."""
    share = number(rows, "kappa", "factual_larger")
    return ClaimFinding(verdict_of(share >= WIDER_FROM), f"in {share:.0%} of the middle layers")


@_rule(
    "more than half of K's gap above permuted labels, and no other part more; one of the two is"
    f" mixed (where K is {100 * K_TELLS:g} points or more above them)"
)
def probe_part_of_k(_: SetResult, rows: Rows) -> ClaimFinding:
    """The probe part carries most of what the readout change K tells."""
    above = number(rows, "k-split", "signal_k") - number(rows, "k-split", "null")
    if above < K_TELLS:
        raise NotTestable(
            f"the readout change K tells too little to divide ({signed(above)} points of AUROC)"
        )
    gaps = {name: number(rows, "k-split", f"gap_{name}") for name in ("probe", "metric", "head")}
    text = (
        ", ".join(f"{name} {gap:.0%}" for name, gap in gaps.items()).replace("-", "−") + " of K's"
    )
    return ClaimFinding(verdict_of(gaps["probe"] > 0.5, gaps["probe"] >= max(gaps.values())), text)


def claims(results: Sequence[SetResult], tables: Sequence[Table]) -> list[Claim]:
    """Every claim's verdict; ``tables``: the run's tables of ``paper.report``."""
    cells = cells_by_set(tables)

    def judge(rule: ClaimRule, result: SetResult) -> ClaimFinding:
        try:
            return rule.judge(result, cells.get(result.title, {}))
        except (NotTestable, TrainingError) as error:
            return ClaimFinding("not testable", f"not testable: {error}")

    judged = []
    for rule in RULES:
        findings = [judge(rule, result) for result in results]
        evidence = [
            f"{result.title}: {each.text}" for result, each in zip(results, findings, strict=True)
        ]
        verdict = together([finding.verdict for finding in findings])
        judged.append(Claim(rule.claim, evidence, verdict, rule.rule))
    return judged


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict from those of the sets; a set that cannot test a claim does not count where
    another can."""
    tested = {verdict for verdict in verdicts if verdict != "not testable"}
    if not tested:
        return "not testable"
    return tested.pop() if len(tested) == 1 else "mixed"


def cells_by_set(tables: Sequence[Table]) -> dict[str, Rows]:
    """set -> table name -> the set's row."""
    by_set: dict[str, dict[str, Mapping[str, Cell]]] = {}
    for table in tables:
        for row in table.rows:
            by_set.setdefault(str(row["set"]), {})[table.name] = row
    return dict(by_set)
