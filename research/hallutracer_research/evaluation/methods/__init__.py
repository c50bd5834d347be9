"""Every method of the main table: ours, the paper's baselines (App. baseline-impl), rivals by cost,
free references.  A rival is one function in a module of this package and one line of
``methods.toml``: a ``Fold`` -> scores of its test rows [n_test], fitted on its training rows.  All
that it learns comes from the training side: standardisation, selection, hyperparameters, stopping,
the sign.  Scores rise with hallucination and are not probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hallutracer_research.documents import table_beside
from service.errors import TrainingError

if TYPE_CHECKING:
    from hallutracer_research.evaluation.methods.base import Fold, MethodInputs
    from service.fitting.probes import Floats, Readouts

    Fit = Callable[[Fold], Floats]

CostClass = Literal["none", "A", "B", "C", "D", "other"]
OURS = "hallutracer"
RESIDUAL = "residual-depth-mean"
TRAJECTORY = "trajectory-ridge"
SHUFFLED = "shuffled-labels"
WITH_KIND = "kind-and-depth-mean"
WITH_CONTENT = "content-and-depth-mean"
OTHER = "other-model"
WITH_SCAFFOLD = "scaffold-entropy-and-depth-mean"
ASKED = "asked-depth-mean"
BOTH = "depth-mean-and-asked"
WITH_ANSWER = "depth-mean-and-answer-mean"
ANSWER_MEAN = "answer-mean-depth-mean"
ANSWER_MAX = "answer-max-depth-mean"
RUNNING = {f"answer-first-{count}": count for count in (1, 2, 4, 8, 16)}
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


METHODS = {name: Method(**entry) for name, entry in table_beside(__file__, "methods.toml").items()}
"""By name on the command line, in the order in which they are listed there."""
OF_POSITIONS = {
    name for name, method in METHODS.items() if method.reads == "positions" or name == SOFT
}


def readouts_of(name: str, inputs: MethodInputs) -> Readouts:
    """Return the method's own readouts, ``of``.  Raises TrainingError where they were not read."""
    value: Any = inputs
    for part in METHODS[name].of.split("."):
        if (value := getattr(value, part)) is None:
            raise TrainingError(f"{name} has nothing to read: leave it out", param="methods")
    return value  # type: ignore[no-any-return]


def fit_method(name: str, fold: Fold) -> Floats:
    """Fit the method on the fold's training rows and score its test rows, [n_test].  Raises
    TrainingError."""
    from service.fitting.solver import one_numpy_thread

    fit = METHODS[name].fit
    if METHODS[name].of:
        inputs = replace(fold.inputs, residual=readouts_of(name, fold.inputs))
        fold = replace(fold, inputs=inputs)
    if isinstance(fit, str):
        module, _, function = fit.partition(".")
        fit = getattr(import_module(f"{__name__}.{module}"), function)
    assert callable(fit), f"{name} is fitted from a whole split"
    with one_numpy_thread():  # sums in one order, whatever the number of cores
        return fit(fold)
