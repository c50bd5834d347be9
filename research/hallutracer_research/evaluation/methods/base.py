"""Rows, folds, processes, a linear fit and the choice of a layer, which the methods share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
from joblib import Parallel, cpu_count, delayed, parallel_config
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.linear_model import LogisticRegression

from service.errors import TrainingError
from service.fitting.folds import Pairs, group_folds, unchecked_folds
from service.fitting.probes import Floats, Index, Labels, Readouts, project, standardise
from service.fitting.scores import auroc

_HAS_PENALTY = (
    inspect.signature(LogisticRegression).parameters["penalty"].default == "l2"
)  # scikit-learn before 1.8

Numbers = NDArray[np.floating]  # of any precision
Read = TypeVar("Read")
Item = TypeVar("Item")
Result = TypeVar("Result")


class _ByRow:
    """A dataclass whose fields are by row, or None."""

    def subset(self, rows: Index) -> Self:
        """Return only these of the n rows."""
        of_rows = {name: _subset(value, rows) for name, value in vars(self).items()}
        return replace(self, **of_rows)  # type: ignore[type-var]


def _subset(value: Any, rows: Index) -> Any:
    if isinstance(value, tuple):
        return tuple(value[row] for row in rows.tolist())
    if isinstance(value, _ByRow | Readouts):
        return value.subset(rows)
    return None if value is None else value[rows]


@dataclass(frozen=True, eq=False)
class AnswerReadings(_ByRow):
    """What was read of the model's own answers to the n rows; None where no method asked for it."""

    log_prob: Floats | None = None  # [n] of the greedy answer's tokens, mean, nats
    states: NDArray[np.float32] | None = (
        None  # [n, 2 hidden_size] ``networks.features`` of the greedy answer
    )
    true: Floats | None = None  # [n] log-odds that the model gives its greedy answer of being true
    true_tokens: Floats | None = None  # [n] tokens of the prompt that asks for it
    true_examples: Floats | None = None  # [n], [n] the same, asked behind examples
    true_tokens_examples: Floats | None = None
    content: Floats | None = (
        None  # [n, 2] of the first token of content: log maximum probability, entropy (nats)
    )
    decoded: Floats | None = None  # [n] answer tokens before it
    entropy: Floats | None = None  # [n] discrete semantic entropy of the sampled answers, nats
    entropy_weighted: Floats | None = None  # [n] the same, by their likelihoods
    eigenscore: Floats | None = None  # [n]
    right: Floats | None = (
        # [n] share of the sampled answers that the judge calls right; NaN where it judges none
        None
    )


@dataclass(frozen=True, eq=False)
class OtherPositions(_ByRow):
    """What was read at other positions than t*."""

    states: NDArray[
        np.float16
    ]  # [n, layers, tokens, hidden_size] of the prompt's last tokens, zeros before shorter ones
    last_8: Readouts  # attention heads, mean over so many of the prompt's last tokens
    last_16: Readouts
    behind: Readouts  # behind the prompt and the beginning of an answer
    first_token: Floats  # [n, 2] there: log maximum probability, entropy (nats)
    scaffold: Index  # [n] tokens of that beginning


@dataclass(frozen=True, eq=False)
class BehindAnswers(_ByRow):
    """What was read of the judged answers' tokens, and behind them."""

    last: Readouts  # attention heads, at the answer's last token
    mean: Readouts  # mean over the answer's tokens
    follow_up: Readouts  # behind a short question about the answer
    residual: Readouts  # the residual stream, at the answer's last token
    tokens: NDArray[
        np.float16
    ]  # [n, first tokens, m, width] attention heads at each; its last one's behind the end
    answer_tokens: Index  # [n]
    question: Index  # [n] tokens of that question


@dataclass(frozen=True, eq=False)
class MethodInputs(_ByRow):
    """The n labelled rows, read in one extraction pass; None or empty where no method asked for
    it."""

    label: Index  # [n] 1 factual, 0 hallucinated
    group: Index  # [n] rows of one group are never on both sides of a split
    heads: Readouts  # the attention-head site
    residual: Readouts  # the residual-stream site
    first_token: Floats  # [n, 2] log maximum probability, entropy (nats)
    prompt_tokens: Index  # [n]
    text: tuple[str, ...] = ()  # [n] the prompts
    kind: NDArray[np.str_] = field(
        default_factory=lambda: np.array([], np.str_)
    )  # [n] sub-dataset, "" for none
    halluguard: Floats | None = None  # [n] ``halluguard_scores``
    positions: OtherPositions | None = None
    behind: BehindAnswers | None = None
    other_model: Readouts | None = None  # its attention heads, at its own t*
    other_tokens: Index | None = None  # [n] of the prompt as that model reads it
    embedding: NDArray[np.float32] | None = None  # [n, d] of the text
    answers: AnswerReadings = AnswerReadings()


