"""The paper's claims against this run: each with its numbers, and a verdict by a written rule.

A claim is judged on each set: supported where it is on all that can test it, mixed where they
differ.  A threshold is the paper's own where it prints one.  Differences of AUROC are judged by the
95 % interval of the difference of mean AUROCs over test sides (``fitting.scores``): supported where
all of it agrees, not supported where all contradicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from hallutracer_research.evaluation.methods import OURS, RESIDUAL
from hallutracer_research.evaluation.page import Cell, Claim, Table, Verdict
from hallutracer_research.evaluation.results import SetResult, aurocs
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
from service.fitting.scores import Gain, gain
from service.readout import Pooling

Rows = Mapping[str, Mapping[str, Cell]]  # table name -> one set's row
HALF_A_POINT = 0.005  # the paper's margin for "the same" (Sec. exp-ablation)
# A depth mean below this AUROC has no signal to divide among layers, heads or statistics.
NEAR_CHANCE = 0.55
NEAR_ORTHOGONAL = 1.5  # times the expected |cos|; the paper's tables reach 1.3 times
FISHER_LIMIT = 1.04  # the largest R_Fisher in Tab. fisher-gap
SHIFT_LIMIT = 0.09  # of Tr(Sigma) (Sec. exp-geometry)
ETA_LIMIT = 0.01  # of eta from 1 (App. snr-empirical)
WIDER_FROM = 0.9  # of the middle layers (Rem. heteroscedastic)
K_TELLS = 0.02  # of AUROC above permuted labels; the paper's K are 0.12 above and more
A_TENTH = 0.001  # of a point: what one printed decimal cannot show
MEDIAN_AGREES = 0.99  # Pearson's r (Tab. mean-vs-median)
SATURATES_BY = 16  # layers (App. depth-weighting: 12 to 16)
HEADS_AGREE = 0.65  # mean correlation within a layer (Tab. head_distribution)


class NotTestable(Exception):
    """This set, or this run, cannot test the claim; the message gives the reason."""


class ClaimFinding(NamedTuple):
    """One claim on one set."""

    verdict: Verdict
    text: str


class Evidence(NamedTuple):
    """One set, and its row of each table by the table's name."""

    result: SetResult
    rows: Rows

    def number(self, table: str, key: str) -> float:
        """Return one cell of the set's row, the mean where it has a spread.  Raises NotTestable
        where there is none."""
        cell = self.rows.get(table, {}).get(key)
        value = cell.get("mean") if isinstance(cell, Mapping) else cell
        if not isinstance(value, int | float):
            raise NotTestable(f"table {table} has no {key}")
        return float(value)

    def numbers(self, table: str, *keys: str) -> list[float]:
        """Return several cells.  Raises NotTestable."""
        return [self.number(table, key) for key in keys]

    def signal(self, table: str = "mean-dominance", key: str = "mean") -> float:
        """Return the AUROC of the depth mean.  Raises NotTestable where it is near chance."""
        if (mean := self.number(table, key)) < NEAR_CHANCE:
            raise NotTestable(f"the depth mean is near chance ({points(mean)})")
        return mean

    def scores(self, features: Features) -> list[FoldScores]:
        """Return the first seed's scores of several features together."""
        return classifier_scores(self.result.folds(0), self.result.label, features)

    def lead(self, scores: Sequence[FoldScores], base_scores: Sequence[FoldScores]) -> Gain:
        """Return the scores' AUROC minus the base scores'; both must have the same test sides."""
        sides = test_sides(scores), test_sides(base_scores)
        return gain(self.result.label, self.result.group, *sides)


Judge = Callable[[Evidence], ClaimFinding]
"""Raises NotTestable."""


class ClaimRule(NamedTuple):
    """A claim, the rule in words, and the rule as code."""

    claim: str
    rule: str
    judge: Judge


RULES: list[ClaimRule] = []


def _rule(words: str) -> Callable[[Judge], Judge]:
    """Append the decorated function to ``RULES``: its docstring is the claim, ``words`` the
    rule."""

    def add(judge: Judge) -> Judge:
        RULES.append(ClaimRule(judge.__doc__ or "", words, judge))
        return judge

    return add


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


