"""Evaluates by nested cross-validation: outer folds x seeds, with every choice made inside the
training side.

``nested_cv`` runs any fit over the outer folds.  The trainer uses ``evaluate``: standardisation,
head selection, C and the classifier see only the training side of a fold, and the classifier is
fitted on an inner cross-fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder
from tqdm import tqdm

from probes_store.manifest import Signal
from probes_store.records import CONTEXT_SIGNALS
from service.fitting import DEPTH_MEAN, FIRST_TOKEN, LogitScale, decisions
from service.fitting import scores as measures
from service.fitting.context import PromptLabels, context_columns, fit_passage_probes
from service.fitting.estimator import (
    DepthMeanProbe,
    FinalClassifier,
    extra_signals,
    fit_classifier,
    signal_matrix,
)
from service.fitting.folds import OuterFold, outer_folds
from service.fitting.probes import Floats, Index, Readouts
from service.fitting.recalibration import cox_line
from service.readout import Site

FUSED: tuple[Signal, ...] = (DEPTH_MEAN, *FIRST_TOKEN)
SCALES: tuple[LogitScale, ...] = get_args(LogitScale)
CONTEXT_NAMES = tuple(
    f"{kind}_{scale}" for kind in ("context", "fused_context") for scale in SCALES
)  # with passages
KIND_AND_FORM = "kind_and_form"  # a reference that needs no model
NAMES = (
    *(f"{kind}_{scale}" for kind in ("depth_mean", "fused") for scale in SCALES),
    *CONTEXT_NAMES,
    "best_head",
    "best_layer",
    "first_token_max_prob",
    "first_token_entropy",
    "prompt_length",
    KIND_AND_FORM,
)
CLOSED_BOOK = "kind_x_form_closed_book"  # pairs of rows without a passage
STRATA = {
    CLOSED_BOOK: ("kind", "form"),
    "kind": ("kind",),
    "kind_x_template": ("kind", "template"),
    "form": ("form",),
}
WITH_INTERVALS = (CLOSED_BOOK, "kind")
PROTOCOL = {
    "splits": "stratified, group-disjoint; scaling, head, C, classifier from the training side",
    "mean_and_std": "over the test sides of all folds and seeds; population standard deviation",
    "ece": (
        f"{measures.ECE_BINS} equal-mass bins of each test side; small test sides make it larger"
    ),
    "ece_pooled": (
        "the same over all rows, each with the risk of the fold that tested it; mean over seeds"
    ),
    "calibration_debiased": (
        "root of the squared error over the same bins of all rows, less what chance adds "
        "(Kumar et al. 2019); mean over seeds"
    ),
    "calibration_slope": (
        "of the log odds of hallucinated over those of the risk, with calibration_intercept; 1 and"
        " 0 are perfect (Cox 1958); over all rows, mean over seeds; null where risks separate the"
        " classes"
    ),
    "low_and_high": (
        "95 % interval of the mean, over training and test rows: jackknife over groups with the"
        " fits held fixed, its variance times folds / (folds - 1) for what other training rows"
        " would change"
    ),
    "within_stratum": "AUROC among rows of one stratum, strata weighted by their pairs of rows",
    f"within_{CLOSED_BOOK}": "the same in kinds and forms of conversation, rows without a passage",
    KIND_AND_FORM: (
        "logistic regression on kind and form of conversation, one column for each value: no model"
        " is read"
    ),
    "e_aurc": (
        "area under the curve of wrong among answered over coverage, less that of a perfect order"
    ),
    "caught_at": (
        "share of the wrong answers that is withheld where so many percent of the right ones are"
    ),
    "best_head": "the head with the best training AUROC (the ITI rule)",
    "best_layer": "the layer whose selected head has the best inner out-of-fold AUROC",
}


def scales_at(site: Site) -> tuple[LogitScale, ...]:
    """Return the rules of ``logit_scale`` at a site; residual streams have too many columns for
    "joint"."""
    return (
        SCALES
        if site is Site.ATTENTION_HEAD
        else tuple(scale for scale in SCALES if scale != "joint")
    )


class FoldScores(NamedTuple):
    """The scores of one method on the test rows of one outer fold."""

    seed: int
    fold: int
    test: Index
    score: Floats  # [n_test] rises with hallucination


def nested_cv(
    outer: Iterable[OuterFold], fit: Callable[[OuterFold], Mapping[str, Floats]]
) -> dict[str, list[FoldScores]]:
    """Call ``fit`` on each outer fold and return its test scores by name, in the order of the
    folds.

    ``fit`` must learn from ``fold.train`` only; it returns the scores of ``fold.test`` [n_test] by
    each method."""
    scores: dict[str, list[FoldScores]] = {}
    for fold in outer:
        for name, score in fit(fold).items():
            scores.setdefault(name, []).append(FoldScores(fold.seed, fold.fold, fold.test, score))
    return scores


def test_sides(scores: Sequence[FoldScores]) -> measures.Tests:
    """Return the rows of each test side with their scores."""
    return [(fold.test, fold.score) for fold in scores]


def by_row(scores: Sequence[FoldScores], rows: int) -> Floats:
    """Return the scores in the order of the data, [seeds, n]; each row has that of the fold that
    tested it."""
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
    prompts: PromptLabels | None = None  # None: context signals are not evaluated
    # [n] what figures are by; None: by the label that the fits learn
    truth: NDArray[np.int64] | None = None

    @property
    def label(self) -> NDArray[np.int64]:
        """What figures are by, [n]: 1 factual, 0 hallucinated."""
        return self.readouts.label if self.truth is None else self.truth

    def classifier(self, signals: Floats, rows: Index) -> FinalClassifier:
        """Return a classifier that learnt from signals [r, k] of these rows [r]."""
        return fit_classifier(signals, self.readouts.label[rows], self.readouts.soft(rows))

    def stratum_of_rows(self) -> dict[str, Index]:
        """Return each row's stratum [n], for each name in ``STRATA`` whose keys every row has.

        In ``CLOSED_BOOK`` each row with a passage is a stratum of its own, so it is in no pair."""
        strata = {}
        for name, keys in STRATA.items():
            if all(key in row for row in self.strata for key in keys):
                [strata[name]] = measures.number_together(map(itemgetter(*keys), self.strata))
        if CLOSED_BOOK in strata and self.prompts is not None:
            passage = np.flatnonzero(self.prompts.passage)
            strata[CLOSED_BOOK][passage] = len(self.strata) + passage
        return strata


@dataclass(frozen=True, eq=False)
class Evaluation:
    """``cross_validation`` of evaluation.json, and the risks behind it."""

    document: dict[str, Any]
    risk: dict[str, Floats]  # signal -> [seeds, n], each row's risk by a fold that never saw it
    tests: dict[str, measures.Tests]  # signal -> test sides of all folds: rows and their risks


def name_of(signals: Sequence[str], scale: LogitScale) -> str:
    """Return the name in ``NAMES`` of a bundle with these signals."""
    fused = bool(set(FIRST_TOKEN) & set(signals))
    context = bool(set(CONTEXT_SIGNALS) & set(signals))
    kind = {(False, False): "depth_mean", (True, False): "fused", (False, True): "context"}
    return f"{kind.get((fused, context), 'fused_context')}_{scale}"


def evaluate(
    inputs: Inputs, *, folds: int, seeds: Sequence[int], probe: DepthMeanProbe, context: bool = True
) -> Evaluation:
    """Return the nested cross-validation of every signal in ``NAMES``; ``probe`` gives the options.

    Without ``context`` the signals of the context are left out.  Raises TrainingError."""
    label, group = inputs.label, inputs.group
    strata = inputs.stratum_of_rows()
    records: list[dict[str, Any]] = []

    def fit(fold: OuterFold) -> dict[str, Floats]:
        train, test = fold.train, fold.test
        prompts = inputs.prompts if context else None
        c, signals = probe_columns(
            inputs.readouts, group, inputs.first_token, train, test, fold.seed, probe, prompts
        )
        signals += [(name, (column[train], column[test])) for name, column in _references(inputs)]
        record: dict[str, Any] = {
            "seed": fold.seed,
            "fold": fold.fold,
            "c": c,
            "rows": len(test),
            "signals": {},
        }
        risks = {
            name: inputs.classifier(of_train, train).risk(of_test)
            for name, (of_train, of_test) in signals
        }
        risks |= _without_a_model(inputs, train, inputs, test)
        of_test_rows = {name: stratum[test] for name, stratum in strata.items()}
        record["signals"] = {
            name: scores_of(label[test], risk, of_test_rows) for name, risk in risks.items()
        }
        records.append(record)
        return risks

    outer = outer_folds(label, group, folds=folds, seeds=seeds)
    scores = nested_cv(tqdm(outer, "evaluation", mininterval=1), fit)
    # A fold whose training side has too few passages lacks the signals of ``CONTEXT_NAMES``: then
    # leave them all out.
    names = [name for name in NAMES if len(scores.get(name, ())) == len(outer)]
    risks = {name: by_row(scores[name], len(label)) for name in names}
    tests = {name: test_sides(scores[name]) for name in names}
    signals: dict[str, Any] = {}
    for name in names:
        signals[name] = row = _summarise([record["signals"][name] for record in records])
        row["ece_pooled"] = _over([measures.ece(label, risk) for risk in risks[name]])
        row["calibration_debiased"] = _over(
            [measures.debiased_calibration_error(label, risk) for risk in risks[name]]
        )
        row |= rounded(cox_line(label, group, risks[name], folds))
        row["auroc"] |= rounded(measures.auroc_interval(label, group, tests[name])._asdict())
        for within in WITH_INTERVALS:
            if row.get(key := f"auroc_within_{within}") is not None:
                ends = measures.auroc_interval(label, group, tests[name], strata[within])
                row[key] = {"mean": row[key]["mean"]} | rounded(ends._asdict())
    protocol = {"folds": folds, "inner_folds": probe.inner_folds, "seeds": list(seeds), **PROTOCOL}
    return Evaluation(
        {"protocol": protocol, "signals": signals, "folds": rounded(records)}, risks, tests
    )


def held_out(
    inputs: Inputs,
    classifier: FinalClassifier,
    threshold: float,
    signals: Floats,
    references: Inputs,
) -> dict[str, Any]:
    """Return scores on held-out rows: of the bundle's classifier on its signals [n, k], and of
    reference signals.

    The latter are fitted on all training rows (``references``)."""
    label, factual = inputs.label, int(inputs.label.sum())
    every = np.arange(len(references.label))
    risks = {"bundle": classifier.risk(signals)}
    for (name, of_train), (_, of_test) in zip(
        _references(references), _references(inputs), strict=True
    ):
        risks[name] = references.classifier(of_train, every).risk(of_test)
    risks |= _without_a_model(references, every, inputs, np.arange(len(label)))
    strata = inputs.stratum_of_rows()
    scores = {name: scores_of(label, risk, strata) for name, risk in risks.items()}
    gate = decisions.at_threshold(label, risks["bundle"], threshold)
    calibration = cox_line(label, inputs.group, risks["bundle"][None])
    counts = {"rows": len(label), "factual": factual, "hallucinated": len(label) - factual}
    return {
        **counts,
        **rounded({"signals": scores, "at_threshold": gate, "calibration": calibration}),
    }


def rounded(value: Any) -> Any:
    """Return the same structure with floats rounded to six decimals."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(float(value), 6) if isinstance(value, float | np.floating) else value


