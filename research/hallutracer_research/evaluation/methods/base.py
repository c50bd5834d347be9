"""Rows, processes, a linear fit and the choice of a layer, which the methods share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

import numpy as np
from joblib import Parallel, cpu_count, delayed, parallel_config
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.linear_model import LogisticRegression

from service.errors import TrainingError
from service.fitting.folds import Labels, Pairs, unchecked_folds
from service.fitting.probes import Readouts, project, standardise
from service.fitting.scores import auroc
from service.fitting.solver import one_numpy_thread

_HAS_PENALTY = (
    inspect.signature(LogisticRegression).parameters["penalty"].default == "l2"
)  # scikit-learn before 1.8

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
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
    asked: Floats | None = None  # [n] tokens of the prompt that asks for it
    true_examples: Floats | None = None  # [n], [n] the same, asked behind examples
    asked_examples: Floats | None = None
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
    scaffold: NDArray[np.int64]  # [n] tokens of that beginning


@dataclass(frozen=True, eq=False)
class BehindAnswers(_ByRow):
    """What was read of the judged answers' tokens, and behind them."""

    last: Readouts  # attention heads, at the answer's last token
    mean: Readouts  # mean over the answer's tokens
    asked: Readouts  # behind a short question about the answer
    residual: Readouts  # the residual stream, at the answer's last token
    tokens: NDArray[
        np.float16
    ]  # [n, first tokens, m, width] attention heads at each; its last one's behind the end
    said: Index  # [n] tokens of the answer
    question: Index  # [n] tokens of that question


@dataclass(frozen=True, eq=False)
class MethodInputs(_ByRow):
    """The n labelled rows, read in one extraction pass; None or empty where no method asked for
    it."""

    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated
    group: Index  # [n] rows of one group are never on both sides of a split
    heads: Readouts  # the attention-head site
    residual: Readouts  # the residual-stream site
    first_token: Floats  # [n, 2] log maximum probability, entropy (nats)
    prompt_tokens: NDArray[np.int64]  # [n]
    text: tuple[str, ...] = ()  # [n] the prompts
    kind: NDArray[np.str_] = field(
        default_factory=lambda: np.array([], np.str_)
    )  # [n] sub-dataset, "" for none
    halluguard: Floats | None = None  # [n] ``halluguard_scores``
    positions: OtherPositions | None = None
    behind: BehindAnswers | None = None
    other: Readouts | None = None  # another model's attention heads, at its own t*
    other_tokens: NDArray[np.int64] | None = None  # [n] of the prompt as that model reads it
    embedding: NDArray[np.float32] | None = None  # [n, d] of the text
    answers: AnswerReadings = AnswerReadings()


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


@dataclass(frozen=True, eq=False)
class Linear:
    """logit = weight . x + bias in raw activations; it rises with factuality."""

    weight: Floats  # [d]
    bias: float

    def logits(self, x: NDArray[np.floating]) -> Floats:
        """Return [n] of x [n, d], summed in float64 a few thousand rows at a time, so that no whole
        copy is made."""
        return project(x, np.arange(len(x)), self.weight, self.bias)


def fit_linear(
    x: NDArray[np.floating], label: NDArray[np.integer], c: float, kind: Penalty
) -> Linear:
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
DEPTHS = (
    0.2,
    0.4,
    0.6,
    0.8,
    1.0,
)  # candidates of those that read one layer: 0 is the first block, 1 the last
Rows = NDArray[np.float32]
Fit = Callable[[Any, NDArray[np.int64], Any], Floats]
"""Training rows [n, d], labels [n], rows to score [t, d] -> truth logits [t]; processes must be
able to pickle it."""


def linear_logits(
    c: float, kind: Penalty, x: NDArray[np.floating], label: Index, x_test: NDArray[np.floating]
) -> Floats:
    """Return truth logits [t] of ``fit_linear``; with its first two arguments bound it is a
    ``Fit``."""
    return fit_linear(x, label, c, kind).logits(x_test)


def at_depths(layers: int, shares: Sequence[float]) -> list[int]:
    """Return the layers at these shares of the depth; each once, in order."""
    return sorted({round(share * (layers - 1)) for share in shares})