WITH_SIGNAL = f"(where the depth mean's AUROC is {points(NEAR_CHANCE)} or more)"
SHAPE_FALLS = 0.19  # "removing it collapses AUROC by more than 19 pp" (Sec. exp-ablation)


def shown(gain: Gain) -> str:
    """Return the difference and its 95 % interval in points."""
    return f"{signed(gain.difference)} points [{signed(gain.low)}, {signed(gain.high)}]"


def above(gain: Gain, bar: float) -> Verdict:
    """Return whether the difference is more than ``bar``."""
    if gain.low > bar:
        return "supported"
    return "not supported" if gain.high < bar else "mixed"


def within(gain: Gain, margin: float) -> Verdict:
    """Return whether the difference is at most ``margin`` either way."""
    if -margin <= gain.low and gain.high <= margin:
        return "supported"
    return "not supported" if gain.low > margin or gain.high < -margin else "mixed"


def ahead_of(names: Sequence[str], evidence: Evidence) -> ClaimFinding:
    """Judge ours against the best of ``names`` by mean AUROC."""
    label, scores = evidence.result.label, evidence.result.scores
    rivals = [name for name in names if name in scores]
    if not rivals:
        raise NotTestable(f"{' and '.join(names)} did not take part")
    quality = {name: float(np.mean(aurocs(label, scores[name]))) for name in (OURS, *rivals)}
    best = max(rivals, key=quality.__getitem__)
    lead = evidence.lead(scores[OURS], scores[best])
    verdict = above(lead, 0.0)
    text = f"{points(quality[OURS])} against {points(quality[best])} ({best}), {shown(lead)}"
    if verdict == "mixed":
        text += ", not distinguishable from none"
    return ClaimFinding(verdict, text)


def _ahead(claim: str, *names: str, more: str = "") -> None:
    """Append the claim that ours is ahead of these methods."""
    words = (
        "supported where the 95 % interval of the AUROC difference is above zero, not supported"
        f" where it is below, mixed where it holds zero{more}"
    )
    RULES.append(ClaimRule(claim, words, partial(ahead_of, names)))


_ahead("The depth mean beats the best single head (ITI).", "iti")
_ahead(
    "The depth mean beats the other probes of internal states (Fact-Probe, IRIS).",
    "fact-probe",
    "iris",
    more="; against the better of the two",
)
_ahead(
    "Before the first token, the depth mean knows the risk better than what costs nothing:"
    " first-token probability, entropy, prompt length.",
    "first-token-max-prob",
    "first-token-entropy",
    "prompt-length",
    more="; against the best of the three",
)


@_rule(
    "the 95 % interval of 5-D minus mean ends at 0.5 points or below; not supported where it"
    f" begins above, mixed where it holds 0.5 {WITH_SIGNAL}"
)
def mean_suffices(evidence: Evidence) -> ClaimFinding:
    """The mean of the trajectory suffices."""
    mean, five = evidence.signal(), evidence.number("mean-dominance", "mean_and_shape")
    lead = evidence.lead(evidence.scores(FIVE_D), evidence.result.scores[OURS])
    loss = lead._replace(difference=-lead.difference, low=-lead.high, high=-lead.low)
    text = f"mean {points(mean)}, 5-D {points(five)}, {shown(lead)}"
    return ClaimFinding(above(loss, -HALF_A_POINT), text)


@_rule(
    f"5-D loses more than {100 * SHAPE_FALLS:g} points without the mean: supported where the 95 %"
    f" interval of the loss is above {100 * SHAPE_FALLS:g}, not supported where it is below, mixed"
    f" where it holds {100 * SHAPE_FALLS:g} (where 5-D's AUROC is {points(0.5 + SHAPE_FALLS)} or"
    " more: below, a fall to chance is smaller)"
)
def shape_falls(evidence: Evidence) -> ClaimFinding:
    """Without the mean, the shape of the trajectory knows little."""
    five, shape = evidence.numbers("mean-dominance", "mean_and_shape", "shape")
    if five < 0.5 + SHAPE_FALLS:
        raise NotTestable(
            f"5-D is {points(five)}: even a fall to chance is less than {100 * SHAPE_FALLS:g}"
            " points"
        )
    loss = evidence.lead(evidence.scores(FIVE_D), evidence.scores(SHAPE))
    text = f"5-D {points(five)}, shape alone {points(shape)}, {shown(loss)}"
    return ClaimFinding(above(loss, SHAPE_FALLS), text)


