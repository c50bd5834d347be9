"""Claims on level and shape, probe directions and the readout change, judged by the cells of the run's tables."""

from __future__ import annotations

from typing import Final

import numpy as np

from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.paper.claim_rules import (
    WITH_SIGNAL,
    Finding,
    NotTestable,
    Rows,
    Rule,
    add_to,
    both,
    number,
    signal,
    signed,
    verdict_of,
)

NEAR_ORTHOGONAL: Final = 1.5  # times the expected |cos|; the paper's tables reach 1.3 times
FISHER_LIMIT: Final = 1.04  # the largest R_Fisher in Tab. fisher-gap
SHIFT_LIMIT: Final = 0.09  # of Tr(Sigma) (Sec. exp-geometry)
ETA_LIMIT: Final = 0.01  # of eta from 1 (App. snr-empirical)
WIDER_FROM: Final = 0.9  # of the middle layers (Rem. heteroscedastic)
K_TELLS: Final = 0.02  # of AUROC above permuted labels; the paper's K are 0.12 above and more

GEOMETRY_RULES: Final[list[Rule]] = []
_rule = add_to(GEOMETRY_RULES)


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
    return Finding(both(held[0], held[-1]), f"{text} against {expected:.3f} by chance")


@_rule("its share of the readouts' variance is at most 1/d, a random direction's")
def low_energy(_: SetResult, rows: Rows) -> Finding:
    """The probe lies in a direction of low energy."""
    energy, even = number(rows, "geometry", "energy"), number(rows, "geometry", "random_energy")
    return Finding(verdict_of(energy <= even), f"{energy:.2%} of the variance against 1/d = {even:.2%}")


@_rule(f"bias-corrected energy ratio T_CQ / Tr(Σ) below {SHIFT_LIMIT:.0%} {WITH_SIGNAL}")
def shift_small(_: SetResult, rows: Rows) -> Finding:
    """Without any probe, the classes' separation is of low energy."""
    signal(rows)
    ratio = number(rows, "geometry", "energy_ratio")
    return Finding(verdict_of(ratio < SHIFT_LIMIT), f"{ratio:.1%} of the variance".replace("-", "−"))


@_rule(
    f"R_Fisher at most {FISHER_LIMIT:g}, unbiased where the rows allow it: in sample it is above 1 even where the "
    f"mean is optimal {WITH_SIGNAL}"
)
def fisher_gap_small(_: SetResult, rows: Rows) -> Finding:
    """The Fisher-optimal weights gain only 2-4 % over the mean."""
    signal(rows)
    plain = number(rows, "fisher", "r_fisher")
    unbiased = rows["fisher"].get("r_fisher_unbiased")
    if isinstance(unbiased, float):
        text = f"{unbiased - 1:+.1%} without optimism, {plain - 1:+.1%} in sample".replace("-", "−")
        return Finding(verdict_of(unbiased <= FISHER_LIMIT), text)
    if number(rows, "fisher", "shrinkage") > 0:
        raise NotTestable(f"the covariance is singular; shrunk, the gap is {plain - 1:.1%}")
    if plain <= FISHER_LIMIT:  # optimism only enlarges it
        return Finding("supported", f"{plain - 1:.1%} in sample")
    raise NotTestable(f"{plain - 1:.1%} in sample, and too few rows to tell a gain from noise")


@_rule(
    f"|η − 1| below {ETA_LIMIT:g} (where the classes' shares differ by {100 * ETA_LIMIT:g} points or more: below, η is "
    "that close to 1 by algebra)"
)
def snr_predicted(result: SetResult, rows: Rows) -> Finding:
    """The covariance of the layers predicts the signal-to-noise ratio of slope against mean."""
    eta = number(rows, "snr", "eta")
    # One ratio weighs the classes' variances by size, the other evenly: each pair is within 1 +- u, so that eta^2 lies
    # in [(1 - u) / (1 + u), (1 + u) / (1 - u)] whatever the rows are.
    uneven = abs(2.0 * float(np.mean(result.label)) - 1.0)
    if uneven < ETA_LIMIT:
        raise NotTestable(f"η = {eta:.3f} is no test: the classes are of one size")
    return Finding(verdict_of(abs(eta - 1.0) < ETA_LIMIT), f"η = {eta:.3f}")


@_rule(f"its increments along the probe have the larger variance in {WIDER_FROM:.0%} of the middle layers or more")
def factual_varies_more(_: SetResult, rows: Rows) -> Finding:
    """The factual class varies more along the probe than the hallucinated one."""
    share = number(rows, "kappa", "factual_larger")
    return Finding(verdict_of(share >= WIDER_FROM), f"in {share:.0%} of the middle layers")


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
    return Finding(both(gaps["probe"] > 0.5, gaps["probe"] >= max(gaps.values())), text)
