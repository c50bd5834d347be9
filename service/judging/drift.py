"""Whether the prompts of today look like those of training: numbers over a window of served risks, on both sides.

A gate that lets everything pass drifts as much as one that withholds everything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from probes_store.bundle import Bundle
from service.judging.evaluation import training_risks

Floats = NDArray[np.float64]
BINS = 10  # of the population stability index: tenths of the reference
# What chance exceeds once in 10^6: the distance over its scale, the index over its own, a share over its deviation.
KS_BY_CHANCE, PSI_BY_CHANCE, SHARE_BY_CHANCE = 2.7, 46.0, 4.8
MOST_ALIKE = 10  # prompts that count as one, at most: else whoever sends prompts that are alike could hide any drift


@dataclass(frozen=True)
class DriftLimits:
    """When a window is said to differ; by what is large, since any difference is significant over enough prompts.

    A limit is wider where the window holds too few independent prompts for it: then it lies where prompts like
    training's come once in about 10^6 windows (benchmarks/drift.py)."""

    window: int = 1000  # different prompts
    every: int = 100  # requests between two comparisons
    ks: float = 0.12
    psi: float = 0.2
    outside: float = 0.05  # more than the bundle's own share of prompts outside training, which is 0.01
    back: float = 0.8  # a limit is no longer exceeded below this share of it

    def of_ks(self, independent: float, rows: int) -> float:
        """Return the limit for so many independent prompts beside a reference of ``rows``."""
        return max(self.ks, KS_BY_CHANCE * math.sqrt(1 / independent + 1 / rows))

    def of_psi(self, independent: float, rows: int) -> float:
        """Return the limit as ``of_ks`` does."""
        return max(self.psi, PSI_BY_CHANCE * (1 / independent + 1 / rows))

    def of_outside(self, independent: float, share: float) -> float:
        """Return the limit for so many independent prompts, of which ``share`` lie outside."""
        return max(self.outside, SHARE_BY_CHANCE * math.sqrt(share * (1 - share) / independent))


@dataclass(frozen=True, eq=False)
class Reference:
    """The training rows' risks, sorted, and the ends of their tenths."""

    risks: Floats  # [N]
    edges: Floats  # [BINS - 1]
    outside: float | None  # share of training rows outside; None where the bundle cannot tell


@dataclass(frozen=True, slots=True)
class Drift:
    """The newest window of prompts that this bundle judged, beside its training rows."""

    prompts: Annotated[int, Field(description="different ones, the newest")]
    independent: Annotated[
        float, Field(description="prompts that tell as much, since neighbours are alike; limits follow it")
    ]
    ks: Annotated[float, Field(description="largest distance of the two distribution functions of the risk")]
    psi: Annotated[float, Field(description="population stability index over the tenths of training")]
    shift: Annotated[float, Field(description="mean risk of the window less that of training")]
    outside: Annotated[
        float | None, Field(description="share of prompts outside training; null where the bundle cannot tell")
    ]


def reference_of(bundle: Bundle) -> Reference | None:
    """Return what the bundle keeps of its out-of-fold risks; None where it keeps none."""
    if (found := training_risks(bundle)) is None:
        return None
    risks = np.sort(found)
    edges = np.asarray(np.quantile(risks, np.arange(1, BINS) / BINS), np.float64)
    return Reference(risks, edges, bundle.manifest.uncertainty.outside_share)


def compare(risks: Floats, outside: NDArray[np.bool_] | None, reference: Reference) -> Drift:
    """risks [n] and, where the bundle can tell, outside [n], of served prompts in the order they came."""
    sample = np.sort(risks)
    ranks = np.searchsorted(reference.risks, risks) / len(reference.risks)
    alike = max(alike_of(ranks), 1.0 if outside is None else alike_of(outside.astype(np.float64)))
    sides = (sample, reference.risks)
    below = [np.searchsorted(one, np.concatenate(sides), side="right") / len(one) for one in sides]
    # Half a count more in each bin, so that an empty one is no infinity.
    counts = [np.bincount(np.searchsorted(reference.edges, one, "right"), minlength=BINS) + 0.5 for one in sides]
    now, before = (one / one.sum() for one in counts)
    return Drift(
        prompts=len(sample),
        independent=len(sample) / min(alike, MOST_ALIKE),
        ks=float(np.abs(below[0] - below[1]).max()),  # the two-sample statistic of Kolmogorov and Smirnov
        psi=float(np.sum((now - before) * np.log(now / before))),
        shift=float(sample.mean() - reference.risks.mean()),
        outside=None if outside is None else float(outside.mean()),
    )


def alike_of(values: Floats) -> float:
    """Return how many neighbouring values [n] tell as much as one independent value, by their autocorrelation; >= 1.

    Sums of two autocorrelations in turn, each at most the one before, up to the first that is not positive (Geyer 1992,
    Statist. Sci. 7(4), 473-483).  Values that are all the same tell nothing of dependence: 1."""
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
    """Whether more of the answers that were drawn were wrong than a guarantee allows; may be asked after every label.

    The likelihood ratio of a beta mixture over shares above alpha against alpha is a nonnegative martingale of mean at
    most 1 while the share is at most alpha, so that it ever reaches 1 / error has a probability of at most ``error``
    (Ville 1939; Robbins 1970, Ann. Math. Statist. 41(5), 1397-1409).  An answer without a label is taken for right:
    then the evidence is at most what all labels would give, whoever chose which answers to label."""

    def __init__(self, alpha: float, error: float = 0.01, points: int = 64) -> None:
        self.alpha, self._limit = alpha, math.log(1 / error)
        self._shares = alpha + (1 - alpha) * (np.arange(points) + 0.5) / points

    def evidence(self, wrong: int, drawn: int) -> float:
        """Return the log of the mixture's likelihood ratio: of ``drawn`` answers so many are known to be wrong."""
        terms = wrong * np.log(self._shares / self.alpha)
        terms += (drawn - wrong) * np.log((1 - self._shares) / (1 - self.alpha))
        top = terms.max()
        return float(top + np.log(np.mean(np.exp(terms - top))))

    def broken(self, wrong: int, drawn: int) -> bool:
        """Return whether that is at odds with the guarantee."""
        return self.evidence(wrong, drawn) >= self._limit
