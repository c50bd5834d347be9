"""Rows that a published bundle has never seen: reading them, scoring them, and publishing the bundle anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle, BundleDraft
from probes_store.manifest import Manifest
from probes_store.store import Store
from probes_store.tensors import Golden
from probes_store.uncertainty import OUTSIDE
from service.data.labels import check_answers
from service.data.training_rows import Dataset, check_all_apply, read_dataset
from service.errors import TrainingError
from service.judging.uncertainty import distance
from service.readout import Probes, Site
from service.risk import served_risk
from service.trainer.options import NewRowsOptions
from service.trainer.prepare import PreparedData, trajectories
from service.trainer.publish import served_signals

QUESTION = "question.json"  # in the folder of the rows: what they were asked, once a label was looked at


@dataclass(frozen=True, eq=False)
class NewRows:
    """A bundle and a file of rows for it; whether they are new to it is not checked yet."""

    bundle: Bundle
    evaluation: dict[str, Any]
    dataset: Dataset
    options: NewRowsOptions  # filled in

    @property
    def folder(self) -> str:
        """Of the rows, in the run folder: calibration and recalibration share it, so that neither hides the other."""
        return f"calibration-{self.dataset.digest.removeprefix('sha256:')[:12]}"


def read_new_rows(bundle: Bundle, options: NewRowsOptions, store: Store, *, folds: int | None = None) -> NewRows:
    """Check everything that needs no model; ``folds`` as in ``read_dataset``.

    Raises DataError, TrainingError, and what the store raises.
    """
    options = options.of(bundle.manifest.name, bundle.manifest.training)
    if options.new_name == bundle.manifest.name and not store.is_own(bundle.path):
        raise TrainingError(
            f"{bundle.reference} is not in {store.where}, and a version there would hide it: publish under another "
            "name (--new-name)",
            param="name",
        )
    dataset = read_dataset(options.file, options.answers, folds=folds)
    check_all_apply(dataset)
    if options.answers == "generate":
        check_answers(dataset, options)
    return NewRows(bundle, bundle.evaluation(), dataset, options)


def risks_of(bundle: Bundle, data: PreparedData, *, withhold_outside: bool = False) -> NDArray[np.float64]:
    """The bundle's risk of each labelled row, as it would be served: [n].

    With ``withhold_outside`` 1 for a prompt outside training, where a policy that says nothing withholds these
    (``Scorer.withholds_outside``).
    """
    manifest, inputs, layers = bundle.manifest, data.inputs, bundle.manifest.model.num_layers
    logits = trajectories(inputs.readouts, Probes.all_of(Site(manifest.readout.site), bundle.probes))
    signals = served_signals(
        logits, inputs.first_token, inputs.prompt_tokens, manifest.signals, manifest.context, layers
    )
    found = served_risk(signals, manifest)
    if not (withhold_outside and manifest.tells_outside):
        return found
    mean, whitening = bundle.probes.reference_mean, bundle.probes.reference_whitening
    assert mean is not None, "its reader wants the tensors with the record"
    assert whitening is not None, "its reader wants the tensors with the record"
    away = distance(logits, mean, whitening)
    return np.where(away >= OUTSIDE, 1.0, found)


def draft_of(
    bundle: Bundle,
    manifest: Manifest,
    evaluation: dict[str, Any],
    card: str,
    *,
    golden: Golden | None = None,
    plots: Mapping[str, bytes] | None = None,
) -> BundleDraft:
    """The bundle's probes and plots with another manifest, evaluation and card; ``plots`` are further ones."""
    own = {
        name.removeprefix("plots/"): (bundle.path / name).read_bytes() for name in bundle.manifest.files if "/" in name
    }
    return BundleDraft(manifest, bundle.probes, golden or bundle.golden, evaluation, card, own | dict(plots or {}))
