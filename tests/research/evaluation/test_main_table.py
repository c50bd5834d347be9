"""The main table's numbers from known scores, and when a difference counts."""

from __future__ import annotations

import numpy as np
import pytest

from hallutracer_research.evaluation.cost import Lengths, cost
from hallutracer_research.evaluation.main_table import compare, measured, pooled_ranks, rows_of
from hallutracer_research.evaluation.options import OURS
from service.fitting.nested_cv import FoldScores


def runs_of(label: np.ndarray, score: np.ndarray, seeds: int = 2, folds: int = 4) -> list[FoldScores]:
    found = []
    for seed in range(seeds):
        fold = np.random.default_rng(seed).permutation(len(label)) % folds
        found += [
            FoldScores(seed, place, np.flatnonzero(fold == place), score[fold == place] * (place + 1) + 10 * place)
            for place in range(folds)
        ]
    return found


def planted(separation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    label = (np.random.default_rng(99).random(800) < 0.5).astype(np.int64)
    return label, rng.standard_normal(800) + separation * (1 - label)


def test_measures_are_means_over_the_test_sides_with_the_positive_class_named() -> None:
    label = np.array([1, 1, 1, 0, 1, 0, 0])
    right, wrong = np.array([0, 3]), np.array([1, 2, 4, 5, 6])
    risk = 1.0 - label
    found = measured(label, [FoldScores(0, 0, right, risk[right]), FoldScores(0, 1, wrong, -risk[wrong])])
    assert found["auroc"] == {"mean": 0.5, "std": 0.5}
    # On the wrong side all rows of the other class come first: precision is the class's share.
    assert found["auprc_hallucinated"]["mean"] == pytest.approx((1 + 2 / 5) / 2)
    assert found["auprc_factual"]["mean"] == pytest.approx((1 + 3 / 5) / 2)


def test_folds_of_different_scales_are_ranked_within_themselves() -> None:
    label, score = planted(1.0, 0)
    runs = [run for run in runs_of(label, score) if run.seed == 0]
    ranks = pooled_ranks(len(label), runs)
    assert not np.isnan(ranks).any()
    assert ranks.min() > 0
    assert ranks.max() < 1
    for run in runs:
        assert np.array_equal(np.argsort(ranks[run.test]), np.argsort(score[run.test]))


def test_a_better_method_is_told_from_the_best_baseline() -> None:
    label, ours = planted(1.6, 0)
    group = np.arange(len(label)) // 2
    scores = {OURS: ours, "iti": planted(0.6, 1)[1], "iris": planted(1.0, 2)[1], "prompt-length": planted(3.0, 3)[1]}
    runs = {name: runs_of(label, score) for name, score in scores.items()}
    aurocs = {name: measured(label, found)["auroc"]["mean"] for name, found in runs.items()}
    found = compare(label, group, runs, aurocs)
    assert found is not None
    assert found.runner_up == "iris"  # free references are no runner-up
    assert found.low < found.difference < found.high
    assert found.low > 0
    assert found.p_value < 0.01
    assert found.p_delong is not None
    assert found.p_delong < 0.01


def test_equal_methods_do_not_differ() -> None:
    label, ours = planted(1.0, 0)
    runs = {OURS: runs_of(label, ours), "iti": runs_of(label, planted(1.0, 7)[1])}
    found = compare(label, np.arange(len(label)), runs, {OURS: 0.7, "iti": 0.7})
    assert found is not None
    assert found.low < 0 < found.high
    assert found.p_value > 0.05


def test_without_a_baseline_there_is_nothing_to_compare() -> None:
    label, ours = planted(1.0, 0)
    runs = {OURS: runs_of(label, ours), "prompt-length": runs_of(label, ours)}
    assert compare(label, np.arange(len(label)), runs, {OURS: 0.7, "prompt-length": 0.9}) is None


def test_rows_stand_by_cost_class_and_else_in_the_order_asked_for() -> None:
    names = ("text-ngrams", OURS, "eigenscore", "halluguard", "first-token-entropy", "iti")
    measures = {name: {"auroc": {"mean": 0.6, "std": 0.1}} for name in names}
    costs = {name: cost(name, None, Lengths(9.0, 5)) for name in names}
    rows = rows_of("set", {name: name for name in names}, measures, costs)
    expected = [OURS, "iti", "first-token-entropy", "halluguard", "eigenscore", "text-ngrams"]
    assert [row["method"] for row in rows] == expected
    assert [row["class"] for row in rows] == ["A", "A", "B", "C", "D", "none"]
    assert [row["cost"] for row in rows] == [1.0, 1.0, None, None, None, 0.0]
