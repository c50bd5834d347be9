"""Chen and Qin's test against its definition and simulation, and distance correlation."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hallutracer_research.paper.diagnostics.two_samples import (
    chen_qin,
    chen_qin_by_group,
    one_row_a_group,
    squared_trace,
)
from service.errors import TrainingError

Floats = NDArray[np.float64]


def statistic(one: Floats, two: Floats) -> float:
    within = []
    for x in (one, two):
        gram = x @ x.T
        within.append((gram.sum() - np.trace(gram)) / (len(x) * (len(x) - 1)))
    return float(sum(within) - 2 * (one @ two.T).mean())


def leave_two_out(x: Floats) -> float:
    """tr(Sigma^2) by Chen and Qin's formula, one pair at a time."""
    n, total = len(x), 0.0
    for j in range(n):
        for k in range(n):
            if j != k:
                mean = np.delete(x, [j, k], axis=0).mean(axis=0)
                total += float(np.trace(np.outer(x[j] - mean, x[j]) @ np.outer(x[k] - mean, x[k])))
    return total / (n * (n - 1))


def leave_one_out(one: Floats, two: Floats) -> float:
    """tr(Sigma_1 Sigma_2) by Chen and Qin's formula."""
    total = 0.0
    for j in range(len(one)):
        for k in range(len(two)):
            left, right = np.delete(one, j, axis=0).mean(axis=0), np.delete(two, k, axis=0).mean(axis=0)
            total += float(np.trace(np.outer(one[j] - left, one[j]) @ np.outer(two[k] - right, two[k])))
    return total / (len(one) * len(two))


@pytest.mark.parametrize("shape", [(7, 4), (5, 20), (12, 12)])
def test_the_closed_form_is_the_sum_over_pairs(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal(shape) + 0.5
    assert squared_trace(x) == pytest.approx(leave_two_out(x), rel=1e-10)


@pytest.mark.parametrize("dim", [3, 30])
def test_statistic_and_variance_follow_the_definitions(dim: int) -> None:
    rng = np.random.default_rng(1)
    one, two = rng.standard_normal((8, dim)) + 0.3, 2 * rng.standard_normal((6, dim)) + 0.2
    label = np.repeat([1, 0], [8, 6])
    found = chen_qin(np.concatenate([one, two]), label)
    assert found.statistic == pytest.approx(statistic(one, two), rel=1e-9)
    expected = (
        2 / (8 * 7) * leave_two_out(one - two.mean(axis=0))
        + 2 / (6 * 5) * leave_two_out(two - one.mean(axis=0))
        + 4 / 48 * leave_one_out(one, two)
    )
    assert found.variance == pytest.approx(expected, rel=1e-9)
    trace = 8 / 14 * np.trace(np.cov(one, rowvar=False)) + 6 / 14 * np.trace(np.cov(two, rowvar=False))
    assert found.energy_ratio == pytest.approx(found.statistic / trace, rel=1e-9)


def test_blocks_do_not_change_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    label = np.arange(40) % 2
    wide, tall = rng.standard_normal((40, 60)), rng.standard_normal((40, 9))
    whole = [chen_qin(x, label).variance for x in (wide, tall)]
    monkeypatch.setattr("hallutracer_research.paper.diagnostics.two_samples._BLOCK", 4)
    assert [chen_qin(x, label).variance for x in (wide, tall)] == pytest.approx(whole, rel=1e-12)


def test_a_common_offset_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    x, label = rng.standard_normal((60, 10)), np.arange(60) % 2
    one, two = chen_qin(x, label), chen_qin(x + 1000 * rng.standard_normal(10), label)
    assert two.statistic == pytest.approx(one.statistic, rel=1e-6)
    assert two.p_value == pytest.approx(one.p_value, rel=1e-6)


def test_two_rows_of_a_class_are_too_few_and_constant_rows_have_no_test() -> None:
    with pytest.raises(TrainingError, match="2 rows are factual"):
        chen_qin(np.zeros((6, 2)), [1, 1, 0, 0, 0, 0])
    found = chen_qin(np.zeros((6, 2)), [1, 1, 1, 0, 0, 0])
    assert found.p_value is None
    assert found.energy_ratio is None
    assert found.notes


def test_alike_rows_of_a_group_reject_by_themselves_and_one_row_of_each_does_not() -> None:
    """Equal class means; groups of five rows share most of their readout."""
    rng = np.random.default_rng(7)
    group = np.repeat(np.arange(40), 5)
    label = (np.arange(40) % 2)[group]
    naive = by_group = 0
    for _ in range(200):
        x = rng.standard_normal((40, 30))[group] + 0.5 * rng.standard_normal((200, 30))
        flattered, honest = chen_qin(x, label).p_value, chen_qin_by_group(x, label, group).p_value
        assert flattered is not None
        assert honest is not None
        naive += flattered < 0.05
        by_group += honest < 0.05
    assert naive > 150
    assert 2 <= by_group <= 24  # 0.05 within three standard errors, and a little for the normal limit


def test_rows_without_company_are_all_taken_and_too_few_groups_have_no_test() -> None:
    rng = np.random.default_rng(8)
    x, label = rng.standard_normal((30, 4)), np.arange(30) % 2
    assert chen_qin_by_group(x, label, np.array([f"g{row}" for row in range(30)])) == chen_qin(x, label)
    found = chen_qin_by_group(x, label, np.arange(30) // 6)
    assert (found.statistic, found.p_value, found.energy_ratio) == (None, None, None)
    assert "one row of each group leaves" in found.notes[0]
    rows = one_row_a_group(np.arange(30) // 6)
    assert (rows // 6).tolist() == [0, 1, 2, 3, 4]
    assert len({tuple((one_row_a_group(np.arange(30) // 6, seed) % 6).tolist()) for seed in range(5)}) > 1
