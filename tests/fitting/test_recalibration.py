"""Slope and intercept of a risk: known distortions are found, and their intervals cover."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy.special import expit, logit

from service.fitting.jackknife import t_interval
from service.fitting.recalibration import KEYS, recalibrate, recalibration

SLOPE, INTERCEPT = KEYS


def draw(rng: np.random.Generator, groups: int, size: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of calibrated risks, whose groups share risk and label by half."""
    group = np.repeat(np.arange(groups), size)
    copied = rng.random(len(group)) < 0.5
    x, u = rng.normal(-1, 1.3, len(group)), rng.random(len(group))
    first = size * group
    x, u = np.where(copied, x[first], x), np.where(copied, u[first], u)
    return (u >= expit(x)).astype(np.int64), group, expit(x)


@pytest.mark.parametrize(("slope", "intercept"), [(1.0, 0.0), (0.5, 0.0), (1.6, -0.7)])
def test_a_known_distortion_is_found(slope: float, intercept: float) -> None:
    label, _, risk = draw(np.random.default_rng(0), 40_000, 1)
    distorted = expit((logit(risk) - intercept) / slope)
    found = recalibrate(label, distorted)
    assert found is not None
    assert found.slope == pytest.approx(slope, abs=0.05)
    assert found.intercept == pytest.approx(intercept, abs=0.05)


def test_separated_or_constant_risks_and_a_single_class_have_no_line() -> None:
    label, group = np.repeat([0, 1], 10), np.arange(20)
    risk = np.linspace(0.9, 0.1, 20)
    constant = np.full(20, 0.3)
    for given in (risk, 1 - risk, constant, np.where(label == 0, 1.0, 0.0)):
        assert recalibrate(label, given) is None
        assert recalibration(label, group, given[None]) == {SLOPE: None, INTERCEPT: None}
    assert recalibrate(np.ones(20, int), risk) is None
    mixed = risk.copy()
    mixed[[9, 10]] = mixed[[10, 9]]
    found = recalibration(label, group, np.stack([mixed, mixed]))
    assert np.isfinite(found[SLOPE]["mean"])
    assert np.isfinite(list(found[SLOPE].values())).all()
    assert recalibration(label, group, np.stack([mixed, risk])) == {SLOPE: None, INTERCEPT: None}  # one seed's are


def test_risks_of_zero_and_one_are_taken_as_nearly_so() -> None:
    label, group, risk = draw(np.random.default_rng(1), 200)
    risk[0], risk[1] = 0.0, 1.0
    assert np.isfinite(recalibration(label, group, risk[None])[SLOPE]["high"])


def test_the_intervals_cover_and_rows_taken_as_independent_would_not() -> None:
    rng = np.random.default_rng(2)
    draws, hits, naive = 200, np.zeros(2), np.zeros(2)
    for _ in range(draws):
        label, group, risk = draw(rng, 80, 8)
        for groups, count in ((group, hits), (np.arange(len(group)), naive)):
            found = recalibration(label, groups, risk[None])
            for place, (key, truth) in enumerate(((SLOPE, 1.0), (INTERCEPT, 0.0))):
                count[place] += found[key]["low"] <= truth <= found[key]["high"]
    assert hits.min() / draws > 0.9  # 95 % nominal
    assert naive.max() / draws < 0.87


def test_one_newton_step_is_close_to_refitting_without_each_group() -> None:
    label, group, risk = draw(np.random.default_rng(3), 100)
    found = recalibration(label, group, risk[None])
    lines = [recalibrate(label[group != name], risk[group != name]) for name in np.unique(group)]
    refitted = np.array([line for line in lines if line is not None])
    assert len(refitted) == 100
    for key, column in zip(KEYS, refitted.T, strict=True):
        exact = t_interval(found[key]["mean"], column)
        assert [found[key]["low"], found[key]["high"]] == pytest.approx(exact, abs=0.01 * (exact.high - exact.low))


def test_a_cross_validation_s_interval_is_wider() -> None:
    label, group, risk = draw(np.random.default_rng(3), 100)
    held, crossed = (recalibration(label, group, risk[None], folds)[SLOPE] for folds in (None, 5))
    wider = (crossed["high"] - crossed["low"]) / (held["high"] - held["low"])
    assert wider == pytest.approx(np.sqrt(1.25))


def test_seeds_are_averaged_in_each_draw_and_nine_thousand_rows_take_seconds() -> None:
    label, group, risk = draw(np.random.default_rng(4), 1800)
    start = time.process_time()
    found = recalibration(label, group, np.stack([risk] * 5))
    assert time.process_time() - start < 5
    alone = recalibration(label, group, risk[None])
    for key in KEYS:
        assert found[key] == pytest.approx(alone[key], abs=1e-9)
