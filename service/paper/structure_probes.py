"""Are probe directions like random ones, and what is a change of readout made of?  Tables that need activations.

Isotropy takes one fold and one head for all layers; the split of K takes each fold's probes on its test side, and the
folds of the first seed are averaged.  One layer of one fold is in memory at a time.  Fits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from service.errors import TrainingError
from service.evaluation.set_run import SetRun
from service.evaluation.splits import Split
from service.evaluation.tables import Column, Table
from service.fitting.scores import auroc
from service.paper.cells import Row, by_set, published_columns, spread
from service.paper.diagnostics.classes import middle_layers
from service.paper.diagnostics.geometry import layer_geometry
from service.paper.diagnostics.increments import crossings
from service.paper.diagnostics.isotropy import isotropy
from service.paper.diagnostics.k_split import PARTS, KTable, StandardizedProbes, k_table, split_readout_change
from service.paper.structure_geometry import BY_FOLD, mean_defined, readout_of

PERMUTATIONS: Final = 200


def isotropy_tests(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. isotropy-results: tests 1 to 3 under the fixed-head protocol (App. isotropy-verification)."""

    def row(run: SetRun, notes: list[str]) -> Row:
        split = run.folds(0)[0]
        every, label = split.every, run.label[split.test]
        whole = np.flatnonzero((every.auroc > 0).all(axis=0))
        if not len(whole):
            raise TrainingError("no head has a probe at every layer: give a larger C")
        head = int(whole[every.auroc[:, whole].mean(axis=0).argmax()])
        direction = every.direction[:, head]
        m, dim = direction.shape
        middle = list(middle_layers(m))
        layers = [layer_geometry(readout_of(run, layer, head, split.test), label, direction[layer]) for layer in middle]
        ranks = [one.stable_rank for one in layers if one.stable_rank is not None]
        found = isotropy(direction, float(np.mean(ranks)) if ranks else None)
        notes += found.notes
        return {
            "layers": m,
            "head_dim": dim,
            "head": head,
            "auc": spread([auroc(label, every.logits[:, layer, head]) for layer in middle]),
            "effective_rank": spread(ranks) if ranks else None,
            "energy": mean_defined([one.energy_fraction for one in layers], "energy", notes),
            "adjacent_cos": found.mean_abs_cos,
            "cos_ambient": found.expected_ambient,
            "cos_rank": found.expected_rank,
            "ks_p": found.ks_rank_p,
            "shapiro_p": found.shapiro_p,
            "trend_slope": found.trend_slope,
            "trend_p": found.trend_p,
            "anova_p": found.anova_p,
            "permutation_ambient_p": found.permutation_ambient_p,
            "permutation_rank_p": found.permutation_rank_p,
        }

    notes = ["First fold of the first seed: probes of its training side, readouts and AUROC of its test side."]
    label = "tab:isotropy-results"
    keys = (
        "auc", "effective_rank", "energy", "adjacent_cos", "cos_ambient", "cos_rank", "ks_p", "shapiro_p",
        "trend_slope", "trend_p", "anova_p", "permutation_ambient_p", "permutation_rank_p",
    )  # fmt: skip
    return [
        Table(
            name="isotropy",
            title="Probe isotropy",
            columns=[
                *published_columns(label, "layers", "head_dim"),
                Column("head", "Head", "integer"),
                *published_columns(label, *keys)[1:],
            ],
            rows=by_set(runs, row, notes),
            label=label,
            caption="Probes of one head, the one with the best mean training AUROC over layers, at the middle 60 % of "
            "layers (mean ± standard deviation over layers where given). Test 1: distribution of adjacent inner "
            "products. Test 2: the same at growing gaps. Test 3: distance to random unit vectors, on the ambient and "
            "on the effective-rank sphere, against 10,000 drawn sets.",
            notes=notes,
        )
    ]


def k_split(runs: Sequence[SetRun]) -> list[Table]:
    """Tab. k-decomp-auroc and k-decomp-cov: what the parts of the readout change tell, and how they vary (Lemma
    k-decomp)."""
    signals: dict[str, Row] = {}

    def variances(run: SetRun, notes: list[str]) -> Row:
        folds = [_fold_k(run, split) for split in run.folds(0)]
        signal, null, varied = (
            {name: float(np.mean([getattr(one.parts[name], field) for one in folds])) for name in PARTS}
            for field in ("signal", "null", "variance")
        )
        whole = signal["k"] - null["k"]
        if whole <= 0:
            notes.append("gaps are left out: K itself tells no more than permuted labels")
        gaps = {name: (signal[name] - null[name]) / whole if whole > 0 else None for name in PARTS}
        signals[run.title] = (
            {"null": null["k"]}
            | {f"signal_{name}": value for name, value in signal.items()}
            | {f"gap_{name}": value for name, value in gaps.items()}
        )
        notes.append(f"the parts add up to K within {max(one.reconstruction_error for one in folds):.1e} of their size")
        return {f"var_{name}": value for name, value in varied.items()} | {
            "cov_metric_head": float(np.mean([one.cov_metric_head for one in folds]))
        }

    notes = [BY_FOLD]
    rows = by_set(runs, variances, notes)
    keys = [f"{what}_{name}" for what in ("signal", "gap") for name in PARTS]
    return [
        Table(
            name="k-split",
            title="Discriminative content of the parts of the readout change",
            columns=[*published_columns("tab:k-decomp-auroc", *keys), Column("null", "Null of K", "number", 3)],
            rows=[{"set": run.title, **signals.get(run.title, {})} for run in runs],
            label="tab:k-decomp-auroc",
            caption="max(AUROC, 1 − AUROC), out of fold, averaged over the recognition zone; the gap above its mean "
            f"over {PERMUTATIONS} permutations of the label, in percent of K's gap. A folded AUROC is above 0.5 by "
            "chance, the more so the smaller the test side.",
            notes=notes,
        ),
        Table(
            name="k-split-variance",
            title="Variance and covariance of the parts of the readout change",
            columns=published_columns(
                "tab:k-decomp-cov", "var_probe", "var_metric", "var_head", "cov_metric_head", "var_k"
            ),
            rows=rows,
            label="tab:k-decomp-cov",
            caption="Averaged over the recognition zone, in squared truth-logit units.",
            notes=[BY_FOLD],
        ),
    ]


def _fold_k(run: SetRun, split: Split) -> KTable:
    """The split of K on the test side; z is the standardisation of the selected heads' training rows."""
    heads, head = run.gathered.material.heads, split.every.selected
    direction, bias = split.every.of(head)
    mean, std = np.empty_like(direction), np.empty_like(direction)
    for layer, selected in enumerate(head.tolist()):
        x = readout_of(run, layer, selected, split.train)
        mean[layer], std[layer] = x.mean(axis=0), x.std(axis=0)
    probes = StandardizedProbes.of(direction, bias, mean, np.where(std > 0, std, 1.0))
    across = crossings(
        lambda layer: heads.file.layer(layer)[heads.index[split.test]], head, heads.file.geometry, heads.file.site
    )
    found = split_readout_change(across, probes, direction, bias)
    return k_table(found, run.label[split.test], PERMUTATIONS, split.fold)