Columns = list[
    tuple[str, tuple[Floats, Floats]]
]  # signal, its columns on the training [n_train, k] and test rows


def probe_columns(
    readouts: Readouts,
    group: Index,
    first_token: Floats,
    train: Index,
    test: Index,
    seed: int,
    probe: DepthMeanProbe,
    prompts: PromptLabels | None = None,
) -> tuple[float, Columns]:
    """Return C and the probes' signals in one outer fold, fitted on ``train``, whose columns are
    out of fold.

    group [n], first_token [n, 2]; ``probe`` gives the options.  Without ``prompts`` none of
    ``CONTEXT_NAMES``."""
    folds = probe.inner_folds
    inner = clone(probe).set_params(folds=folds, seeds=(seed,), logit_scale="unit_norm")
    scales = scales_at(readouts.file.site)
    inner.fit_readouts(readouts, group, train, test, scales=scales, fold=True)
    kinds: list[tuple[Signal, ...]] = [(DEPTH_MEAN,), FUSED]
    context = None
    # A training side may have fewer groups than ``LEAST``, which holds for all rows, so ``folds``
    # groups are enough.
    if prompts and (passages := fit_passage_probes(readouts, prompts, group, train, inner, folds)):
        context = context_columns(passages, prompts)
        read = CONTEXT_SIGNALS[: context.shape[1]]
        kinds += [(DEPTH_MEAN, *read), (*FUSED, *read)]
    columns: Columns = []
    for names in kinds:
        extra = extra_signals(names, first_token, context)
        for scale in scales:
            scaled = inner.scaled_[scale]
            sides = (scaled.out_of_fold[0], train), (scaled.trajectory, test)
            of_train, of_test = (
                signal_matrix(side, None if extra is None else extra[rows]) for side, rows in sides
            )
            columns.append((name_of(names, scale), (of_train, of_test)))
    crossed, fit = inner.cross_fit_, inner.probes_
    columns.append(
        ("best_head", (crossed.best_head[0][:, None], fit.trajectory[:, [fit.best_layer]]))
    )
    of_layers = crossed.unit_norm[0]
    layer = int(
        np.argmax([measures.auroc(readouts.label[train], column) for column in of_layers.T])
    )
    columns.append(("best_layer", (of_layers[:, [layer]], fit.trajectory[:, [layer]])))
    return inner.C_, columns


