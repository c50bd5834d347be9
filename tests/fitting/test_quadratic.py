"""Coordinate descent: the minimiser by its optimality conditions, and the same from both implementations."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.fitting.quadratic import descend, descend_batched


def problem(seed: int, problems: int = 5, size: int = 7) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((2, 40, size)) @ rng.standard_normal((size, size))
    metric = rows.transpose(0, 2, 1) @ rows / 40 + 0.2 * np.eye(size)
    return (
        metric.astype(np.float32),
        rng.integers(0, 2, problems),
        rng.standard_normal((problems, size)) * rng.integers(0, 2, (problems, size)),
        rng.standard_normal((problems, size)),
        rng.uniform(0.1, 1.0, (problems, 1)) * np.ones(size),
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_minimiser_meets_the_optimality_conditions(seed: int) -> None:
    metric, partition, start, gradient, penalty = problem(seed)
    found, given_slope = descend(metric, partition, start, gradient, penalty, 2_000, 1e-14)
    slope = gradient + np.einsum("pij,pj->pi", metric[partition], found - start)
    scale = 3e-4 * (1 + np.abs(metric).max())  # float32 sums
    np.testing.assert_allclose(given_slope, slope, atol=scale)
    zero = found == 0
    assert np.all(np.abs(slope[zero]) <= penalty[zero] + scale)
    np.testing.assert_allclose(slope[~zero], -np.sign(found[~zero]) * penalty[~zero], atol=scale)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), sweeps=st.integers(1, 6))
def test_the_batched_one_takes_the_same_sweeps(seed: int, sweeps: int) -> None:
    given_ = problem(seed)
    found = descend(*given_, sweeps, 0.0)
    batched = descend_batched(*(torch.from_numpy(np.asarray(value)) for value in given_), sweeps, 0.0)
    for one, other in zip(batched, found, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-3, atol=1e-4)


def test_a_coordinate_without_curvature_keeps_its_start() -> None:
    metric, partition, start, gradient, penalty = problem(3)
    metric[:, 2, :] = metric[:, :, 2] = 0.0
    start[:, 2] = 1.5
    for found in (
        descend(metric, partition, start, gradient, penalty, 5, 0.0)[0],
        descend_batched(*map(torch.from_numpy, (metric, partition, start, gradient, penalty)), 5, 0.0)[0].numpy(),
    ):
        assert np.all(found[:, 2] == 1.5)
        assert np.all(np.isfinite(found))


def test_it_stops_where_a_sweep_gains_little() -> None:
    given_ = problem(4)
    one, _ = descend(*given_, 1, 0.0)
    assert np.array_equal(descend(*given_, 100, 1.0)[0], one)
    assert not np.array_equal(descend(*given_, 100, 1e-3)[0], one)
