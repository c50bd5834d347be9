"""Context probes: what a prompt is, by the same heads, layers and depth mean that the risk is read from.

Their labels come from the prompts alone, so they cost no answer and no judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from probes_store.records import ContextName, ContextProbe
from service.fitting.estimator import DepthMeanProbe, fit_classifier
from service.fitting.joint import joined
from service.fitting.layer_weights import fit_layer_weights
from service.fitting.probes import Floats, Index, ProbeFit, Readouts, Task
from service.fitting.scores import auroc
from service.risk import depth_mean, risk

# Fixed, so that nothing of a nested evaluation is chosen by its test side.  Whether a prompt asks or has a passage is
# read by any; whether the passage states the answer by weak penalties only.
C: Final[Mapping[ContextName, float]] = {"asks": 0.03, "passage": 0.03, "stated": 0.3}
ASKS_C: Final = 5e-3  # of ``asks`` where the directions of all layers are fitted together
LEAST = 40  # groups of each class, below which no such probe is fitted
LENGTHS = 4  # of the longer ones to the shorter ones, from which on the classifier reads the length, too
SIDES = 3  # rows of the larger class for each of the smaller, at most: more cost time and tell nothing new


@dataclass(frozen=True, eq=False)
class ContextFit:
    """One context probe, fitted."""

    record: ContextProbe
    probe: ProbeFit  # on all rows that it learns from
    logits: Floats  # [n, m] standardised and weighted, of every row: out of fold where it learnt from it

    @property
    def probability(self) -> Floats:
        """P(name) of every row, [n]."""
        return 1.0 - risk(depth_mean(self.logits)[:, None], np.array([self.record.weight]), self.record.intercept)


@dataclass(frozen=True, eq=False)
class PromptLabels:
    """What is known of the labelled rows' prompts, [n] each."""

    passage: NDArray[np.bool_]  # text to answer from stands beside the question
    stated: NDArray[np.bool_]  # an accepted answer stands in the prompt
    tokens: NDArray[np.int64]  # of the prompt, 1 or more

    @property
    def tells_length(self) -> bool:
        """Whether the prompts that state an answer differ enough in length for its effect to be learnt."""
        if not self.stated.any():
            return False
        low, high = np.quantile(self.tokens[self.stated], (0.05, 0.95))
        return bool(high >= LENGTHS * low)


def fit_context_probe(
    name: ContextName, readouts: Readouts, group: Index, rows: Index, probe: DepthMeanProbe, least: int = LEAST
) -> ContextFit | None:
    """Learn from ``rows`` [r] of ``readouts`` [n], whose labels say of which it is true; group [n].

    ``probe`` has the options: its folds, the first of its seeds.  None where a class has fewer than ``least`` groups.
    """
    label, seed = readouts.label, probe.seeds[0]
    if any(len(np.unique(group[rows[label[rows] == value]])) < least for value in (0, 1)):
        return None
    rows = _balanced(label, group, rows, seed)
    own = label[rows]
    # The layers are fitted together, as for the risk: one at a time they read how a prompt is worded.
    together = name == "asks" and probe.logit_scale == "joint"
    every = np.arange(len(label))
    one_seed = clone(probe).set_params(seeds=(seed,))
    crossed = one_seed.cross_fit(readouts, group, rows, C[name], joint=together, joint_c=ASKS_C)
    fit = probe.refit(readouts, rows, every, C[name], zero_layers=True)
    if together:
        task = Task(rows, every, C[name])
        fit = joined(readouts, task, fit, probe.class_balance, zero_layers=True, c=ASKS_C)
        out_of_fold = crossed.joint[0]
    else:
        # Whether a passage states the answer is known in the middle of a model and forgotten later.
        layers = fit_layer_weights(crossed.standardized[0], own, group[rows], folds=probe.folds, seed=seed)
        fit = replace(fit, scale=fit.scale / layers.weight)
        out_of_fold = layers.out_of_fold
    logits = fit.standardized
    logits[rows] = out_of_fold
    mean = depth_mean(logits[rows])
    found = fit_classifier(mean[:, None], own)
    weight = max(float(found.weight[0]), 1e-6)  # a probe that tells nothing must still be a rising map
    record = ContextProbe(name, weight, found.intercept, len(rows), int(own.sum()), float(auroc(own, mean)))
    return ContextFit(record, fit, logits)


def fit_passage_probes(
    readouts: Readouts, labels: PromptLabels, group: Index, rows: Index, probe: DepthMeanProbe, least: int = LEAST
) -> tuple[ContextFit, ContextFit] | None:
    """Fit ``passage`` and, of the rows with one, ``stated``, learnt from ``rows``.  None where there are too few."""
    own = replace(readouts, label=labels.passage.astype(np.int64))
    passage = fit_context_probe("passage", own, group, rows, probe, least)
    own, inside = replace(own, label=labels.stated.astype(np.int64)), rows[labels.passage[rows]]
    stated = fit_context_probe("stated", own, group, inside, probe, least)
    return None if passage is None or stated is None else (passage, stated)


def context_columns(fits: Sequence[ContextFit], labels: PromptLabels) -> Floats:
    """Return what a classifier reads of ``fit_passage_probes``: [n, 3], or [n, 2], the first of ``CONTEXT_SIGNALS``."""
    assert [fit.record.name for fit in fits] == ["passage", "stated"]
    passage, stated = (fit.probability for fit in fits)
    both = passage * stated
    columns = [passage, both, both * np.log(labels.tokens)]
    return np.stack(columns if labels.tells_length else columns[:2], axis=1)


def _balanced(label: NDArray[np.int64], group: Index, rows: Index, seed: int) -> Index:
    """Return all rows of the smaller class and, of a seeded draw of groups, at most ``SIDES`` times as many others.
    Whole groups, so that the probe has not seen the sibling of a row that it is going to read."""
    small, large = sorted((rows[label[rows] == value] for value in (0, 1)), key=len)
    most = SIDES * len(small)
    if len(large) > most:
        names, member = np.unique(group[large], return_inverse=True)
        rank = np.random.default_rng(seed).permutation(len(names))[member]
        large = large[(np.cumsum(np.bincount(rank)) <= most)[rank]]
    return np.sort(np.concatenate([small, large]))