@_rule(
    "the 95 % interval of 5-D minus 2m + 5 begins above −0.5 points; not supported where it ends"
    f" below, mixed where it holds −0.5 {WITH_SIGNAL}"
)
def five_no_worse(evidence: Evidence) -> ClaimFinding:
    """The five statistics are no worse than the full trajectory with its 2m + 5 features."""
    evidence.signal()
    five, full = evidence.numbers("feature-sets", "trajectory", "full")
    lead = evidence.lead(evidence.scores(FIVE_D), evidence.scores(FULL))
    text = f"5-D {points(five)}, 2m + 5 {points(full)}, {shown(lead)}"
    return ClaimFinding(above(lead, -HALF_A_POINT), text)


@_rule(
    "the 95 % interval of the difference of their depth means' AUROC lies within ±0.5 points; not"
    f" supported where it lies wholly outside, mixed otherwise {WITH_SIGNAL}"
)
def sites_equivalent(evidence: Evidence) -> ClaimFinding:
    """Heads and residual stream are equivalent readouts."""
    scores = evidence.result.scores
    if RESIDUAL not in scores:
        raise NotTestable(f"{RESIDUAL} did not take part")
    evidence.signal()
    head, residual = evidence.numbers("readout-site", "head", "residual")
    difference = evidence.lead(scores[RESIDUAL], scores[OURS])
    text = f"heads {points(head)}, residual stream {points(residual)}, {shown(difference)}"
    return ClaimFinding(within(difference, HALF_A_POINT), text)


@_rule(f"neither gains more than 0.1 points {WITH_SIGNAL}")
def median_no_better(evidence: Evidence) -> ClaimFinding:
    """The median is no better than the mean, nor is the trimmed mean."""
    mean = evidence.signal()
    median, trimmed = evidence.numbers("location", "median", "trimmed_mean")
    text = f"mean {points(mean)}, median {points(median)}, trimmed mean {points(trimmed)}"
    return ClaimFinding(verdict_of(max(median, trimmed) - mean <= A_TENTH), text)


@_rule(f"their correlation over the rows is above {MEDIAN_AGREES:g}")
def median_is_the_mean(evidence: Evidence) -> ClaimFinding:
    """Mean and median of the trajectory rank the rows alike."""
    r = evidence.number("location", "correlation")
    return ClaimFinding(verdict_of(r > MEDIAN_AGREES), f"r = {r:.3f}")


@_rule(
    "all layers above one, and no step down by more than 0.5 points, which makes it mixed"
    f" {WITH_SIGNAL}"
)
def depth_grows(evidence: Evidence) -> ClaimFinding:
    """AUROC grows with the number of layers."""
    evidence.signal()
    curve = _curve(evidence)
    sizes = sorted(curve)
    if len(sizes) < 2:
        raise NotTestable("one layer has no curve")
    largest = max(curve[a] - curve[b] for a, b in zip(sizes, sizes[1:], strict=False))
    text = ", ".join(f"{points(curve[size])} with {size}" for size in sizes)
    grows = curve[sizes[-1]] > curve[sizes[0]]
    return ClaimFinding(verdict_of(grows, grows and largest <= HALF_A_POINT), text)


@_rule(f"within 0.5 points of all layers from {SATURATES_BY} or fewer on {WITH_SIGNAL}")
def depth_saturates(evidence: Evidence) -> ClaimFinding:
    """AUROC saturates before all layers are in."""
    evidence.signal()
    curve = _curve(evidence)
    full = max(curve)
    between = sorted(size for size in curve if 1 < size < full)
    if len(between) < 2:
        raise NotTestable(
            f"{full} layers are too few: {len(between) or 'no'} size between one and all of them"
        )
    first = full
    for size in reversed(between):
        if curve[full] - curve[size] > HALF_A_POINT:
            break
        first = size
    if first == full:
        return ClaimFinding("not supported", f"not before all {full} layers")
    text = f"within half a point from {first} of {full} layers on"
    return ClaimFinding(verdict_of(first <= SATURATES_BY), text)


