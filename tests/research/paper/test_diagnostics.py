"""The diagnostics against closed forms, definitions and simulation: classes, features, increments,
geometry, shape."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from scipy.stats import kstest, linregress, norm, trim_mean, ttest_1samp
from sklearn.metrics import roc_auc_score

from hallutracer_research.paper.ablations import uniformity
from hallutracer_research.paper.diagnostics import classes, features, geometry, increments
from hallutracer_research.paper.diagnostics.geometry import (
    expected_cosine,
    expected_cosine_exact,
    isotropy,
)
from hallutracer_research.paper.diagnostics.increments import (
    PARTS,
    Increments,
    KSplit,
    StandardizedProbes,
)
from hallutracer_research.paper.diagnostics.shape import fisher_gap, snr_table, variance_components
from service.errors import TrainingError
from service.risk import truth_logits
from tests.research.made import random_intercepts, unit_rows

ZEROS, ONES = np.zeros((2, 4)), np.ones((2, 3))
STANDARD = features.Standard.of(ZEROS)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: classes.factual_rows(np.zeros(5)), "0 rows are factual"),
        (lambda: classes.factual_rows(np.array([0, 1, 2])), r"0 or 1: found \[0, 1, 2\]"),
        (lambda: classes.as_float([[1.0, np.nan]], "trajectory", 2), "trajectory holds 1"),
        (lambda: features.zones(2), "at least 3"),
        (
            lambda: features.source_features(ZEROS, ZEROS[:, 1:], ZEROS[:, 1:], STANDARD),
            "at least 5",
        ),
        (
            lambda: features.source_features(ZEROS, ZEROS, ZEROS[:, 1:], STANDARD),
            r"w has shape \[2, 4\]: \[2, 3\]",
        ),
        (lambda: classes.chen_qin(np.zeros((6, 2)), [1, 1, 0, 0, 0, 0]), "2 rows are factual"),
        (lambda: increments.decompose(ZEROS, ZEROS), r"crossed has shape \[2, 4\]: \[2, 3\]"),
        (lambda: increments.decompose(ZEROS, np.full((2, 3), np.nan)), "not finite"),
        (lambda: StandardizedProbes.of(ONES, np.zeros(2), ONES, 0 * ONES), "std above 0"),
        (lambda: isotropy(np.eye(2)), "at least 3"),
        (lambda: isotropy(np.diag([1.0, 2.0, 1.0])), "layer 1 is not of unit length"),
        (
            lambda: geometry.layer_geometry(np.eye(8), np.arange(8) % 2, np.full(8, 1.0)),
            "length 2.8",
        ),
        (lambda: variance_components(np.zeros((4, 2)), [0, 0, 1, 1]), "at least 3"),
        (lambda: snr_table(np.ones((6, 4)), [0, 1] * 3), "same depth mean"),
        (
            lambda: fisher_gap(*random_intercepts(20, 24, seed=5)),
            r"singular \(rank 18 of 24.*ledoit_wolf",
        ),
        (lambda: fisher_gap(*random_intercepts(400, 3), 1.5), "between 0 and 1"),
    ],
)
def test_what_cannot_be_diagnosed_is_named(call: Any, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        call()


def test_pooled_spreads_of_15_factual_rows_and_35_others() -> None:
    x, factual = default_rng(0).standard_normal((50, 3)) * [1, 2, 3], np.arange(50) < 15
    covariance = 0.3 * np.cov(x[:15], rowvar=False) + 0.7 * np.cov(x[15:], rowvar=False)
    assert classes.pooled_covariance(x, factual) == pytest.approx(covariance)
    assert classes.pooled_variance(x, factual) == pytest.approx(np.diag(covariance))
    assert np.isnan(classes.effect_size(np.ones((4, 1)), np.arange(4) < 2)).all()


def test_undefined_numbers_are_null() -> None:
    numbers = {"a": np.array([1.0, np.nan]), "b": (np.float64(2), np.inf, "x", None, np.int64(3))}
    assert classes.as_document(numbers) == {"a": [1.0, None], "b": [2.0, None, "x", None, 3]}
    assert increments.kappa_table(np.zeros((4, 3)), [0, 0, 1, 1]).kappa_mean is None


def test_as_many_middle_layers_as_the_paper_counts_for_its_models() -> None:
    for m, count in ((28, 18), (32, 20), (48, 30), (64, 40), (80, 48)):
        assert len(classes.middle_layers(m)) == len(classes.middle_transitions(m)) == count
    assert (len(classes.middle_layers(3)), len(classes.middle_transitions(3))) == (3, 2)


@pytest.mark.parametrize(
    ("m", "ends"),
    [
        (28, [(9, 20, 12), (21, 27, 7), (9, 20, 12), (21, 26, 6)]),
        (32, [(10, 23, 14), (24, 31, 8), (10, 23, 14), (24, 30, 7)]),
    ],
)
def test_the_first_and_the_last_of_each_zone_and_how_many_it_has(m: int, ends: Any) -> None:
    zones = vars(features.zones(m)).values()
    assert [(zone[0], zone[-1], len(set(zone.tolist()))) for zone in zones] == ends


def test_layers_of_the_trimmed_mean_and_of_the_depth_curve() -> None:
    assert [features.trimmed_layers(m) for m in (9, 10, 28, 32, 80)] == [0, 1, 2, 3, 8]
    depth_layers: Any = partial(features.depth_layers, 32, best_layer=17)
    for size, layers in ((4, [3, 11, 20, 29]), (32, range(32)), (1, [17])):
        assert depth_layers(size).tolist() == [*layers]
    assert depth_layers(28) is None
    assert features.depth_sizes(32) == ((1, 2, 4, 8, 12, 16, 20, 24, 32), (28,))
    assert features.depth_sizes(6) == ((1, 6), (2, 4, 8, 12, 16, 20, 24, 28))
    assert features.depth_sizes(28)[0][-1] == 28


def test_the_full_trajectory_by_hand() -> None:
    (row,) = features.full_trajectory(np.array([[1.0, 4.0, 2.0, 3.0]]))
    statistics = [2.5, np.std([1, 4, 2, 3]), 1, 4, 3, 2]
    assert row == pytest.approx([1, 4, 2, 3, 3, -2, 1, *statistics])


def test_the_expected_cosine_on_the_circle_on_the_sphere_and_in_many_dimensions() -> None:
    assert expected_cosine(128) == pytest.approx(0.0705, abs=1e-4)  # the paper's 0.071
    assert expected_cosine_exact(2) == pytest.approx(2 / math.pi)
    assert expected_cosine_exact(3) == pytest.approx(0.5)
    assert expected_cosine_exact(999) == pytest.approx(expected_cosine(999), rel=0.001)


def statistic(one: np.ndarray, two: np.ndarray) -> float:
    within = [np.mean([x @ y for x, y in permutations(rows, 2)]) for rows in (one, two)]
    return float(sum(within) - 2 * (one @ two.T).mean())


def mean_without(x: np.ndarray, *rows: int) -> np.ndarray:
    """The mean of the other rows."""
    return np.asarray(np.delete(x, rows, axis=0).mean(axis=0))


def leave_two_out(x: np.ndarray) -> float:
    """tr(Sigma^2) by Chen and Qin's formula, one pair at a time."""
    pairs = [(x[j], x[k], mean_without(x, j, k)) for j, k in permutations(range(len(x)), 2)]
    return float(np.mean([(a @ (b - mean)) * (b @ (a - mean)) for a, b, mean in pairs]))


