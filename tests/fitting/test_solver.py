"""The solver against liblinear, at the edges; its descent by optimality."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from threadpoolctl import ThreadpoolController, threadpool_info, threadpool_limits

from service.fitting import solver
from service.fitting.probes import row_weights
from service.fitting.solver import GAP, INTERCEPT_PENALTY, descend, one_numpy_thread, solve

GRID = np.array([0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
PARTITION, C = np.repeat(np.arange(5), len(GRID)), np.tile(GRID, 5)


def heads(
    count: int = 6, n: int = 400, d: int = 24, signal: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, ...]:
    """Correlated readouts [count, n, d], offsets and scales of their own; labels [n]; five folds'
    weights [5, n]."""
    rng = np.random.default_rng(seed)
    label = (rng.random(n) < 0.4).astype(np.int64)
    spectrum = np.arange(1, d + 1) ** -0.7
    shared = rng.standard_normal((n, d)) * spectrum
    found = []
    for _ in range(count):
        mix = rng.standard_normal((d, d)) / np.sqrt(d)
        own = rng.standard_normal((n, d)) * spectrum * 0.5
        shift = signal * rng.standard_normal(d) * 0.15 * spectrum
        mixed = (shared + own + label[:, None] * shift) @ mix
        found.append(mixed * rng.uniform(0.1, 20) + rng.standard_normal(d) * 3)
    fold = rng.permutation(n) % 5
    weight = np.zeros((5, n))
    for place in range(5):
        train = np.flatnonzero(fold != place)
        weight[place, train] = row_weights(label[train], "weights")
    return np.stack(found).astype(np.float32), label, weight


class Problem:
    """One probe: rows standardised by the training rows' own statistics, labels, weights, C;
    objectives by hand."""

    def __init__(self, x: np.ndarray, label: np.ndarray, s: np.ndarray, c: float) -> None:
        self.scaler = StandardScaler().fit(x[s > 0].astype(np.float64))
        self.z = self.scaler.transform(x.astype(np.float64))
        self.label, self.s, self.c = label, s, c

    def objective(self, w: np.ndarray, b: float) -> float:
        margin = (2 * self.label - 1) * (self.z @ w + b)
        loss = self.c * np.sum(self.s * np.logaddexp(0, -margin))
        return float(loss + np.abs(w).sum() + INTERCEPT_PENALTY * abs(b))

    def of(self, raw: np.ndarray, intercept: float) -> float:
        return self.objective(raw * self.scaler.scale_, intercept + float(raw @ self.scaler.mean_))

    def liblinear(self) -> float:
        used, options = self.s > 0, {"intercept_scaling": 100.0, "max_iter": 20_000, "tol": 1e-6}
        model = LogisticRegression(C=self.c, l1_ratio=1.0, solver="liblinear", **options)
        model.fit(self.z[used], self.label[used], sample_weight=self.s[used])
        return self.objective(model.coef_[0], float(model.intercept_[0]))


@pytest.mark.parametrize("signal", [0.3, 1.0, 6.0])
def test_no_objective_is_above_liblinears(signal: float) -> None:
    """Three heads, five folds, six values of C: 90 problems a signal, up to separable ones; the
    readouts of one head lie far from zero, where what counts is the standardised problem."""
    x, label, weight = heads(count=3, signal=signal)
    x[0] += 512.0
    found = solve(x, label, weight, PARTITION, C)
    for h, (raw, intercept) in enumerate(zip(*found, strict=True)):
        for p in range(len(C)):
            problem = Problem(x[h], label, weight[PARTITION[p]], C[p])
            ours = problem.of(raw[p], intercept[p])
            assert ours <= problem.liblinear() * (1 + 2 * GAP)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), c=st.floats(0.005, 5.0), share=st.floats(0.1, 0.9))
def test_any_problem_is_solved_to_a_millionth(seed: int, c: float, share: float) -> None:
    rng = np.random.default_rng(seed)
    label = (rng.random(150) < share).astype(np.int64)
    label[:2] = 0, 1
    x = (rng.standard_normal((1, 150, 6)) + label[:, None] * rng.standard_normal(6)).astype(
        np.float32
    )
    s = row_weights(label, "weights")
    raw, intercept = solve(x, label, s[None], np.array([0]), np.array([c]))
    problem = Problem(x[0], label, s, c)
    assert problem.of(raw[0, 0], intercept[0, 0]) <= problem.liblinear() * (1 + 1e-6)


def test_a_problem_does_not_care_what_is_solved_beside_it_nor_how_many_kinds_of_rows_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, label, weight = heads(count=1)
    found = [solve(x, label, weight, PARTITION, C)]
    monkeypatch.setattr(solver, "MAX_KINDS", 1)
    found.append(solve(x, label, weight, PARTITION, C))
    monkeypatch.undo()
    for p in range(len(C)):
        problem = Problem(x[0], label, weight[PARTITION[p]], C[p])
        objectives = [problem.of(raw[0, p], intercept[0, p]) for raw, intercept in found]
        if p in (0, 9, 29):
            raw, intercept = solve(
                x, label, weight[PARTITION[p]][None], np.array([0]), C[p : p + 1]
            )
            objectives.append(problem.of(raw[0, 0], intercept[0, 0]))
        np.testing.assert_allclose(objectives, objectives[0], rtol=3 * GAP)


def test_constant_columns_have_no_weight_and_zero_problems_are_zero() -> None:
    x, label, weight = heads(count=1, d=6)
    x[0, :, 2] = 7.3
    x[0, :, 4] = np.where(
        weight[0] > 0, 1.0, 9.0
    )  # constant in the training rows of the first partition only
    found, _ = solve(x, label, weight[:2], np.array([0, 1, 0]), np.array([1.0, 1.0, 1e-6]))
    assert np.all(found[0, :, 2] == 0)
    assert found[0, 0, 4] == 0
    assert np.all(np.isfinite(found))
    assert np.all(found[0, 2] == 0)


def test_fits_run_on_one_thread_and_the_libraries_are_looked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info()}

    with one_numpy_thread():
        pass
    monkeypatch.setattr(ThreadpoolController, "_load_libraries", lambda self: pytest.fail("again"))
    with one_numpy_thread():
        pass
    monkeypatch.undo()
    with threadpool_limits(2):
        before = threads()
        assert 2 in before
        with one_numpy_thread():
            assert threads() == {1}
        assert threads() == before


def quadratics(seed: int, problems: int = 5, size: int = 7) -> tuple[np.ndarray, ...]:
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


def test_descent_keeps_a_coordinate_without_curvature_and_stops_where_a_sweep_gains_little() -> (
    None
):
    metric, partition, start, gradient, penalty = quadratics(3)
    metric[:, 2, :] = metric[:, :, 2] = 0.0
    start[:, 2] = 1.5
    found = descend(metric, partition, start, gradient, penalty, 5, 0.0)[0]
    assert np.all(found[:, 2] == 1.5)
    assert np.all(np.isfinite(found))
    one, _ = descend(*quadratics(4), 1, 0.0)
    assert np.array_equal(descend(*quadratics(4), 100, 1.0)[0], one)
    assert not np.array_equal(descend(*quadratics(4), 100, 1e-3)[0], one)
