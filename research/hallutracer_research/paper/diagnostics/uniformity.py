"""How alike the heads of a layer are (App. head-uniformity, Table head_distribution)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hallutracer_research.paper.diagnostics.classes import as_float, mean_or_none
from service.errors import TrainingError


@dataclass(frozen=True)
class Uniformity:
    """The table's columns; None where a layer has one head, or one whose score varies."""

    layers: int
    heads: int
    auc_cv: float  # standard deviation / mean of the AUROC within a layer, averaged over layers
    switch_rate: float | None  # share of adjacent layers whose best head (ties: lowest) differs
    correlation: float | None  # mean pairwise Pearson correlation of scores within a layer
    effective_rank: float | None  # exp(entropy of the correlation matrix's eigenvalues / heads), mean over layers
    rank_share: float | None  # of the heads
    notes: tuple[str, ...] = ()


def uniformity(auroc: ArrayLike, scores: Callable[[int], NDArray[np.floating]]) -> Uniformity:
    """Training auroc [m, K], and every head's probe scores by layer, layer -> [N, K].

    Heads with constant scores have no correlation; they
    are left out of their layer's correlation and rank, and counted in ``notes``.
    """
    quality = as_float(auroc, "auroc", 2)
    m, heads = quality.shape
    best = np.argmax(quality, axis=1)
    correlations: list[float] = []
    ranks: list[float] = []
    constant = 0
    for layer in range(m):
        values = as_float(scores(layer), f"scores of layer {layer}", 2)
        if values.shape[1] != heads:
            raise TrainingError(f"scores of layer {layer} have {values.shape[1]} heads and auroc {heads}")
        kept = values[:, np.ptp(values, axis=0) > 0]
        constant += heads - kept.shape[1]
        if kept.shape[1] < 2:
            continue
        matrix = np.corrcoef(kept, rowvar=False)
        correlations.append(float(matrix[np.triu_indices(len(matrix), 1)].mean()))
        share = np.clip(np.linalg.eigvalsh(matrix), 0.0, None) / len(matrix)
        share = share[share > 0]
        ranks.append(float(np.exp(-np.sum(share * np.log(share)))))
    rank = mean_or_none(ranks)
    notes = [f"{constant} heads have constant scores and are left out of correlation and rank"] if constant else []
    if not ranks:
        notes.append("correlation and rank are left out: no layer has two heads whose scores vary")
    return Uniformity(
        layers=m,
        heads=heads,
        auc_cv=float(np.mean(quality.std(axis=1) / quality.mean(axis=1))),
        switch_rate=float(np.mean(best[1:] != best[:-1])) if m > 1 else None,
        correlation=mean_or_none(correlations),
        effective_rank=rank,
        rank_share=rank / heads if rank is not None else None,
        notes=tuple(notes),
    )
