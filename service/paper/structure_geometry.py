"""Where probes lie among the readouts (Tab. validation_results), on the folds of the first seed.

Each fold's probes look at the rows of its test side, and the folds are averaged.  One layer of one fold is in memory
at a time.  Fits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from service.errors import TrainingError
from service.evaluation.page import figures
from service.evaluation.page.report_data import Figure
from service.evaluation.set_run import SetRun
from service.evaluation.splits import Split
from service.evaluation.tables import Cell, Column, Table
from service.fitting.fit import Floats, Index
from service.paper.cells import Row, by_set, published_columns
from service.paper.diagnostics.chen_qin import ChenQin, chen_qin
from service.paper.diagnostics.classes import mean_or_none, middle_layers
from service.paper.diagnostics.geometry import (
    ReadoutGeometry,
    expected_cosine,
    layer_geometry,
    readout_geometry,
    transition_geometry,
)
from service.paper.diagnostics.increments import decompose

ALPHA: Final = 0.05  # of the layer-wise Chen-Qin tests
BY_FOLD: Final = "Each fold's probes on its test side, mean over the folds of the first seed."
_COLUMNS: Final = {  # the table's column -> the diagnostic's name
    "cohen_d": "cohen_d", "dcov": "distance_correlation", "alignment": "alignment", "v2_top90": "v2_top90",
    "energy": "energy_fraction", "adjacent_cos": "adjacent_cos", "mean_shift": "mean_shift_norm",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Fold:
    """One fold's geometry, and Chen and Qin's test at each layer."""

    geometry: ReadoutGeometry
    tests: tuple[ChenQin, ...]


def geometry(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. validation_results: separation, alignment, energy, neighbouring cosines, and the probe-free test."""

    def row(run: SetRun, notes: list[str]) -> Row:
        folds = [_fold(run, split) for split in run.folds(0)]
        cells: dict[str, Cell] = {
            key: mean_defined([one.geometry.middle[name] for one in folds], key, notes)
            for key, name in _COLUMNS.items()
        }
        drift, whole = (
            mean_defined([one.geometry.middle[name] for one in folds]) for name in ("cohen_d", "increment_d")
        )
        cells["r_w"] = drift / whole if drift is not None and whole else None
        middle = middle_layers(len(folds[0].tests))
        tests = [[one.tests[layer] for layer in middle] for one in folds]
        ratios = [test.energy_ratio for one in tests for test in one]
        cells["energy_ratio"] = mean_defined(ratios, "energy_ratio", notes)
        counts = [sum(test.p_value is not None and test.p_value < ALPHA for test in one) for one in tests]
        cells["cq_significant"] = f"{np.mean(counts):.1f}/{len(middle)}"
        if undefined := sum(test.p_value is None for one in tests for test in one):
            notes.append(f"{undefined} of {len(ratios)} Chen-Qin tests have no p-value and count as not significant")
        dim = folds[0].geometry.dim
        p_values = [one.geometry.cos_p_value for one in folds]
        found = [value for value in p_values if value is not None]
        shown = tuple(_COLUMNS.values())
        notes += [note for one in folds for note in one.geometry.notes if note.startswith(shown)]
        return cells | {
            "expected_cos": expected_cosine(dim),
            "cos_p": float(np.median(found)) if found else None,
            "random_energy": 1.0 / dim,
        }

    notes = [
        BY_FOLD,
        "The paper defines neither r_w nor the norm of dCov: here the effect size of W over that of the whole "
        "increment, and the distance correlation of W and K.",
        "Neighbouring layers may select different heads: their probes' cosine is taken in head coordinates (the "
        "readout gauge). Tab. isotropy-results fixes the head.",
        "The norm of the mean shift is not corrected for noise, which enlarges it on a small test side.",
    ]
    return [
        Table(
            name="geometry",
            title="Structural hypotheses",
            columns=[
                *published_columns(
                    "tab:validation_results", "cohen_d", "r_w", "dcov", "alignment", "v2_top90", "energy"
                ),
                Column("random_energy", "1/d", "percent", 4),
                *published_columns("tab:validation_results", "adjacent_cos")[1:],
                Column("expected_cos", "√(2/(πd))", "number", 2),
                Column("cos_p", "|cos| t-test p, median", "p_value"),
                *published_columns("tab:validation_results", "mean_shift", "energy_ratio", "cq_significant")[1:],
            ],
            rows=by_set(runs, row, notes),
            label="tab:validation_results",
            caption="Averages over the middle 60 % of layers. Class separation of the intrinsic increment W, its ratio "
            "and dependence; alignment of probe and mean shift, the probe's share of variance beside a random "
            "direction's, neighbouring probes' cosine beside its expectation; and, without any probe, mean-shift norm, "
            f"Chen-Qin energy ratio and how many layers it finds significant at {ALPHA:g} (mean over folds).",
            notes=notes,
        )
    ]


def geometry_figures(runs: Sequence[SetRun]) -> list[Figure]:
    """``figures.geometry`` of every set whose numbers are all defined (the table's notes say of which they are not)."""
    found = []
    for run in runs:
        try:
            cosines, energy, dim = geometry_by_layer(run)
        except TrainingError:
            continue  # the table has the reason
        if np.isfinite(energy).all():
            one = figures.geometry(cosines, energy, dim)
            found.append(Figure(one.name, f"{run.title}: {one.caption}", f"{run.title}: {one.alt}", one.svg))
    return found


def geometry_by_layer(run: SetRun) -> tuple[Floats, Floats, int]:
    """Adjacent |cos| [m - 1], the probe's share of variance [m] (NaN where a fold has none), d; means over folds."""
    folds = [_fold(run, split).geometry for split in run.folds(0)]
    cosines = np.array([[one.adjacent_cos for one in fold.transitions] for fold in folds])
    energy = np.array(
        [[np.nan if one.energy_fraction is None else one.energy_fraction for one in fold.layers] for fold in folds]
    )
    return cosines.mean(axis=0), energy.mean(axis=0), folds[0].dim


def readout_of(run: SetRun, layer: int, head: int, rows: Index) -> Floats:
    """One head's readouts at one layer, [r, d]."""
    heads = run.gathered.material.heads
    dim = heads.file.geometry.dim(heads.file.site)
    return heads.file.layer(layer)[heads.index[rows], head * dim : (head + 1) * dim].astype(np.float64)


def _fold(run: SetRun, split: Split) -> _Fold:
    label, head = run.label[split.test], split.every.selected
    direction, _ = split.every.of(head)
    layers, tests = [], []
    for layer, selected in enumerate(head.tolist()):
        x = readout_of(run, layer, selected, split.test)
        layers.append(layer_geometry(x, label, direction[layer]))
        tests.append(chen_qin(x, label))
    increments = decompose(split.test_trajectory, split.test_crossed)
    transitions = transition_geometry(increments, direction, label)
    return _Fold(readout_geometry(layers, transitions, direction.shape[1]), tuple(tests))


def mean_defined(values: Sequence[float | None], key: str = "", notes: list[str] | None = None) -> float | None:
    """Mean of the defined ones; says under ``key`` where some are not."""
    if notes is not None and (missing := sum(value is None for value in values)):
        notes.append(f"{key} has no value in {missing} of {len(values)} folds or layers")
    return mean_or_none([np.nan if value is None else value for value in values])
