"""Nested cross-validation: outer folds x seeds, everything else inside the training side.

``nested_cv`` runs any fit over the outer folds.  ``evaluate`` is the trainer's: standardisation, head selection, C and
the classifier see only the training side of a fold, where the classifier is fitted on an inner cross-fit
(``inner_folds``, one seed).  One outer fold costs 1 + inner_folds fits of all heads, and the choice of C about
inner_folds x |grid| fits of at most 8 x 8 heads; all signals share these fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from probes_store.manifest import Signal
from probes_store.records import CONTEXT_SIGNALS
from service.fitting.calibration import (
    FinalClassifier,
    FitOptions,
    choose_c,
    cross_fit,
    fit_classifier,
    refit,
    signal_matrix,
)
from service.fitting.context import PromptLabels, context_columns, fit_passage_probes
from service.fitting.fit import Floats, Index, Readouts
from service.fitting.folds import OuterFold, outer_folds
from service.fitting.jackknife import Tests, auroc_interval
from service.fitting.layer_weights import fit_layer_weights
from service.fitting.options import DEPTH_MEAN, FIRST_TOKEN, SEVERAL, LogitScale
from service.fitting.recalibration import recalibration
from service.fitting.scores import (
    ECE_BINS,
    SUMMARY,
    at_threshold,
    debiased_calibration_error,
    ece,
    risk_auroc,
    summary,
    within_stratum_auroc,
)

FUSED: tuple[Signal, ...] = (DEPTH_MEAN, *FIRST_TOKEN)
CONTEXT_NAMES = (
    "context_unit_norm",
    "context_standardized",
    "context_weighted",
    "fused_context_unit_norm",
    "fused_context_standardized",
    "fused_context_weighted",
)  # where rows tell of passages
NAMES = (
    "depth_mean_unit_norm",
    "depth_mean_standardized",
    "depth_mean_weighted",
    "fused_unit_norm",
    "fused_standardized",
    "fused_weighted",
    *(f"depth_mean_{heads}_heads" for heads in SEVERAL),
    *CONTEXT_NAMES,
    "best_head",
    "best_layer",
    "first_token_max_prob",
    "first_token_entropy",
    "prompt_length",
)
STRATA = {"kind": ("kind",), "kind_x_template": ("kind", "template"), "form": ("form",)}


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


def test_sides(scores: Sequence[FoldScores]) -> Tests:
    """The rows of each test side with their scores."""
    return [(fold.test, fold.score) for fold in scores]


def by_row(scores: Sequence[FoldScores], rows: int) -> Floats:
    """The scores in the order of the data, [seeds, n]: each row's by the fold that tested it."""
    seeds = list(dict.fromkeys(fold.seed for fold in scores))
    values = np.full((len(seeds), rows), np.nan)
    for fold in scores:
        values[seeds.index(fold.seed), fold.test] = fold.score
    return values


@dataclass(frozen=True, eq=False)
class Inputs:
    """The labelled rows of an evaluation, n of them."""

    readouts: Readouts
    group: Index  # [n]
    first_token: Floats  # [n, 2] log maximum probability, entropy
    prompt_tokens: NDArray[np.int64]  # [n]
    strata: tuple[Mapping[str, str], ...]  # [n] metadata that names strata
    prompts: PromptLabels | None = None  # None: no passage is told from other prompts

    @property
    def label(self) -> NDArray[np.int64]:
        """[n] 1 factual, 0 hallucinated."""
        return self.readouts.label


@dataclass(frozen=True, eq=False)
class Evaluation:
    """``cross_validation`` of evaluation.json, and the risks behind it."""

    document: dict[str, Any]
    risk: dict[str, Floats]  # signal -> [seeds, n], each row's risk by a fold that never saw it
    tests: dict[str, Tests]  # signal -> test sides of all folds: rows and their risks


def name_of(signals: Sequence[str], scale: LogitScale) -> str:
    """The name in ``NAMES`` of a bundle with these signals."""
    fused, context = (any(name in signals for name in names) for names in (FIRST_TOKEN, CONTEXT_SIGNALS))
    kind = {(False, False): "depth_mean", (True, False): "fused", (False, True): "context"}
    return f"{kind.get((fused, context), 'fused_context')}_{scale}"