def fit_at_best_layer(
    inputs: MethodInputs,
    train: Index,
    test: Index,
    seed: int,
    jobs: int | None,
    *,
    fits: Sequence[Fit],
    what: str,
    depths: Sequence[float] = DEPTHS,
) -> Floats:
    """Return scores [n_test] from the residual stream's layer, and the way to fit, that inner folds
    find the best.  The fit is repeated on all training rows.  Raises TrainingError: no inner fold,
    named ``what``, has both classes."""
    layers = at_depths(inputs.residual.file.geometry.num_layers, depths)
    layer, fit = choose(inputs, train, seed, layers=layers, fits=fits, jobs=jobs, what=what)
    rows, index = inputs.residual.file.layer(layer), inputs.residual.index
    with one_numpy_thread():  # sums in one order, whatever the number of cores
        return -fits[fit](rows[index[train]], inputs.label[train], rows[index[test]])


L2_GRID = (0.0001, 0.001, 0.01, 0.1, 1.0)


def l2_at_best_c(
    x: NDArray[np.floating],
    inputs: MethodInputs,
    train: Index,
    test: Index,
    seed: int,
    *,
    what: str,
) -> Floats:
    """Return scores [n_test] of an L2 logistic regression on columns x [n, d], with the C of
    ``L2_GRID`` that inner folds find the best, ties to the stronger penalty.  Raises TrainingError
    where no inner fold has both classes."""
    pairs = usable_folds(inputs.label, inputs.group, train, INNER_FOLDS, seed, what=what)
    with one_numpy_thread():  # sums in one order, whatever the number of cores
        c, _ = best_c(x, inputs.label, pairs, L2_GRID)
        return -linear_logits(c, "l2", x[train], inputs.label[train], x[test])


def best_c(
    x: NDArray[np.floating], label: Index, pairs: Pairs, grid: Sequence[float]
) -> tuple[float, float]:
    """Return the C of an L2 logistic regression on columns x [n, d] with the best mean AUROC over
    the folds, and that, rounded; ties to the first of ``grid``."""
    found = np.round(
        [held_out_auroc(partial(linear_logits, c, "l2"), x, label, pairs) for c in grid], 12
    )
    return grid[int(np.argmax(found))], float(found.max())


def choose(
    inputs: MethodInputs,
    train: Index,
    seed: int,
    *,
    layers: Sequence[int],
    fits: Sequence[Fit],
    jobs: int | None,
    what: str,
) -> tuple[int, int]:
    """Return (layer, position in ``fits``) with the best mean AUROC; ties: lower layer, first
    way."""
    pairs = usable_folds(inputs.label, inputs.group, train, INNER_FOLDS, seed, what=what)
    spans = [(layer, 1) for layer in layers]
    found = in_processes(partial(held_out_aurocs, inputs.residual, pairs, fits), spans, jobs)
    # Rounded, so that the order of a sum does not decide a tie.
    place, fit = np.unravel_index(int(np.argmax(np.round(found, 12))), (len(layers), len(fits)))
    return layers[int(place)], int(fit)


def usable_folds(
    label: Labels, group: Labels, rows: Index, folds: int, seed: int, *, what: str = "fold"
) -> Pairs:
    """Return those of ``group_folds`` whose two sides have both classes; for a choice that need not
    test every row. Raises TrainingError: not one has."""
    pairs = unchecked_folds(label, group, rows, folds, seed, what)
    usable = [
        (inside, held)
        for inside, held in pairs
        if len(np.unique(label[inside])) == len(np.unique(label[held])) == 2
    ]
    if not usable:
        raise TrainingError(
            f"seed {seed}: none of the {folds} {what}s has both classes on both sides; add rows"
        )
    return usable


def window(readouts: Readouts, start: int, size: int, rows: Index) -> Rows:
    """Return the hidden states of ``size`` layers side by side: [n, size * hidden_size]."""
    index = readouts.index[rows]
    return np.concatenate(
        [readouts.file.layer(layer)[index] for layer in range(start, start + size)], axis=1
    )


def held_out_aurocs(
    readouts: Readouts,
    pairs: Sequence[tuple[Index, Index]],
    fits: Sequence[Fit],
    span: tuple[int, int],
) -> list[float]:
    """Return the mean AUROC of each way to fit over the folds (fitted, held out), for one window
    read once."""
    x = window(readouts, *span, np.arange(len(readouts.index)))
    with one_numpy_thread():  # sums in one order, whatever the number of cores
        return [held_out_auroc(fit, x, readouts.label, pairs) for fit in fits]


def held_out_auroc(
    fit: Fit, x: NDArray[np.floating], label: Index, pairs: Sequence[tuple[Index, Index]]
) -> float:
    """Return the mean AUROC over the held-out rows of ``pairs`` (fitted, held out)."""
    return float(
        np.mean(
            [auroc(label[held], fit(x[inside], label[inside], x[held])) for inside, held in pairs]
        )
    )
