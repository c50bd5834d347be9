"""Readouts in memory; rows whose true risks are known, in groups, at any share of hallucinations or
another shift."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from service.fitting.nested_cv import Inputs
from service.fitting.probes import ActivationArray, Index, Readouts
from service.readout import Site

Rows = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # risk at training's share, label (1 factual), group

# training's share of hallucinated rows; distance of the classes in standard deviations
PRIOR, APART = 0.3, 1.6


def readouts(
    a: NDArray[np.floating], label: NDArray[np.generic], site: Site = Site.ATTENTION_HEAD
) -> Readouts:
    """a [n, m, heads, d], or at the residual stream [n, m, d]; label [n]."""
    values = a.astype(np.float32).reshape(*a.shape[:2], -1, a.shape[-1])
    return Readouts(ActivationArray(values, site), np.arange(len(a)), label.astype(np.int64))


def labelled_inputs(label: NDArray[np.generic], group: Index, kinds: Sequence[str] = ()) -> Inputs:
    """Rows of which labels, groups and kinds are known, and nothing that is read of a model."""
    count = len(label)
    strata = [{"kind": kind} for kind in kinds] or [{}] * count
    data = readouts(np.zeros((count, 1, 1, 1)), label)
    return Inputs(data, group, np.zeros((count, 2)), np.ones(count, int), tuple(strata))


def rows(rng: np.random.Generator, groups: int, share: float, *, size: int = 1) -> Rows:
    """Rows whose class-conditional distributions are training's: x ~ N(+-APART / 2, 1), risk =
    P(hallucinated | x).

    Rows of one group are of one class, and their x have a correlation of one half."""
    group = np.repeat(np.arange(groups), size)
    bad = (rng.random(groups) < share)[group]
    noise = (rng.standard_normal(groups)[group] + rng.standard_normal(len(group))) / np.sqrt(2)
    x = np.where(bad, APART / 2, -APART / 2) + noise
    return expit(APART * x + logit(PRIOR)), (~bad).astype(int), group
