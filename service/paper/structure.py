"""What the trajectories of a run are made of: the paper's tables on level, shape and increments, a row for each set.

Trajectories are the out-of-fold ones of the first seed: every row by probes that have not seen it.  The folds' probes
differ, so that what moves between them counts as spread within the classes.  What needs readouts is in
``structure_geometry`` and ``structure_probes``.  Fits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from service.errors import TrainingError
from service.evaluation.set_run import SetRun
from service.evaluation.tables import Column, Table
from service.paper.cells import Maker, Row, by_set, published_columns
from service.paper.diagnostics.fisher import FisherGap, fisher_gap
from service.paper.diagnostics.increments import decompose
from service.paper.diagnostics.kappa import kappa_table
from service.paper.diagnostics.snr import snr_table
from service.paper.diagnostics.variance import variance_components
from service.paper.structure_geometry import geometry, geometry_figures
from service.paper.structure_probes import isotropy_tests, k_split

OUT_OF_FOLD: Final = "Out-of-fold trajectories of the first seed; the folds' probes differ."

__all__ = ["READOUTS", "TRAJECTORY", "fisher", "geometry_figures", "kappa", "snr", "variance"]


def snr(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. snr_verification: slope against mean, predicted and measured (Prop. snr)."""

    def row(run: SetRun, notes: list[str]) -> Row:
        found = snr_table(run.trajectory(0), run.label)
        notes += found.notes
        return {
            "rho": found.rho,
            "gamma": found.gamma,
            "gamma_plugin": found.gamma_plugin,
            "r_plugin": found.r_plugin,
            "r_empirical": found.r_empirical,
            "eta": found.eta,
        }

    notes = [OUT_OF_FOLD, "η is 1 by algebra where the classes are of one size: no test of the theory there."]
    columns = published_columns("tab:snr_verification", "rho", "gamma", "r_plugin", "r_empirical", "eta")
    columns.insert(3, Column("gamma_plugin", "γ, plug-in variances", "number", 2))
    return [
        Table(
            name="snr",
            title="Signal-to-noise ratio of slope against mean",
            columns=columns,
            rows=by_set(runs, row, notes),
            label="tab:snr_verification",
            caption="Divergence ratio ρ; origin penalty γ by moments and from the paper's plug-in variances; "
            "the ratio of SNRs predicted from the trajectory covariance, measured, and measured over predicted.",
            notes=notes,
        )
    ]


