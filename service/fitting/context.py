"""Fits the context probes, which tell what a prompt is, by the same heads, layers and depth mean as
the risk.

Their labels come from the prompts alone, so they need no answers and no judge."""

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

# Fixed, so that no test side of a nested evaluation chooses them. ``asks`` and ``passage`` work
# with any strength of the penalty, ``stated`` with a weak penalty only.
C: Final[Mapping[ContextName, float]] = {"asks": 0.03, "passage": 0.03, "stated": 0.3}
ASKS_C: Final = 5e-3  # for ``asks`` if the directions of all layers are fitted together
LEAST = 40  # groups; with fewer in a class no context probe is fitted
LENGTHS = 4  # ratio of long to short prompts from which on the classifier reads the length, too
SIDES = 3  # most rows of the larger class for each row of the smaller: more only cost time


@dataclass(frozen=True, eq=False)
class ContextFit:
    """One fitted context probe."""

    record: ContextProbe
    probe: ProbeFit
    # [n, m] standardised and weighted logits of every row; out of fold for the rows of the fit
    logits: Floats

    @property
    def probability(self) -> Floats:
        """P(name) of every row, [n]."""
        return 1.0 - risk(
            depth_mean(self.logits)[:, None], np.array([self.record.weight]), self.record.intercept
        )


@dataclass(frozen=True, eq=False)
class PromptLabels:
    """The labels of the labelled rows' prompts, [n] each."""

    passage: NDArray[np.bool_]  # text to answer from stands beside the question
    stated: NDArray[np.bool_]  # an accepted answer stands in the prompt
    tokens: NDArray[np.int64]  # length of the prompt, 1 or more

    @property
    def tells_length(self) -> bool:
        """Whether the lengths of the prompts that state an answer differ enough to learn the effect
        of length."""
        if not self.stated.any():
            return False
        low, high = np.quantile(self.tokens[self.stated], (0.05, 0.95))
        return bool(high >= LENGTHS * low)


def fit_context_probe(
    name: ContextName,
    readouts: Readouts,
    group: Index,
    rows: Index,
    probe: DepthMeanProbe,
    least: int = LEAST,
) -> ContextFit | None:
    """Fit a probe on ``rows`` [r] of ``readouts`` [n], whose labels are 1 where the property holds;
    group [n].

    ``probe`` gives the options and the seed, its first.  Return None if a class has fewer than
    ``least`` groups."""
    label, seed = readouts.label, probe.seeds[0]
    if any(len(np.unique(group[rows[label[rows] == value]])) < least for value in (0, 1)):
        return None
    rows = _balanced(label, group, rows, seed)
    row_label = label[rows]
    # Fit the layers together, as for the risk: probes of single layers read how a prompt is worded.
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
        # The middle layers of a model know whether a passage states the answer; later layers do
        # not.
        layers = fit_layer_weights(
            crossed.standardized[0], row_label, group[rows], folds=probe.folds, seed=seed
        )
        fit = replace(fit, scale=fit.scale / layers.weight)
        out_of_fold = layers.out_of_fold
    logits = fit.standardized
    logits[rows] = out_of_fold
    mean = depth_mean(logits[rows])
    classifier = fit_classifier(mean[:, None], row_label)
    weight = max(
        float(classifier.weight[0]), 1e-6
    )  # even a probe without a signal must be an increasing map
    record = ContextProbe(
        name,
        weight,
        classifier.intercept,
        len(rows),
        int(row_label.sum()),
        float(auroc(row_label, mean)),
    )
    return ContextFit(record, fit, logits)


def fit_passage_probes(
    readouts: Readouts,
    labels: PromptLabels,
    group: Index,
    rows: Index,
    probe: DepthMeanProbe,
    least: int = LEAST,
) -> tuple[ContextFit, ContextFit] | None:
    """Fit ``passage`` on ``rows``, and ``stated`` on those with a passage.  Return None if the rows
    are too few."""
    of_passage = replace(readouts, label=labels.passage.astype(np.int64), soft_label=None)
    passage = fit_context_probe("passage", of_passage, group, rows, probe, least)
    of_stated = replace(of_passage, label=labels.stated.astype(np.int64))
    stated = fit_context_probe("stated", of_stated, group, rows[labels.passage[rows]], probe, least)
    return None if passage is None or stated is None else (passage, stated)


def context_columns(fits: Sequence[ContextFit], labels: PromptLabels) -> Floats:
    """Return the classifier's columns from ``fit_passage_probes``, [n, 2 or 3]: the first of
    ``CONTEXT_SIGNALS``."""
    assert [fit.record.name for fit in fits] == ["passage", "stated"]
    passage, stated = (fit.probability for fit in fits)
    both = passage * stated
    columns = [passage, both, both * np.log(labels.tokens)]
    return np.stack(columns if labels.tells_length else columns[:2], axis=1)


def _balanced(label: NDArray[np.int64], group: Index, rows: Index, seed: int) -> Index:
    """Return all rows of the smaller class and at most ``SIDES`` times as many of the larger one.

    Whole groups are drawn, so that the probe is not fitted on a sibling of a row that it scores
    later."""
    small, large = sorted((rows[label[rows] == value] for value in (0, 1)), key=len)
    most = SIDES * len(small)
    if len(large) > most:
        names, member = np.unique(group[large], return_inverse=True)
        rank = np.random.default_rng(seed).permutation(len(names))[member]
        large = large[(np.cumsum(np.bincount(rank)) <= most)[rank]]
    return np.sort(np.concatenate([small, large]))