def evaluate(inputs: Inputs, *, folds: int, seeds: Sequence[int], options: FitOptions) -> Evaluation:
    """Nested cross-validation of every signal in ``NAMES``.  Raises TrainingError."""
    label = inputs.label
    records: list[dict[str, Any]] = []

    def fit(fold: OuterFold) -> dict[str, Floats]:
        train, test = fold.train, fold.test
        chosen, signals = _signals(inputs, train, test, fold.seed, options)
        record: dict[str, Any] = {"seed": fold.seed, "fold": fold.fold, "c": chosen, "rows": len(test), "signals": {}}
        risks = {}
        strata = [inputs.strata[int(row)] for row in test]
        for name, (of_train, of_test) in signals:
            classifier = fit_classifier(of_train, label[train], inputs.readouts.share_of(train))
            risks[name] = risk = classifier.risk(of_test)
            record["signals"][name] = summary(label[test], risk) | _within(label[test], risk, strata)
        records.append(record)
        return risks

    outer = outer_folds(label, inputs.group, folds=folds, seeds=seeds)
    scores = nested_cv(tqdm(outer, "evaluation", mininterval=1), fit)
    # A fold whose training side has too few passages has none of ``CONTEXT_NAMES``: then the run has none.
    names = [name for name in NAMES if len(scores.get(name, ())) == len(outer)]
    risks = {name: by_row(scores[name], len(label)) for name in names}
    tests = {name: test_sides(scores[name]) for name in names}
    intervals = {name: auroc_interval(label, inputs.group, tests[name]) for name in names}
    document: dict[str, Any] = {
        "protocol": {
            "folds": folds,
            "inner_folds": options.inner_folds,
            "seeds": list(seeds),
            "splits": "stratified, group-disjoint; scaling, head, C, classifier from the training side",
            "mean_and_std": "over the test sides of all folds and seeds; population standard deviation",
            "ece": f"{ECE_BINS} equal-mass bins of each test side; small test sides make it larger",
            "ece_pooled": "the same over all rows, each with the risk of the fold that tested it; mean over seeds",
            "calibration_debiased": "root of the squared error over the same bins of all rows, less what chance adds "
            "(Kumar et al. 2019); mean over seeds",
            "calibration_slope": "of the log odds of hallucinated over those of the risk, with calibration_intercept; "
            "1 and 0 are perfect (Cox 1958); over all rows, mean over seeds; null where risks separate the classes",
            "low_and_high": "95 % interval of the mean, over training and test rows: jackknife over groups with the "
            "fits held fixed, its variance times folds / (folds - 1) for what other training rows would change",
            "within_stratum": "AUROC among rows of one stratum, strata weighted by their pairs of rows",
            "weighted": "weights over layers, fitted on the training side's out-of-fold trajectories",
            "heads": "a layer's logit is the mean over so many heads, the best by training AUROC, or all it has",
            "best_head": "the head with the best training AUROC (the ITI rule)",
            "best_layer": "the layer whose selected head has the best inner out-of-fold AUROC",
        },
        "signals": {
            name: _summarise([record["signals"][name] for record in records])
            | {
                "ece_pooled": _over([ece(label, risk) for risk in risks[name]]),
                "calibration_debiased": _over([debiased_calibration_error(label, risk) for risk in risks[name]]),
            }
            | rounded(recalibration(label, inputs.group, risks[name], folds))
            for name in names
        },
        "folds": rounded(records),
    }
    for name, interval in intervals.items():
        document["signals"][name]["auroc"] |= rounded(interval._asdict())
    return Evaluation(document, risks, tests)


def held_out(
    inputs: Inputs,
    classifier: FinalClassifier,
    threshold: float,
    signals: Floats,
    references: Inputs,
) -> dict[str, Any]:
    """The final bundle on rows that took no part, by its classifier's signals [n, k].

    The reference signals are fitted on all training rows (``references``).  ``at_threshold`` and ``calibration`` are
    the bundle's.
    """
    label = inputs.label
    fitted = {"bundle": (classifier, signals)}
    for (name, of_train), (_, of_test) in zip(_references(references), _references(inputs), strict=True):
        fitted[name] = (fit_classifier(of_train, references.label, references.readouts.share), of_test)
    scores: dict[str, Any] = {}
    for name, (model, x) in fitted.items():
        risk = model.risk(x)
        scores[name] = summary(label, risk) | _within(label, risk, inputs.strata)
    counts = {"rows": len(label), "factual": int(label.sum()), "hallucinated": int((1 - label).sum())}
    model, x = fitted["bundle"]
    own = model.risk(x)
    return {
        **counts,
        "signals": rounded(scores),
        "at_threshold": rounded(at_threshold(label, own, threshold)),
        "calibration": rounded(recalibration(label, inputs.group, own[None])),
    }


