"""The method's arithmetic, against plain loops and under wild values; rows, heads and shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from service.readout import Geometry, Site
from service.risk import RunningDepthMean, depth_mean, risk, running_means, truth_logits

Array = np.ndarray[Any, np.dtype[np.float64]]
MODERATE = st.floats(-1e3, 1e3, allow_nan=False)
WILD = st.floats(-1e300, 1e300, allow_nan=False)
ANY = st.floats(allow_nan=False, allow_infinity=False)
SEEDS = st.integers(0, 2**32 - 1)


@given(hnp.arrays(np.float64, st.integers(1, 120), elements=WILD), MODERATE, st.integers(1, 200))
def test_every_prefix_has_its_mean_and_the_running_one_is_the_batchs(
    trajectory: Array, constant: float, layers: int
) -> None:
    running, means = RunningDepthMean(), running_means(trajectory)
    close = 1e-12 * max(1.0, float(np.abs(trajectory).max()))
    for layer, logit in enumerate(trajectory):
        assert running.update(float(logit)) == running.mean
        assert abs(means[layer] - math.fsum(trajectory[: layer + 1] / (layer + 1))) <= close
    assert running.layers == len(trajectory)
    assert abs(running.mean - math.fsum(trajectory / len(trajectory))) <= close
    assert abs(running.mean - float(depth_mean(trajectory))) <= close
    assert running_means(np.full(layers, constant))[-1] == pytest.approx(constant, rel=1e-15, abs=0)


@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=MODERATE))
def test_depth_means_of_a_set_are_taken_row_by_row(trajectories: Array) -> None:
    expected = [math.fsum(row) / len(row) for row in trajectories]
    assert depth_mean(trajectories).tolist() == pytest.approx(expected, abs=1e-10)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 8), SEEDS, st.booleans())
def test_truth_logits_equal_a_plain_loop(n: int, m: int, d: int, seed: int, scaled: bool) -> None:
    generator = np.random.default_rng(seed)
    readout = generator.normal(size=(n, m, d))
    direction = generator.normal(size=(m, d))
    bias = generator.normal(size=m)
    scale = generator.uniform(0.1, 10, m) if scaled else np.ones(m)
    logits = truth_logits(readout, direction, bias, scale if scaled else 1.0)
    assert logits.shape == (n, m)
    for i, layer in np.ndindex(n, m):
        dot = math.fsum(float(direction[layer, j]) * float(readout[i, layer, j]) for j in range(d))
        assert logits[i, layer] == pytest.approx(
            (dot + bias[layer]) / scale[layer], rel=1e-9, abs=1e-9
        )
    np.testing.assert_allclose(
        truth_logits(readout[0], direction, bias, scale), logits[0], rtol=1e-12, atol=1e-12
    )


def test_truth_logits_of_float32_are_summed_in_float64() -> None:
    readout = np.array([[1e8, 1.0, -1e8]], np.float32)
    logits = truth_logits(readout, np.ones((1, 3), np.float32), np.zeros(1, np.float32))
    assert (logits.dtype, logits[0]) == (np.float64, 1.0)


@given(
    hnp.arrays(np.float64, st.integers(1, 50), elements=ANY),
    st.floats(-1e8, 1e8),
    st.floats(-1e8, 1e8),
)
def test_risk_is_a_probability_without_overflow(
    means: Array, weight: float, intercept: float
) -> None:
    with np.errstate(over="raise", invalid="raise", under="ignore"):
        if np.abs(means).max() < 1e290:  # beyond that w x itself leaves float64
            values = risk(means[:, None], np.array([weight]), intercept)
            assert values.shape == means.shape
            assert np.all((values >= 0) & (values <= 1))


@given(
    st.lists(MODERATE, min_size=2, max_size=40),
    st.floats(1e-3, 50),
    st.floats(-20, 20),
    st.floats(-30, 30),
)
def test_risk_falls_as_the_depth_mean_rises_and_is_one_minus_the_sigmoid(
    means: list[float], weight: float, intercept: float, z: float
) -> None:
    ordered = np.sort(np.array(means))[:, None]
    assert np.all(np.diff(risk(ordered, np.array([weight]), intercept)) <= 0)
    assert np.all(np.diff(risk(ordered, np.array([-weight]), intercept)) >= 0)
    ours, mirrored = (float(risk(np.array([one]), np.array([1.0]), 0.0)) for one in (z, -z))
    assert ours == pytest.approx(1 - 1 / (1 + math.exp(-z)), abs=1e-12)
    assert ours + mirrored == pytest.approx(1.0, abs=1e-15)


def test_risk_at_the_extremes_and_the_middle_and_of_several_signals() -> None:
    values = risk(np.array([[-1e308], [-745.0], [0.0], [745.0], [1e308]]), np.array([1.0]), 0.0)
    assert (values[0], values[2], values[4]) == (1.0, 0.5, 0.0)
    assert 0.0 < values[3] < 1e-300  # the small tail is kept, not rounded to zero
    several = risk(np.array([[1.0, -2.0, 0.5]]), np.array([0.3, 0.1, -1.0]), 0.7)
    assert several[0] == pytest.approx(1 / (1 + math.exp(0.3 - 0.2 - 0.5 + 0.7)))


GEOMETRIES = st.builds(
    Geometry, st.integers(1, 5), st.integers(1, 6), st.integers(1, 7), st.integers(1, 20)
)


@given(GEOMETRIES, st.sampled_from(Site), st.lists(st.integers(1, 3), max_size=2), SEEDS)
def test_a_layers_own_head_is_its_slice_of_the_row(
    shape: Geometry, site: Site, leading: list[int], seed: int
) -> None:
    heads, d = shape.heads(site), shape.dim(site)
    assert heads * d == shape.width(site)
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(*leading, shape.num_layers, shape.width(site)))
    by_head, head = shape.by_head(rows, site), generator.integers(0, heads, shape.num_layers)
    assert by_head.shape == (*rows.shape[:-1], heads, d)
    assert by_head.base is not None  # a view, no copy
    for k in range(heads):
        np.testing.assert_array_equal(by_head[..., k, :], rows[..., k * d : (k + 1) * d])
    selected = shape.select(rows, head, site)
    assert selected.shape == (*leading, shape.num_layers, d)
    for layer, k in enumerate(head):
        np.testing.assert_array_equal(
            selected[..., layer, :], rows[..., layer, k * d : (k + 1) * d]
        )


def test_widths_do_not_assume_that_heads_make_the_hidden_size_and_heads_exist() -> None:
    shape = Geometry(num_layers=3, num_heads=4, head_dim=16, hidden_size=32)
    assert [(shape.width(site), shape.heads(site), shape.dim(site)) for site in Site] == [
        (64, 4, 16),
        (32, 1, 32),
    ]
    with pytest.raises(IndexError):
        shape.select(np.zeros((3, 64)), np.array([0, 4, 1]), Site.ATTENTION_HEAD)
