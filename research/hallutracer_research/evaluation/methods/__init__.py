"""Every method of the main table: ours, the paper's baselines (App. baseline-impl), rivals by cost,
free references.  A rival is one function in a module of this package and one line in ``METHODS``:
(inputs, train, test, seed, jobs) -> scores [n_test], fitted on the ``train`` rows.  All that it
learns comes from the training side: standardisation, selection, hyperparameters, stopping, the
sign.  Scores rise with hallucination and are not probabilities.  ``jobs``: processes for the fits,
None for all cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from service.errors import TrainingError

if TYPE_CHECKING:
    from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs
    from service.fitting.probes import Readouts

    Fit = Callable[[MethodInputs, Index, Index, int, int | None], Floats]

CostClass = Literal["none", "A", "B", "C", "D", "other"]
OURS = "hallutracer"
RESIDUAL = "residual-depth-mean"
TRAJECTORY = "trajectory-ridge"
SHUFFLED = "shuffled-labels"
WITH_KIND = "kind-and-depth-mean"
WITH_CONTENT = "content-and-depth-mean"
SCAFFOLD = "scaffold-depth-mean"
OTHER = "other-model"
LAST_8, LAST_16 = "last-8-depth-mean", "last-16-depth-mean"
WITH_SCAFFOLD = "scaffold-entropy-and-depth-mean"
ASKED = "asked-depth-mean"
BOTH = "depth-mean-and-asked"
WITH_ANSWER = "depth-mean-and-answer-mean"
ANSWER_MEAN = "answer-mean-depth-mean"
ANSWER_MAX = "answer-max-depth-mean"
BEGINNINGS = (1, 2, 4, 8, 16)
RUNNING = {f"answer-first-{count}": count for count in BEGINNINGS}
SOFT, SEP_BEHIND = "attention-pooled-soft", "answer-sep"  # of last tokens and of samples


class Method(NamedTuple):
    """One method of the main table."""

    title: str  # in the tables
    cost: CostClass  # what a score takes: ``options.CLASSES``
    # "module.function" of this package, imported on use (torch and scikit-learn are slow to load);
    # None: ours, which ``run`` fits from a whole split.
    fit: str | Fit | None = None
    # Besides the prompt's end: its last tokens; a beginning of an answer behind it; the model's own
    # greedy answer, or its first word of content, or what stands behind it, or sampled ones;
    # another model; an encoder of sentences.
    reads: Literal[
        "prompt",
        "positions",
        "answer",
        "content",
        "behind-answer",
        "samples",
        "other-model",
        "embedder",
    ] = "prompt"
    # Where in ``MethodInputs`` the depth mean's readouts are, or those that ``fit`` takes for the
    # residual stream.
    of: str = ""


METHODS: dict[str, Method] = {
    OURS: Method("HalluTracer (depth mean)", "A"),
    RESIDUAL: Method("Residual-stream depth mean", "A", of="residual"),
    WITH_KIND: Method("Share of its kind and depth mean", "A"),
    TRAJECTORY: Method("Whole trajectory (ridge)", "A"),
    LAST_8: Method(
        "Depth mean of the last 8 tokens' mean", "A", reads="positions", of="positions.last_8"
    ),
    LAST_16: Method(
        "Depth mean of the last 16 tokens' mean", "A", reads="positions", of="positions.last_16"
    ),
    SCAFFOLD: Method(
        'Depth mean behind "The answer is"', "A", reads="positions", of="positions.behind"
    ),
    "attention-pooled": Method(
        "Attention-pooled probe", "A", "networks.attention_pooled", "positions"
    ),
    SOFT: Method(
        "Attention-pooled probe, soft targets", "A", "networks.attention_pooled_soft", "samples"
    ),
    "pca-heads": Method("PCA of all heads, logistic regression", "A", "probes.pca_heads"),
    "iti": Method("ITI-Probe", "A", "probes.iti"),
    "fact-probe": Method("Fact-Probe", "A", "probes.fact_probe"),
    "iris": Method("IRIS", "A", "networks.iris"),
    "p-ik": Method("p(IK): logistic regression on the last token", "A", "probes.p_ik"),
    "saplma": Method("SAPLMA", "A", "networks.saplma"),
    "mass-mean": Method("Mass-mean probe (LDA)", "A", "probes.mass_mean"),
    "sep": Method("Semantic-entropy probe", "A", "probes.sep", "samples"),
    "halluguard": Method("HalluGuard (post-generation)", "C", "references.halluguard"),
    "content-max-prob": Method(
        "Maximum probability, first token of content", "C", "references.content_max_prob", "content"
    ),
    "content-entropy": Method(
        "Entropy, first token of content", "C", "references.content_entropy", "content"
    ),
    WITH_CONTENT: Method(
        "Depth mean and entropy of the first token of content", "C", reads="content"
    ),
    "answer-last-depth-mean": Method(
        "Depth mean at the answer's last token", "C", reads="behind-answer", of="behind.last"
    ),
    ANSWER_MEAN: Method(
        "Depth mean of the answer's tokens' mean", "C", reads="behind-answer", of="behind.mean"
    ),
    **{
        name: Method(
            f"The same probes, mean of the first {count} tokens", "C", reads="behind-answer"
        )
        for name, count in RUNNING.items()
    },
    ANSWER_MAX: Method("The same probes, the riskiest token", "C", reads="behind-answer"),
    WITH_ANSWER: Method(
        "Depth means before the answer and of its tokens' mean",
        "C",
        reads="behind-answer",
        of="behind.mean",
    ),
    ASKED: Method(
        'Depth mean behind "Is that correct?"', "C", reads="behind-answer", of="behind.asked"
    ),
    BOTH: Method(
        'Depth means before the answer and behind "Is that correct?"',
        "C",
        reads="behind-answer",
        of="behind.asked",
    ),
    "answer-saplma": Method(
        "SAPLMA at the answer's last token",
        "C",
        "networks.saplma",
        "behind-answer",
        of="behind.residual",
    ),
    SEP_BEHIND: Method(
        "Semantic-entropy probe at the answer's last token",
        "C",
        "probes.sep",
        "behind-answer",
        of="behind.residual",
    ),
    "perplexity": Method("Perplexity of the answer", "C", "references.perplexity", "answer"),
    "p-true": Method("P(True)", "C", "references.p_true", "answer"),
    "p-true-examples": Method("P(True), six examples", "C", "references.p_true_examples", "answer"),
    "mind": Method("MIND's network, supervised", "C", "networks.mind", "answer"),
    "semantic-entropy": Method(
        "Semantic entropy, by likelihood", "D", "references.semantic_entropy", "samples"
    ),
    "semantic-entropy-discrete": Method(
        "Semantic entropy, by counts", "D", "references.semantic_entropy_discrete", "samples"
    ),
    "eigenscore": Method("EigenScore", "D", "references.eigenscore", "samples"),
    "first-token-max-prob": Method(
        "First-token max probability", "B", "references.first_token_max_prob"
    ),
    "first-token-entropy": Method("First-token entropy", "B", "references.first_token_entropy"),
    "scaffold-max-prob": Method(
        'Maximum probability behind "The answer is"',
        "B",
        "references.scaffold_max_prob",
        "positions",
    ),
    "scaffold-entropy": Method(
        'Entropy behind "The answer is"', "B", "references.scaffold_entropy", "positions"
    ),
    WITH_SCAFFOLD: Method('Depth mean and entropy behind "The answer is"', "B", reads="positions"),
    OTHER: Method("Another model's depth mean", "other", reads="other-model", of="other"),
    "text-embedding": Method(
        "Sentence embedding of the text", "other", "references.text_embedding", "embedder"
    ),
    "prompt-length": Method("Prompt length", "none", "references.prompt_length"),
    "text-ngrams": Method(
        "Text alone (word and character n-grams)", "none", "references.text_ngrams"
    ),
    "kind-prior": Method("Share of its kind", "none", "references.kind_prior"),
    SHUFFLED: Method("HalluTracer on shuffled labels (control)", "A"),
}
"""By name on the command line, in the order in which they are listed there."""
OF_POSITIONS = {
    name for name, method in METHODS.items() if method.reads == "positions" or name == SOFT
}


def readouts_of(name: str, inputs: MethodInputs) -> Readouts:
    """Return the method's own readouts, ``of``.  Raises TrainingError where they were not read."""
    found: Any = inputs
    for part in METHODS[name].of.split("."):
        if (found := getattr(found, part)) is None:
            raise TrainingError(f"{name} has nothing to read: leave it out", param="methods")
    return found  # type: ignore[no-any-return]


def fit_method(
    name: str, inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None
) -> Floats:
    """Fit the method on the rows ``train`` and score the rows ``test``, [n_test].  Raises
    TrainingError."""
    fit = METHODS[name].fit
    if METHODS[name].of:
        inputs = replace(inputs, residual=readouts_of(name, inputs))
    if isinstance(fit, str):
        module, _, function = fit.partition(".")
        fit = getattr(import_module(f"{__name__}.{module}"), function)
    assert callable(fit), f"{name} is fitted from a whole split"
    return fit(inputs, train, test, seed, jobs)
