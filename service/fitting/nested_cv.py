"""The nested evaluation: outer folds x seeds, everything else inside the training side.

Standardisation, head selection, C, the classifier and the threshold see only the training side of an outer fold.  There
the classifier is fitted on an inner cross-fit (``inner_folds``, one seed), the way the bundle's is on a larger one, and
so is each reference, so that every row of the table has a calibrated risk.  One outer fold costs 1 + inner_folds fits
of all heads, and the choice of C about inner_folds x |grid| of at most 8 x 8 heads; all signals share these fits.
Knows no engine and no bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from service.fitting.calibration import (
    FinalClassifier,
    FitOptions,
    choose_c,
    cross_fit,
    fit_classifier,
    refit,
    signal_matrix,
)
from service.fitting.fit import Floats, Index, Readouts
from service.fitting.folds import OuterFold, outer_folds
from service.fitting.options import DEPTH_MEAN, FIRST_TOKEN, LogitScale
from service.fitting.scores import ECE_BINS, SUMMARY, auroc, ece, risk_auroc, summary, within_stratum_auroc

FUSED = (DEPTH_MEAN, *FIRST_TOKEN)
NAMES = (
    "depth_mean_unit_norm",
    "depth_mean_standardized",
    "fused_unit_norm",
    "fused_standardized",
    "best_head",
    "best_layer",
    "first_token_max_prob",
    "first_token_entropy",
    "prompt_length",
)
STRATA = {"kind": ("kind",), "kind_x_template": ("kind", "template")}


@dataclass(frozen=True, eq=False)
class FoldScores:
    """One method's scores of one outer fold's test rows."""

    seed: int
    fold: int
    test: Index
    score: Floats  # [n_test] rises with hallucination


def nested_cv(
    outer: Iterable[OuterFold], fit: Callable[[OuterFold], Mapping[str, Floats]]
) -> dict[str, list[FoldScores]]:
    """Call ``fit`` on each outer fold and collect its test scores by name, in the order of the folds.

    ``fit`` must learn from ``fold.train`` only; it returns the scores of ``fold.test`` [n_test] by each method.
    """
    scores: dict[str, list[FoldScores]] = {}
    for fold in outer:
        for name, score in fit(fold).items():
            scores.setdefault(name, []).append(FoldScores(fold.seed, fold.fold, fold.test, score))
    return scores


def by_row(scores: Sequence[FoldScores], rows: int) -> Floats:
    """The scores in the order of the data, [seeds, n]: each row's by the fold that tested it."""
    seeds = list(dict.fromkeys(one.seed for one in scores))
    values = np.full((len(seeds), rows), np.nan)
    for one in scores:
        values[seeds.index(one.seed), one.test] = one.score
    return values


@dataclass(frozen=True, eq=False)
class Inputs:
    """The labelled rows as the evaluation sees them; n rows."""

    readouts: Readouts
    group: Index  # [n]
    first_token: Floats  # [n, 2] log maximum probability, entropy
    prompt_tokens: NDArray[np.int64]  # [n]
    strata: tuple[Mapping[str, str], ...]  # [n] metadata that names strata

    @property
    def label(self) -> NDArray[np.int64]:
        """[n] 1 factual, 0 hallucinated."""
        return self.readouts.label


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What evaluation.json holds under ``cross_validation``, and the risks behind it for the plots."""

    document: dict[str, Any]
    risk: dict[str, Floats]  # signal -> [seeds, n], each row's risk by a fold that never saw it


def name_of(signals: Sequence[str], scale: LogitScale) -> str:
    """The row of the table that a bundle with these signals corresponds to."""
    return f"{'depth_mean' if len(signals) == 1 else 'fused'}_{scale}"


def evaluate(inputs: Inputs, *, folds: int, seeds: Sequence[int], options: FitOptions) -> Evaluation:
    """Run every outer fold of every seed.  Raises TrainingError for folds without both classes, and NoDirection."""
    label = inputs.label
    records: list[dict[str, Any]] = []

    def fit(fold: OuterFold) -> dict[str, Floats]:
        train, test = fold.train, fold.test
        chosen, signals = _signals(inputs, train, test, fold.seed, options)
        record: dict[str, Any] = {"seed": fold.seed, "fold": fold.fold, "c": chosen, "rows": len(test), "signals": {}}
        risks = {}
        strata = [inputs.strata[int(row)] for row in test]
        for name, (of_train, of_test) in signals:
            classifier = fit_classifier(of_train, label[train])
            risks[name] = risk = classifier.risk(of_test)
            record["signals"][name] = summary(label[test], risk, classifier.threshold) | _within(
                label[test], risk, strata
            )
        records.append(record)
        return risks

    outer = outer_folds(label, inputs.group, folds=folds, seeds=seeds)
    scores = nested_cv(tqdm(outer, "evaluation", mininterval=1), fit)
    risks = {name: by_row(scores[name], len(label)) for name in NAMES}
    return Evaluation(
        {
            "protocol": {
                "folds": folds,
                "inner_folds": options.inner_folds,
                "seeds": list(seeds),
                "splits": "stratified, group-disjoint; scaling, head, C, classifier, threshold from the training side",
                "mean_and_std": "over the test sides of all folds and seeds; population standard deviation",
                "accuracy": "at the cut with the largest Youden's J on the training side",
                "ece": f"{ECE_BINS} equal-mass bins of each test side; small test sides make it larger",
                "ece_pooled": "the same over all rows, each with the risk of the fold that tested it; mean over seeds",
                "within_stratum": "AUROC among rows of one stratum, strata weighted by their pairs of rows",
                "best_head": "the head with the best training AUROC (the ITI rule)",
                "best_layer": "the layer whose selected head has the best inner out-of-fold AUROC",
            },
            "signals": {
                name: _summarise([record["signals"][name] for record in records])
                | {"ece_pooled": _over([ece(label, risk) for risk in risks[name]])}
                for name in NAMES
            },
            "folds": rounded(records),
        },
        risks,
    )


def held_out(
    inputs: Inputs, classifier: FinalClassifier, trajectory: Floats, signals: Sequence[str], references: Inputs
) -> dict[str, Any]:
    """The final bundle on rows that took no part: trajectory [n, m] already scaled.

    The free references are fitted on all training rows (``references``), which is the bundle's own information.
    """
    label = inputs.label
    found: dict[str, Any] = {}
    risks = {"bundle": (classifier, signal_matrix(trajectory, inputs.first_token, signals))}
    for (name, of_train), (_, of_test) in zip(_references(references), _references(inputs), strict=True):
        risks[name] = (fit_classifier(of_train, references.label), of_test)
    for name, (one, x) in risks.items():
        risk = one.risk(x)
        found[name] = summary(label, risk, one.threshold) | _within(label, risk, inputs.strata)
    counts = {"rows": len(label), "factual": int(label.sum()), "hallucinated": int((1 - label).sum())}
    return counts | {"signals": rounded(found)}


def rounded(value: Any) -> Any:
    """The same structure with floats to six decimals: enough to read, and free of the last bits' noise."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(float(value), 6) if isinstance(value, float | np.floating) else value


