"""Measures against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.fitting import scores as measures


@st.composite
def labelled(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    size = draw(st.integers(2, 40))
    label = np.array(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
    label[0], label[1] = 0, 1
    risk = np.array(draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))) / 12
    return label, risk


def pair_auroc(label: np.ndarray, risk: np.ndarray) -> float:
    pairs = [(bad, good) for bad in risk[label == 0] for good in risk[label == 1]]
    return float(np.mean([1.0 if bad > good else 0.5 if bad == good else 0.0 for bad, good in pairs]))


@given(labelled())
@settings(max_examples=100, deadline=None)
def test_auroc_is_the_share_of_ordered_pairs(sample: tuple[np.ndarray, np.ndarray]) -> None:
    label, risk = sample
    assert measures.risk_auroc(label, risk) == pytest.approx(pair_auroc(label, risk))
    assert measures.auroc(label, -risk) == pytest.approx(pair_auroc(label, risk))


@given(labelled(), st.lists(st.integers(0, 3), min_size=40, max_size=40))
@settings(max_examples=100, deadline=None)
def test_within_stratum_auroc_counts_only_pairs_of_one_stratum(
    sample: tuple[np.ndarray, np.ndarray], strata: list[int]
) -> None:
    label, risk = sample
    wins = [
        1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
        for i, j in itertools.product(range(len(label)), repeat=2)
        if label[i] == 0 and label[j] == 1 and strata[i] == strata[j]
    ]
    found = measures.within_stratum_auroc(label, risk, strata[: len(label)])
    if wins:
        assert found == pytest.approx(float(np.mean(wins)))
    else:
        assert found is None


def test_within_stratum_removes_what_the_stratum_tells() -> None:
    label = np.array([0, 0, 0, 1, 1, 1, 1, 0])
    strata = ["a", "a", "a", "a", "b", "b", "b", "b"]
    risk = np.array([0.9 if s == "a" else 0.1 for s in strata])  # knows the stratum and nothing else
    assert measures.risk_auroc(label, risk) > 0.7
    assert measures.within_stratum_auroc(label, risk, strata) == 0.5


@given(labelled(), st.integers(1, 15), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_ece_by_hand_and_independent_of_row_order(sample: tuple[np.ndarray, np.ndarray], bins: int, random) -> None:
    label, risk = sample
    rows = sorted(zip(risk.tolist(), label.tolist(), strict=True))
    groups: dict[int, list[tuple[float, int]]] = {}
    for value, truth in rows:
        first = next(place for place, (other, _) in enumerate(rows) if other == value)
        groups.setdefault(first * bins // len(rows), []).append((value, truth))
    expected = sum(
        abs(sum(v for v, _ in g) / len(g) - sum(1 - t for _, t in g) / len(g)) * len(g) for g in groups.values()
    ) / len(rows)
    assert measures.ece(label, risk, bins) == pytest.approx(expected)
    order = list(range(len(label)))
    random.shuffle(order)
    assert measures.ece(label[order], risk[order], bins) == pytest.approx(expected)


def test_ece_bins_have_equal_mass() -> None:
    rng = np.random.default_rng(0)
    risk = rng.beta(0.3, 3, 1500)
    label = (rng.random(1500) >= risk).astype(int)
    assert measures.reliability(label, risk)[2].tolist() == [100] * 15
    assert measures.ece(label, risk) < 0.04
    assert measures.ece(label, np.clip(risk + 0.3, 0, 1)) > 0.25


@pytest.mark.parametrize("count", [10, 100, 3000])
def test_the_debiased_error_is_small_where_risks_are_calibrated_and_says_what_is_off(count: int) -> None:
    rng = np.random.default_rng(1)
    squared, biased, off = [], [], []
    for _ in range(300):
        risk = rng.beta(1, 3, count)
        label = (rng.random(count) >= risk).astype(int)
        squared.append(measures.debiased_calibration_error(label, risk) ** 2)
        biased.append(measures.ece(label, risk))
        off.append(measures.debiased_calibration_error(label, np.clip(risk + 0.2, 0, 1)))
    assert np.sqrt(np.mean(squared)) < (0.13 if count == 10 else 0.6 * np.mean(biased) + 0.02)
    if count > 10:
        assert np.mean(off) == pytest.approx(0.2, abs=0.03)
    assert measures.debiased_calibration_error(np.array([0, 1]), np.array([0.2, 0.7])) == 0.0


def test_what_a_gate_does_by_hand() -> None:
    label, risk = np.array([1, 1, 0, 1, 0, 0]), np.array([0.1, 0.2, 0.3, 0.6, 0.7, 0.9])
    assert measures.at_threshold(label, risk, 0.5) == pytest.approx(
        {"answered": 0.5, "wrong_among_answered": 1 / 3, "right_withheld": 1 / 3}
    )
    assert measures.at_threshold(label, risk, 0.1) == {
        "answered": 0.0,
        "wrong_among_answered": 0.0,
        "right_withheld": 1.0,
    }
    answered, wrong = measures.coverage_curve(label, risk)
    assert answered.tolist() == pytest.approx([k / 6 for k in range(1, 7)])
    assert wrong.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 4, 2 / 5, 1 / 2])


def test_auprc_names_its_positive_class() -> None:
    label = np.array([1, 1, 1, 0])
    risk = np.array([0.1, 0.2, 0.9, 0.8])
    assert measures.auprc(label, risk, positive=0) == pytest.approx(1 / 2)
    assert measures.auprc(label, risk, positive=1) == pytest.approx((1 + 1 + 3 / 4) / 3)
    with pytest.raises(ValueError, match="positive must be"):
        measures.auprc(label, risk, positive=2)


def test_summary_has_every_measure_and_needs_both_classes() -> None:
    label, risk = np.array([0, 1, 1, 0]), np.array([0.8, 0.3, 0.4, 0.6])
    found = measures.summary(label, risk)
    assert tuple(found) == measures.SUMMARY
    assert found["auroc"] == 1
    assert found["brier"] == pytest.approx((0.04 + 0.09 + 0.16 + 0.16) / 4)
    with pytest.raises(ValueError, match="both classes"):
        measures.summary(np.ones(4, int), risk)
