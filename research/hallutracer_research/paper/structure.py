"""The paper's tables on level, shape and increments of the trajectories (Prop. snr, Thm.
uniform-optimal, Eq. icc), and on probe directions and readouts.  Trajectories are the out-of-fold
ones of the first seed; the folds' probes differ, which adds to the spread within classes.  On
readouts each fold's probes are applied to its test side, and the folds of the first seed averaged;
isotropy takes the first fold and one head.  One layer of one fold is in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from hallutracer_research.evaluation.page import Cell
from hallutracer_research.evaluation.results import SetResult, spread
from hallutracer_research.evaluation.splits import Split
from hallutracer_research.paper.diagnostics import geometry, increments
from hallutracer_research.paper.diagnostics.classes import (
    chen_qin_by_group,
    mean_or_none,
    middle_layers,
)
from hallutracer_research.paper.diagnostics.increments import PARTS, Part
from hallutracer_research.paper.diagnostics.shape import fisher_gap, snr_table, variance_components
from hallutracer_research.paper.tables import Row, attributes, specs
from service.errors import TrainingError
from service.fitting.probes import Floats, Index
from service.fitting.scores import auroc


def _fisher(result: SetResult, notes: list[str]) -> Row:
    """A singular covariance of the layers is shrunk (Ledoit-Wolf); a note and a column give the
    amount."""
    trajectory = result.trajectory(0)
    try:
        gap = fisher_gap(trajectory, result.label)
    except TrainingError as error:
        gap = fisher_gap(
            trajectory, result.label, "ledoit_wolf"
        )  # raises again what shrinking does not cure
        notes.append(
            "the covariance was shrunk towards a multiple of the identity (Ledoit-Wolf), for:"
            f" {error}"
        )
    return attributes(gap, notes)


def _variance(result: SetResult, notes: list[str]) -> Row:
    trajectory = result.trajectory(0)
    m = trajectory.shape[1]
    cells = attributes(variance_components(trajectory, result.label), notes)
    if m < 10:
        notes.append(f"{m} layers: too few for a residual correlation at lag 8")
    acf = cells["residual_acf"]
    return {**cells, "layers": m, "acf_1": acf[0], "acf_8": acf[7] if len(acf) > 7 else None}


def _kappa(result: SetResult, notes: list[str]) -> Row:
    trajectory, crossed = result.trajectory(), result.by_row(lambda split: split.test_crossed)
    table = increments.kappa_table(increments.decompose(trajectory, crossed).w, result.label)
    cells = attributes(table, notes)
    return {**cells, "layers": trajectory.shape[1], "factual_larger": table.factual_wider}


def _snr(result: SetResult, notes: list[str]) -> Row:
    return attributes(snr_table(result.trajectory(0), result.label), notes)


TRAJECTORY = specs({"snr": _snr, "fisher": _fisher, "variance": _variance, "kappa": _kappa})
ALPHA = 0.05  # of the layer-wise Chen-Qin tests
PERMUTATIONS = 200
_DIAGNOSTICS = {  # the table's column -> the diagnostic's name
    "cohen_d": "cohen_d",
    "dcov": "distance_correlation",
    "alignment": "alignment",
    "v2_top90": "v2_top90",
    "energy": "energy_fraction",
    "adjacent_cos": "adjacent_cos",
    "mean_shift": "mean_shift_norm",
}


def _geometry(result: SetResult, notes: list[str]) -> Row:
    folds = [_fold_geometry(result, split) for split in result.folds(0)]
    cells: dict[str, Cell] = {}
    for key, name in _DIAGNOSTICS.items():
        cells[key] = _mean_defined([fold.middle[name] for fold in folds], key, notes)
    drift = mean_or_none([fold.middle["cohen_d"] for fold in folds])
    whole = mean_or_none([fold.middle["increment_d"] for fold in folds])
    cells["r_w"] = drift / whole if drift is not None and whole else None
    middle = middle_layers(len(folds[0].layers))

    tests = []
    for split in result.folds(0):
        label, group = result.label[split.test], result.group[split.test]
        for layer in middle:
            x = _selected_readout(result, split, layer)
            tests.append(chen_qin_by_group(x, label, group))
    ratios = [test.energy_ratio for test in tests]
    cells["energy_ratio"] = _mean_defined(ratios, "energy_ratio", notes)
    significant = sum(test.p_value is not None and test.p_value < ALPHA for test in tests)
    cells["cq_significant"] = f"{significant / len(folds):.1f}/{len(middle)}"
    if undefined := sum(test.p_value is None for test in tests):
        notes.append(
            f"{undefined} of {len(ratios)} Chen-Qin tests have no p-value and count as not"
            " significant"
        )
    p_values = [fold.cos_p_value for fold in folds if fold.cos_p_value is not None]
    shown = tuple(_DIAGNOSTICS.values())
    notes += [note for fold in folds for note in fold.notes if note.startswith(shown)]
    return cells | {
        "expected_cos": geometry.expected_cosine(folds[0].dim),
        "cos_p": float(np.median(p_values)) if p_values else None,
        "random_energy": 1.0 / folds[0].dim,
    }


def _isotropy(result: SetResult, notes: list[str]) -> Row:
    split = result.folds(0)[0]
    probes, label = split.probes, result.label[split.test]
    complete = np.flatnonzero((probes.auroc > 0).all(axis=0))
    if not len(complete):
        raise TrainingError("no head has a probe at every layer: give a larger C")
    head = int(complete[probes.auroc[:, complete].mean(axis=0).argmax()])
    direction = probes.direction[:, head]
    middle = list(middle_layers(len(direction)))
    layers = []
    for layer in middle:
        x = readout_of(result, layer, head, split.test)
        layers.append(geometry.layer_geometry(x, label, direction[layer]))
    ranks = [layer.stable_rank for layer in layers if layer.stable_rank is not None]
    tests = geometry.isotropy(direction, float(np.mean(ranks)) if ranks else None)
    notes += tests.notes
    return {
        **vars(tests),
        "layers": len(direction),
        "head_dim": direction.shape[1],
        "head": head,
        "auc": spread([auroc(label, probes.logits[:, layer, head]) for layer in middle]),
        "effective_rank": spread(ranks) if ranks else None,
        "energy": _mean_defined([layer.energy_fraction for layer in layers], "energy", notes),
        "adjacent_cos": tests.mean_abs_cos,
        "cos_ambient": tests.expected_ambient,
        "cos_rank": tests.expected_rank,
        "ks_p": tests.ks_rank_p,
    }


def _k_split(result: SetResult, notes: list[str]) -> Row:
    """Return the cells of both tables on the parts of the readout change."""
    folds = [_fold_k(result, split) for split in result.folds(0)]

    means = {}
    for name in PARTS:
        columns = zip(*(fold.parts[name] for fold in folds), strict=True)
        means[name] = Part(*(float(np.mean(column)) for column in columns))
    whole, null = means["k"].signal - means["k"].null, means["k"].null
    if whole <= 0:
        notes.append("gaps are left out: K itself tells no more than permuted labels")
    notes.append(
        f"the parts add up to K within {max(fold.reconstruction_error for fold in folds):.1e} of"
        " their size"
    )
    cells: dict[str, Cell] = {"null": null}
    for name, part in means.items():
        cells[f"signal_{name}"] = part.signal
        cells[f"gap_{name}"] = (part.signal - part.null) / whole if whole > 0 else None
        cells[f"var_{name}"] = part.variance
    return cells | {"cov_metric_head": float(np.mean([fold.cov_metric_head for fold in folds]))}


READOUTS = specs(
    {
        "geometry": _geometry,
        "isotropy": _isotropy,
        "k-split": _k_split,
        "k-split-variance": _k_split,
    },
    alpha=ALPHA,
    permutations=PERMUTATIONS,
)


def geometry_by_layer(result: SetResult) -> tuple[Floats, Floats, int]:
    """Return adjacent |cos| [m - 1], the probe's share of variance [m] (NaN where a fold has none),
    d; fold means."""
    folds = [_fold_geometry(result, split) for split in result.folds(0)]
    cosines = [list(map(attrgetter("adjacent_cos"), fold.transitions)) for fold in folds]
    energy = [list(map(attrgetter("energy_fraction"), fold.layers)) for fold in folds]
    share = np.array(energy, np.float64).mean(axis=0)  # None becomes NaN
    return np.array(cosines).mean(axis=0), share, folds[0].dim


def readout_of(result: SetResult, layer: int, head: int, rows: Index) -> Floats:
    """Return one head's readouts at one layer, [r, d]."""
    heads = result.prepared.inputs.heads
    return heads.file.head(layer, head)[heads.index[rows]].astype(np.float64)


