"""The paper's tables on level, shape and increments of the trajectories (Prop. snr, Thm. uniform-optimal, Eq. icc).

Trajectories are the out-of-fold ones of the first seed.  The folds' probes differ, which adds to the spread within the
classes.  Tables that need readouts are in ``structure_readouts``.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.evaluation.tables import Column
from hallutracer_research.paper.diagnostics.fisher import fisher_gap
from hallutracer_research.paper.diagnostics.increments import decompose
from hallutracer_research.paper.diagnostics.kappa import kappa_table
from hallutracer_research.paper.diagnostics.snr import snr_table
from hallutracer_research.paper.diagnostics.variance import variance_components
from hallutracer_research.paper.table_spec import Row, TableSpec, attributes
from service.errors import TrainingError

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
    table = kappa_table(decompose(trajectory, crossed).w, result.label)
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
