"""Fits the detector, ``DepthMeanProbe``: chooses C, fits probes, takes their depth mean and fits
the classifier.

The classifier is fitted on out-of-fold depth means, since probes separate their own training rows
too well.  Then the probes are refitted on all rows.  The scale stays valid, because every probe has
unit norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from probes_store.records import CONTEXT_SIGNALS
from service.fitting import C_GRID, DEPTH_MEAN, ClassBalance, LogitScale
from service.fitting.folds import group_folds
from service.fitting.joint import C as JOINT_C
from service.fitting.joint import joined
from service.fitting.probes import (
    ActivationArray,
    Floats,
    Index,
    Labels,
    ProbeFit,
    Readouts,
    Task,
    fit_probes,
    project,
    weighted_rows,
)
from service.fitting.scores import auroc, number_together
from service.fitting.solver import one_numpy_thread
from service.readout import Site
from service.risk import depth_mean, risk


class OutOfFold(NamedTuple):
    """Logits of rows by probes that were fitted without them; the first axis is the seed."""

    unit_norm: Floats  # [seeds, n, m]
    standardized: (
        Floats  # [seeds, n, m] each logit over its own fold's within-class training deviation
    )
    # [seeds, n, m] by directions that are fitted together; NaN if the cross-fit did not fit them
    joint: Floats
    best_head: Floats  # [seeds, n] the logit of the fold's single best head


class ScaledLogits(NamedTuple):
    """Logits by one rule of ``logit_scale``."""

    out_of_fold: Floats  # [seeds, n, m]
    trajectory: Floats  # [n_test, m] of the refitted probes
    scale: Floats  # [m] of the refitted probes


class ChosenC(NamedTuple):
    """A value of C, and the scores of all candidates."""

    c: float
    auroc: dict[
        str, float | None
    ]  # grid value -> out-of-fold AUROC of the depth mean; None if a layer was zero


class FinalClassifier(NamedTuple):
    """risk = 1 - sigmoid(weight . signals + intercept), signals in raw units."""

    weight: Floats  # [k]
    intercept: float

    def risk(self, signals: Floats) -> Floats:
        """Return P(hallucinated) of signals [..., k], [...]."""
        return risk(signals, self.weight, self.intercept)


class DepthMeanProbe(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """The paper's detector as a scikit-learn classifier: one probe a layer, the mean of their
    logits, a risk.

    Args:
        C: Inverse strength of the probes' penalty, or "auto": the best of ``c_grid`` by
            ``inner_folds`` folds.
        c_grid: The candidates of "auto".
        logit_scale: "unit_norm" (the paper), "standardized" (each layer's logit over its
            deviation), or "joint": all layers' directions from one regression, at the heads chosen
            by the paper's rule.
        class_balance: How probe fits balance the classes: by "weights", or by "downsample" of the
            larger class.
        folds: Folds of the cross-fit, whose out-of-fold depth means the classifier is fitted on.
        inner_folds: Folds for the choice of C.
        seeds: Each gives one shuffle of ``folds``; the classifier is fitted on the rows of all
            shuffles.
        n_jobs: Number of processes.

    ``fit`` takes activations [n, layers, heads, d], of which each layer's best head is taken (an L1
    probe each), or [n, layers, d], such as residual streams (L2); [n, d] is one layer.  The larger
    of the two classes is the factual one, so ``predict_proba(X)[:, 0]`` is the risk.

    After ``fit``: ``C_``, ``probes_`` (head, direction, bias and AUROC by layer), ``scale_``,
    ``classifier_``, ``out_of_fold_`` [seeds, n, layers] logits and ``out_of_fold_risk_``
    [seeds, n], ``classes_``, ``shape_``."""

    def __init__(
        self,
        C: float | Literal["auto"] = "auto",
        *,
        c_grid: tuple[float, ...] = C_GRID,  # noqa: N803
        logit_scale: LogitScale = "unit_norm",
        class_balance: ClassBalance = "weights",
        folds: int = 5,
        inner_folds: int = 3,
        seeds: tuple[int, ...] = (0, 1, 2),
        n_jobs: int = 1,
    ) -> None:
        self.C, self.c_grid = C, c_grid
        self.logit_scale, self.class_balance = logit_scale, class_balance
        self.folds, self.inner_folds = folds, inner_folds
        self.seeds = seeds
        self.n_jobs = n_jobs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.three_d_array = True
        return tags

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        groups: ArrayLike | None = None,
        extra: ArrayLike | None = None,  # noqa: N803
    ) -> Self:
        """Fit probes and classifier: X as described for the class, y [n], groups [n] of rows that
        depend on each other.

        ``extra`` [n, k] are further signals of the classifier besides the depth mean, such as
        entropies. Raises ValueError for arrays that do not fit together, TrainingError if a fold
        lacks a class."""
        x: NDArray[np.float32]
        x, classes = validate_data(self, X, y, dtype=np.float32, allow_nd=True)
        check_classification_targets(classes)
        self.classes_, label = np.unique(classes, return_inverse=True)
        if len(self.classes_) == 1:
            raise ValueError("y has one class: two are needed")
        if len(self.classes_) > 2:  # in scikit-learn's words
            kind = type_of_target(classes)
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}."
            )
        self.shape_ = x.shape[1:]
        named = range(len(x)) if groups is None else np.asarray(groups).tolist()
        [group] = number_together(named)  # in order of appearance, as in training
        if len(group) != len(x):
            raise ValueError(f"groups has {len(group)} rows, X {len(x)}")
        self.fit_readouts(Readouts(_activations(x), np.arange(len(x)), label), group)
        return self.fit_risk(label, _extra(extra, len(x)))

    def trajectory(self, X: ArrayLike) -> Floats:  # noqa: N803
        """Return each layer's truth logit, scaled: [n, layers]."""
        check_is_fitted(self)
        x: NDArray[np.float32] = validate_data(
            self, X, dtype=np.float32, allow_nd=True, reset=False
        )
        if x.shape[1:] != self.shape_:
            raise ValueError(
                f"X has rows of shape {x.shape[1:]}, DepthMeanProbe was fitted on {self.shape_}"
            )
        file, rows = _activations(x), np.arange(len(x))
        chosen = zip(
            self.probes_.head.tolist(),
            self.probes_.direction,
            self.probes_.bias.tolist(),
            strict=True,
        )
        logits = [
            project(file.head(layer, head), rows, v, b) for layer, (head, v, b) in enumerate(chosen)
        ]
        return np.stack(logits, axis=1) / self.scale_

    def decision_function(
        self,
        X: ArrayLike,  # noqa: N803
        extra: ArrayLike | None = None,
    ) -> Floats:
        """Return the log odds of a factual answer, [n]."""
        signals = signal_matrix(self.trajectory(X), _extra(extra, None))
        if signals.shape[1] != len(self.classifier_.weight):
            raise ValueError(
                f"extra must have {len(self.classifier_.weight) - 1} columns, as in fit"
            )
        return np.asarray(signals @ self.classifier_.weight + self.classifier_.intercept)

    def predict_proba(self, X: ArrayLike, extra: ArrayLike | None = None) -> Floats:  # noqa: N803
        """Return [n, 2]: the risk, and the probability that the answer is factual."""
        hallucinated = risk(self.decision_function(X, extra)[:, None], np.ones(1), 0.0)
        return np.stack([hallucinated, 1 - hallucinated], axis=1)

    def predict(self, X: ArrayLike, extra: ArrayLike | None = None) -> NDArray[Any]:  # noqa: N803
        """Return the likelier class of each row, [n]."""
        factual = self.decision_function(X, extra) > 0
        return np.asarray(self.classes_[factual.astype(np.int64)])

    def fit_readouts(
        self,
        readouts: Readouts,
        group: Index,
        rows: Index | None = None,
        test: Index | None = None,
        *,
        scales: Sequence[LogitScale] = (),
        fold: bool = False,
    ) -> Self:
        """Fit everything except the classifier on ``rows`` of activations, and score the rows
        ``test``; group [n].

        Sets ``C_``, ``c_search_``, ``cross_fit_``, ``probes_`` and, by ``logit_scale`` and
        ``scales``, ``scaled_``.
        ``fold``: the fit is of one fold and never served, so a layer may lack a direction.
        Raises NoDirection (not with ``fold``), TrainingError."""
        rows = np.arange(len(readouts.label)) if rows is None else rows
        rules = {self.logit_scale, *scales}
        test = rows if test is None else test
        self.C_, self.c_search_ = self.choose_c(readouts, group, rows, self.seeds[0], must=not fold)
        self.cross_fit_ = self.cross_fit(readouts, group, rows, self.C_, joint="joint" in rules)
        fit = self.refit(readouts, rows, test, self.C_, zero_layers=fold)
        task, together = Task(rows, test, self.C_), fit
        if "joint" in rules:
            together = joined(readouts, task, fit, self.class_balance, zero_layers=fold)
        self.probes_ = together if self.logit_scale == "joint" else fit
        self.scaled_ = {
            rule: _scaled(rule, self.cross_fit_, together if rule == "joint" else fit)
            for rule in rules
        }
        served = self.scaled_[self.logit_scale]
        self.out_of_fold_, self.scale_ = served.out_of_fold, served.scale
        return self

    def fit_risk(
        self, label: Labels, extra: Floats | None = None, soft_label: Floats | None = None
    ) -> Self:
        """Fit the classifier on out-of-fold signals: label, soft_label [n] of ``fit_readouts``'
        rows, extra [n, k]."""
        seeds, signals = len(self.out_of_fold_), signal_matrix(self.out_of_fold_, extra)
        # Seeds are stacked and not averaged: an average would be less noisy than the single probe
        # that is served.
        self.signals_ = signals.reshape(-1, signals.shape[-1])
        soft = None if soft_label is None else np.tile(soft_label, seeds)
        self.classifier_ = fit_classifier(self.signals_, np.tile(label, seeds), soft)
        self.out_of_fold_risk_ = self.classifier_.risk(self.signals_).reshape(seeds, -1)
        return self

    def choose_c(
        self, readouts: Readouts, group: Index, rows: Index, seed: int, *, must: bool = True
    ) -> ChosenC:
        """Return the C with the largest out-of-fold AUROC of the depth mean, by grouped folds
        inside ``rows``.

        At most 8 layers and 8 heads, evenly spaced, take part.  A C that leaves a layer without a
        direction is excluded.  If all are, raises NoDirection, or without ``must`` returns the
        largest C."""
        grid = tuple(sorted(set(self.c_grid))) if self.C == "auto" else (float(self.C),)
        if len(grid) == 1:
            return ChosenC(grid[0], {})
        geometry, site = readouts.file.geometry, readouts.file.site
        pairs = group_folds(readouts.label, group, rows, self.inner_folds, seed, what="inner fold")
        tasks = [Task(train, test, c) for c in grid for train, test in pairs]
        options: dict[str, Any] = {
            "balance": self.class_balance,
            "jobs": self.n_jobs,
            "layers": _evenly_spaced(geometry.num_layers),
            "heads": _evenly_spaced(geometry.heads(site)),
        }
        results = fit_probes(readouts, tasks, zero_layers=True, **options)
        table: dict[str, float | None] = dict.fromkeys(f"{c:g}" for c in grid)
        best: tuple[float, float] | None = None
        for number, c in enumerate(grid):
            fits = results[number * len(pairs) : (number + 1) * len(pairs)]
            if all(fit.direction.any(axis=1).all() for fit in fits):
                score = np.empty(len(readouts.label))
                for (_, test), fit in zip(pairs, fits, strict=True):
                    score[test] = depth_mean(fit.trajectory)
                quality = table[f"{c:g}"] = auroc(readouts.label[rows], score[rows])
                if best is None or quality > best[0] + 1e-12:
                    best = (quality, c)
        if best is None and must:
            fit_probes(readouts, tasks, **options)
        return ChosenC(max(grid) if best is None else best[1], table)

    def cross_fit(
        self,
        readouts: Readouts,
        group: Index,
        rows: Index,
        c: float,
        *,
        joint: bool = False,
        joint_c: float = JOINT_C,
    ) -> OutOfFold:
        """Return logits of ``rows`` [n], in their order, for each seed; zeros if a fold's layer has
        no direction.

        ``joint`` adds the logits of directions that are fitted together, with the penalty
        ``joint_c``."""
        pairs = [
            (number, train, test)
            for number, seed in enumerate(self.seeds)
            for train, test in group_folds(
                readouts.label, group, rows, self.folds, seed, what="cross-fit fold"
            )
        ]
        tasks = [Task(train, test, c) for _, train, test in pairs]
        fits = self._fit(readouts, tasks, zero_layers=True)
        where = np.full(len(readouts.label), -1)
        where[rows] = np.arange(len(rows))
        unit = np.full((len(self.seeds), len(rows), readouts.file.geometry.num_layers), np.nan)
        crossed = OutOfFold(unit, unit.copy(), unit.copy(), unit[:, :, 0].copy())
        for (number, _, test), task, fit in zip(pairs, tasks, fits, strict=True):
            at = number, where[test]
            if joint:
                together = joined(
                    readouts, task, fit, self.class_balance, zero_layers=True, c=joint_c
                )
                crossed.joint[at] = together.standardized
            crossed.unit_norm[at], crossed.standardized[at] = fit.trajectory, fit.standardized
            crossed.best_head[at] = fit.trajectory[:, fit.best_layer]
        return crossed

    def refit(
        self, readouts: Readouts, rows: Index, test: Index, c: float, *, zero_layers: bool = False
    ) -> ProbeFit:
        """Return probes on all of ``rows``, with the logits of ``test``: ``fit_probes``' result and
        errors."""
        return self._fit(readouts, [Task(rows, test, c)], zero_layers=zero_layers)[0]

    def _fit(
        self, readouts: Readouts, tasks: Sequence[Task], *, zero_layers: bool
    ) -> list[ProbeFit]:
        options: dict[str, Any] = {
            "balance": self.class_balance,
            "jobs": self.n_jobs,
            "zero_layers": zero_layers,
        }
        return fit_probes(readouts, tasks, retry_larger_c=True, **options)