def _selected_readout(result: SetResult, split: Split, layer: int) -> Floats:
    return readout_of(result, layer, int(split.probes.selected[layer]), split.test)


def _fold_geometry(result: SetResult, split: Split) -> geometry.ReadoutGeometry:
    label = result.label[split.test]
    direction, _ = split.probes.of(split.probes.selected)
    layers = [
        geometry.layer_geometry(_selected_readout(result, split, layer), label, v)
        for layer, v in enumerate(direction)
    ]
    parts = increments.decompose(split.test_trajectory, split.test_crossed)
    return geometry.readout_geometry(
        layers, geometry.transition_geometry(parts, direction, label), direction.shape[1]
    )


def _fold_k(result: SetResult, split: Split) -> increments.KTable:
    """Return the split of K on the test side; z is the standardisation of the selected heads'
    training rows."""
    head = split.probes.selected
    direction, bias = split.probes.of(head)
    mean, std = np.empty_like(direction), np.empty_like(direction)
    for layer, selected in enumerate(head.tolist()):
        x = readout_of(result, layer, selected, split.train)
        mean[layer], std[layer] = x.mean(axis=0), x.std(axis=0)
    probes = increments.StandardizedProbes.of(direction, bias, mean, np.where(std > 0, std, 1.0))
    across = increments.crossings(
        lambda layer, head: readout_of(result, layer, head, split.test), head.tolist()
    )
    parts = increments.split_readout_change(across, probes, direction, bias)
    return increments.k_table(parts, result.label[split.test], PERMUTATIONS, split.fold)


def _mean_defined(values: Sequence[float | None], key: str, notes: list[str]) -> float | None:
    """Return the mean of the defined ones; a note under ``key`` counts the others."""
    if missing := sum(value is None for value in values):
        notes.append(f"{key} has no value in {missing} of {len(values)} folds or layers")
    return mean_or_none(values)
