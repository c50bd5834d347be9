"""Labelled trajectories, from an ``.npz`` or by a bundle's own probes on a file of rows, and their
diagnostics.  An ``.npz`` with trajectory [N, m] and label [N] (1 factual, 0 hallucinated); optional
group [N], readout [N, m, d] and direction [m, d].  Reads arrays only, never pickles."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.documents import Row
from hallutracer_research.paper.diagnostics import geometry
from hallutracer_research.paper.diagnostics.classes import (
    MIN_ROWS,
    as_document,
    chen_qin_by_group,
    middle_layers,
    one_row_a_group,
)
from hallutracer_research.paper.diagnostics.features import trajectory_features
from hallutracer_research.paper.diagnostics.increments import decompose, kappa_table
from hallutracer_research.paper.diagnostics.shape import (
    Shrinkage,
    fisher_gap,
    snr_table,
    variance_components,
)
from probes_store.bundle import Bundle
from service.data.labels import check_answers
from service.data.rows import prompt_mark
from service.data.run_folder import locked
from service.data.training_rows import Dataset, check_all_apply, read_dataset
from service.engines.base import Engine
from service.errors import DataError
from service.fitting.probes import Floats, Index
from service.fitting.scores import auroc
from service.readout import Probes, Site
from service.scoring import Scorer
from service.trainer.new_rows import Marks, NewRows, group_mark
from service.trainer.options import NewRowsOptions
from service.trainer.prepare import trajectories

NAMES = ("trajectory", "label", "group", "readout", "direction")
ALPHA = 0.05  # of the layer-wise Chen-Qin tests
# of a number's size: diagnostics take fourth powers and sum them over rows, in float64
LIMIT = 1e30
MOST_BYTES = 1 << 31  # of readouts in memory; the sections that need them are left out above it


@dataclass(frozen=True, eq=False)
class LabelledSet:
    """What a file held, checked: N rows, m >= 3 layers, both classes, finite numbers."""

    trajectory: Floats  # [N, m]
    label: Index  # [N]
    group: Index | None  # [N] numbered from 0, None where the file has none
    readout: NDArray[np.floating] | None  # [N, m, d], as stored
    direction: Floats | None  # [m, d]
    remarks: tuple[str, ...] = ()  # what is to be said of it


def read_set(path: Path | str) -> LabelledSet:
    """Read and check a file.  Raises DataError, which names every array that does not fit."""
    arrays = _arrays(Path(path))
    for check in (_not_numbers, _misfits, _not_unit):  # each where those before are passed
        if problems := list(check(arrays)):
            raise DataError(str(path), problems)
    direction, ignored = arrays.get("direction"), [name for name in arrays if name not in NAMES]
    return LabelledSet(
        trajectory=arrays["trajectory"].astype(np.float64),
        label=arrays["label"].astype(np.int64),
        group=_numbered(arrays["group"]) if "group" in arrays else None,
        readout=arrays.get("readout"),
        direction=direction.astype(np.float64) if direction is not None else None,
        remarks=(f"ignored arrays: {', '.join(ignored)}",) if ignored else (),
    )


def _numbered(group: NDArray[Any]) -> Index:
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def diagnose_set(data: LabelledSet, shrinkage: Shrinkage = None) -> Row:
    """Return the diagnostics as a JSON document.  Keys: fisher, snr, variance, features (AUROC of
    each, factual
    positive: below 0.5 the feature falls with factuality); with readouts also geometry and
    chen_qin.  A number that has no value is None, and the section's ``notes`` say why.  Raises
    TrainingError where the covariance of the layers is singular (see ``fisher_gap``)."""
    variance = as_document(variance_components(data.trajectory, data.label))
    groups = int(data.group.max()) + 1 if data.group is not None else len(data.label)
    if groups < len(data.label):
        # Nothing here resamples, so groups change no number but the Chen-Qin test's; they change
        # what one is worth.
        variance["groups"] = groups
        variance["notes"].append(
            f"{len(data.label)} rows in {groups} groups: p-values and unbiased estimates here, but"
            " for the Chen-Qin test's, treat rows as independent, which flatters them where rows"
            " of a group are alike"
        )
    document: Row = {
        "fisher": as_document(fisher_gap(data.trajectory, data.label, shrinkage)),
        "snr": as_document(snr_table(data.trajectory, data.label)),
        "variance": variance,
        "features": {
            name: auroc(data.label, feature)
            for name, feature in trajectory_features(data.trajectory).items()
        },
    }
    if data.readout is not None:
        document["geometry"] = _geometry(data, data.readout)
        document["chen_qin"] = _chen_qin(data, data.readout)
    return document


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    cure = "make it with numpy.savez(FILE, trajectory=..., label=...)"
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, Mapping):
            raise DataError(
                str(path), [f"one bare array, not a .npz archive of named ones: {cure}"]
            )
        with cast(Any, loaded):
            arrays = {}
            for name in loaded:
                try:
                    arrays[name] = np.asarray(loaded[name])
                except ValueError as error:
                    reason = (
                        "store it as numbers, or as fixed-width text"
                        if "pickle" in str(error)
                        else str(error)
                    )
                    raise DataError(
                        str(path), [f"{name}: cannot be read without unpickling: {reason}"]
                    ) from error
            return arrays
    except (ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        reason = "no NumPy file" if "pickle" in str(error) else str(error)
        raise DataError(str(path), [f"not a readable .npz archive ({reason}): {cure}"]) from error


def _not_numbers(arrays: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    for name in NAMES[:2]:
        if name not in arrays:
            yield f"{name}: missing; trajectory [N, m] and label [N] are needed"
    for name, array in arrays.items():
        if name in NAMES and name != "group" and array.dtype.kind not in "biuf":
            yield f"{name}: holds {array.dtype}, numbers are needed"


def _misfits(arrays: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    """Yield what is wrong with the shapes and values of arrays of numbers."""
    trajectory, label = arrays["trajectory"], arrays["label"]
    if trajectory.ndim != 2 or trajectory.shape[1] < 3:
        yield f"trajectory: shape {list(trajectory.shape)}, [N, m] with at least 3 layers is needed"
        return
    n, m = trajectory.shape
    if label.shape != (n,):
        yield f"label: shape {list(label.shape)}, [{n}] is needed, one per trajectory"
    elif not np.isin(label, (0, 1)).all():
        shown = np.unique(label[~np.isin(label, (0, 1))])[:5].tolist()
        yield f"label: holds {shown}; 1 (factual) and 0 (hallucinated) are the only labels"
    else:
        for value, name in ((1, "1 (factual)"), (0, "0 (hallucinated)")):
            if (count := int(np.sum(label == value))) < MIN_ROWS:
                yield f"label: {count} rows are {name}, at least {MIN_ROWS} of each are needed"
    if "group" in arrays and arrays["group"].shape != (n,):
        yield f"group: shape {list(arrays['group'].shape)}, [{n}] is needed, one per trajectory"
    readout, direction = arrays.get("readout"), arrays.get("direction")
    if readout is not None and (readout.ndim != 3 or readout.shape[:2] != (n, m)):
        yield f"readout: shape {list(readout.shape)}, [{n}, {m}, d] is needed to go with trajectory"
    elif readout is not None and readout.shape[2] < 2:
        yield f"readout: d = {readout.shape[2]}, at least 2 is needed"
    if direction is not None and readout is None:
        yield (
            "direction: is of use with readout [N, m, d] only; add readout, or leave direction out"
        )
    elif direction is not None and readout is not None:
        wanted = [m, *readout.shape[2:]]
        if list(direction.shape) != wanted:
            yield f"direction: shape {list(direction.shape)}, {wanted} is needed with readout"
    for name in ("trajectory", "readout", "direction"):
        array = arrays.get(name, np.zeros(0))
        if bad := int(np.sum(~np.isfinite(array))):
            yield f"{name}: {bad} numbers are not finite (NaN or infinite); leave their rows out"
        elif array.size and max(abs(float(array.max())), abs(float(array.min()))) > LIMIT:
            yield (
                f"{name}: {int(np.sum(np.abs(array) > LIMIT))} numbers are larger than {LIMIT:g} in"
                " size, and their powers overflow; divide the whole array by a constant, or leave"
                " their rows out"
            )


def _not_unit(arrays: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    """Yield the direction that is farthest from unit length, where it is not of it."""
    if "direction" in arrays:
        norms = np.linalg.norm(arrays["direction"].astype(np.float64), axis=1)
        worst = int(np.argmax(np.abs(norms - 1.0)))
        if abs(norms[worst] - 1.0) > 1e-3:
            length = f"{norms[worst]:.4g}"
            yield f"direction: row {worst} has length {length}; divide each row by its length"


def _geometry(data: LabelledSet, readout: NDArray[np.floating]) -> Row:
    """Return the geometry section: readouts of layer l + 1 are taken for layer l's head too (the
    readout gauge)."""
    n, m, dim = readout.shape
    v = data.direction
    layers = []
    projected, crossed = np.empty((n, m)), np.empty((n, m - 1))
    for layer in range(m):
        x = readout[:, layer].astype(np.float64)
        layers.append(geometry.layer_geometry(x, data.label, None if v is None else v[layer]))
        if v is not None:  # without biases, which move no spread and no gap
            projected[:, layer] = x @ v[layer]
            if layer:
                crossed[:, layer - 1] = x @ v[layer - 1]
    if v is None:
        return geometry.readout_geometry(layers, (), dim).document()
    parts = decompose(projected, crossed)
    whole = geometry.readout_geometry(
        layers, geometry.transition_geometry(parts, v, data.label), dim
    )
    document = whole.document()
    document["kappa"] = as_document(kappa_table(parts.w, data.label))
    document["isotropy"] = as_document(geometry.isotropy(v, whole.middle["stable_rank"]))
    document["notes"].append(
        "W, K, kappa and isotropy take readout l + 1 as the same head's as readout l: exact for the"
        " residual stream and for one head fixed through all layers, a convention (the paper's"
        " readout gauge) for heads chosen by layer"
    )
    # A bias is one number per layer: anything else between v . a and the trajectory says that they
    # do not match.
    spread = (data.trajectory - projected).std(axis=0)
    if off := int(np.sum(spread > 1e-3 * data.trajectory.std(axis=0))):
        document["notes"].append(
            f"at {off} of {m} layers the trajectory is not direction . readout plus a bias (another"
            " head, scale or position?): W and K are of direction . readout, the other sections of"
            " the trajectory"
        )
    return document


def _chen_qin(data: LabelledSet, readout: NDArray[np.floating]) -> Row:
    group = np.arange(len(data.label)) if data.group is None else data.group
    by_layer = (readout[:, layer].astype(np.float64) for layer in range(readout.shape[1]))
    tests = [chen_qin_by_group(x, data.label, group) for x in by_layer]
    rows, notes = len(one_row_a_group(group)), []
    if rows < len(group):
        notes = [f"one row of each group, {rows} of {len(group)}: the test is for independent rows"]
    elif data.group is None:
        notes = ["p-values are of independent rows: where a question has several, give their group"]
    significant = [test.p_value is not None and test.p_value < ALPHA for test in tests]
    middle = middle_layers(len(tests))
    numbers: Row = {}
    for name in ("statistic", "energy_ratio", "p_value", "z"):
        numbers[name] = [getattr(test, name) for test in tests]
    return numbers | {
        "layers_significant": sum(significant),
        "layers": len(tests),
        "middle_significant": sum(significant[layer] for layer in middle),
        "middle_layers": len(middle),
        "alpha": ALPHA,
        "notes": (
            notes
            + [f"layer {layer}: {note}" for layer, test in enumerate(tests) for note in test.notes]
        ),
    }


def own_trajectories(
    bundle: Bundle, options: NewRowsOptions, engine_factory: Callable[[], Engine]
) -> LabelledSet:
    """Run every row through the model, label it, and read it with the bundle's probes; resumes in
    the run folder.  The file is checked before the model is loaded.  Raises DataError (also for a
    model whose trajectories are too short to have a shape), TrainingError, RunMismatch and
    BundleRefused."""
    manifest = bundle.manifest
    if manifest.model.num_layers < 3:
        raise DataError(
            bundle.reference,
            ["its model has fewer than 3 layers: a trajectory of two has no shape"],
        )
    site = Site(manifest.readout.site)
    options = options.of(manifest.name, manifest.training)
    dataset = read_dataset(options.file, options.answers, folds=MIN_ROWS)
    check_all_apply(dataset)
    if options.answers == "generate":
        check_answers(dataset, options)
    folder = f"diagnosis-{dataset.digest.removeprefix('sha256:')[:12]}"
    with locked(options.folder), closing(engine_factory()) as engine:
        Scorer(engine, bundle)  # this model's bundle, and it reads what it should
        rows = NewRows(bundle, bundle.evaluation(), dataset, options)
        prepared = rows.prepare(engine, folds=MIN_ROWS, name=folder)
        probes, inputs = Probes.of(site, bundle.probes), prepared.inputs
        remarks = _seen(bundle, prepared.dataset)
        if left := prepared.labelled.left_out:
            remarks.append(
                "left out: " + ", ".join(f"{count} {why}" for why, count in left.items())
            )
        readouts = inputs.readouts
        readout = direction = None
        if len(readouts.index) * probes.direction.size * 4 <= MOST_BYTES:
            heads = [
                readouts.file.head(layer, head)[readouts.index]
                for layer, head in enumerate(probes.head.tolist())
            ]
            readout, direction = np.stack(heads, axis=1), np.asarray(probes.direction, np.float64)
        else:
            remarks.append(
                "the readouts take more than 2 GiB: the sections on geometry and class means are"
                " left out"
            )
        trajectory = trajectories(readouts, [probes])
        return LabelledSet(
            trajectory, inputs.label, _numbered(inputs.group), readout, direction, tuple(remarks)
        )


def _seen(bundle: Bundle, dataset: Dataset) -> list[str]:
    """Return a remark where probes are diagnosed on the rows that they were fitted on, which
    flatters them."""
    record, name = bundle.evaluation().get("rows_seen", {}).get("training"), bundle.reference
    if record is None:
        if dataset.digest == bundle.manifest.training.data_digest:
            return [f"these are the rows that {name} was fitted on: everything here is too good"]
        return [f"{name} does not record its training rows: make sure that these are others"]
    marks = Marks.read(record)
    seen = sum(
        prompt_mark(row.prompt_digest) in marks.prompts
        or bool(row.group and group_mark(row.group) in marks.groups)
        for row in dataset.rows
    )
    of_rows = f"{seen:,} of the {len(dataset):,} rows"
    return [f"{name} was fitted on {of_rows}: everything here is too good"] if seen else []