def probe_columns(
    readouts: Readouts, group: Index, first_token: Floats, train: Index, test: Index, seed: int, options: FitOptions
) -> tuple[float, list[tuple[str, tuple[Floats, Floats]]]]:
    """C, and by the names in ``NAMES`` what probes make of one outer fold: columns [n_train, k] and [n_test, k].

    Everything is fitted on ``train``; its own columns are out of fold.  group [n], first_token [n, 2].
    """
    label = readouts.label
    c = choose_c(readouts, group, train, seed, options).c
    inner = cross_fit(readouts, group, train, c, options.inner_folds, (seed,), options)
    fit = refit(readouts, train, test, c, options)
    found: list[tuple[str, tuple[Floats, Floats]]] = []
    scaled: dict[LogitScale, tuple[Floats, Floats]] = {
        "unit_norm": (inner.unit_norm[0], fit.trajectory),
        "standardized": (inner.standardized[0], fit.trajectory / fit.scale),
    }
    for names in ((DEPTH_MEAN,), FUSED):
        for scale, (of_train, of_test) in scaled.items():
            columns = (
                signal_matrix(of_train, first_token[train], names),
                signal_matrix(of_test, first_token[test], names),
            )
            found.append((name_of(names, scale), columns))
    found.append(("best_head", (inner.best_head[0][:, None], fit.trajectory[:, [fit.best_layer]])))
    layer = int(np.argmax([auroc(label[train], column) for column in inner.unit_norm[0].T]))
    found.append(("best_layer", (inner.unit_norm[0][:, [layer]], fit.trajectory[:, [layer]])))
    return c, found


def _signals(
    inputs: Inputs, train: Index, test: Index, seed: int, options: FitOptions
) -> tuple[float, list[tuple[str, tuple[Floats, Floats]]]]:
    """C and every signal of the table, the free references included."""
    c, found = probe_columns(inputs.readouts, inputs.group, inputs.first_token, train, test, seed, options)
    found += [(name, (column[train], column[test])) for name, column in _references(inputs)]
    return c, found


def _references(inputs: Inputs) -> Iterator[tuple[str, Floats]]:
    """What costs nothing: one column [n, 1] each."""
    yield "first_token_max_prob", inputs.first_token[:, [0]]  # the log; ranking is the probability's own
    yield "first_token_entropy", inputs.first_token[:, [1]]
    yield "prompt_length", inputs.prompt_tokens[:, None].astype(np.float64)


def _within(label: NDArray[np.int64], risk: Floats, strata: Sequence[Mapping[str, str]]) -> dict[str, float | None]:
    """AUROC within each stratification whose keys every row has."""
    found = {}
    for name, keys in STRATA.items():
        if all(key in row for row in strata for key in keys):
            cells = [tuple(row[key] for key in keys) for row in strata]
            found[f"auroc_within_{name}"] = within_stratum_auroc(label, risk, cells)
    return found


def _summarise(records: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Mean and standard deviation over folds and seeds; a measure that no fold has is None."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys((*SUMMARY, *(key for record in records for key in record))):
        values = [value for record in records if (value := record.get(name)) is not None]
        found[name] = _over(values) if values else None
    return found


def _over(values: Sequence[float]) -> dict[str, float]:
    return dict(rounded({"mean": float(np.mean(values)), "std": float(np.std(values))}))


def layer_aurocs(label: NDArray[np.int64], trajectory: Floats) -> tuple[Floats, Floats]:
    """AUROC of each layer's logit and of the depth mean, by seed: [seeds, n, m] -> [seeds, m], [seeds]."""
    layers = np.array([[risk_auroc(label, -column) for column in one.T] for one in trajectory])
    return layers, np.array([risk_auroc(label, -one.mean(axis=1)) for one in trajectory])