@_rule(f"it loses at most 0.5 points {WITH_SIGNAL}")
def any_head_will_do(evidence: Evidence) -> ClaimFinding:
    """A random head of each layer does as well as the best."""
    evidence.signal()
    top, drawn = evidence.numbers("top-heads", "top_1", "random_1")
    text = f"random {points(drawn)} against top-1 {points(top)}"
    return ClaimFinding(verdict_of(top - drawn <= HALF_A_POINT), text)


@_rule(
    f"mean correlation of the probes' scores within a layer at least {HEADS_AGREE:g} {WITH_SIGNAL}"
)
def heads_redundant(evidence: Evidence) -> ClaimFinding:
    """The heads of a layer are redundant."""
    evidence.signal()
    r = evidence.number("head-distribution", "correlation")
    return ClaimFinding(verdict_of(r >= HEADS_AGREE), f"mean correlation {r:.2f}")


@_rule(f"no other pooling gains; mixed up to 0.5 points {WITH_SIGNAL}")
def last_token_best(evidence: Evidence) -> ClaimFinding:
    """The last prompt token is the best place to read."""
    table = "readout-position"
    last = evidence.signal(table, "last_1")
    gains = {
        pooling.value: evidence.number(table, pooling.value)
        for pooling in Pooling
        if pooling is not Pooling.LAST_1 and evidence.rows[table].get(pooling.value) is not None
    }
    if not gains:
        raise NotTestable("no other pooling was extracted")
    best = max(gains, key=gains.__getitem__)
    text = (
        f"last-1 {points(last)}; next best {best.replace('_', '-')}, {signed(gains[best])} points"
    )
    return ClaimFinding(verdict_of(gains[best] <= 0, gains[best] <= HALF_A_POINT), text)


def _curve(evidence: Evidence) -> dict[int, float]:
    prefix = depth_key(0).removesuffix("0")
    keys = [key for key in evidence.rows.get("depth-subsampling", {}) if key.startswith(prefix)]
    return {
        int(key.removeprefix(prefix)): evidence.number("depth-subsampling", key) for key in keys
    }


@_rule(
    f"mean |cos| at most {NEAR_ORTHOGONAL:g} times √(2/(πd)), for selected heads and for one fixed"
    " head; one of the two is mixed"
)
def near_orthogonal(evidence: Evidence) -> ClaimFinding:
    """Probes of neighbouring layers are nearly orthogonal."""
    cosines = {"selected heads": evidence.number("geometry", "adjacent_cos")}
    expected = evidence.number("geometry", "expected_cos")
    if evidence.rows.get("isotropy", {}).get("adjacent_cos") is not None:
        cosines["one fixed head"] = evidence.number("isotropy", "adjacent_cos")
    text = ", ".join(f"|cos| {cosine:.3f} ({heads})" for heads, cosine in cosines.items())
    holds = [cosine <= NEAR_ORTHOGONAL * expected for cosine in cosines.values()]
    return ClaimFinding(verdict_of(holds[0], holds[-1]), f"{text} against {expected:.3f} by chance")


@_rule("its share of the readouts' variance is at most 1/d, a random direction's")
def low_energy(evidence: Evidence) -> ClaimFinding:
    """The probe lies in a direction of low energy."""
    energy, even = evidence.numbers("geometry", "energy", "random_energy")
    return ClaimFinding(
        verdict_of(energy <= even), f"{energy:.2%} of the variance against 1/d = {even:.2%}"
    )


@_rule(f"bias-corrected energy ratio T_CQ / Tr(Σ) below {SHIFT_LIMIT:.0%} {WITH_SIGNAL}")
def shift_small(evidence: Evidence) -> ClaimFinding:
    """Without any probe, the classes' separation is of low energy."""
    evidence.signal()
    ratio = evidence.number("geometry", "energy_ratio")
    return ClaimFinding(
        verdict_of(ratio < SHIFT_LIMIT), f"{ratio:.1%} of the variance".replace("-", "−")
    )


