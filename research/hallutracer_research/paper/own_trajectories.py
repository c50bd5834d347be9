"""Labelled trajectories of a bundle's own probes on a file of rows: what ``diagnose`` reads, without preparing it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.paper.diagnose import LabelledSet
from hallutracer_research.paper.diagnostics.chen_qin import MIN_ROWS
from probes_store.bundle import Bundle
from service.data.labels import check_answers
from service.data.rows import prompt_mark
from service.data.run_folder import locked
from service.data.training_rows import Dataset, check_all_apply, read_dataset
from service.engines.base import Engine
from service.errors import DataError
from service.fitting.fit import Readouts
from service.prompts import as_prompt_format
from service.readout import Probes, Site
from service.scoring import Scorer
from service.trainer.new_rows import Marks, group_mark
from service.trainer.options import NewRowsOptions
from service.trainer.prepare import PreparedData, prepare, trajectories

MOST_BYTES = 1 << 31  # of readouts in memory; the sections that need them are left out above it


@dataclass(frozen=True, eq=False)
class OwnSet:
    """The set, and what is to be said of it."""

    labelled: LabelledSet
    remarks: tuple[str, ...]


def own_trajectories(bundle: Bundle, options: NewRowsOptions, engine_factory: Callable[[], Engine]) -> OwnSet:
    """Run every row through the model, label it, and read it with the bundle's probes; resumes in the run folder.

    The file is checked before the model is loaded.  Raises DataError, TrainingError, RunMismatch and BundleRefused.
    """
    check_three_layers(bundle)
    manifest = bundle.manifest
    site = Site(manifest.readout.site)
    options = options.of(manifest.name, manifest.training)
    dataset = read_dataset(options.file, options.answers, folds=MIN_ROWS)
    check_all_apply(dataset)
    if options.answers == "generate":
        check_answers(dataset, options)
    folder = f"diagnosis-{dataset.digest.removeprefix('sha256:')[:12]}"
    with locked(options.folder), closing(engine_factory()) as engine:
        Scorer(engine, bundle)  # this model's bundle, and it reads what it should
        prompt_format = as_prompt_format(manifest.prompt_format)
        prepared = prepare(engine, dataset, options, prompt_format, folder, sites=[site], folds=MIN_ROWS)
        return _read(bundle, prepared, Probes.of(site, bundle.probes))


def _read(bundle: Bundle, prepared: PreparedData, probes: Probes) -> OwnSet:
    remarks = list(_seen(bundle, prepared.dataset))
    if left := prepared.labelled.left_out:
        remarks.append("left out: " + ", ".join(f"{count} {why}" for why, count in left.items()))
    inputs = prepared.inputs
    readout = _readouts(inputs.readouts, probes)
    if readout is None:
        remarks.append("the readouts take more than 2 GiB: the sections on geometry and class means are left out")
    labelled = LabelledSet(
        trajectory=trajectories(inputs.readouts, [probes]),
        label=inputs.label,
        group=np.unique(inputs.group, return_inverse=True)[1].astype(np.int64),
        readout=readout,
        direction=None if readout is None else np.asarray(probes.direction, np.float64),
    )
    return OwnSet(labelled, tuple(remarks))


def _readouts(readouts: Readouts, probes: Probes) -> NDArray[np.floating] | None:
    """What the probes read, [n, m, d]; None where that is too much for the memory."""
    layers, dim = probes.direction.shape
    if len(readouts.index) * layers * dim * 4 > MOST_BYTES:
        return None
    columns = [readouts.file.head(layer, head)[readouts.index] for layer, head in enumerate(probes.head.tolist())]
    return np.stack(columns, axis=1)


def _seen(bundle: Bundle, dataset: Dataset) -> list[str]:
    """A remark where probes are diagnosed on the rows that they were fitted on, which flatters them."""
    record = bundle.evaluation().get("rows_seen", {}).get("training")
    if record is None:
        if dataset.digest == bundle.manifest.training.data_digest:
            return [f"these are the rows that {bundle.reference} was fitted on: everything here is too good"]
        return [f"{bundle.reference} does not record its training rows: make sure that these are others"]
    marks = Marks.read(record)
    seen = sum(
        prompt_mark(row.prompt_digest) in marks.prompts or bool(row.group and group_mark(row.group) in marks.groups)
        for row in dataset.rows
    )
    if not seen:
        return []
    return [f"{bundle.reference} was fitted on {seen:,} of the {len(dataset):,} rows: everything here is too good"]


def check_three_layers(bundle: Bundle) -> None:
    """Raise DataError for a model whose trajectories are too short to have a shape."""
    if bundle.manifest.model.num_layers < 3:
        raise DataError(bundle.reference, ["its model has fewer than 3 layers: a trajectory of two has no shape"])