def _evenly_spaced(count: int) -> list[int]:
    """Return at most 8 of the numbers 0 .. count - 1."""
    return sorted({round(number) for number in np.linspace(0, count - 1, min(count, 8))})


def _scaled(rule: LogitScale, crossed: OutOfFold, refitted: ProbeFit) -> ScaledLogits:
    if rule == "unit_norm":
        return ScaledLogits(crossed.unit_norm, refitted.trajectory, np.ones_like(refitted.scale))
    out_of_fold = crossed.joint if rule == "joint" else crossed.standardized
    return ScaledLogits(out_of_fold, refitted.standardized, refitted.scale)


def fit_classifier(
    signals: Floats, label: Labels, soft_label: Floats | None = None
) -> FinalClassifier:
    """Return a practically unregularised logistic regression: signals [n, k], label [n] (1
    factual), or soft_label [n].

    It has no class weights, so the risk is a probability at the training data's share of
    hallucinations."""
    mean, std = signals.mean(axis=0), signals.std(axis=0)
    std = np.where(std > 0, std, 1.0)
    rows = weighted_rows(label, soft_label)
    with one_numpy_thread():  # the same order of summation for any number of cores
        model = LogisticRegression(
            C=1e4, tol=1e-8, max_iter=5000
        )  # C matters if the classes are separable
        model.fit(((signals - mean) / std)[rows.row], rows.label, sample_weight=rows.weight)
    weight = model.coef_[0] / std
    return FinalClassifier(weight, float(model.intercept_[0] - weight @ mean))


