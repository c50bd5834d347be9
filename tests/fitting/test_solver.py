"""The solver against liblinear and saga, against its own certificate, at the edges; its descent by optimality."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from service.fitting import solver
from service.fitting.probes import row_weights
from service.fitting.solver import GAP, INTERCEPT_PENALTY, Solution, descend, solve

GRID = np.array([0.01, 0.03, 0.1, 0.3, 1.0, 3.0])


def heads(count: int = 6, n: int = 400, d: int = 24, signal: float = 1.0, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Correlated readouts [count, n, d], offsets and scales of their own; labels [n]; five folds' weights [5, n]."""
    rng = np.random.default_rng(seed)
    label = (rng.random(n) < 0.4).astype(np.int64)
    spectrum = np.arange(1, d + 1) ** -0.7
    shared = rng.standard_normal((n, d)) * spectrum
    found = []
    for _ in range(count):
        mix = rng.standard_normal((d, d)) / np.sqrt(d)
        own = rng.standard_normal((n, d)) * spectrum * 0.5
        shift = signal * rng.standard_normal(d) * 0.15 * spectrum
        found.append(
            ((shared + own + label[:, None] * shift) @ mix) * rng.uniform(0.1, 20) + rng.standard_normal(d) * 3
        )
    fold = rng.permutation(n) % 5
    weight = np.zeros((5, n))
    for place in range(5):
        train = np.flatnonzero(fold != place)
        weight[place, train] = row_weights(label[train], "weights")
    return np.stack(found).astype(np.float32), label, weight


def path(partitions: int = 5) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(partitions), len(GRID)), np.tile(GRID, partitions)


def objective(z: np.ndarray, label: np.ndarray, s: np.ndarray, w: np.ndarray, b: float, c: float) -> float:
    margin = (2 * label - 1) * (z @ w + b)
    return float(c * np.sum(s * np.logaddexp(0, -margin)) + np.abs(w).sum() + INTERCEPT_PENALTY * abs(b))


def standardised(x: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    train = x[s > 0].astype(np.float64)
    mean, std = train.mean(0), train.std(0)
    std[std <= 1e-9 * np.abs(mean)] = np.inf
    return (x.astype(np.float64) - mean) / std, mean, np.where(np.isinf(std), 0.0, std)


def own_objective(x: np.ndarray, label: np.ndarray, s: np.ndarray, found: Solution, h: int, p: int, c: float) -> float:
    z, mean, std = standardised(x[h], s)
    raw = found.weight[h, p]
    return objective(z, label, s, raw * std, found.intercept[h, p] + float(raw @ mean), c)


def liblinear(z: np.ndarray, label: np.ndarray, s: np.ndarray, c: float) -> LogisticRegression:
    return LogisticRegression(
        C=c, l1_ratio=1.0, solver="liblinear", intercept_scaling=100.0, max_iter=20_000, random_state=0, tol=1e-6
    ).fit(z[s > 0], label[s > 0], sample_weight=s[s > 0])


@pytest.mark.parametrize("signal", [0.3, 1.0, 6.0])
def test_no_objective_is_above_liblinears(signal: float) -> None:
    """Six heads, five folds, six values of C: 180 problems a signal, up to separable ones."""
    x, label, weight = heads(signal=signal)
    partition, c = path()
    found = solve(x, label, weight, partition, c)
    assert found.gap.max() <= GAP
    for h in range(len(x)):
        for p, (place, strength) in enumerate(zip(partition, c, strict=True)):
            s = weight[place]
            z, _, _ = standardised(x[h], s)
            model = liblinear(z, label, s, strength)
            theirs = objective(z, label, s, model.coef_[0], float(model.intercept_[0]), strength)
            ours = own_objective(x, label, s, found, h, p, strength)
            assert ours <= theirs * (1 + 2 * GAP)
            assert found.objective[h, p] == pytest.approx(ours, rel=1e-3)


def test_weights_and_zeros_are_sagas() -> None:
    x, label, weight = heads(count=2, n=300, d=8)
    partition, c = np.zeros(3, int), np.array([0.02, 0.1, 0.5])
    found = solve(x, label, weight[:1], partition, c)
    for h in range(2):
        z, mean, std = standardised(x[h], weight[0])
        for p, strength in enumerate(c):
            model = LogisticRegression(C=strength, l1_ratio=1.0, solver="saga", tol=1e-10, max_iter=100_000)
            used = weight[0] > 0
            model.fit(z[used], label[used], sample_weight=weight[0][used])
            mine = found.weight[h, p] * std
            size = max(1e-3, float(np.abs(model.coef_).max()))
            np.testing.assert_allclose(mine, model.coef_[0], atol=0.02 * size)
            assert np.all(mine[np.abs(model.coef_[0]) > 0.05 * size] != 0)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), c=st.floats(0.005, 5.0), share=st.floats(0.1, 0.9))
