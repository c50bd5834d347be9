"""The references that cost nothing: first-token maximum probability, first-token entropy, prompt length.

Each is one number per row.  Nothing is fitted but its sign, by the AUROC on the training rows, as the trainer's own
evaluation does: on sets whose statement stands in the prompt nobody knows beforehand which way a long prompt points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from service.evaluation.methods.base import Floats, Index, Material, Scores
from service.fitting.scores import risk_auroc
from service.readout import Site


def _oriented(values: Floats, material: Material, train: Index, test: Index, what: str) -> Scores:
    """``values`` [n] turned so that they rank the training rows right; as they are where they rank nothing."""
    flip = risk_auroc(material.label[train], values[train]) < 0.5
    scores = -values if flip else values
    # One bit was learned from the training rows, so their own scores are as good as out-of-fold ones.
    return Scores(scores[test], scores[train], f"risk rises as the {what} {'falls' if flip else 'rises'}")


@dataclass(frozen=True)
class FirstTokenMaxProb:
    """The largest probability of the first answer token; its logarithm ranks the same."""

    name: ClassVar[str] = "first-token-max-prob"
    title: ClassVar[str] = "First-token max probability"
    needs: ClassVar[tuple[Site, ...]] = ()

    def fit(self, material: Material, train: Index, test: Index, seed: int) -> Scores:
        """See the module."""
        return _oriented(material.first_token[:, 0], material, train, test, "first token's largest probability")


@dataclass(frozen=True)
class FirstTokenEntropy:
    """The entropy of the first answer token's distribution, nats."""

    name: ClassVar[str] = "first-token-entropy"
    title: ClassVar[str] = "First-token entropy"
    needs: ClassVar[tuple[Site, ...]] = ()

    def fit(self, material: Material, train: Index, test: Index, seed: int) -> Scores:
        """See the module."""
        return _oriented(material.first_token[:, 1], material, train, test, "first token's entropy")


@dataclass(frozen=True)
class PromptLength:
    """The number of prompt tokens: what a detector knows that has read nothing."""

    name: ClassVar[str] = "prompt-length"
    title: ClassVar[str] = "Prompt length"
    needs: ClassVar[tuple[Site, ...]] = ()

    def fit(self, material: Material, train: Index, test: Index, seed: int) -> Scores:
        """See the module."""
        return _oriented(material.prompt_tokens.astype(np.float64), material, train, test, "prompt's length")