@_rule(
    f"R_Fisher at most {FISHER_LIMIT:g}, unbiased where the rows allow it: in sample it is above 1"
    f" even where the mean is optimal {WITH_SIGNAL}"
)
def fisher_gap_small(evidence: Evidence) -> ClaimFinding:
    """The Fisher-optimal weights gain only 2-4 % over the mean."""
    evidence.signal()
    plain = evidence.number("fisher", "r_fisher")
    unbiased = evidence.rows["fisher"].get("r_fisher_unbiased")
    if isinstance(unbiased, float):
        text = f"{unbiased - 1:+.1%} without optimism, {plain - 1:+.1%} in sample".replace("-", "−")
        return ClaimFinding(verdict_of(unbiased <= FISHER_LIMIT), text)
    if evidence.number("fisher", "shrinkage") > 0:
        raise NotTestable(f"the covariance is singular; shrunk, the gap is {plain - 1:.1%}")
    if plain <= FISHER_LIMIT:  # optimism only enlarges it
        return ClaimFinding("supported", f"{plain - 1:.1%} in sample")
    raise NotTestable(f"{plain - 1:.1%} in sample, and too few rows to tell a gain from noise")


@_rule(
    f"|η − 1| below {ETA_LIMIT:g} (where the classes' shares differ by {100 * ETA_LIMIT:g} points"
    " or more: below, η is that close to 1 by algebra)"
)
def snr_predicted(evidence: Evidence) -> ClaimFinding:
    """The covariance of the layers predicts the signal-to-noise ratio of slope against mean."""
    eta = evidence.number("snr", "eta")
    # One ratio weighs the classes' variances by size, the other evenly: each pair is within 1 +- u,
    # so that eta^2 lies in [(1 - u) / (1 + u), (1 + u) / (1 - u)] whatever the rows are.
    uneven = abs(2.0 * float(np.mean(evidence.result.label)) - 1.0)
    if uneven < ETA_LIMIT:
        raise NotTestable(f"η = {eta:.3f} is no test: the classes are of one size")
    return ClaimFinding(verdict_of(abs(eta - 1.0) < ETA_LIMIT), f"η = {eta:.3f}")


@_rule(
    f"its increments along the probe have the larger variance in {WIDER_FROM:.0%} of the middle"
    " layers or more"
)
def factual_varies_more(evidence: Evidence) -> ClaimFinding:
    """The factual class varies more along the probe than the hallucinated one."""
    share = evidence.number("kappa", "factual_larger")
    return ClaimFinding(verdict_of(share >= WIDER_FROM), f"in {share:.0%} of the middle layers")


@_rule(
    "more than half of K's gap above permuted labels, and no other part more; one of the two is"
    f" mixed (where K is {100 * K_TELLS:g} points or more above them)"
)
def probe_part_of_k(evidence: Evidence) -> ClaimFinding:
    """The probe part carries most of what the readout change K tells."""
    above = evidence.number("k-split", "signal_k") - evidence.number("k-split", "null")
    if above < K_TELLS:
        raise NotTestable(
            f"the readout change K tells too little to divide ({signed(above)} points of AUROC)"
        )
    gaps = {name: evidence.number("k-split", f"gap_{name}") for name in ("probe", "metric", "head")}
    text = (
        ", ".join(f"{name} {gap:.0%}" for name, gap in gaps.items()).replace("-", "−") + " of K's"
    )
    return ClaimFinding(verdict_of(gaps["probe"] > 0.5, gaps["probe"] >= max(gaps.values())), text)


def claims(results: Sequence[SetResult], tables: Sequence[Table]) -> list[Claim]:
    """Every claim's verdict; ``tables``: the run's tables of ``paper.report``."""
    cells = cells_by_set(tables)

    def judge(rule: ClaimRule, result: SetResult) -> ClaimFinding:
        try:
            return rule.judge(Evidence(result, cells.get(result.title, {})))
        except (NotTestable, TrainingError) as error:
            return ClaimFinding("not testable", f"not testable: {error}")

    judged = []
    for rule in RULES:
        findings = {result.title: judge(rule, result) for result in results}
        lines = [f"{title}: {finding.text}" for title, finding in findings.items()]
        verdict = together([finding.verdict for finding in findings.values()])
        judged.append(Claim(rule.claim, lines, verdict, rule.rule))
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