def test_the_gap_is_a_certificate(seed: int, c: float, share: float) -> None:
    """No point we can find is further below than the gap says; looser gaps are certificates too."""
    rng = np.random.default_rng(seed)
    label = (rng.random(150) < share).astype(np.int64)
    label[:2] = 0, 1
    x = (rng.standard_normal((1, 150, 6)) + label[:, None] * rng.standard_normal(6)).astype(np.float32)
    s = row_weights(label, "weights")[None]
    found = solve(x, label, s, np.array([0]), np.array([c]))
    ours = own_objective(x, label, s[0], found, 0, 0, c)
    z, _, _ = standardised(x[0], s[0])
    model = liblinear(z, label, s[0], c)
    least = min(ours, objective(z, label, s[0], model.coef_[0], float(model.intercept_[0]), c))
    assert ours - least <= max(found.gap[0, 0], 1e-6) * ours


def test_a_problem_does_not_care_what_is_solved_beside_it() -> None:
    x, label, weight = heads(count=1)
    partition, c = path()
    everything = solve(x, label, weight, partition, c)
    for p in (0, 9, 29):
        alone = solve(x, label, weight[partition[p]][None], np.array([0]), c[p : p + 1])
        assert alone.objective[0, 0] == pytest.approx(everything.objective[0, p], rel=3 * GAP)


def test_constant_columns_have_no_weight_and_zero_problems_are_zero() -> None:
    x, label, weight = heads(count=1, d=6)
    x[0, :, 2] = 7.3
    x[0, :, 4] = np.where(weight[0] > 0, 1.0, 9.0)  # constant in the training rows of the first partition only
    found = solve(x, label, weight[:2], np.array([0, 1, 0]), np.array([1.0, 1.0, 1e-6]))
    assert np.all(found.weight[0, :, 2] == 0)
    assert found.weight[0, 0, 4] == 0
    assert np.all(np.isfinite(found.weight))
    assert np.all(found.weight[0, 2] == 0)


def test_a_large_offset_does_not_spoil_a_small_spread() -> None:
    """Raw readouts may sit far from zero: what counts is the standardised problem."""
    x, label, weight = heads(count=1, d=6)
    s = weight[0]
    found = solve(x + 512.0, label, weight[:1], np.array([0]), np.array([0.3]))
    shifted = own_objective(x + 512.0, label, s, found, 0, 0, 0.3)
    z, _, _ = standardised((x + 512.0)[0], s)
    model = liblinear(z, label, s, 0.3)
    assert shifted <= objective(z, label, s, model.coef_[0], float(model.intercept_[0]), 0.3) * (1 + 2 * GAP)


def test_many_kinds_of_rows_give_the_same_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    x, label, weight = heads(count=1)
    partition, c = path()
    few = solve(x, label, weight, partition, c)
    monkeypatch.setattr(solver, "MAX_KINDS", 1)
    many = solve(x, label, weight, partition, c)
    np.testing.assert_allclose(many.objective, few.objective, rtol=3 * GAP)


def test_the_same_call_gives_the_same_bits() -> None:
    x, label, weight = heads(count=2)
    partition, c = path()
    one, other = solve(x, label, weight, partition, c), solve(x, label, weight, partition, c)
    assert one.weight.tobytes() == other.weight.tobytes()
    assert one.intercept.tobytes() == other.intercept.tobytes()


def problem(seed: int, problems: int = 5, size: int = 7) -> tuple[np.ndarray, ...]:
    """Metric, partition, start, gradient and penalty of ``descend``."""
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
def test_the_minimiser_of_a_quadratic_meets_the_optimality_conditions(seed: int) -> None:
    metric, partition, start, gradient, penalty = problem(seed)
    found, given_slope = descend(metric, partition, start, gradient, penalty, 2_000, 1e-14)
    slope = gradient + np.einsum("pij,pj->pi", metric[partition], found - start)
    scale = 3e-4 * (1 + np.abs(metric).max())  # float32 sums
    np.testing.assert_allclose(given_slope, slope, atol=scale)
    zero = found == 0
    assert np.all(np.abs(slope[zero]) <= penalty[zero] + scale)
    np.testing.assert_allclose(slope[~zero], -np.sign(found[~zero]) * penalty[~zero], atol=scale)


def test_a_coordinate_without_curvature_keeps_its_start() -> None:
    metric, partition, start, gradient, penalty = problem(3)
    metric[:, 2, :] = metric[:, :, 2] = 0.0
    start[:, 2] = 1.5
    found = descend(metric, partition, start, gradient, penalty, 5, 0.0)[0]
    assert np.all(found[:, 2] == 1.5)
    assert np.all(np.isfinite(found))


def test_descent_stops_where_a_sweep_gains_little() -> None:
    given_ = problem(4)
    one, _ = descend(*given_, 1, 0.0)
    assert np.array_equal(descend(*given_, 100, 1.0)[0], one)
    assert not np.array_equal(descend(*given_, 100, 1e-3)[0], one)