def _references(inputs: Inputs) -> Iterator[tuple[str, Floats]]:
    """Yield the signals that need no probe, one column [n, 1] each."""
    yield "first_token_max_prob", inputs.first_token[:, [0]]  # the logarithm, which ranks the same
    yield "first_token_entropy", inputs.first_token[:, [1]]
    yield "prompt_length", inputs.prompt_tokens[:, None].astype(np.float64)


def _without_a_model(
    fitted: Inputs, train: Index, inputs: Inputs, rows: Index
) -> dict[str, Floats]:
    """Return the risk of ``rows`` of ``inputs`` by kind and form alone, fitted on ``train`` rows of
    ``fitted``.

    Empty unless all rows have a kind, or all have a form."""
    named = {"kind", "form"}.intersection(*fitted.strata, *inputs.strata)
    keys = [key for key in ("kind", "form") if key in named]
    if not keys:
        return {}
    columns = OneHotEncoder(handle_unknown="ignore")
    of_train = columns.fit_transform(_values(fitted, train, keys))
    of_rows = columns.transform(_values(inputs, rows, keys))
    model = LogisticRegression().fit(of_train, fitted.readouts.label[train])
    factual: Floats = model.predict_proba(of_rows)[:, 1]
    return {KIND_AND_FORM: 1 - factual}


