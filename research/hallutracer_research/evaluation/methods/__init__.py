"""The paper's baselines (App. baseline-impl), rivals by what they cost, free references: one file and one line each.

A method is a function (inputs, train, test, seed, jobs) -> scores [n_test], fitted on the ``train`` rows.  All that it
learns comes from the training side: standardisation, selection, hyperparameters, stopping, the sign.  Scores rise with
hallucination and are not probabilities.  ``jobs``: processes for the fits, None for all cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

if TYPE_CHECKING:
    from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs

CostClass = Literal["none", "A", "B", "C", "D"]


class Method(NamedTuple):
    """One method of the main table."""

    title: str  # in the tables
    cost: CostClass  # what a score takes: ``options.CLASSES``
    fit: str  # module.function of this package, imported on use: torch and scikit-learn are slow to load
    reads: Literal["prompt", "answer", "samples"] = "prompt"  # the model's own greedy answer, or sampled ones


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "iti": Method("ITI-Probe", "A", "iti.iti"),
        "fact-probe": Method("Fact-Probe", "A", "fact_probe.fact_probe"),
        "iris": Method("IRIS", "A", "iris.iris"),
        "p-ik": Method("p(IK): logistic regression on the last token", "A", "p_ik.p_ik"),
        "saplma": Method("SAPLMA", "A", "saplma.saplma"),
        "mass-mean": Method("Mass-mean probe (LDA)", "A", "mass_mean.mass_mean"),
        "sep": Method("Semantic-entropy probe", "A", "sep.sep", "samples"),
        "halluguard": Method("HalluGuard (post-generation)", "C", "references.halluguard"),
        "perplexity": Method("Perplexity of the answer", "C", "references.perplexity", "answer"),
        "p-true": Method("P(True)", "C", "references.p_true", "answer"),
        "mind": Method("MIND's network, supervised", "C", "mind.mind", "answer"),
        "semantic-entropy": Method("Semantic entropy, by likelihood", "D", "references.semantic_entropy", "samples"),
        "semantic-entropy-discrete": Method(
            "Semantic entropy, by counts", "D", "references.semantic_entropy_discrete", "samples"
        ),
        "eigenscore": Method("EigenScore", "D", "references.eigenscore", "samples"),
        "first-token-max-prob": Method("First-token max probability", "B", "references.first_token_max_prob"),
        "first-token-entropy": Method("First-token entropy", "B", "references.first_token_entropy"),
        "prompt-length": Method("Prompt length", "none", "references.prompt_length"),
        "text-ngrams": Method("Text alone (word and character n-grams)", "none", "text_alone.text_ngrams"),
        "kind-prior": Method("Share of its kind", "none", "text_alone.kind_prior"),
    }
)
"""By name on the command line."""


def fit_method(
    name: str, inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None
) -> Floats:
    """Fit the method on the rows ``train`` and score the rows ``test``, [n_test].  Raises TrainingError."""
    module, _, function = METHODS[name].fit.partition(".")
    fit = getattr(import_module(f"{__name__}.{module}"), function)
    return cast("Floats", fit(inputs, train, test, seed, jobs))