@dataclass(frozen=True, eq=False)
class Fold:
    """What a method is fitted on and scored on."""

    inputs: MethodInputs
    train: Index  # [n_train] positions of rows; all that a method learns is learned from them
    test: Index  # [n_test]
    seed: int
    jobs: int | None = None  # processes for the fits; None: all cores

    @property
    def label(self) -> Index:
        """[n_train] 1 factual, 0 hallucinated."""
        return self.inputs.label[self.train]

    def folds(self, count: int, what: str) -> Pairs:
        """Return ``group_folds`` of the training rows.  Raises TrainingError where a side lacks a
        class."""
        label, group = self.inputs.label, self.inputs.group
        return group_folds(label, group, self.train, count, self.seed, what=what)

    def usable_folds(self, what: str) -> Pairs:
        """Return those of ``INNER_FOLDS`` folds of the training rows whose two sides have both
        classes; for a choice that need not test every row.  Raises TrainingError: not one has."""
        label, group = self.inputs.label, self.inputs.group
        pairs = unchecked_folds(label, group, self.train, INNER_FOLDS, self.seed, what)
        usable = [
            (train, test)
            for train, test in pairs
            if len(np.unique(label[train])) == len(np.unique(label[test])) == 2
        ]
        if not usable:
            raise TrainingError(
                f"seed {self.seed}: none of the {INNER_FOLDS} {what}s has both classes on both"
                " sides; add rows"
            )
        return usable


def required(values: Read | None, problem: str) -> Read:
    """Return what was read.  Raises TrainingError, with this problem, where it was not."""
    if values is None:
        raise TrainingError(f"{problem}; leave it out", param="methods")
    return values


def in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int | None
) -> list[Result]:
    """Return ``function`` of every item, in order, in processes of one thread each (in this one
    where ``jobs`` is 1). Processes and not threads: liblinear draws its coordinate order from one
    random state per process, so threads would make a fit depend on its timing."""
    workers = min(cpu_count() if jobs is None else jobs, len(items))
    if workers <= 1:
        return [function(item) for item in items]
    with parallel_config(backend="loky", n_jobs=workers, inner_max_num_threads=1):
        return list(Parallel()(delayed(function)(item) for item in items))


Penalty = Literal["l1", "l2"]

# liblinear penalises the intercept like a weight; this height of its constant column makes that a
# matter of 1 %.
_INTERCEPT_HEIGHT = 100.0


class Linear(NamedTuple):
    """logit = weight . x + bias in raw activations; it rises with factuality."""

    weight: Floats  # [d]
    bias: float

    def logits(self, x: Numbers) -> Floats:
        """Return [n] of x [n, d], summed in float64 a few thousand rows at a time, so that no whole
        copy is made."""
        return project(x, np.arange(len(x)), self.weight, self.bias)


def fit_linear(x: Numbers, label: Labels, c: float, kind: Penalty) -> Linear:
    """Fit x [n, d], label [n] with inverse strength ``c``.  An L1 fit may come back with all
    weights zero.  Memory: one float64 copy of x and the solver's own, of 16 bytes a number."""
    z, mean, std = standardise(x)
    model = LogisticRegression(
        C=c,
        solver="liblinear",
        class_weight="balanced",
        intercept_scaling=_INTERCEPT_HEIGHT,
        max_iter=1000,
        random_state=0,
        **({"penalty": kind} if _HAS_PENALTY else {"l1_ratio": 1.0 if kind == "l1" else 0.0}),
    )
    with config_context(
        assume_finite=True, skip_parameter_validation=True
    ):  # rows were checked when collected
        model.fit(z, label)
    weight = model.coef_[0] / std
    return Linear(weight, float(model.intercept_[0] - weight @ mean))