def _values(inputs: Inputs, rows: Index, keys: Sequence[str]) -> NDArray[np.object_]:
    """Return the values of these keys of the rows' strata, [rows, keys]."""
    strata = [inputs.strata[row] for row in rows.tolist()]
    return np.array([list(map(itemgetter(key), strata)) for key in keys], np.object_).T


def scores_of(
    label: NDArray[np.int64], risk: Floats, strata: Mapping[str, Index]
) -> dict[str, float | None]:
    """Return every score of one signal's risks [n], and the AUROC within each of the ``strata``,
    [n] each."""
    return {
        **measures.summary(label, risk),
        **decisions.decisions(label, risk),
        **{
            f"auroc_within_{name}": measures.within_stratum_auroc(label, risk, stratum.tolist())
            for name, stratum in strata.items()
        },
    }


def _summarise(records: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Return mean and standard deviation over folds and seeds; None for a score that no fold
    has."""
    table: dict[str, Any] = {}
    for name in dict.fromkeys((*measures.SUMMARY, *(key for record in records for key in record))):
        of_folds = [record.get(name) for record in records]
        values = [value for value in of_folds if value is not None]
        table[name] = _over(values) if values else None
    return table


def _over(values: Sequence[float]) -> dict[str, float]:
    return dict(rounded({"mean": float(np.mean(values)), "std": float(np.std(values))}))


def layer_aurocs(label: NDArray[np.int64], trajectory: Floats) -> tuple[Floats, Floats]:
    """Return the AUROC of each layer's logit and of the depth mean, by seed: [seeds, n, m] ->
    [seeds, m], [seeds]."""
    aurocs = [measures.risk_auroc(label, -column) for of_seed in trajectory for column in of_seed.T]
    layers = np.array(aurocs).reshape(len(trajectory), -1)
    return layers, np.array(
        [measures.risk_auroc(label, -of_seed.mean(axis=1)) for of_seed in trajectory]
    )
