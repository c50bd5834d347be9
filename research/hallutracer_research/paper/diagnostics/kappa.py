"""How unequally the two classes spread along the frozen probe (Lemma snr, Table kappa-calibration).

W_l = v_l . (a_{l+1} - a_l) already is the increment along v_l, so that its class variances are q_l^(c).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hallutracer_research.paper.diagnostics.classes import (
    as_document,
    gap,
    labelled,
    middle_transitions,
    pooled_variance,
    variances,
)


@dataclass(frozen=True)
class KappaTable:
    """The table's columns, over the middle transitions that have variance in both classes; None where none has."""

    kappa_mean: float | None
    kappa_median: float | None
    kappa_p95: float | None
    effect_size: float | None  # d_pi: mean pooled effect size
    worst_case_snr: float | None  # m^wc: mean of the smaller class's SNR
    degradation: float | None  # 1 - m^wc / d_pi
    factual_wider: float | None  # share of transitions with q_F > q_H
    transitions: int  # how many were counted
    kappa_by_layer: tuple[float | None, ...]  # all m - 1
    notes: tuple[str, ...] = ()


def kappa_table(w: ArrayLike, label: ArrayLike) -> KappaTable:
    """w [N, m - 1] (``increments.decompose``), label [N] -> the table's row, over the middle 60 % of layers."""
    values, factual = labelled(w, label, "w")
    hallucinated_variance, factual_variance = variances(values, factual)
    low, high = np.minimum(hallucinated_variance, factual_variance), np.maximum(hallucinated_variance, factual_variance)
    kappa = np.divide(high, low, out=np.full_like(high, np.nan), where=low > 0)
    middle = np.array(middle_transitions(values.shape[1] + 1), np.int64)
    kept = middle[low[middle] > 0]
    by_layer = tuple(as_document(kappa))
    notes = (
        (f"{len(middle) - len(kept)} of {len(middle)} middle transitions have a class without variance",)
        if len(kept) < len(middle)
        else ()
    )
    if not len(kept):
        return KappaTable(None, None, None, None, None, None, None, 0, by_layer, notes)
    size = np.abs(gap(values, factual)[kept])
    effect = float(np.mean(size / np.sqrt(pooled_variance(values, factual)[kept])))
    worst = float(np.mean(size / np.sqrt(high[kept])))
    return KappaTable(
        kappa_mean=float(kappa[kept].mean()),
        kappa_median=float(np.median(kappa[kept])),
        kappa_p95=float(np.percentile(kappa[kept], 95)),
        effect_size=effect,
        worst_case_snr=worst,
        degradation=1.0 - worst / effect if effect > 0 else None,
        factual_wider=float(np.mean(factual_variance[kept] > hallucinated_variance[kept])),
        transitions=len(kept),
        kappa_by_layer=by_layer,
        notes=notes,
    )