INNER_FOLDS = 3
# Of those that read one layer the candidates: 0 is the first block, 1 the last.
DEPTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
Rows = NDArray[np.float32]
LayerFit = Callable[[Any, Index, Any], Floats]
"""Training rows [n, d], labels [n], rows to score [t, d] -> truth logits [t]; processes must be
able to pickle it."""


def linear_logits(c: float, kind: Penalty, x: Numbers, label: Index, x_test: Numbers) -> Floats:
    """Return truth logits [t] of ``fit_linear``; with its first two arguments bound it is a
    ``LayerFit``."""
    return fit_linear(x, label, c, kind).logits(x_test)


def at_depths(layers: int, shares: Sequence[float]) -> list[int]:
    """Return the layers at these shares of the depth; each once, in order."""
    return sorted({round(share * (layers - 1)) for share in shares})


def fit_at_best_layer(
    fold: Fold, fits: Sequence[LayerFit], what: str, depths: Sequence[float] = DEPTHS
) -> Floats:
    """Return scores [n_test] from the residual stream's layer, and the way to fit, that inner folds
    find the best.  The fit is repeated on all training rows.  Raises TrainingError: no inner fold,
    named ``what``, has both classes."""
    residual = fold.inputs.residual
    layers = at_depths(residual.file.geometry.num_layers, depths)
    layer, fit = choose(fold, layers, fits, what)
    rows, index = residual.file.layer(layer), residual.index
    return -fits[fit](rows[index[fold.train]], fold.label, rows[index[fold.test]])


L2_GRID = (0.0001, 0.001, 0.01, 0.1, 1.0)


def l2_at_best_c(x: Numbers, fold: Fold, what: str) -> Floats:
    """Return scores [n_test] of an L2 logistic regression on columns x [n, d], with the C of
    ``L2_GRID`` that inner folds find the best, ties to the stronger penalty.  Raises TrainingError
    where no inner fold has both classes."""
    c, _ = best_c(x, fold.inputs.label, fold.usable_folds(what), L2_GRID)
    return -linear_logits(c, "l2", x[fold.train], fold.label, x[fold.test])


def best_c(x: Numbers, label: Index, pairs: Pairs, grid: Sequence[float]) -> tuple[float, float]:
    """Return the C of an L2 logistic regression on columns x [n, d] with the best mean AUROC over
    the folds, and that, rounded; ties to the first of ``grid``."""
    aurocs = np.round(
        [held_out_auroc(partial(linear_logits, c, "l2"), x, label, pairs) for c in grid], 12
    )
    return grid[int(np.argmax(aurocs))], float(aurocs.max())


def choose(
    fold: Fold, layers: Sequence[int], fits: Sequence[LayerFit], what: str
) -> tuple[int, int]:
    """Return (layer, position in ``fits``) with the best mean AUROC; ties: lower layer, first
    way."""
    spans = [(layer, 1) for layer in layers]
    rate = partial(held_out_aurocs, fold.inputs.residual, fold.usable_folds(what), fits)
    # Rounded, so that the order of a sum does not decide a tie.
    aurocs = np.round(in_processes(rate, spans, fold.jobs), 12)
    layer, fit = np.unravel_index(int(np.argmax(aurocs)), (len(layers), len(fits)))
    return layers[int(layer)], int(fit)


def window(readouts: Readouts, start: int, size: int, rows: Index) -> Rows:
    """Return the hidden states of ``size`` layers side by side: [n, size * hidden_size]."""
    index = readouts.index[rows]
    return np.concatenate(
        [readouts.file.layer(layer)[index] for layer in range(start, start + size)], axis=1
    )


def held_out_aurocs(
    readouts: Readouts, pairs: Pairs, fits: Sequence[LayerFit], span: tuple[int, int]
) -> list[float]:
    """Return the mean AUROC of each way to fit over the folds (fitted, held out), for one window
    read once."""
    x = window(readouts, *span, np.arange(len(readouts.index)))
    return [held_out_auroc(fit, x, readouts.label, pairs) for fit in fits]


def held_out_auroc(fit: LayerFit, x: Numbers, label: Index, pairs: Pairs) -> float:
    """Return the mean AUROC over the held-out rows of ``pairs`` (fitted, held out)."""
    aurocs = [auroc(label[held], fit(x[inside], label[inside], x[held])) for inside, held in pairs]
    return float(np.mean(aurocs))