def fisher(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. fisher-gap (Thm. uniform-optimal), with the direct ratio and the one corrected for its optimism.

    Where the covariance of the layers is singular it is shrunk (Ledoit-Wolf), and the row says by how much.
    """

    def row(run: SetRun, notes: list[str]) -> Row:
        found = _fisher(run, notes)
        notes += found.notes
        return {
            "r_fisher": found.r_fisher,
            "theta": found.theta,
            "chi": found.chi,
            "t": found.t,
            "r_fisher_direct": found.r_fisher_direct,
            "r_fisher_unbiased": found.r_fisher_unbiased,
            "cauchy_schwarz": found.cauchy_schwarz,
            "shrinkage": found.shrinkage,
        }

    notes = [
        OUT_OF_FOLD,
        "R_Fisher is estimated on the rows it is computed from, where layers of pure noise seem to help: it is above 1 "
        "even where the mean is optimal. The unbiased column takes that out, for normal classes of one covariance.",
    ]
    return [
        Table(
            name="fisher",
            title="Fisher gap",
            columns=[
                *published_columns("tab:fisher-gap", "r_fisher", "theta", "chi", "t"),
                Column("r_fisher_direct", "R_Fisher, direct", "number", 3),
                Column("r_fisher_unbiased", "R_Fisher, unbiased", "number", 3),
                Column("cauchy_schwarz", "t / (√θ χ)", "number", 3),
                Column("shrinkage", "Shrinkage", "number", 4),
            ],
            rows=by_set(runs, row, notes),
            label="tab:fisher-gap",
            caption="SNR of the Fisher-optimal linear score over that of the depth mean; level-shape coupling θ, shape "
            "energy χ, cross term t; the same ratio computed directly and without optimism; t over its bound.",
            notes=notes,
        )
    ]


def _fisher(run: SetRun, notes: list[str]) -> FisherGap:
    trajectory = run.trajectory(0)
    try:
        return fisher_gap(trajectory, run.label)
    except TrainingError as error:
        found = fisher_gap(trajectory, run.label, "ledoit_wolf")  # what shrinking does not cure is raised again
        notes.append(f"the covariance was shrunk towards a multiple of the identity (Ledoit-Wolf), for: {error}")
        return found


def variance(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. variance-decomp: ICC (Eq. icc) and residual correlation at lags 1 and 8, factual class."""

    def row(run: SetRun, notes: list[str]) -> Row:
        trajectory = run.trajectory(0)
        found = variance_components(trajectory, run.label)
        notes += found.notes
        m = trajectory.shape[1]
        if m < 10:
            notes.append(f"{m} layers: too few for a residual correlation at lag 8")
        return {
            "layers": m,
            "icc": found.icc,
            "icc_factual": found.icc_factual,
            "icc_hallucinated": found.icc_hallucinated,
            "icc_unbiased": found.icc_unbiased,
            "acf_1": found.residual_acf[0],
            "acf_8": found.residual_acf[7] if len(found.residual_acf) > 7 else None,
            "acf_floor": found.acf_floor,
        }

    notes = [OUT_OF_FOLD]
    keys = ("layers", "icc", "icc_factual", "icc_hallucinated", "acf_1", "acf_8")
    return [
        Table(
            name="variance",
            title="Variance components of the trajectory",
            columns=[
                *published_columns("tab:variance-decomp", *keys),
                Column("acf_floor", "ACF of independent residuals", "number", 2),
                Column("icc_unbiased", "ICC, unbiased", "number", 2),
            ],
            rows=by_set(runs, row, notes),
            label="tab:variance-decomp",
            caption="Share of the within-class variance due to the sample's common level (ICC; all, factual, "
            "hallucinated), and the mean correlation of what is left between layers at a lag (factual class). A row's "
            "residuals sum to zero, so that independent ones have the ACF −1 / (m − 1). The paper's ICC counts part "
            "of the layers' noise as level; the unbiased one does not.",
            notes=notes,
        )
    ]


def kappa(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. kappa-calibration: how unequally the classes spread along the frozen probe (Lemma snr)."""

    def row(run: SetRun, notes: list[str]) -> Row:
        trajectory = run.trajectory(0)
        crossed = np.full((len(trajectory), trajectory.shape[1] - 1), np.nan)
        for split in run.folds(0):
            crossed[split.test] = split.test_crossed
        found = kappa_table(decompose(trajectory, crossed).w, run.label)
        notes += found.notes
        return {
            "layers": trajectory.shape[1],
            "kappa_mean": found.kappa_mean,
            "kappa_median": found.kappa_median,
            "kappa_p95": found.kappa_p95,
            "effect_size": found.effect_size,
            "worst_case_snr": found.worst_case_snr,
            "degradation": found.degradation,
            "factual_larger": found.factual_wider,
        }

    notes = [OUT_OF_FOLD]
    columns = published_columns(
        "tab:kappa-calibration", "layers", "kappa_mean", "kappa_median", "kappa_p95", "effect_size", "worst_case_snr",
        "degradation", "factual_larger",
    )  # fmt: skip
    return [
        Table(
            name="kappa",
            title="Directional variance ratio of the increment",
            columns=columns,
            rows=by_set(runs, row, notes),
            label="tab:kappa-calibration",
            caption="Over the middle 60 % of layers: κ, the larger class variance of W over the smaller (mean, median, "
            "95th percentile); mean pooled effect size, mean worst-case SNR, its relative degradation; share of layers "
            "where the factual class varies more.",
            notes=notes,
        )
    ]


TRAJECTORY: Final[tuple[Maker, ...]] = (snr, fisher, variance, kappa)
READOUTS: Final[tuple[Maker, ...]] = (geometry, isotropy_tests, k_split)
