"""The method's arithmetic, against plain loops and under wild values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from service.risk import RunningDepthMean, depth_mean, risk, running_means, truth_logits

MODERATE = st.floats(-1e3, 1e3, allow_nan=False)
WILD = st.floats(-1e300, 1e300, allow_nan=False)
ANY = st.floats(allow_nan=False, allow_infinity=False)
TRAJECTORY = hnp.arrays(np.float64, st.integers(1, 120), elements=WILD)


@given(TRAJECTORY)
def test_the_running_mean_is_the_batch_mean(trajectory: np.ndarray):
    running = RunningDepthMean()
    for logit in trajectory:
        latest = running.update(float(logit))
    assert running.layers == len(trajectory)
    assert latest == running.mean
    exact = math.fsum(float(logit) / len(trajectory) for logit in trajectory)
    size = max(1.0, float(np.abs(trajectory).max()))
    assert abs(running.mean - exact) <= 1e-12 * size
    assert abs(running.mean - float(depth_mean(trajectory))) <= 1e-12 * size


@given(TRAJECTORY)
def test_every_prefix_has_its_own_mean(trajectory: np.ndarray):
    means = running_means(trajectory)
    size = max(1.0, float(np.abs(trajectory).max()))
    for layer in range(len(trajectory)):
        assert abs(means[layer] - math.fsum(trajectory[: layer + 1] / (layer + 1))) <= 1e-12 * size


@given(MODERATE, st.integers(1, 200))
def test_the_mean_of_a_constant_is_that_constant(value: float, layers: int):
    assert running_means(np.full(layers, value))[-1] == pytest.approx(value, rel=1e-15, abs=0)


@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=MODERATE))
def test_depth_means_of_a_set_are_taken_row_by_row(trajectories: np.ndarray):
    means = depth_mean(trajectories)
    assert means.shape == trajectories.shape[:1]
    for row, mean in zip(trajectories, means, strict=True):
        assert mean == pytest.approx(math.fsum(row) / len(row), abs=1e-10)


@given(
    n=st.integers(1, 4), m=st.integers(1, 6), d=st.integers(1, 8), seed=st.integers(0, 2**32 - 1), scaled=st.booleans()
)
def test_truth_logits_equal_a_plain_loop(n: int, m: int, d: int, seed: int, scaled: bool):
    generator = np.random.default_rng(seed)
    readout, direction, bias = generator.normal(size=(n, m, d)), generator.normal(size=(m, d)), generator.normal(size=m)
    scale = generator.uniform(0.1, 10, m) if scaled else np.ones(m)
    logits = truth_logits(readout, direction, bias, scale if scaled else 1.0)
    assert logits.shape == (n, m)
    for i in range(n):
        for layer in range(m):
            dot = math.fsum(float(direction[layer, j]) * float(readout[i, layer, j]) for j in range(d))
            assert logits[i, layer] == pytest.approx((dot + bias[layer]) / scale[layer], rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(truth_logits(readout[0], direction, bias, scale), logits[0], rtol=1e-12, atol=1e-12)


def test_truth_logits_of_float32_are_summed_in_float64():
    readout = np.array([[1e8, 1.0, -1e8]], np.float32)
    logits = truth_logits(readout, np.ones((1, 3), np.float32), np.zeros(1, np.float32))
    assert logits.dtype == np.float64
    assert logits[0] == 1.0


@given(hnp.arrays(np.float64, st.integers(1, 50), elements=ANY), st.floats(-1e8, 1e8), st.floats(-1e8, 1e8))
def test_risk_is_a_probability_without_overflow(means: np.ndarray, weight: float, intercept: float):
    with np.errstate(over="raise", invalid="raise", under="ignore"):
        if np.abs(means).max() < 1e290:  # beyond that w x itself leaves float64
            values = risk(means[:, None], np.array([weight]), intercept)
            assert values.shape == means.shape
            assert np.all((values >= 0) & (values <= 1))


@given(st.lists(MODERATE, min_size=2, max_size=40), st.floats(1e-3, 50), st.floats(-20, 20))
def test_risk_falls_as_the_depth_mean_rises(means: list[float], weight: float, intercept: float):
    ordered = np.sort(np.array(means))
    falling = risk(ordered[:, None], np.array([weight]), intercept)
    rising = risk(ordered[:, None], np.array([-weight]), intercept)
    assert np.all(np.diff(falling) <= 0)
    assert np.all(np.diff(rising) >= 0)


@given(st.floats(-30, 30))
def test_risk_is_one_minus_the_sigmoid_and_symmetric(z: float):
    ours = float(risk(np.array([z]), np.array([1.0]), 0.0))
    assert ours == pytest.approx(1 - 1 / (1 + math.exp(-z)), abs=1e-12)
    assert ours + float(risk(np.array([-z]), np.array([1.0]), 0.0)) == pytest.approx(1.0, abs=1e-15)


def test_risk_at_the_extremes_and_the_middle():
    means = np.array([-1e308, -745.0, 0.0, 745.0, 1e308])
    values = risk(means[:, None], np.array([1.0]), 0.0)
    assert values[0] == 1.0
    assert values[2] == 0.5
    assert 0.0 < values[3] < 1e-300  # the small tail is kept, not rounded to zero
    assert values[4] == 0.0


def test_risk_takes_several_signals():
    signals, weight = np.array([[1.0, -2.0, 0.5]]), np.array([0.3, 0.1, -1.0])
    z = 0.3 - 0.2 - 0.5 + 0.7
    assert risk(signals, weight, 0.7)[0] == pytest.approx(1 / (1 + math.exp(z)))
