"""Semantic entropy: how many different things the model says when it is asked several times (Farquhar et al. 2024,
"Detecting hallucinations in large language models using semantic entropy").

K answers are sampled and grouped by meaning; with p(c) the probability of a group,

    SE = - sum_c p(c) log p(c)

discrete: p(c) is the share of the answers in the group.  Weighted: p(c) is proportional to the sum over the group's
answers of exp(mean log-probability of their tokens), the paper's length-normalised likelihoods.

**Which answers mean the same.** The paper asks an entailment model, which is one more LLM.  Here no model is asked.
Texts are normalised as the judges do, and the question's words are left out, since answers in whole sentences repeat
it.  Two answers mean the same where all words that remain of the one are among those of the other, and both negate
or neither does.  Where nothing remains of an answer, the whole texts must be equal.  As in the paper each answer is
compared with the first of each group, in the order in which they were sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from hallutracer_research.evaluation.methods.base import Floats, Index
from service.data.judges import normalise

_NEGATION = re.compile(
    r"no|not|never|none|nobody|nothing|cannot|(is|are|was|were|do|does|did|ca|could|wo|would|has|have|had)nt"
)


def semantic_entropy(clusters: Index, log_prob: Floats | None = None) -> float:
    """SE in nats of answers in ``clusters`` [K]; weighted where ``log_prob`` [K], of a mean token each, is given."""
    weight = np.ones(len(clusters)) if log_prob is None else np.exp(log_prob - log_prob.max())
    share = np.bincount(clusters, weights=weight) / weight.sum()
    share = share[share > 0]
    return float(-(share * np.log(share)).sum()) + 0.0  # no minus zero


def clusters(question: str, answers: Sequence[str]) -> Index:
    """The group of each answer, [K], numbered from 0 in the order in which they appear."""
    asked = set(normalise(question).split())
    firsts: list[_Said] = []
    found = []
    for text in answers:
        said = _Said(text, asked)
        place = next((number for number, first in enumerate(firsts) if said.means(first)), len(firsts))
        if place == len(firsts):
            firsts.append(said)
        found.append(place)
    return np.array(found, np.int64)


class _Said:
    """An answer's words: all of them, those the question has not, and whether one of them negates."""

    def __init__(self, text: str, asked: set[str]) -> None:
        self.words = normalise(text).split()
        self.negates = any(_NEGATION.fullmatch(word) for word in self.words)
        self.new = set(self.words) - asked

    def means(self, other: _Said) -> bool:
        if not self.new or not other.new:
            return self.words == other.words
        return self.negates == other.negates and (self.new <= other.new or other.new <= self.new)
