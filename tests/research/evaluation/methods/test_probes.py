"""Linear probes: which head, window or layer each picks, what it fits there, and that this is worth something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from hallutracer_research.evaluation.methods.base import (
    DEPTHS,
    INNER_FOLDS,
    MethodInputs,
    Penalty,
    at_depths,
    choose,
    fit_linear,
    usable_folds,
)
from hallutracer_research.evaluation.methods.fact_probe import fact_probe, search, starts, window
from hallutracer_research.evaluation.methods.iti import best_head, group_bootstrap, iti
from hallutracer_research.evaluation.methods.mass_mean import SHRINKAGE, discriminant
from hallutracer_research.evaluation.methods.p_ik import C_GRID, logistic, p_ik
from hallutracer_research.evaluation.splits import trajectory_ridge
from service.errors import TrainingError
from service.fitting.folds import group_folds
from service.fitting.scores import auroc, risk_auroc
from service.readout import Geometry, Site
from tests.research.evaluation.methods.made import BEST, GEOMETRY, WIDE, made_inputs, noise, plant, readouts, split

D = GEOMETRY.head_dim
P_IK_FITS = [partial(logistic, c) for c in C_GRID]


def planted(folder: Path, site: Site, plan: Callable[[np.ndarray, np.ndarray], Any], count: int = 120) -> MethodInputs:
    """Inputs whose rows of one site ``plan`` changes: rows [n, m, width], label [n]; each row is its own group."""
    base, label = made_inputs(folder, count), np.arange(count) % 2
    rows = noise(np.random.default_rng(1), count, site)
    plan(rows, label)
    name = "heads" if site is Site.ATTENTION_HEAD else "residual"
    made: dict[str, Any] = {"label": label, "group": np.arange(count), name: readouts(folder, rows, label, site)}
    return replace(base, **made)


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_raw_logits_are_the_standardised_pipeline_s(penalty: Penalty) -> None:
    rng = np.random.default_rng(1)
    label = (rng.random(400) < 0.3).astype(np.int64)
    x = rng.standard_normal((400, 6)) * [1, 20, 0.1, 3, 1, 1] + [0, 50, -2, 0, 0, 0]
    x[:, 1] += 9 * label
    x[:, 5] = 7.1  # constant
    fitted = fit_linear(x.astype(np.float32), label, 0.2, penalty)
    z = StandardScaler().fit_transform(x)
    z[:, 5] = 0.0
    ratio = 1.0 if penalty == "l1" else 0.0
    saga = LogisticRegression(C=0.2, l1_ratio=ratio, solver="saga", class_weight="balanced", tol=1e-8, max_iter=20000)
    expected = saga.fit(z, label).decision_function(z)  # saga does not penalise the intercept
    np.testing.assert_allclose(fitted.logits(x), expected, atol=0.01 * expected.std())
    assert fitted.weight[5] == 0.0


def test_logits_of_many_rows_are_those_of_few_and_a_strong_penalty_leaves_a_constant() -> None:
    x = np.random.default_rng(2).standard_normal((5000, 3)).astype(np.float32)
    label = (x[:, 0] > 0).astype(np.int64)
    fitted = fit_linear(x[:200], label[:200], 1.0, "l2")
    np.testing.assert_allclose(fitted.logits(x), x.astype(np.float64) @ fitted.weight + fitted.bias, rtol=1e-12)
    constant = fit_linear(x[:50], label[:50], 1e-6, "l1")
    assert not constant.weight.any()
    assert np.ptp(constant.logits(x)) == 0.0


def test_iti_finds_the_planted_head_and_averages_three_probes(tmp_path: Path) -> None:
    data = made_inputs(tmp_path)
    train, test = split(data)
    layer, head, quality = best_head(data.heads, train, 1)
    assert (layer, head) == BEST
    x = np.asarray(data.heads.file.layer(BEST[0])[3:, BEST[1] * D : (BEST[1] + 1) * D])
    rng = np.random.default_rng(5)
    expected = np.zeros(len(test))
    for _ in range(3):
        drawn = train[group_bootstrap(data.label[train], data.group[train], rng)]
        expected -= fit_linear(x[drawn], data.label[drawn], 1.0, "l2").logits(x[test]) / 3
    np.testing.assert_allclose(iti(data, train, test, 5, 1), expected, rtol=1e-9)
    fitted = fit_linear(x[train], data.label[train], 1.0, "l2")
    assert quality == pytest.approx(auroc(data.label[train], fitted.logits(x[train])))


def test_iti_s_ties_go_to_the_lowest_layer_and_head(tmp_path: Path) -> None:
    def plan(rows: np.ndarray, label: np.ndarray) -> None:
        plant(rows, label, 2, D, 2.0)
        for layer, head in ((2, 2), (4, 0), (5, 2)):  # the same head again, later
            rows[:, layer, head * D : (head + 1) * D] = rows[:, 2, D : 2 * D]

    data = planted(tmp_path, Site.ATTENTION_HEAD, plan)
    assert best_head(data.heads, split(data)[0], 1)[:2] == (2, 1)


def test_the_bootstrap_draws_whole_groups_with_replacement() -> None:
    group, label = np.array([5, 5, 5, 2, 2, 9]), np.array([1, 1, 1, 0, 0, 1])
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(50):
        counts = np.bincount(group_bootstrap(label, group, rng), minlength=6)
        assert all(len(set(counts[group == name])) == 1 for name in (5, 2, 9))  # all rows of a group, equally often
        times = tuple(int(counts[group == name][0]) for name in (5, 2, 9))
        assert sum(times) == 3
        assert times[1] > 0  # the only hallucinated group: a sample without it is drawn again
        seen.add(times)
    assert len(seen) > 3
    with pytest.raises(TrainingError, match="only one class"):
        group_bootstrap(np.ones(4, np.int64), np.arange(4), rng)


@pytest.mark.parametrize("method", [iti, fact_probe])
def test_processes_change_nothing(tmp_path: Path, method: Callable[..., np.ndarray]) -> None:
    data = made_inputs(tmp_path, 120)
    alone, shared = (method(data, *split(data), 1, jobs) for jobs in (1, 2))
    assert alone.tobytes() == shared.tobytes()


def test_fact_probe_reads_a_signal_spread_over_layers_from_a_window(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 400)
    train, test = split(data)
    start, size, c, quality = search(data, train, 2, 1)
    assert (start, size) == (WIDE[0], len(WIDE))
    assert c in (0.1, 0.5)
    x = np.concatenate([np.asarray(data.residual.file.layer(layer)[3:]) for layer in WIDE], axis=1)
    np.testing.assert_array_equal(window(data.residual, 1, 5, np.arange(400)), x)
    probe = fit_linear(x[train], data.label[train], c, "l1")
    np.testing.assert_allclose(fact_probe(data, train, test, 2, 1), -probe.logits(x[test]), rtol=1e-9)
    inner = [
        auroc(data.label[held], fit_linear(x[fit], data.label[fit], c, "l1").logits(x[held]))
        for fit, held in group_folds(data.label, data.group, train, 3, 2)
    ]
    assert quality == pytest.approx(np.mean(inner))


def test_of_equally_good_windows_the_smallest_is_taken(tmp_path: Path) -> None:
    plan = partial(plant, layer=3, column=2, strength=8.0)  # separable: every window that holds layer 3 is perfect
    data = planted(tmp_path, Site.RESIDUAL_STREAM, plan, 200)
    assert search(data, split(data)[0], 0, 1) == (3, 1, 0.1, 1.0)


def test_windows_are_thinned_evenly_and_a_model_of_few_layers_has_only_single_ones(tmp_path: Path) -> None:
    assert (starts(12, 1), starts(6, 5), starts(4, 5)) == (list(range(12)), [0, 1], [])
    for layers, size in ((13, 1), (28, 1), (28, 5), (80, 5)):
        found = starts(layers, size)
        assert (len(found), found[0], found[-1]) == (12, 0, layers - size)
        assert np.ptp(np.diff(found)) <= 1
    geometry = Geometry(num_layers=3, num_heads=1, head_dim=2, hidden_size=4)
    base = made_inputs(tmp_path, 90)
    rows = noise(np.random.default_rng(3), 90, Site.RESIDUAL_STREAM, geometry)
    plant(rows, base.label, 1, 0, 2.0)
    data = replace(base, residual=readouts(tmp_path, rows, base.label, Site.RESIDUAL_STREAM, geometry))
    assert search(data, split(data)[0], 0, 1)[:2] == (1, 1)


def test_depths_become_layers_once_each_and_in_order() -> None:
    assert at_depths(30, DEPTHS) == [6, 12, 17, 23, 29]
    assert at_depths(2, (0.5, 0.75, 1.0)) == [0, 1]
    assert at_depths(1, (0.5, 1.0)) == [0]


def test_the_best_layer_and_fit_of_the_inner_folds_are_taken(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 200)
    train, test = split(data)
    layers = at_depths(6, DEPTHS)
    pairs = group_folds(data.label, data.group, train, INNER_FOLDS, 2)
    best = max(
        (
            np.mean([auroc(data.label[held], logistic(c, x[inside], data.label[inside], x[held]))
                     for inside, held in pairs]),
            layer,
            c,
        )
        for layer in layers
        for x in [np.asarray(data.residual.file.layer(layer)[3:])]
        for c in C_GRID
    )  # fmt: skip
    layer, fit = choose(data, train, 2, layers=layers, fits=P_IK_FITS, jobs=1, what="fold")
    assert (layer, C_GRID[fit]) == best[1:]
    x = np.asarray(data.residual.file.layer(layer)[3:])
    expected = -fit_linear(x[train], data.label[train], C_GRID[fit], "l2").logits(x[test])
    np.testing.assert_allclose(p_ik(data, train, test, 2, jobs=1), expected, rtol=1e-9)


def test_ties_go_to_the_lowest_layer_and_the_first_fit(tmp_path: Path) -> None:
    def plan(rows: np.ndarray, label: np.ndarray) -> None:
        plant(rows, label, 2, 2, 2.0)
        rows[:, 4] = rows[:, 2]

    data = planted(tmp_path, Site.RESIDUAL_STREAM, plan)
    fits = [partial(logistic, 0.01)] * 2
    assert choose(data, split(data)[0], 0, layers=[1, 2, 4], fits=fits, jobs=1, what="fold") == (2, 0)


def test_a_fold_that_lacks_a_class_is_left_out_and_the_method_named_where_all_do(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 60)
    train, test = split(data)
    label = np.zeros(60, np.int64)
    label[train[0]] = 1
    with pytest.raises(TrainingError, match=r"p\(IK\) inner folds"):
        p_ik(replace(data, label=label), train, test, 0, jobs=1)
    label[train[:2]] = 1  # one in each of two folds' test sides; the third has none
    data = replace(data, label=label, group=np.arange(60))
    assert [label[held].sum() for _, held in usable_folds(label, data.group, train, INNER_FOLDS, 0)] == [1, 1]
    choose(data, train, 0, layers=[1, 2], fits=P_IK_FITS, jobs=1, what="fold")


def correlated(rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x [n, d], label [n], the covariance [d, d] within the classes, the difference of their means [d]."""
    rng = np.random.default_rng(0)
    mixed = np.eye(width) + 3.0 * rng.standard_normal((width, 1)) @ rng.standard_normal((1, width))
    shift = rng.standard_normal(width)
    label = (rng.random(rows) < 0.3).astype(np.int64)
    x = rng.standard_normal((rows, width)) @ mixed.T + label[:, None] * shift + 5.0
    return x.astype(np.float32), label, mixed @ mixed.T, shift


