"""The paper's baselines (App. baseline-impl), rivals by what they cost, and free references, by name.

A method is fitted on the ``train`` rows and scores the ``test`` rows.  Everything it learns comes from the training
side: standardisation, selection, hyperparameters, stopping, the sign.  Scores rise with hallucination and are not
probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "iti": "ITI-Probe",
        "fact-probe": "Fact-Probe",
        "iris": "IRIS",
        "p-ik": "p(IK): logistic regression on the last token",
        "saplma": "SAPLMA",
        "mass-mean": "Mass-mean probe (LDA)",
        "sep": "Semantic-entropy probe",
        "halluguard": "HalluGuard (post-generation)",
        "perplexity": "Perplexity of the answer",
        "p-true": "P(True)",
        "mind": "MIND's network, supervised",
        "semantic-entropy": "Semantic entropy, by likelihood",
        "semantic-entropy-discrete": "Semantic entropy, by counts",
        "eigenscore": "EigenScore",
        "first-token-max-prob": "First-token max probability",
        "first-token-entropy": "First-token entropy",
        "prompt-length": "Prompt length",
        "text-ngrams": "Text alone (word and character n-grams)",
        "kind-prior": "Share of its kind",
    }
)
"""Name on the command line -> title in the tables."""


def fit_method(
    name: str, inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None
) -> Floats:
    """Fit the method on the rows ``train`` and score the rows ``test``, [n_test].

    ``jobs``: processes for the fits, None for all cores.  Raises TrainingError.  Modules are imported on use: torch and
    scikit-learn are slow to load.
    """
    from hallutracer_research.evaluation.methods.fact_probe import FactProbe
    from hallutracer_research.evaluation.methods.iris import Iris
    from hallutracer_research.evaluation.methods.iti import Iti
    from hallutracer_research.evaluation.methods.mass_mean import mass_mean
    from hallutracer_research.evaluation.methods.mind import mind
    from hallutracer_research.evaluation.methods.p_ik import p_ik
    from hallutracer_research.evaluation.methods.references import reference
    from hallutracer_research.evaluation.methods.saplma import saplma
    from hallutracer_research.evaluation.methods.sep import sep
    from hallutracer_research.evaluation.methods.text_alone import kind_prior, text_ngrams

    match name:
        case "iti":
            return Iti(jobs=jobs).fit(inputs, train, test, seed)
        case "fact-probe":
            return FactProbe(jobs=jobs).fit(inputs, train, test, seed)
        case "iris":
            return Iris().fit(inputs, train, test, seed)
        case "p-ik":
            return p_ik(inputs, train, test, seed, jobs)
        case "saplma":
            return saplma(inputs, train, test, seed, jobs)
        case "mass-mean":
            return mass_mean(inputs, train, test, seed, jobs)
        case "sep":
            return sep(inputs, train, test, seed, jobs)
        case "mind":
            return mind(inputs, train, test, seed)
        case "text-ngrams":
            return text_ngrams(inputs, train, test, seed)
        case "kind-prior":
            return kind_prior(inputs, train, test)
    return reference(name, inputs, train, test)
