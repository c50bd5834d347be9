"""Measures whether served prompts differ from training, by a window of their risks, and tests a
guarantee by labels.

The measures are two-sided: a gate that lets everything pass drifts as much as one that withholds
everything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from service.judging.evaluation import training_risks

Floats = NDArray[np.float64]
BINS = 10  # of the population stability index: tenths of the reference
# Limits that chance exceeds once in 10^6 windows, in units of the scale of each measure.
KS_BY_CHANCE = 2.7
PSI_BY_CHANCE = 46.0
SHARE_BY_CHANCE = 4.8
# at most so many prompts count as one; else a sender of similar prompts could hide any drift
MOST_ALIKE = 10


@dataclass(frozen=True)
class DriftLimits:
    """The limits above which a window differs.  They limit the size of a difference, not its
    significance.

    A limit is wider if the window has too few independent prompts for it: then prompts like
    training's exceed it once in about 10^6 windows (benchmarks/drift.py)."""

    window: int = 1000  # different prompts
    every: int = 100  # requests between two comparisons
    ks: float = 0.12
    psi: float = 0.2
    outside: float = (
        0.05  # above the bundle's expected share of prompts outside training, which is 0.01
    )
    back: float = 0.8  # a limit is no longer exceeded below this share of it

    def of_ks(self, independent: float, rows: int) -> float:
        """Return the limit for a number of independent prompts and a reference of ``rows``."""
        return max(self.ks, KS_BY_CHANCE * math.sqrt(1 / independent + 1 / rows))

    def of_psi(self, independent: float, rows: int) -> float:
        """Return the limit for the same arguments as ``of_ks``."""
        return max(self.psi, PSI_BY_CHANCE * (1 / independent + 1 / rows))

    def of_outside(self, independent: float, share: float) -> float:
        """Return the limit for a number of independent prompts, of which ``share`` is expected
        outside."""
        return max(self.outside, SHARE_BY_CHANCE * math.sqrt(share * (1 - share) / independent))


@dataclass(frozen=True, eq=False)
class Reference:
    """The training rows' risks, sorted, and the ends of their tenths."""

    risks: Floats  # [N]
    edges: Floats  # [BINS - 1]
    outside: float | None  # share of training rows outside; None if the bundle cannot tell


@dataclass(frozen=True, slots=True)
class Drift:
    """The newest window of prompts that this bundle judged, compared with its training rows."""

    prompts: int  # different ones
    independent: float  # prompts that tell as much, since neighbours are alike; limits follow it
    ks: float  # largest distance of the two distribution functions of the risk
    psi: float  # population stability index over the tenths of training
    shift: float  # mean risk of the window less that of training
    outside: float | None  # share of prompts outside training; None where the bundle cannot tell


def reference_of(bundle: Bundle) -> Reference | None:
    """Return the reference by the bundle's out-of-fold risks; None if it records none."""
    if (recorded := training_risks(bundle)) is None:
        return None
    risks = np.sort(recorded)
    edges = np.asarray(np.quantile(risks, np.arange(1, BINS) / BINS), np.float64)
    return Reference(risks, edges, bundle.manifest.uncertainty.outside_share)


def compare(risks: Floats, outside: NDArray[np.bool_] | None, reference: Reference) -> Drift:
    """Compare risks [n] and, if the bundle can tell, outside [n], of served prompts in order, with
    the reference."""
    sample = np.sort(risks)
    ranks = np.searchsorted(reference.risks, risks) / len(reference.risks)
    alike = max(alike_of(ranks), 1.0 if outside is None else alike_of(outside.astype(np.float64)))
    sides = (sample, reference.risks)
    below = [
        np.searchsorted(side, np.concatenate(sides), side="right") / len(side) for side in sides
    ]
    # Add half a count to each bin, so that an empty bin does not give infinity.
    counts = [
        np.bincount(np.searchsorted(reference.edges, side, "right"), minlength=BINS) + 0.5
        for side in sides
    ]
    now, before = (side / side.sum() for side in counts)
    return Drift(
        prompts=len(sample),
        independent=len(sample) / min(alike, MOST_ALIKE),
        ks=float(
            np.abs(below[0] - below[1]).max()
        ),  # the two-sample statistic of Kolmogorov and Smirnov
        psi=float(np.sum((now - before) * np.log(now / before))),
        shift=float(sample.mean() - reference.risks.mean()),
        outside=None if outside is None else float(outside.mean()),
    )


def alike_of(values: Floats) -> float:
    """Return how many neighbouring values [n] count as one independent value, by their
    autocorrelation; >= 1.

    It sums pairs of autocorrelations, each limited by the previous one, up to the first that is not
    positive (Geyer 1992, Statist. Sci. 7(4), 473-483).  Equal values give 1."""
    centred = values - values.mean()
    power = float(centred @ centred)
    if power <= 1e-18 * len(values):
        return 1.0
    spectrum = np.fft.rfft(centred, 2 * len(values))
    correlations = np.fft.irfft(np.abs(spectrum) ** 2)[: len(values) // 2 * 2] / power
    pairs = correlations.reshape(-1, 2).sum(axis=1)
    ended = np.flatnonzero(pairs <= 0)
    positive = np.minimum.accumulate(pairs[: ended[0]] if len(ended) else pairs)
    return max(1.0, float(2 * positive.sum() - 1))


class LabelTest:
    """Tests whether more of the drawn answers were wrong than a guarantee allows; it is valid after
    every label.

    The likelihood ratio of a beta mixture over shares above alpha against alpha is a nonnegative
    martingale.  Its mean is at most 1 while the share is at most alpha, so the probability that it
    ever reaches 1 / error is at most ``error`` (Ville 1939; Robbins 1970, Ann. Math. Statist.
    41(5), 1397-1409).  An answer without a label counts as right.  So the evidence is never larger
    than with all labels, for any choice of answers to label."""

    def __init__(self, alpha: float, error: float = 0.01, points: int = 64) -> None:
        self.alpha, self._limit = alpha, math.log(1 / error)
        self._shares = alpha + (1 - alpha) * (np.arange(points) + 0.5) / points

    def evidence(self, wrong: int, drawn: int) -> float:
        """Return the log of the mixture's likelihood ratio if ``wrong`` of ``drawn`` answers are
        known to be wrong."""
        terms = wrong * np.log(self._shares / self.alpha)
        terms += (drawn - wrong) * np.log((1 - self._shares) / (1 - self.alpha))
        top = terms.max()
        return float(top + np.log(np.mean(np.exp(terms - top))))

    def broken(self, wrong: int, drawn: int) -> bool:
        """Return whether these counts contradict the guarantee."""
        return self.evidence(wrong, drawn) >= self._limit