def test_mass_mean_is_the_covariance_s_inverse_times_the_difference_of_means() -> None:
    x, label, covariance, shift = correlated(40_000, 5)
    found = discriminant(None, x, label, np.concatenate([np.zeros((1, 5)), np.eye(5)]).astype(np.float32))
    direction, expected = found[1:] - found[0], np.linalg.solve(covariance, shift)
    assert direction @ expected / np.linalg.norm(direction) / np.linalg.norm(expected) > 0.999
    means = [x[label == value].mean(axis=0) for value in (0, 1)]
    np.testing.assert_allclose(discriminant(None, x, label, np.stack(means).mean(axis=0)[None]), 0.0, atol=1e-3)


def test_mass_mean_needs_fewer_rows_than_columns_and_ignores_constant_ones() -> None:
    x, label, _, shift = correlated(400, 150)
    train, test = np.arange(100), np.arange(100, 400)
    found = auroc(label[test], discriminant(None, x[train], label[train], x[test]))
    plain = auroc(label[test], (x[test] - x[train].mean(axis=0)) @ shift)  # the true difference, uncorrected
    assert found > max(plain, 0.9)
    label = np.arange(40) % 2
    x = np.stack([np.full(40, 7.1), label.astype(float)], axis=1).astype(np.float32)
    low, high = discriminant(None, x, label, np.array([[1e6, 0.0], [7.1, 1.0]], np.float32))
    assert -np.inf < low < 0 < high < np.inf