def signal_matrix(trajectory: Floats, extra: Floats | None = None) -> Floats:
    """Return the classifier's input [..., n, 1 + k]: trajectory [..., n, m] scaled, extra
    [n, k]."""
    mean = depth_mean(trajectory)[..., None]
    more = [] if extra is None else [np.broadcast_to(extra, (*mean.shape[:-1], extra.shape[1]))]
    return np.concatenate([mean, *more], axis=-1)


def extra_signals(
    names: Sequence[str], first_token: Floats, context: Floats | None = None
) -> Floats | None:
    """Return the columns of a bundle's signals after the depth mean, [n, k], or None if there are
    none.

    first_token [n, 2], context [n, 2 or 3]."""
    columns = {"log_max_prob": first_token[:, 0], "entropy": first_token[:, 1]}
    if context is not None:  # its last column, the length, may be missing
        columns |= dict(zip(CONTEXT_SIGNALS, context.T, strict=False))
    chosen = [columns[name] for name in names if name != DEPTH_MEAN]
    return np.stack(chosen, axis=1) if chosen else None


def class_statistics(trajectory: Floats, label: Labels) -> tuple[Floats, Floats]:
    """Return mean and deviation by class of trajectories [seeds, n, m], each [2, m]; row 0
    hallucinated."""
    by_class = [trajectory[:, label == value].reshape(-1, trajectory.shape[-1]) for value in (0, 1)]
    return np.stack([rows.mean(axis=0) for rows in by_class]), np.stack(
        [rows.std(axis=0) for rows in by_class]
    )


