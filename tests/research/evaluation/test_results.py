"""What is found on one set: the main table's numbers, DeLong's test, forms, from known scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hallutracer_research.evaluation.options import OURS, TITLES, cost
from hallutracer_research.evaluation.results import (
    SetResult,
    compare,
    delong,
    form_table,
    measured,
    pooled_ranks,
    rows_of,
)
from service.errors import TrainingError
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


def test_without_a_baseline_there_is_nothing_to_compare() -> None:
    label, ours = planted(1.0, 0)
    runs = {OURS: runs_of(label, ours), "prompt-length": runs_of(label, ours)}
    assert compare(label, np.arange(len(label)), runs, {OURS: 0.7, "prompt-length": 0.9}) is None


def test_rows_stand_by_cost_class_and_else_in_the_order_asked_for() -> None:
    names = ("text-ngrams", OURS, "eigenscore", "halluguard", "first-token-entropy", "iti")
    measures = {name: {"auroc": {"mean": 0.6, "std": 0.1}} for name in names}
    costs = {name: cost(name, None, prompt=9.0, answer=5) for name in names}
    rows = rows_of("set", measures, costs)
    expected = [OURS, "iti", "first-token-entropy", "halluguard", "eigenscore", "text-ngrams"]
    assert [row["method"] for row in rows] == [TITLES[name] for name in expected]
    assert [row["class"] for row in rows] == ["A", "A", "B", "C", "D", "none"]
    assert [row["cost"] for row in rows] == [1.0, 1.0, None, None, None, 0.0]


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw(rng: np.random.Generator, count: int = 200, gain: float = 0.0, shared: float = 0.6) -> Arrays:
    """Two risks of the same rows with correlated noise; the first separates the classes better by ``gain``."""
    label = np.repeat([0, 1], count // 2)
    common = rng.standard_normal(count) * shared
    noise = rng.standard_normal((2, count)) * np.sqrt(1 - shared**2)
    risk_a, risk_b = common + noise + np.array([[0.8 + gain], [0.8]]) * (1 - label)
    return label, risk_a, risk_b


def kernel(bad: float, good: float) -> float:
    return 1.0 if bad > good else 0.5 if bad == good else 0.0


def by_definition(label: np.ndarray, risk_a: np.ndarray, risk_b: np.ndarray) -> tuple[float, float, float]:
    """AUROCs and the variance of their difference from all pairs, as DeLong et al. (1988) write it."""
    bad, good = np.flatnonzero(label == 0), np.flatnonzero(label == 1)
    psi = np.array([[[kernel(risk[i], risk[j]) for j in good] for i in bad] for risk in (risk_a, risk_b)])
    of_bad, of_good = psi.mean(axis=2), psi.mean(axis=1)  # [2, bad], [2, good]
    covariance = np.cov(of_bad) / len(bad) + np.cov(of_good) / len(good)
    contrast = np.array([1.0, -1.0])
    return float(psi[0].mean()), float(psi[1].mean()), float(contrast @ covariance @ contrast)


@pytest.mark.parametrize("decimals", [1, 12])  # 1: many ties
def test_delong_equals_its_definition(decimals: int) -> None:
    label, risk_a, risk_b = draw(np.random.default_rng(0), 60, 0.7)
    risk_a, risk_b = np.round(risk_a, decimals), np.round(risk_b, decimals)
    auc_a, auc_b, variance = by_definition(label, risk_a, risk_b)
    found = delong(label, risk_a, risk_b)
    assert found.auc_a == pytest.approx(auc_a, abs=1e-12)
    assert found.auc_b == pytest.approx(auc_b, abs=1e-12)
    assert found.z == pytest.approx((auc_a - auc_b) / np.sqrt(variance), rel=1e-9)
    assert found.p_value is not None
    assert 0 < found.p_value < 1


def test_equal_rankings_give_one() -> None:
    label, risk, _ = draw(np.random.default_rng(5))
    for other in (risk, np.exp(risk), 3 * risk - 7):
        assert delong(label, risk, other)[2:] == (0.0, 1.0)


def test_no_variance_and_another_auroc_has_no_p_value() -> None:
    label = np.array([0, 0, 0, 1, 1, 1])
    perfect = np.array([0.9, 0.8, 0.7, 0.3, 0.2, 0.1])
    assert delong(label, perfect, np.full(6, 0.5)) == (1.0, 0.5, None, None)
    assert delong(np.array([0, 1, 1]), perfect[:3], perfect[:3])[2:] == (None, None)  # one row of a class


def test_refusals_name_what_is_wrong() -> None:
    label, risk, other = draw(np.random.default_rng(8), 20)
    with pytest.raises(TrainingError, match="risk_b is not finite at row 3"):
        delong(label, risk, np.where(np.arange(20) == 3, np.nan, other))
    with pytest.raises(TrainingError, match=r"risk_a has shape \(19,\)"):
        delong(label, risk[1:], other)
    for bad in (label + 1, np.ones(20, int)):
        with pytest.raises(TrainingError, match="both of them"):
            delong(bad, risk, other)


FORMS = ["lone", "turn"] * 20 + ["polite"] * 4
FORM_LABEL = np.array([0, 0, 1, 1] * 10 + [1] * 4)


def with_forms(forms: list[str] = FORMS) -> SetResult:
    """Of lone questions our method ranks all right, behind a turn all wrong; one head ranks them the other way."""
    sign = np.array([{"turn": -1}.get(form, 1) for form in forms])
    good = sign * (1 - 2 * FORM_LABEL)  # rises with hallucination
    strata = [{"form": form} if form else {} for form in forms]
    tests = [np.arange(0, 24), np.arange(24, 44)]
    scores = {
        method: [FoldScores(0, fold, test, values[test]) for fold, test in enumerate(tests)]
        for method, values in ((OURS, good), ("iti", -good), ("prompt-length", good))
    }
    rows = SimpleNamespace(name="made", dataset=SimpleNamespace(rows=[SimpleNamespace(strata=one) for one in strata]))
    prepared: Any = SimpleNamespace(rows=rows, index=np.arange(44), inputs=SimpleNamespace(label=FORM_LABEL))
    return SetResult(prepared, [], scores, None)


def test_each_form_has_its_ranking_and_one_of_a_single_class_none() -> None:
    table = form_table([with_forms()])
    assert table is not None
    found = {row["form"]: row for row in table.rows}
    assert list(found) == ["lone", "polite", "turn"]
    assert (found["lone"][OURS], found["lone"]["iti"], found["lone"]["wrong"]) == (1.0, 0.0, 0.5)
    assert (found["turn"][OURS], found["turn"]["iti"], found["turn"]["rows"]) == (0.0, 1.0, 20)
    assert (found["polite"]["wrong"], found["polite"].get(OURS)) == (0.0, None)
    assert [column.title for column in table.columns][4:] == ["AUROC, HalluTracer (depth mean)", "AUROC, ITI-Probe"]


def test_sets_of_one_form_or_none_have_no_table() -> None:
    assert form_table([with_forms(["lone"] * 44), with_forms([""] * 44), with_forms(["lone"] * 40 + [""] * 4)]) is None
    mixed = form_table([with_forms(["lone"] * 44), with_forms()])
    assert mixed is not None
    assert len(mixed.rows) == 3
