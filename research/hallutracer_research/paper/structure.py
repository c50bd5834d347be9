"""The paper's tables on level, shape and increments of the trajectories (Prop. snr, Thm. uniform-optimal, Eq. icc), and
on probe directions and readouts: geometry, isotropy, the parts of the readout change.

Trajectories are the out-of-fold ones of the first seed.  The folds' probes differ, which adds to the spread within the
classes.  On readouts each fold's probes are applied to its test side, and the folds of the first seed are averaged;
isotropy takes the first fold and one head for all layers.  One layer of one fold is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from hallutracer_research.evaluation.results import SetResult, spread
from hallutracer_research.evaluation.splits import Split
from hallutracer_research.evaluation.tables import Cell, Column
from hallutracer_research.paper.diagnostics import geometry, increments
from hallutracer_research.paper.diagnostics.classes import ChenQin, chen_qin_by_group, mean_or_none, middle_layers
from hallutracer_research.paper.diagnostics.increments import PARTS
from hallutracer_research.paper.diagnostics.shape import fisher_gap, snr_table, variance_components
from hallutracer_research.paper.tables import Row, TableSpec, attributes
from service.errors import TrainingError
from service.fitting.probes import Floats, Index
from service.fitting.scores import auroc

OUT_OF_FOLD: Final = "Out-of-fold trajectories of the first seed; the folds' probes differ."


def _snr(result: SetResult, notes: list[str]) -> Row:
    return attributes(snr_table(result.trajectory(0), result.label), notes)


def _fisher(result: SetResult, notes: list[str]) -> Row:
    """A singular covariance of the layers is shrunk (Ledoit-Wolf); a note and a column give the amount."""
    trajectory = result.trajectory(0)
    try:
        gap = fisher_gap(trajectory, result.label)
    except TrainingError as error:
        gap = fisher_gap(trajectory, result.label, "ledoit_wolf")  # raises again what shrinking does not cure
        notes.append(f"the covariance was shrunk towards a multiple of the identity (Ledoit-Wolf), for: {error}")
    return attributes(gap, notes)


def _variance(result: SetResult, notes: list[str]) -> Row:
    trajectory = result.trajectory(0)
    m = trajectory.shape[1]
    components = variance_components(trajectory, result.label)
    cells = attributes(components, notes)
    if m < 10:
        notes.append(f"{m} layers: too few for a residual correlation at lag 8")
    acf = components.residual_acf
    return {**cells, "layers": m, "acf_1": acf[0], "acf_8": acf[7] if len(acf) > 7 else None}


def _kappa(result: SetResult, notes: list[str]) -> Row:
    trajectory = result.trajectory(0)
    crossed = np.full((len(trajectory), trajectory.shape[1] - 1), np.nan)
    for split in result.folds(0):
        crossed[split.test] = split.test_crossed
    table = increments.kappa_table(increments.decompose(trajectory, crossed).w, result.label)
    return {**attributes(table, notes), "layers": trajectory.shape[1], "factual_larger": table.factual_wider}


SNR: Final = TableSpec(
    "snr", "Signal-to-noise ratio of slope against mean", "tab:snr_verification",
    ("rho", "gamma", Column("gamma_plugin", "γ, plug-in variances", "number", 2), "r_plugin", "r_empirical", "eta"),
    "Divergence ratio ρ; origin penalty γ by moments and from the paper's plug-in variances; the ratio of SNRs "
    "predicted from the trajectory covariance, measured, and measured over predicted.",
    _snr,
    (OUT_OF_FOLD, "η is 1 by algebra where the classes are of one size: no test of the theory there."),
)  # fmt: skip
FISHER: Final = TableSpec(
    "fisher", "Fisher gap", "tab:fisher-gap",
    (
        "r_fisher", "theta", "chi", "t",
        Column("r_fisher_direct", "R_Fisher, direct", "number", 3),
        Column("r_fisher_unbiased", "R_Fisher, unbiased", "number", 3),
        Column("cauchy_schwarz", "t / (√θ χ)", "number", 3),
        Column("shrinkage", "Shrinkage", "number", 4),
    ),
    "SNR of the Fisher-optimal linear score over that of the depth mean; level-shape coupling θ, shape energy χ, cross "
    "term t; the same ratio computed directly and without optimism; t over its bound.",
    _fisher,
    (
        OUT_OF_FOLD,
        "R_Fisher is estimated on the rows it is computed from, where layers of pure noise seem to help: it is above 1 "
        "even where the mean is optimal. The unbiased column takes that out, for normal classes of one covariance.",
    ),
)  # fmt: skip
VARIANCE: Final = TableSpec(
    "variance", "Variance components of the trajectory", "tab:variance-decomp",
    (
        "layers", "icc", "icc_factual", "icc_hallucinated", "acf_1", "acf_8",
        Column("acf_floor", "ACF of independent residuals", "number", 2),
        Column("icc_unbiased", "ICC, unbiased", "number", 2),
    ),
    "Share of the within-class variance due to the sample's common level (ICC; all, factual, hallucinated), and the "
    "mean correlation of what is left between layers at a lag (factual class). A row's residuals sum to zero, so that "
    "independent ones have the ACF −1 / (m − 1). The paper's ICC counts part of the layers' noise as level; the "
    "unbiased one does not.",
    _variance,
    (OUT_OF_FOLD,),
)  # fmt: skip
KAPPA: Final = TableSpec(
    "kappa", "Directional variance ratio of the increment", "tab:kappa-calibration",
    (
        "layers", "kappa_mean", "kappa_median", "kappa_p95", "effect_size", "worst_case_snr", "degradation",
        "factual_larger",
    ),
    "Over the middle 60 % of layers: κ, the larger class variance of W over the smaller (mean, median, 95th "
    "percentile); mean pooled effect size, mean worst-case SNR, its relative degradation; share of layers where the "
    "factual class varies more.",
    _kappa,
    (OUT_OF_FOLD,),
)  # fmt: skip
TRAJECTORY: Final = (SNR, FISHER, VARIANCE, KAPPA)
ALPHA: Final = 0.05  # of the layer-wise Chen-Qin tests
PERMUTATIONS: Final = 200
BY_FOLD: Final = "Each fold's probes on its test side, mean over the folds of the first seed."
_DIAGNOSTICS: Final = {  # the table's column -> the diagnostic's name
    "cohen_d": "cohen_d", "dcov": "distance_correlation", "alignment": "alignment", "v2_top90": "v2_top90",
    "energy": "energy_fraction", "adjacent_cos": "adjacent_cos", "mean_shift": "mean_shift_norm",
}  # fmt: skip


def _geometry(result: SetResult, notes: list[str]) -> Row:
    folds = [_fold_geometry(result, split) for split in result.folds(0)]
    cells: dict[str, Cell] = {
        key: _mean_defined([fold.middle[name] for fold in folds], key, notes) for key, name in _DIAGNOSTICS.items()
    }
    drift, whole = (mean_or_none([fold.middle[name] for fold in folds]) for name in ("cohen_d", "increment_d"))
    cells["r_w"] = drift / whole if drift is not None and whole else None
    middle = middle_layers(len(folds[0].layers))

    def tested(split: Split, layer: int) -> ChenQin:
        x = _selected_readout(result, split, layer)
        return chen_qin_by_group(x, result.label[split.test], result.group[split.test])

    tests = [[tested(split, layer) for layer in middle] for split in result.folds(0)]
    ratios = [test.energy_ratio for of_fold in tests for test in of_fold]
    cells["energy_ratio"] = _mean_defined(ratios, "energy_ratio", notes)
    counts = [sum(test.p_value is not None and test.p_value < ALPHA for test in of_fold) for of_fold in tests]
    cells["cq_significant"] = f"{np.mean(counts):.1f}/{len(middle)}"
    if undefined := sum(test.p_value is None for of_fold in tests for test in of_fold):
        notes.append(f"{undefined} of {len(ratios)} Chen-Qin tests have no p-value and count as not significant")
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
    layers = [
        geometry.layer_geometry(readout_of(result, layer, head, split.test), label, direction[layer])
        for layer in middle
    ]
    ranks = [layer.stable_rank for layer in layers if layer.stable_rank is not None]
    tests = geometry.isotropy(direction, float(np.mean(ranks)) if ranks else None)
    notes += tests.notes
    return {
        **vars(tests), "layers": len(direction), "head_dim": direction.shape[1], "head": head,
        "auc": spread([auroc(label, probes.logits[:, layer, head]) for layer in middle]),
        "effective_rank": spread(ranks) if ranks else None,
        "energy": _mean_defined([layer.energy_fraction for layer in layers], "energy", notes),
        "adjacent_cos": tests.mean_abs_cos, "cos_ambient": tests.expected_ambient, "cos_rank": tests.expected_rank,
        "ks_p": tests.ks_rank_p,
    }  # fmt: skip


def _k_split(result: SetResult, notes: list[str]) -> Row:
    """Return the cells of both tables on the parts of the readout change."""
    folds = [_fold_k(result, split) for split in result.folds(0)]
    signal, null, variance = (
        {name: float(np.mean([getattr(fold.parts[name], field) for fold in folds])) for name in PARTS}
        for field in ("signal", "null", "variance")
    )
    whole = signal["k"] - null["k"]
    if whole <= 0:
        notes.append("gaps are left out: K itself tells no more than permuted labels")
    notes.append(f"the parts add up to K within {max(fold.reconstruction_error for fold in folds):.1e} of their size")
    cells: dict[str, Cell] = {"null": null["k"]}
    for name in PARTS:
        cells[f"signal_{name}"] = signal[name]
        cells[f"gap_{name}"] = (signal[name] - null[name]) / whole if whole > 0 else None
        cells[f"var_{name}"] = variance[name]
    return cells | {"cov_metric_head": float(np.mean([fold.cov_metric_head for fold in folds]))}


GEOMETRY: Final = TableSpec(
    "geometry", "Structural hypotheses", "tab:validation_results",
    (
        "cohen_d", "r_w", "dcov", "alignment", "v2_top90", "energy", Column("random_energy", "1/d", "percent", 4),
        "adjacent_cos", Column("expected_cos", "√(2/(πd))", "number", 2),
        Column("cos_p", "|cos| t-test p, median", "p_value"), "mean_shift", "energy_ratio", "cq_significant",
    ),
    "Averages over the middle 60 % of layers. Class separation of the intrinsic increment W, its ratio and dependence; "
    "alignment of probe and mean shift, the probe's share of variance beside a random direction's, neighbouring "
    "probes' cosine beside its expectation; and, without any probe, mean-shift norm, Chen-Qin energy ratio and how "
    f"many layers it finds significant at {ALPHA:g} (mean over folds).",
    _geometry,
    (
        BY_FOLD,
        "The paper defines neither r_w nor the norm of dCov: here the effect size of W over that of the whole "
        "increment, and the distance correlation of W and K.",
        "Neighbouring layers may select different heads: their probes' cosine is taken in head coordinates (the "
        "readout gauge). Tab. isotropy-results fixes the head.",
        "The Chen-Qin test, which needs independent rows, takes one row of each group, drawn with a fixed seed; other "
        "p-values and unbiased estimates here treat all rows as independent.",
        "The norm of the mean shift is not corrected for noise, which enlarges it on a small test side.",
    ),
)  # fmt: skip
ISOTROPY: Final = TableSpec(
    "isotropy", "Probe isotropy", "tab:isotropy-results",
    (
        "layers", "head_dim", Column("head", "Head", "integer"), "auc", "effective_rank", "energy", "adjacent_cos",
        "cos_ambient", "cos_rank", "ks_p", "shapiro_p", "trend_slope", "trend_p", "anova_p", "permutation_ambient_p",
        "permutation_rank_p",
    ),
    "Probes of one head, the one with the best mean training AUROC over layers, at the middle 60 % of layers (mean ± "
    "standard deviation over layers where given). Test 1: distribution of adjacent inner products. Test 2: the same at "
    "growing gaps. Test 3: distance to random unit vectors, on the ambient and on the effective-rank sphere, against "
    "10,000 drawn sets.",
    _isotropy,
    ("First fold of the first seed: probes of its training side, readouts and AUROC of its test side.",),
)  # fmt: skip
K_SPLIT: Final = TableSpec(
    "k-split", "Discriminative content of the parts of the readout change", "tab:k-decomp-auroc",
    (
        *(f"{what}_{name}" for what in ("signal", "gap") for name in PARTS),
        Column("null", "Null of K", "number", 3),
    ),
    "max(AUROC, 1 − AUROC), out of fold, averaged over the recognition zone; the gap above its mean over "
    f"{PERMUTATIONS} permutations of the label, in percent of K's gap. A folded AUROC is above 0.5 by chance, the more "
    "so the smaller the test side.",
    _k_split,
    (BY_FOLD,),
)  # fmt: skip
K_SPLIT_VARIANCE: Final = TableSpec(
    "k-split-variance", "Variance and covariance of the parts of the readout change", "tab:k-decomp-cov",
    ("var_probe", "var_metric", "var_head", "cov_metric_head", "var_k"),
    "Averaged over the recognition zone, in squared truth-logit units.",
    _k_split,
    (BY_FOLD,),
)  # fmt: skip
READOUTS: Final = (GEOMETRY, ISOTROPY, K_SPLIT, K_SPLIT_VARIANCE)


def geometry_by_layer(result: SetResult) -> tuple[Floats, Floats, int]:
    """Return adjacent |cos| [m - 1], the probe's share of variance [m] (NaN where a fold has none), d; fold means."""
    folds = [_fold_geometry(result, split) for split in result.folds(0)]
    cosines = np.array([[transition.adjacent_cos for transition in fold.transitions] for fold in folds])
    energy = np.array([[layer.energy_fraction for layer in fold.layers] for fold in folds], np.float64)
    return cosines.mean(axis=0), energy.mean(axis=0), folds[0].dim


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
        geometry.layer_geometry(_selected_readout(result, split, layer), label, v) for layer, v in enumerate(direction)
    ]
    parts = increments.decompose(split.test_trajectory, split.test_crossed)
    return geometry.readout_geometry(layers, geometry.transition_geometry(parts, direction, label), direction.shape[1])


def _fold_k(result: SetResult, split: Split) -> increments.KTable:
    """Return the split of K on the test side; z is the standardisation of the selected heads' training rows."""
    heads, head = result.prepared.inputs.heads, split.probes.selected
    direction, bias = split.probes.of(head)
    mean, std = np.empty_like(direction), np.empty_like(direction)
    for layer, selected in enumerate(head.tolist()):
        x = readout_of(result, layer, selected, split.train)
        mean[layer], std[layer] = x.mean(axis=0), x.std(axis=0)
    probes = increments.StandardizedProbes.of(direction, bias, mean, np.where(std > 0, std, 1.0))
    across = increments.crossings(
        lambda layer: heads.file.layer(layer)[heads.index[split.test]], head, heads.file.geometry, heads.file.site
    )
    parts = increments.split_readout_change(across, probes, direction, bias)
    return increments.k_table(parts, result.label[split.test], PERMUTATIONS, split.fold)


def _mean_defined(values: Sequence[float | None], key: str, notes: list[str]) -> float | None:
    """Return the mean of the defined ones; a note under ``key`` counts the others."""
    if missing := sum(value is None for value in values):
        notes.append(f"{key} has no value in {missing} of {len(values)} folds or layers")
    return mean_or_none(values)