def scale_shift(out_of_fold: Floats, refit: Floats, label: Labels) -> dict[str, dict[str, float]]:
    """Return mean and deviation by class of cross-fitted depth means [seeds, n] and of refitted,
    in-sample ones [n]."""
    shift: dict[str, dict[str, float]] = {}
    for value, name in enumerate(("hallucinated", "factual")):
        cross_fitted, refitted = out_of_fold[..., label == value], refit[..., label == value]
        shift[name] = {
            "cross_fitted_mean": float(cross_fitted.mean()),
            "refitted_mean": float(refitted.mean()),
            "cross_fitted_std": float(cross_fitted.std()),
            "refitted_std": float(refitted.std()),
        }
    return shift


def _activations(x: NDArray[np.float32]) -> ActivationArray:
    if x.ndim == 4:
        return ActivationArray(x, Site.ATTENTION_HEAD)
    if x.ndim > 4:
        raise ValueError(
            f"X has {x.ndim} dimensions: [n, layers, heads, d], [n, layers, d] or [n, d] is"
            " expected"
        )
    return ActivationArray(x.reshape(len(x), -1, 1, x.shape[-1]), Site.RESIDUAL_STREAM)


def _extra(values: ArrayLike | None, rows: int | None) -> Floats | None:
    if values is None:
        return None
    columns = np.ascontiguousarray(values, np.float64)
    if columns.ndim != 2 or (rows is not None and len(columns) != rows):
        raise ValueError(
            f"extra must be [n, k] with a row for each of X, not {list(columns.shape)}"
        )
    return columns
