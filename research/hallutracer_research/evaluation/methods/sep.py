"""Semantic-entropy probe (Kossen et al. 2024, "Semantic Entropy Probes: Robust and Cheap Hallucination Detection in
LLMs"): a linear probe on the prompt's last token predicts whether sampled answers would differ in meaning.

The discrete semantic entropy of the training rows is cut in two where the squared distances from the means of the two
sides are smallest, and a logistic regression on the residual stream learns the side.  No label of the set is used, and
test rows need no samples.  Inner folds choose one of five layers and C in {0.001, 0.01, 0.1}, by how well the side is
predicted; the paper chooses its layers on held-out rows as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs, fit_at_best_layer
from hallutracer_research.evaluation.methods.p_ik import C_GRID, logistic
from service.errors import TrainingError


def sep(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Return log-odds of a high semantic entropy, [n_test].

    Raises TrainingError without samples, where all entropies are the same, and where no inner fold has both sides.
    """
    entropy = inputs.answers.entropy
    if entropy is None:
        raise TrainingError("sep learns from sampled answers, and there are none; leave it out", param="methods")
    low = np.zeros(len(inputs.label), np.int64)  # of test rows nothing is known
    low[train] = entropy[train] < best_split(entropy[train])
    alike = replace(inputs, label=low, residual=replace(inputs.residual, label=low))
    fits = [partial(logistic, c) for c in C_GRID]
    return fit_at_best_layer(alike, train, test, seed, jobs, fits=fits, what="SEP inner fold")


def best_split(values: Floats) -> float:
    """Return the threshold t for which values < t and values >= t are closest to their means, in sum of squares."""
    ordered = np.sort(values)
    places = np.flatnonzero(np.diff(ordered)) + 1  # the upper side's first row
    if not len(places):
        raise TrainingError("every training row has the same semantic entropy: sep has nothing to learn; leave it out")
    lost = [ordered[:at].var() * at + ordered[at:].var() * (len(ordered) - at) for at in places.tolist()]
    return float(ordered[places[int(np.argmin(np.round(lost, 12)))]])
