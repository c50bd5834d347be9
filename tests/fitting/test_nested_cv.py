"""Nested cross-validation: every row is scored once per seed, by a fold that never saw its group."""

from __future__ import annotations

import numpy as np

from service.fitting.folds import OuterFold, outer_folds
from service.fitting.nested_cv import by_row, nested_cv


def test_every_row_is_scored_once_per_seed_by_a_fold_without_its_group() -> None:
    label, group = np.arange(60) % 2, np.arange(60) // 3
    outer = outer_folds(label, group, folds=4, seeds=(5, 0))
    assert [(fold.seed, fold.fold) for fold in outer] == [(seed, fold) for seed in (5, 0) for fold in range(4)]
    seen: list[OuterFold] = []

    def fit(fold: OuterFold) -> dict[str, np.ndarray]:
        assert not set(group[fold.train]) & set(group[fold.test])
        seen.append(fold)
        return {"row": fold.test.astype(float), "fold": np.full(len(fold.test), 10.0 * fold.seed + fold.fold)}

    scores = nested_cv(outer, fit)
    assert list(scores) == ["row", "fold"]
    assert seen == outer
    np.testing.assert_array_equal(by_row(scores["row"], 60), [np.arange(60.0)] * 2)  # no NaN: every row was tested
    for fold, scored in zip(outer, scores["fold"], strict=True):
        assert np.all(by_row(scores["fold"], 60)[[5, 0].index(fold.seed), scored.test] == 10 * fold.seed + fold.fold)