def leave_one_out(one: np.ndarray, two: np.ndarray) -> float:
    """tr(Sigma_1 Sigma_2) by Chen and Qin's formula."""
    pairs = product(range(len(one)), range(len(two)))
    products = [
        (one[j] @ (two[k] - mean_without(two, k))) * (two[k] @ (one[j] - mean_without(one, j)))
        for j, k in pairs
    ]
    return float(np.mean(products))


@pytest.mark.parametrize("dim", [3, 30])
def test_chen_and_qin_s_statistic_and_variance_follow_the_definitions(dim: int) -> None:
    rng = default_rng(1)
    one, two = rng.standard_normal((8, dim)) + 0.3, 2 * rng.standard_normal((6, dim)) + 0.2
    found = classes.chen_qin(np.concatenate([one, two]), np.repeat([1, 0], [8, 6]))
    assert found.statistic == pytest.approx(statistic(one, two), rel=1e-9)
    expected = (
        2 / (8 * 7) * leave_two_out(one - two.mean(axis=0))
        + 2 / (6 * 5) * leave_two_out(two - one.mean(axis=0))
        + 4 / 48 * leave_one_out(one, two)
    )
    assert found.variance == pytest.approx(expected, rel=1e-9)
    assert found.p_value == pytest.approx(norm.sf(found.statistic / math.sqrt(expected)))
    trace = 8 / 14 * np.trace(np.cov(one, rowvar=False)) + 6 / 14 * np.trace(
        np.cov(two, rowvar=False)
    )
    assert found.energy_ratio == pytest.approx(found.statistic / trace, rel=1e-9)