def test_mass_mean_fully_shrunk_is_the_difference_of_means_of_standardised_columns() -> None:
    x, label, _, _ = correlated(300, 6)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    means = [z[label == value].mean(axis=0) for value in (0, 1)]
    expected = (z - (means[0] + means[1]) / 2) @ (means[1] - means[0])
    found = discriminant(1.0, x, label, x)
    scale = found @ expected / (expected @ expected)
    assert scale > 0
    np.testing.assert_allclose(found, scale * expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shrinkage", SHRINKAGE)
def test_copies_of_rows_are_no_reason_to_trust_the_covariance(shrinkage: float | None) -> None:
    """Each row five times over changes a fixed share's direction by nothing, and Ledoit and Wolf's towards overfit."""
    x, label, _, _ = correlated(60, 50)
    once = discriminant(shrinkage, x, label, x[:5])
    often = discriminant(shrinkage, np.tile(x, (5, 1)), np.tile(label, 5), x[:5])
    assert np.allclose(once, often, rtol=1e-3, atol=1e-3) == (shrinkage is not None)


def test_the_ridge_weighs_layers_where_the_mean_cannot() -> None:
    def made(rows: int, known: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Trajectories [n, 8], labels and groups of two; a strong common level, and the class at the ``known``."""
        rng = np.random.default_rng(0)
        group = np.arange(rows) // 2
        label = (rng.random(rows // 2) < 0.5).astype(np.int64)[group]
        trajectory = rng.standard_normal((rows, 8)) + 3.0 * rng.standard_normal((rows, 1))
        trajectory[:, known] += 1.5 * (2 * label - 1)[:, None]
        return trajectory, label, group

    trajectory, label, group = made(500, (2, 5))
    train, test = slice(300), slice(300, 500)
    found = trajectory_ridge(trajectory[train], label[train], group[train], trajectory[test], 0)
    assert risk_auroc(label[test], found) > 0.9
    assert risk_auroc(label[test], -trajectory[test].mean(axis=1)) < 0.7
    some = trajectory_ridge(trajectory[train], label[train], group[train], trajectory[305:310], 0)
    np.testing.assert_allclose(some, found[5:10], rtol=1e-9)
    trajectory, label, group = made(2000, ())
    found = trajectory_ridge(trajectory[:1000], label[:1000], group[:1000], trajectory[1000:], 0)
    assert abs(risk_auroc(label[1000:], found) - 0.5) < 0.05
