"""What a run leaves in its bundle beside the probes: evaluation.json, the training record, the plots' numbers.

Pure bookkeeping: nothing here fits or reads a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import service
from probes_store.manifest import TrainingRecord
from service.data.collection import Collection
from service.data.labels import Labelled
from service.data.training_rows import Dataset
from service.fitting.calibration import OutOfFold, scale_shift
from service.fitting.fit import Floats
from service.fitting.nested_cv import Evaluation, Inputs, layer_aurocs, name_of, rounded
from service.trainer.options import TrainOptions
from service.trainer.plots import PlotData
from service.trainer.publish import Fitted


@dataclass(frozen=True, eq=False)
class Part:
    """One data file, collected and labelled."""

    dataset: Dataset
    collection: Collection
    labelled: Labelled
    inputs: Inputs


def document_of(
    options: TrainOptions,
    part: Part,
    crossed: OutOfFold,
    own: Floats,
    search: dict[str, float | None],
    nested: Evaluation | None,
) -> dict[str, Any]:
    """evaluation.json."""
    label, trajectory = part.inputs.label, crossed.trajectory(options.logit_scale)
    layers, means = layer_aurocs(label, trajectory)
    document: dict[str, Any] = {
        "data": {"file": options.data.name, "digest": part.dataset.digest} | counts(part),
        "c_search": rounded(search),
        "out_of_fold": {
            "layer_auroc": rounded(layers.mean(axis=0).tolist()),
            "depth_mean_auroc": rounded(float(means.mean())),
            "depth_mean_cross_fitted_and_refitted": rounded(
                scale_shift(trajectory.mean(axis=-1), own.mean(axis=-1), label)
            ),
        },
        "signal_of_the_bundle": name_of(options.signals, options.logit_scale),
    }
    if nested is not None:
        document["cross_validation"] = nested.document
    return document


def counts(part: Part) -> dict[str, int]:
    """Rows by class, as the manifest and the evaluation name them."""
    label = part.labelled.label
    return {
        "rows": len(part.dataset),
        "factual": int(label.sum()),
        "hallucinated": int(len(label) - label.sum()),
        "left_out": sum(part.labelled.left_out.values()),
        "groups": len(np.unique(part.inputs.group)),
    }


def training_record(options: TrainOptions, part: Part, c: float) -> TrainingRecord:
    """What the manifest says of the training."""
    return TrainingRecord(
        data_digest=part.dataset.digest,
        labels=options.labels,
        judge=options.judge.described() if options.labels == "generate" else None,
        seeds=options.seeds,
        folds=options.folds,
        c=c,
        c_grid=tuple(sorted(set(options.c_grid))) if options.c == "auto" else (),
        class_balance=options.class_balance,
        hallutracer_version=service.__version__,
        **counts(part),
    )


def plot_data(
    options: TrainOptions, inputs: Inputs, crossed: OutOfFold, fitted: Fitted, nested: Evaluation | None
) -> PlotData:
    """What the card's plots show."""
    layers, means = layer_aurocs(inputs.label, crossed.trajectory(options.logit_scale))
    risks: dict[str, Floats] = {}
    if nested is not None:  # the first seed's folds; together they cover every row once
        own = name_of(options.signals, options.logit_scale)
        shown = {"depth mean": name_of(options.signals[:1], options.logit_scale)}
        shown |= {"depth mean and first token": own} if len(options.signals) > 1 else {}
        shown |= {"first-token probability": "first_token_max_prob", "prompt length": "prompt_length"}
        risks = {text: nested.risk[name][0] for text, name in shown.items()}
    unit = "distance from the probe's plane" if options.logit_scale == "unit_norm" else "within-class std"
    return PlotData(
        inputs.label,
        risks,
        fitted.trajectory_mean,
        fitted.trajectory_std,
        layers,
        means,
        logit_unit=unit,
        ranking_only=("prompt length",),
    )