def test_neither_blocks_nor_a_common_offset_change_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = default_rng(2)
    x, label = rng.standard_normal((60, 10)), np.arange(60) % 2
    one = classes.chen_qin(x, label)
    two = classes.chen_qin(x + 1000 * rng.standard_normal(10), label)
    assert (two.statistic, two.p_value) == pytest.approx((one.statistic, one.p_value), rel=1e-6)
    found = classes.chen_qin(np.zeros((6, 2)), [1, 1, 1, 0, 0, 0])
    assert (found.p_value, found.energy_ratio, len(found.notes)) == (None, None, 1)
    sets = [(rng.standard_normal((40, width)), np.arange(40) % 2) for width in (60, 9)]
    whole = [classes.chen_qin(*one).variance for one in sets]
    monkeypatch.setattr(classes, "_BLOCK", 4)
    assert [classes.chen_qin(*one).variance for one in sets] == pytest.approx(whole, rel=1e-12)


def test_one_row_of_each_group_is_taken_and_too_few_groups_have_no_test() -> None:
    x = default_rng(8).standard_normal((30, 4))
    label, group = np.arange(30) % 2, np.arange(30) // 2
    alone = classes.chen_qin_by_group(x, label, np.array([f"g{row}" for row in range(30)]))
    assert alone == classes.chen_qin(x, label)
    rows = classes.one_row_a_group(group)
    assert (rows // 2).tolist() == [*range(15)]
    assert classes.chen_qin_by_group(x, label, group) == classes.chen_qin(x[rows], label[rows])
    assert len({tuple(classes.one_row_a_group(group, seed).tolist()) for seed in range(5)}) > 1
    none = classes.chen_qin_by_group(x, label, group // 3)
    assert (none.statistic, none.p_value, none.energy_ratio) == (None, None, None)
    assert "one row of each group" in none.notes[0]


def test_distance_correlation_is_its_definition() -> None:
    def centred(values: np.ndarray) -> np.ndarray:
        distance = np.abs(values[:, None] - values)
        return np.asarray(
            distance - distance.mean(axis=0) - distance.mean(axis=1)[:, None] + distance.mean()
        )

    rng = default_rng(3)
    x = rng.standard_normal(700)
    for y in (rng.standard_normal(700), x + rng.standard_normal(700), x**2, np.round(x), 3 - 2 * x):
        a, b = centred(x), centred(y)
        expected = math.sqrt((a * b).mean() / math.sqrt((a * a).mean() * (b * b).mean()))
        assert classes.distance_correlation(x, y) == pytest.approx(expected, rel=1e-9)
    assert classes.distance_correlation(x, 3 - 2 * x) == pytest.approx(1)
    assert classes.distance_correlation(x, np.ones(700)) is None


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 40), st.integers(0, 1000))
def test_features_agree_with_scipy_and_plain_sums(m: int, seed: int) -> None:
    x = default_rng(seed).standard_normal((4, m)) * 3
    found = features.trajectory_features(x)
    assert found["slope"] == pytest.approx([linregress(np.arange(m), row).slope for row in x])
    assert found["trimmed_mean"] == pytest.approx(trim_mean(x, 0.1, axis=1))
    for i, row in enumerate(x):
        assert found["total_variation"][i] == pytest.approx(
            sum(abs(b - a) for a, b in zip(row, row[1:], strict=False))
        )
        assert found["range"][i] == pytest.approx(max(row) - min(row))
        assert found["zone_shift"][i] == pytest.approx(
            np.mean(row[3 * m // 4 :]) - np.mean(row[m // 3 : 3 * m // 4])
        )
    assert list(found)[:5] == list(features.FIVE)


def test_source_features_by_hand() -> None:
    # m = 8: recognition layers 2..5, output 6, 7; transitions 2..5 and 6
    x = np.arange(8.0)[None] ** 2
    w = np.array([[9, 9, 1.0, -1.0, 2.0, 0.0, 5.0]])
    found = features.source_features(
        x, w, np.diff(x) - w, features.Standard(np.full(8, 1.0), np.full(8, 2.0))
    )
    mean = np.mean(np.arange(8.0) ** 2)
    friction = [-d / (level - mean) for d, level in zip((5, 7, 9, 11), (4, 9, 16, 25), strict=True)]
    expected = {
        "rho_rz": (np.mean([4, 9, 16, 25]) - 1) / 2,
        "l_rz": 13.5,
        "l_end": 49,
        "w_rz": 0.5,
        "tv_w_rz": 2 + 3 + 2,
        "k_rz": np.mean([4, 8, 7, 11]),  # dL is 5, 7, 9, 11 there
        "tv_k_rz": 4 + 1 + 4,
        "log_energy_ratio": np.log(6 / (16 + 64 + 49 + 121)),
        "friction_rz": np.mean(friction),
        "condition_rz": np.mean([1, 9 / 7, 1, 1]),
        "rho_oz": (np.mean([36, 49]) - 1) / 2,
        "k_oz": 13 - 5,
        "rho_last": 24,
    }
    assert dict(zip(features.SOURCE_NAMES, found[0], strict=True)) == pytest.approx(
        expected, rel=1e-5
    )
    still = np.ones((3, 8))
    zeros = np.zeros((3, 7))
    assert np.isfinite(
        features.source_features(still, zeros, zeros, features.Standard.of(still))
    ).all()
    assert features.Standard.of(still).std.tolist() == [1] * 8
    assert sorted(column for group in features.GROUPS.values() for column in group) == list(
        range(13)
    )
    assert [len(columns) for columns in features.GROUPS.values()] == [3, 5, 2, 3]


@given(st.integers(6, 90), st.integers(2, 90))
def test_depth_layers_never_repeat(m: int, size: int) -> None:
    layers = features.depth_layers(m, size, 0)
    if layers is not None:
        assert len(set(layers.tolist())) == size
        assert 0 <= layers.min() <= layers.max() < m


def planted(heads_differ: bool = True, seed: int = 0) -> Any:
    """Rows [layers, prompts, heads, d] of 6 layers, 60 prompts, 3 heads of 8 on scales and offsets
    of their own; probes of the selected heads."""
    rng = default_rng(seed)
    rows = rng.standard_normal((6, 60, 24)) * rng.uniform(
        0.1, 10, (6, 1, 24)
    ) + 5 * rng.standard_normal((6, 1, 24))
    rows = rows.reshape(6, 60, 3, 8)
    head = rng.integers(0, 3, 6) if heads_differ else np.zeros(6, int)
    readout = np.stack([rows[layer][:, head[layer]] for layer in range(6)], axis=1)
    direction, bias = unit_rows(rng.standard_normal((6, 8))), rng.standard_normal(6)
    probes = StandardizedProbes.of(direction, bias, readout.mean(axis=0), readout.std(axis=0))
    return SimpleNamespace(
        rows=rows, head=head, readout=readout, direction=direction, bias=bias, probes=probes
    )


def split(made: Any) -> KSplit:
    steps = increments.crossings(lambda layer, head: made.rows[layer][:, head], made.head)
    return increments.split_readout_change(steps, made.probes, made.direction, made.bias)


def test_w_is_the_frozen_probe_on_the_same_head_and_w_plus_k_the_increment() -> None:
    made, read = planted(), []

    def readout_of(layer: int, head: int) -> np.ndarray:
        read.append((layer, head))
        return np.asarray(made.rows[layer][:, head])

    crossed = []
    for step in increments.crossings(readout_of, made.head):
        layer, following = step.layer, made.rows[step.layer + 1]
        assert np.array_equal(step.same_head, following[:, made.head[layer]])
        assert np.array_equal(step.next_head, following[:, made.head[layer + 1]])
        crossed.append(step.same_head @ made.direction[layer] + made.bias[layer])
    assert read == [(layer, made.head[of]) for layer in range(1, 6) for of in (layer - 1, layer)], (
        "one layer at a time"
    )
    trajectory = truth_logits(made.readout, made.direction, made.bias)
    parts = increments.decompose(trajectory, np.stack(crossed, axis=1))
    assert np.allclose(parts.w + parts.k, np.diff(trajectory, axis=1), atol=1e-12)
    for layer in range(5):
        moved = (made.rows[layer + 1] - made.rows[layer])[:, made.head[layer]]
        assert np.allclose(parts.w[:, layer], moved @ made.direction[layer], atol=1e-10)
    assert increments.decompose(np.full((1, 2), 1e200), np.array([[-1e184]])).w.shape == (1, 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_four_parts_make_k_up_to_1e_12(seed: int) -> None:
    found = split(planted(seed=seed))
    assert found.reconstruction_error <= 1e-12
    assert np.allclose(
        found.probe + found.metric + found.head + found.bias, found.k, rtol=1e-9, atol=1e-9
    )


def test_the_head_part_is_that_of_a_head_switch_alone() -> None:
    found = split(planted(heads_differ=False))
    assert not found.head.any()
    assert found.metric.any()
    made = planted()
    made.direction, made.bias = np.tile(made.direction[:1], (6, 1)), np.full(6, made.bias[0])
    made.probes = StandardizedProbes.of(
        made.direction, made.bias, np.zeros((6, 8)), np.ones((6, 8))
    )
    found = split(made)  # one probe everywhere
    assert not any(part.any() for part in (found.probe, found.metric, found.bias))
    assert np.allclose(found.head, found.k)


def test_the_table_of_k_agrees_with_scikit_learn_and_numpy() -> None:
    rng = default_rng(3)
    label = np.repeat([0, 1], 150)
    made = (
        rng.standard_normal((4, 300, 9))
        + np.array([0.8, 0.8, 0.0, 0.0])[:, None, None] * label[None, :, None]
    )
    made[3] -= made[2]  # head cancels metric
    found = KSplit(*made, np.zeros(9), 0.0)
    table = increments.k_table(found, label, permutations=50)
    steps = features.zones(10).recognition_steps
    for name, values in zip(PARTS, made, strict=True):
        area = np.array([roc_auc_score(label, values[:, step]) for step in steps])
        assert table.parts[name].signal == pytest.approx(
            np.maximum(area, 1 - area).mean(), abs=1e-12
        )
        assert table.parts[name].variance == pytest.approx(
            values[:, steps].var(axis=0, ddof=1).mean()
        )
        assert 0.5 < table.parts[name].null < 0.55
    covariance = [np.cov(made[2][:, step], made[3][:, step])[0, 1] for step in steps]
    assert table.cov_metric_head == pytest.approx(np.mean(covariance))
    assert table == increments.k_table(found, label, permutations=50)


def test_kappa_of_known_spreads_and_a_class_without_spread_is_counted_out() -> None:
    rng = default_rng(0)
    n = 100_000
    label = (np.arange(n) < n // 4).astype(int)
    w = rng.standard_normal((n, 9))
    w[label == 1] *= 2  # variances 4 and 1, shares 1/4 and 3/4
    w += 0.7 * label[:, None]
    found = increments.kappa_table(w, label)
    assert (found.kappa_mean, found.kappa_median) == pytest.approx((4, 4), rel=0.03)
    assert found.effect_size == pytest.approx(0.7 / math.sqrt(0.25 * 4 + 0.75), rel=0.05)
    assert found.worst_case_snr == pytest.approx(0.35, rel=0.05)
    assert found.degradation == pytest.approx(1 - math.sqrt(1.75 / 4), abs=0.02)
    assert (found.factual_wider, found.transitions) == (1, 6)  # of 10 layers, the middle ones
    w, label = rng.standard_normal((10, 4)), np.arange(10) % 2
    w[label == 0, 1] = 3.0
    found = increments.kappa_table(w, label)
    assert found.kappa_by_layer[1] is None
    assert "1 of" in found.notes[0]


def whitened(n: int, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [2n, d] whose unbiased covariance in either class is diag(spread^2) exactly, class means
    0."""
    rng = default_rng(0)
    x = rng.standard_normal((2, n, len(spread)))
    x -= x.mean(axis=1, keepdims=True)
    return np.concatenate(
        [np.linalg.qr(half)[0] * math.sqrt(n - 1) * spread for half in x]
    ), np.repeat([0, 1], n)


def test_a_layer_with_a_known_covariance() -> None:
    spread = np.sqrt(np.array([90.0, 4.0, 3.0, 2.0, 1.0]))
    x, label = whitened(50, spread)
    shift, v = np.array([3.0, 0.0, 4.0, 0.0, 0.0]), np.array([0.0, 0.6, 0.8, 0.0, 0.0])
    x[label == 1] += shift
    found = geometry.layer_geometry(x, label, v)
    fisher = shift / spread**2
    expected = {
        "mean_shift_norm": 5,
        "stable_rank": 100**2 / (8100 + 16 + 9 + 4 + 1),
        "stable_rank_share": 100**2 / 8130 / 5,
        "trace_ratio": 1,
        "energy_fraction": (0.36 * 4 + 0.64 * 3) / 100,
        "alignment": 0.8 * 4 / 5,
        "fisher_cos2": (v @ fisher) ** 2 / (fisher @ fisher),
        "v2_top90": pytest.approx(0, abs=1e-9),  # the first axis holds exactly the 90 %
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value), name
    x, label = whitened(50, np.sqrt(np.array([80.0, 15.0, 5.0])))
    assert geometry.layer_geometry(x, label, np.array([0.0, 0.6, 0.8])).v2_top90 == pytest.approx(
        0.36
    )
    x, label = default_rng(0).standard_normal((8, 20)), np.arange(8) % 2
    assert geometry.layer_geometry(x, label).energy_fraction is None
    singular = geometry.layer_geometry(x, label, unit_rows(np.ones((1, 20)))[0])
    assert singular.fisher_cos2 is None
    assert singular.energy_fraction is not None


def test_transitions_and_the_middle_mean() -> None:
    rng = default_rng(1)
    n, m, d = 4000, 8, 16
    label = np.arange(n) % 2
    w = rng.standard_normal((n, m - 1)) + 0.5 * label[:, None]
    k = rng.standard_normal((n, m - 1)) * 2
    v = unit_rows(rng.standard_normal((m, d)))
    transitions = geometry.transition_geometry(Increments(w, k), v, label)
    assert transitions[0].cohen_d == pytest.approx(0.5, abs=0.1)
    assert np.mean([one.r_w for one in transitions if one.r_w]) == pytest.approx(
        math.sqrt(5), rel=0.15
    )
    assert all(
        one.distance_correlation is not None and one.distance_correlation < 0.08
        for one in transitions
    )
    readout = rng.standard_normal((n, m, d))
    layers = [geometry.layer_geometry(readout[:, layer], label, v[layer]) for layer in range(m)]
    found = geometry.readout_geometry(layers, transitions, d)
    document = found.document()
    for name in ("energy_fraction", "adjacent_cos"):
        assert document[name] == pytest.approx(np.mean(document["by_layer"][name][1:7]))
    assert document["energy_fraction"] == pytest.approx(1 / d, rel=0.1)
    assert document["r_w"] == pytest.approx(document["cohen_d"] / document["increment_d"])
    assert document["notes"] == []
    cosines = np.abs((v[:-1] * v[1:]).sum(axis=1))
    assert document["by_layer"]["adjacent_cos"] == pytest.approx(cosines)
    expected = ttest_1samp(cosines[1:7], expected_cosine_exact(d)).pvalue
    assert found.cos_p_value == pytest.approx(expected)
    assert geometry.readout_geometry(layers, (), d).document()["notes"]


def test_random_directions_are_rejected_at_the_nominal_rate() -> None:
    rng = default_rng(0)
    runs = [
        isotropy(unit_rows(rng.standard_normal((32, 64))), permutations=200, seed=run)
        for run in range(300)
    ]
    for name in ("ks_ambient_p", "shapiro_p", "trend_p", "anova_p", "permutation_ambient_p"):
        rate = np.mean([getattr(run, name) < 0.05 for run in runs])
        assert 0.015 < rate < 0.10, name  # 0.05 with a standard error of 0.0126
    assert np.mean([run.mean_abs_cos for run in runs]) == pytest.approx(
        expected_cosine(64), rel=0.03
    )
    assert {run.pairs for run in runs} == {20}


def test_a_chain_of_slowly_turning_directions_fails_every_comparison_with_random_ones() -> None:
    rng = default_rng(1)
    found = isotropy(
        unit_rows(
            np.cumsum([rng.standard_normal(64), *0.5 * rng.standard_normal((31, 64))], axis=0)
        ),
        permutations=2000,
    )
    assert found.mean_abs_cos > 0.5
    p_values = (found.ks_ambient_p, found.trend_p, found.anova_p, found.permutation_ambient_p)
    assert max(p_values) < 0.001
    assert found.trend_slope < 0
    assert found.permutation_ambient_p == 1 / 2001  # no random set is as far out


def test_directions_of_fewer_dimensions_match_their_rank_and_not_the_space() -> None:
    v = np.zeros((80, 128))
    v[:, :6] = unit_rows(default_rng(2).standard_normal((80, 6)))
    found = isotropy(v, effective_rank=6.2, permutations=500)
    assert found.permutation_ambient_p < 0.01 < found.permutation_rank_p
    assert found.expected_rank == pytest.approx(expected_cosine(6.2))
    few = isotropy(unit_rows(default_rng(5).standard_normal((3, 8))), permutations=50)
    assert (few.pairs, few.shapiro_p, len(few.gap_means)) == (2, None, 2)
    assert any("gaps 1 .. 2 of 9" in note for note in few.notes)
    json.dumps(classes.as_document(few), allow_nan=False)


def test_permutation_p_value_is_near_the_exact_kolmogorov_smirnov_one() -> None:
    rng = default_rng(4)
    v = unit_rows(
        rng.standard_normal((21, 3))
    )  # on the ordinary sphere an inner product is uniform on [-1, 1]
    inner = np.sum(v[1:] * v[:-1], axis=1)
    exact = float(kstest(inner, "uniform", args=(-1, 2)).pvalue)
    assert geometry.permutation_p_value(inner, 3, 10_000, rng) == pytest.approx(exact, abs=0.02)


def equicorrelated(n: int, m: int, heads: int, rho: float) -> np.ndarray:
    rng = default_rng(0)
    shared = rng.standard_normal((n, m, 1))
    return np.asarray(np.sqrt(rho) * shared + np.sqrt(1 - rho) * rng.standard_normal((n, m, heads)))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_equicorrelated_scores_have_a_known_rank(rho: float) -> None:
    found = uniformity(np.full((4, 8), 0.7), equicorrelated(20_000, 4, 8, rho), [])
    values = np.array([1 + 7 * rho] + [1 - rho] * 7) / 8
    rank = np.exp(-np.sum(values * np.log(values)))
    assert found["correlation"] == pytest.approx(rho, abs=0.02)
    assert found["effective_rank"] == pytest.approx(rank, rel=0.03)
    assert found["rank_share"] == pytest.approx(rank / 8, rel=0.03)


def test_variation_and_switches_by_hand_one_head_and_constant_heads() -> None:
    quality = np.array([[0.6, 0.8], [0.7, 0.7], [0.5, 0.9], [0.9, 0.5]])
    found = uniformity(quality, equicorrelated(50, 4, 2, 0.2), [])
    assert found["auc_cv"] == pytest.approx(np.mean([0.1 / 0.7, 0, 0.2 / 0.7, 0.2 / 0.7]))
    assert found["switches"] == 1.0  # best heads 1, 0 (tie: lowest), 1, 0
    assert uniformity(quality[[0, 2, 2]], equicorrelated(50, 3, 2, 0.2), [])["switches"] == 0
    notes: list[str] = []
    single = uniformity(np.full((3, 1), 0.6), default_rng(0).standard_normal((9, 3, 1)), notes)
    assert (single["correlation"], single["rank_share"], len(notes)) == (None, None, 1)
    scores = equicorrelated(100, 2, 3, 0.5)
    scores[:, 0, 1] = 1.0
    uniformity(np.full((2, 3), 0.6), scores, notes)
    assert "1 heads have constant scores" in notes[1]


def test_plug_in_is_exactly_equation_icc_and_lags_are_correlations_between_layers() -> None:
    trajectory, label = random_intercepts(37, 6, share=0.4, seed=1)
    alpha, epsilon = np.empty(37), np.empty((37, 6))
    for value in (0, 1):
        rows = label == value
        away = trajectory[rows] - trajectory[rows].mean(axis=0)
        alpha[rows] = away.mean(axis=1)
        epsilon[rows] = away - alpha[rows][:, None]
    found, ones = variance_components(trajectory, label), label == 1
    assert found.icc == pytest.approx(alpha.var() / (alpha.var() + epsilon.var()), rel=1e-12)
    assert found.icc_factual == pytest.approx(
        alpha[ones].var() / (alpha[ones].var() + epsilon[ones].var()), rel=1e-12
    )
    correlation = np.corrcoef(epsilon[ones], rowvar=False)
    acf = [np.mean(np.diagonal(correlation, lag)) for lag in range(1, 5)]
    assert found.residual_acf == pytest.approx(acf, rel=1e-10)
    assert found.acf_floor == -1 / 5
    lags = [len(variance_components(*random_intercepts(30, m)).residual_acf) for m in (3, 40)]
    assert lags == [1, 12]
    none = variance_components(np.tile([[1.0, 2.0, 3.0]], (4, 1)), [0, 0, 1, 1])
    assert (none.icc, none.icc_unbiased, none.residual_acf) == (None, None, (None,))
    assert len(none.notes) == 2


def test_the_model_gives_the_proposition_back() -> None:
    m = 12
    gap = 1.0 + 0.05 * np.arange(m)
    rows = random_intercepts(200_000, m, alpha=1.2, epsilon=0.7, gap=gap)
    found, parts = snr_table(*rows), variance_components(*rows)
    assert parts.sigma_alpha2 == pytest.approx(1.2**2, rel=0.02)
    assert parts.sigma_epsilon2 == pytest.approx(0.7**2, rel=0.01)
    assert parts.icc_unbiased == pytest.approx(1.2**2 / (1.2**2 + 0.7**2), abs=0.005)
    rho, gamma = 0.05 * m / gap.mean(), math.sqrt(1 + m * 1.2**2 / 0.7**2)
    expected = rho * gamma / math.sqrt(12) * math.sqrt(1 - 1 / m**2)
    assert (found.rho, found.r_independent, found.r_plugin) == pytest.approx(
        (rho, expected, expected), rel=0.03
    )
    assert found.gamma == pytest.approx(gamma, rel=0.01)
    assert found.gamma_plugin > gamma  # Var(alpha-hat) holds sigma_eps^2 / m as well
    gap = np.array([1.0, 2.0, 3.0, 2.0])
    trajectory, label = random_intercepts(40, 4, gap=0.0, seed=1)
    trajectory[label == 1] += (
        gap - trajectory[label == 1].mean(axis=0) + trajectory[label == 0].mean(axis=0)
    )
    assert snr_table(trajectory, label).rho_shape == pytest.approx(math.sqrt(2) / (2 * 2))


def test_eta_is_one_on_balanced_classes_and_the_measured_ratio_that_of_two_scalars() -> None:
    trajectory, label = random_intercepts(500, 8, gap=np.linspace(0.4, 1.2, 8), seed=2)
    trajectory[label == 1] *= np.linspace(1, 3, 8)  # unequal spread: still no difference
    assert snr_table(trajectory, label).eta == pytest.approx(1.0, rel=1e-10)
    trajectory, label = random_intercepts(300, 6, gap=np.linspace(0.2, 1.0, 6), share=0.3, seed=4)
    ratio = []
    for scalar in (np.polyfit(np.arange(6), trajectory.T, 1)[0], trajectory.mean(axis=1)):
        one, zero = scalar[label == 1], scalar[label == 0]
        ratio.append(
            abs(one.mean() - zero.mean()) / math.sqrt((one.var(ddof=1) + zero.var(ddof=1)) / 2)
        )
    assert snr_table(trajectory, label).r_empirical == pytest.approx(ratio[0] / ratio[1], rel=1e-10)


@pytest.mark.parametrize("offset", [0.0, 0.1])  # exact, and with rounding
def test_parallel_trajectories_leave_gaps_with_reasons(offset: float) -> None:
    label = np.repeat([0, 1], 20)
    # Exact halves and quarters, so that equal trajectories stay equal in floating point.
    level = default_rng(5).integers(-8, 8, (40, 1))
    found = snr_table(level + label[:, None] * np.array([1.0, 2.0, 4.0, 1.0]) + offset, label)
    assert (found.gamma, found.r_plugin, found.eta, len(found.notes)) == (None, None, None, 2)


def direct(trajectory: np.ndarray, label: np.ndarray) -> float:
    """d' Sigma^-1 d / (SNR of the mean)^2, from the definitions alone."""
    one, zero = trajectory[label == 1], trajectory[label == 0]
    share = label.mean()
    sigma = share * np.cov(one, rowvar=False) + (1 - share) * np.cov(zero, rowvar=False)
    d, u = one.mean(axis=0) - zero.mean(axis=0), np.ones(trajectory.shape[1])
    return float(d @ np.linalg.inv(sigma) @ d / ((u @ d) ** 2 / (u @ sigma @ u)))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 24), st.integers(0, 10_000))
def test_parts_and_direct_ratio_agree_for_any_covariance(m: int, seed: int) -> None:
    rng = default_rng(seed)
    label = (np.arange(120) < 45).astype(int)
    trajectory = rng.standard_normal((120, m)) @ rng.standard_normal((m, m))
    trajectory += np.outer(label, rng.standard_normal(m) + 1)
    gap = fisher_gap(trajectory, label)
    digits = max(1e-9, 16 * np.finfo(np.float64).eps * gap.condition)
    squared = gap.r_fisher_direct**2
    assert gap.r_fisher**2 == pytest.approx(squared, rel=digits)
    assert squared == pytest.approx(direct(trajectory, label), rel=max(1e-6, digits))


def test_the_unbiased_ratio_takes_the_gain_from_noise_out() -> None:
    gaps = [fisher_gap(*random_intercepts(300, 20, gap=0.8, seed=seed)) for seed in range(60)]
    ratios: Any = [(gap.r_fisher, gap.r_fisher_unbiased) for gap in gaps]
    plain, unbiased = np.mean(ratios, axis=0)
    assert plain > 1.15  # the truth is 1
    assert unbiased == pytest.approx(1.0, abs=0.03)


def test_shrinkage_where_the_covariance_is_singular_and_full_shrinkage_is_a_scaled_identity() -> (
    None
):
    found = fisher_gap(*random_intercepts(20, 24, seed=5), "ledoit_wolf")
    assert found.shrinkage_rule == "ledoit_wolf"
    assert 0 < found.shrinkage <= 1
    assert found.r_fisher_unbiased is None
    assert found.notes
    trajectory, label = random_intercepts(400, 3, gap=np.array([1.0, 0.2, 0.6]), seed=6)
    found, d = fisher_gap(trajectory, label, 1.0), trajectory[label == 1].mean(axis=0)
    d = d - trajectory[label == 0].mean(axis=0)
    assert found.theta == pytest.approx(0, abs=1e-20)
    assert found.r_fisher**2 == pytest.approx(3 * float(d @ d) / d.sum() ** 2)
    trajectory[label == 1] -= d.mean()
    with pytest.raises(TrainingError, match="same depth mean"):
        fisher_gap(trajectory, label)