def rounded(value: Any) -> Any:
    """The same structure with floats rounded to six decimals."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(float(value), 6) if isinstance(value, float | np.floating) else value


Columns = list[tuple[str, tuple[Floats, Floats]]]  # signal, its columns of the training [n_train, k] and test rows


def probe_columns(
    readouts: Readouts,
    group: Index,
    first_token: Floats,
    train: Index,
    test: Index,
    seed: int,
    options: FitOptions,
    prompts: PromptLabels | None = None,
) -> tuple[float, Columns]:
    """C and the probes' signals in one outer fold, fitted on ``train``, whose own columns are out of fold.

    group [n], first_token [n, 2].  Without ``prompts`` none of ``CONTEXT_NAMES``.
    """
    label = readouts.label
    c = choose_c(readouts, group, train, seed, options, must=False).c  # the run's own C was chosen before
    inner = cross_fit(readouts, group, train, c, options.inner_folds, (seed,), options, several=True)
    fit = refit(readouts, train, test, c, options, blank=True, several=True)
    weights = fit_layer_weights(
        inner.unit_norm[0], label[train], group[train],
        folds=options.inner_folds, seed=seed, share=readouts.share_of(train),
    )  # fmt: skip
    trajectories: dict[LogitScale, tuple[Floats, Floats]] = {
        "unit_norm": (inner.unit_norm[0], fit.trajectory),
        "standardized": (inner.standardized[0], fit.standardized),
        "weighted": (weights.out_of_fold, fit.trajectory * weights.weight),
    }
    kinds: list[tuple[Signal, ...]] = [(DEPTH_MEAN,), FUSED]
    context = None
    if prompts is not None:
        least = options.inner_folds  # fewer than ``LEAST``, which all rows have where the run reads the context
        found = fit_passage_probes(readouts, prompts, group, train, options.inner_folds, seed, options, least)
        context = None if found is None else context_columns(found, prompts)
        if context is not None:
            read = CONTEXT_SIGNALS[: context.shape[1]]
            kinds += [(DEPTH_MEAN, *read), (*FUSED, *read)]
    columns: Columns = []
    for names in kinds:
        for scale, sides in trajectories.items():
            of_train, of_test = (
                signal_matrix(side, first_token[rows], names, None if context is None else context[rows])
                for side, rows in zip(sides, (train, test), strict=True)
            )
            columns.append((name_of(names, scale), (of_train, of_test)))
    for place, heads in enumerate(SEVERAL):
        sides = (inner.several[0, place][:, None], fit.several[place][:, None])
        columns.append((f"depth_mean_{heads}_heads", sides))
    columns.append(("best_head", (inner.best_head[0][:, None], fit.trajectory[:, [fit.best_layer]])))
    layer = int(np.argmax([readouts.auroc(train, column) for column in inner.unit_norm[0].T]))
    columns.append(("best_layer", (inner.unit_norm[0][:, [layer]], fit.trajectory[:, [layer]])))
    return c, columns


def _signals(inputs: Inputs, train: Index, test: Index, seed: int, options: FitOptions) -> tuple[float, Columns]:
    """C and every signal in ``NAMES``."""
    c, columns = probe_columns(
        inputs.readouts, inputs.group, inputs.first_token, train, test, seed, options, inputs.prompts
    )
    return c, columns + [(name, (column[train], column[test])) for name, column in _references(inputs)]


def _references(inputs: Inputs) -> Iterator[tuple[str, Floats]]:
    """Signals without a probe, one column [n, 1] each."""
    yield "first_token_max_prob", inputs.first_token[:, [0]]  # its logarithm, which ranks the same
    yield "first_token_entropy", inputs.first_token[:, [1]]
    yield "prompt_length", inputs.prompt_tokens[:, None].astype(np.float64)


def _within(label: NDArray[np.int64], risk: Floats, strata: Sequence[Mapping[str, str]]) -> dict[str, float | None]:
    """AUROC within each stratification whose keys every row has."""
    scores = {}
    for name, keys in STRATA.items():
        if all(key in row for row in strata for key in keys):
            cells = [tuple(row[key] for key in keys) for row in strata]
            scores[f"auroc_within_{name}"] = within_stratum_auroc(label, risk, cells)
    return scores


def _summarise(records: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Mean and standard deviation over folds and seeds; None for a score that no fold has."""
    table: dict[str, Any] = {}
    for name in dict.fromkeys((*SUMMARY, *(key for record in records for key in record))):
        values = [value for record in records if (value := record.get(name)) is not None]
        table[name] = _over(values) if values else None
    return table


def _over(values: Sequence[float]) -> dict[str, float]:
    return dict(rounded({"mean": float(np.mean(values)), "std": float(np.std(values))}))


def layer_aurocs(label: NDArray[np.int64], trajectory: Floats) -> tuple[Floats, Floats]:
    """AUROC of each layer's logit and of the depth mean, by seed: [seeds, n, m] -> [seeds, m], [seeds]."""
    layers = np.array([[risk_auroc(label, -column) for column in of_seed.T] for of_seed in trajectory])
    return layers, np.array([risk_auroc(label, -of_seed.mean(axis=1)) for of_seed in trajectory])
