"""What a run records beside the probes: evaluation.json, the training record and the plots' numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

import service
from probes_store.context import CONTEXT_SIGNALS
from probes_store.manifest import Signal, TrainingRecord
from service.data.training_rows import Dataset
from service.fitting.calibration import scale_shift
from service.fitting.fit import Floats
from service.fitting.group_statistics import effective_groups, largest_share
from service.fitting.label_shift import Source
from service.fitting.nested_cv import Evaluation, Inputs, layer_aurocs, name_of, rounded
from service.fitting.options import FIRST_TOKEN
from service.fitting.promise import Profile
from service.trainer.by_form import FORM
from service.trainer.ledger import Marks
from service.trainer.options import TrainOptions
from service.trainer.plots import PlotData
from service.trainer.prepare import PreparedData


def training_record(options: TrainOptions, data: PreparedData, c: float) -> TrainingRecord:
    """The manifest's record of the training run."""
    counts = data.counts
    del counts["others"]  # only the evaluation names them
    return TrainingRecord(
        data_digest=data.dataset.origin.file_digest,
        labels=options.answers,
        judge=options.judged_by if options.answers == "generate" else None,
        seeds=options.shuffles,
        folds=options.folds,
        c=c,
        c_grid=tuple(sorted(set(options.c_grid))) if options.c is None else (),
        class_balance=options.class_balance,
        hallutracer_version=service.__version__,
        **counts,
    )


def evaluation_document(
    options: TrainOptions,
    signals: Sequence[Signal],
    data: PreparedData,
    out_of_fold: Floats,
    refitted: Floats,
    search: dict[str, float | None],
    nested: Evaluation | None,
    gates: Profile,
    risks: Floats,
) -> dict[str, Any]:
    """evaluation.json of a bundle with these ``signals``.

    ``out_of_fold`` [seeds, n, m] and ``refitted`` [n, m] are trajectories of the training rows.
    ``search`` is the out-of-fold AUROC by value of C; ``gates`` is what thresholds would answer, by the
    out-of-fold ``risks`` [n].
    """
    layers, means = layer_aurocs(data.inputs.label, out_of_fold)
    shift = scale_shift(out_of_fold.mean(axis=-1), refitted.mean(axis=-1), data.inputs.label)
    document: dict[str, Any] = {
        "data": {
            "file": options.file.name,
            "digest": data.dataset.origin.file_digest,
            "effective_groups": rounded(effective_groups(data.inputs.group)),
            "largest_group_share": rounded(largest_share(data.inputs.group)),
        }
        | data.counts
        | _forms(data.dataset)
        | _soft_labels(options, data),
        "c_search": rounded(search),
        "out_of_fold": {
            "layer_auroc": rounded(layers.mean(axis=0).tolist()),
            "depth_mean_auroc": rounded(float(means.mean())),
            "depth_mean_cross_fitted_and_refitted": rounded(shift),
            "gates": asdict(gates),
            "risks": risks_document(risks, data.inputs.label, data.inputs.group),
        },
        "rows_seen": {"training": Marks.of(data.dataset).document()},
        "signal_of_the_bundle": name_of(signals, options.logit_scale),
    }
    if nested is not None:
        document["cross_validation"] = nested.document
    return document


def _forms(dataset: Dataset) -> dict[str, Any]:
    """How many rows of each form were read, where every row names its form."""
    names = [row.strata.get(FORM) for row in dataset.rows]
    return {} if None in names else {"forms": dict(sorted(Counter(names).items()))}


def risks_document(risk: Floats, label: NDArray[np.integer], group: NDArray[np.integer]) -> dict[str, str]:
    """Risk, class and group of each row [n]: texts, since lists would take a line for each number."""
    numbers = np.unique(group, return_inverse=True)[1]
    return {
        "risk": " ".join(f"{value:.6f}" for value in risk),
        "hallucinated": " ".join(str(1 - int(value)) for value in label),
        "group": " ".join(map(str, numbers.tolist())),
    }


def read_risks(document: Mapping[str, str]) -> Source:
    """What ``risks_document`` wrote."""
    return Source(
        np.array(document["risk"].split(), np.float64),
        1 - np.array(document["hallucinated"].split(), np.int64),
        np.array(document["group"].split(), np.int64),
    )


def _soft_labels(options: TrainOptions, data: PreparedData) -> dict[str, Any]:
    """What the probes were fitted on, where that is not the labels that they are measured by."""
    share = data.inputs.readouts.share
    if share is None:
        return {}
    mixed = float(np.mean((share > 0) & (share < 1)))
    return {
        "soft_labels": {
            "samples": options.samples,
            "temperature": options.temperature,
            "right": rounded(float(share.mean())),
            "rows_with_right_and_wrong_answers": rounded(mixed),
            "right_where_the_greedy_answer_is": rounded(float(share[data.inputs.label == 1].mean())),
        }
    }


def plot_data(
    options: TrainOptions,
    signals: Sequence[Signal],
    inputs: Inputs,
    out_of_fold: Floats,
    class_mean: Floats,
    class_std: Floats,
    nested: Evaluation | None,
    threshold: float,
) -> PlotData:
    """The numbers of the plots on the card of a bundle with these ``signals``.

    Trajectories [seeds, n, m], their mean and deviation by class [2, m].
    """
    layers, means = layer_aurocs(inputs.label, out_of_fold)
    own = _in_words(signals)
    risks: dict[str, Floats] = {}
    if nested is not None:  # the first seed's folds; together they cover every row once
        shown = {"depth mean": name_of(options.reads[:1], options.logit_scale)}
        shown |= {own: name_of(signals, options.logit_scale)}
        shown |= {"first-token probability": "first_token_max_prob", "prompt length": "prompt_length"}
        risks = {text: nested.risk[name][0] for text, name in shown.items()}
    units = {"unit_norm": "distance from the probe's plane", "standardized": "within-class std", "weighted": "weighted"}
    unit = units[options.logit_scale]
    return PlotData(
        inputs.label,
        inputs.group,
        risks,
        class_mean,
        class_std,
        layers,
        means,
        logit_unit=unit,
        own=own,
        threshold=threshold,
        ranking_only=("prompt length",),
    )


def _in_words(signals: Sequence[Signal]) -> str:
    groups = {"first token": FIRST_TOKEN, "passage": CONTEXT_SIGNALS}
    read = (words for words, names in groups.items() if any(name in signals for name in names))
    return " and ".join(["depth mean", *read])
