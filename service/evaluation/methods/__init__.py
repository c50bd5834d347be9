"""The paper's baselines and the free references, each by its name (App. baseline-impl).

``METHODS[name]()`` makes one.  Its module is imported then, so that a fitting process never loads transformers, which
only HalluGuard needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.evaluation.methods.base import Factory, Method


def _iti(jobs: int | None = None) -> Method:
    from service.evaluation.methods.iti import Iti

    return Iti(jobs=jobs)


def _fact_probe(jobs: int | None = None) -> Method:
    from service.evaluation.methods.fact_probe import FactProbe

    return FactProbe(jobs=jobs)


def _iris(jobs: int | None = None) -> Method:
    from service.evaluation.methods.iris import Iris

    return Iris()


def _halluguard(jobs: int | None = None) -> Method:
    from service.evaluation.methods.halluguard import HalluGuard

    return HalluGuard()


def _max_prob(jobs: int | None = None) -> Method:
    from service.evaluation.methods.references import FirstTokenMaxProb

    return FirstTokenMaxProb()


def _entropy(jobs: int | None = None) -> Method:
    from service.evaluation.methods.references import FirstTokenEntropy

    return FirstTokenEntropy()


def _length(jobs: int | None = None) -> Method:
    from service.evaluation.methods.references import PromptLength

    return PromptLength()


METHODS: Mapping[str, Factory] = {
    "iti": _iti,
    "fact-probe": _fact_probe,
    "iris": _iris,
    "halluguard": _halluguard,
    "first-token-max-prob": _max_prob,
    "first-token-entropy": _entropy,
    "prompt-length": _length,
}
