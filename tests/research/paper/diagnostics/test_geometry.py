"""Geometry, increments and the classes' spread along the probe, on planted readouts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hallutracer_research.paper.diagnostics.geometry import (
    Increments,
    adjacent_cosines,
    crossings,
    decompose,
    expected_cosine,
    expected_cosine_exact,
    kappa_table,
    layer_geometry,
    readout_geometry,
    transition_geometry,
)
from hallutracer_research.paper.diagnostics.two_samples import distance_correlation
from service.errors import TrainingError
from service.readout import Geometry, Site
from service.risk import truth_logits
from tests.research.paper.diagnostics.simulate import unit_rows


def planted(seed: int = 0, n: int = 30, m: int = 5, heads: int = 3, dim: int = 4):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    geometry = Geometry(m, heads, dim, heads * dim)
    rows = rng.standard_normal((m, n, heads * dim)).astype(np.float32) * 10
    direction = rng.standard_normal((m, dim))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return geometry, rows, rng.integers(0, heads, m), direction, rng.standard_normal(m)


def test_w_is_the_frozen_probe_on_the_same_head_and_w_plus_k_the_increment() -> None:
    geometry, rows, head, direction, bias = planted()
    readout = geometry.select(rows.transpose(1, 0, 2), head, Site.ATTENTION_HEAD)
    trajectory = truth_logits(readout, direction, bias)
    by_head = geometry.by_head(rows, Site.ATTENTION_HEAD).astype(np.float64)
    layers = range(4)
    crossed = [by_head[layer + 1][:, head[layer]] @ direction[layer] + bias[layer] for layer in layers]
    parts = decompose(trajectory, np.stack(crossed, axis=1))
    assert np.allclose(parts.w + parts.k, np.diff(trajectory, axis=1), atol=1e-12)
    for layer in layers:
        moved = by_head[layer + 1][:, head[layer]] - by_head[layer][:, head[layer]]
        assert np.allclose(parts.w[:, layer], moved @ direction[layer], atol=1e-10)


def test_crossings_give_both_heads_of_the_next_layer() -> None:
    geometry, rows, head, _, _ = planted()
    read: list[int] = []

    def rows_of(layer: int) -> np.ndarray:
        read.append(layer)
        return np.asarray(rows[layer])

    for one in crossings(rows_of, head, geometry, Site.ATTENTION_HEAD):
        by_head = rows[one.layer + 1].reshape(30, 3, 4)
        assert np.array_equal(one.same_head, by_head[:, head[one.layer]])
        assert np.array_equal(one.next_head, by_head[:, head[one.layer + 1]])
        assert one.same_head.dtype == np.float64
    assert read == [1, 2, 3, 4], "one layer at a time, each once"


def test_shapes_that_do_not_fit_and_numbers_that_overflow() -> None:
    with pytest.raises(TrainingError, match=r"crossed has shape \[2, 4\]: \[2, 3\] is needed"):
        decompose(np.zeros((2, 4)), np.zeros((2, 4)))
    with pytest.raises(TrainingError, match="not finite"):
        decompose(np.zeros((2, 4)), np.full((2, 3), np.nan))
    assert decompose(np.full((1, 2), 1e200), np.array([[-1e184]])).w.shape == (1, 1)


def whitened(n: int, spread: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows [2n, d] whose unbiased covariance in either class is diag(spread^2) exactly, class means 0."""
    rng = np.random.default_rng(seed)
    halves = []
    for _ in range(2):
        x = rng.standard_normal((n, len(spread)))
        x -= x.mean(axis=0)
        q = np.linalg.qr(x)[0] * math.sqrt(n - 1)
        halves.append(q * spread)
    return np.concatenate(halves), np.repeat([0, 1], n)


def test_a_layer_with_a_known_covariance() -> None:
    spread = np.sqrt(np.array([90.0, 4.0, 3.0, 2.0, 1.0]))
    x, label = whitened(50, spread)
    shift = np.array([3.0, 0.0, 4.0, 0.0, 0.0])
    x[label == 1] += shift
    v = np.array([0.0, 0.6, 0.8, 0.0, 0.0])
    found = layer_geometry(x, label, v)
    assert found.mean_shift_norm == pytest.approx(5)
    assert found.stable_rank == pytest.approx(100**2 / (8100 + 16 + 9 + 4 + 1))
    assert found.stable_rank_share == pytest.approx(100**2 / 8130 / 5)
    assert found.trace_ratio == pytest.approx(1)
    assert found.energy_fraction == pytest.approx((0.36 * 4 + 0.64 * 3) / 100)
    assert found.v2_top90 == pytest.approx(0, abs=1e-9)  # the first axis holds exactly the 90 %
    assert found.alignment == pytest.approx(0.8 * 4 / 5)
    fisher = shift / spread**2
    assert found.fisher_cos2 == pytest.approx((v @ fisher) ** 2 / (fisher @ fisher))


def test_top90_takes_the_axis_that_reaches_the_share() -> None:
    x, label = whitened(50, np.sqrt(np.array([80.0, 15.0, 5.0])))
    assert layer_geometry(x, label, np.array([0.0, 0.6, 0.8])).v2_top90 == pytest.approx(0.36)


def test_without_direction_or_with_a_singular_covariance_values_are_none() -> None:
    x, label = np.random.default_rng(0).standard_normal((8, 20)), np.arange(8) % 2
    assert layer_geometry(x, label).energy_fraction is None
    v = unit_rows(np.ones((1, 20)))[0]
    assert layer_geometry(x, label, v).fisher_cos2 is None
    assert layer_geometry(x, label, v).energy_fraction is not None
    with pytest.raises(TrainingError, match="length 2"):
        layer_geometry(x, label, 2 * v)


@pytest.mark.parametrize("d", [8, 64, 128])
def test_random_unit_vectors_have_the_expected_cosine(d: int) -> None:
    cosines = adjacent_cosines(unit_rows(np.random.default_rng(d).standard_normal((20_001, d))))
    spread = math.sqrt((1 / d - expected_cosine_exact(d) ** 2) / 20_000)
    assert cosines.mean() == pytest.approx(expected_cosine_exact(d), abs=4 * spread)
    assert expected_cosine(d) == pytest.approx(expected_cosine_exact(d), rel=1 / d)
    assert expected_cosine(128) == pytest.approx(0.0705, abs=1e-4)  # the paper's 0.071


def test_transitions_and_the_middle_mean() -> None:
    rng = np.random.default_rng(1)
    n, m, d = 4000, 8, 16
    label = np.arange(n) % 2
    w = rng.standard_normal((n, m - 1)) + 0.5 * label[:, None]
    k = rng.standard_normal((n, m - 1)) * 2
    v = unit_rows(rng.standard_normal((m, d)))
    transitions = transition_geometry(Increments(w, k), v, label)
    assert transitions[0].cohen_d == pytest.approx(0.5, abs=0.1)
    assert np.mean([one.r_w for one in transitions if one.r_w]) == pytest.approx(math.sqrt(5), rel=0.15)
    assert all(one.distance_correlation is not None and one.distance_correlation < 0.08 for one in transitions)
    readout = rng.standard_normal((n, m, d))
    layers = [layer_geometry(readout[:, layer], label, v[layer]) for layer in range(m)]
    found = readout_geometry(layers, transitions, d)
    document = found.document()
    assert document["energy_fraction"] == pytest.approx(np.mean(document["by_layer"]["energy_fraction"][1:7]))
    assert document["adjacent_cos"] == pytest.approx(np.mean(document["by_layer"]["adjacent_cos"][1:7]))
    assert document["energy_fraction"] == pytest.approx(1 / d, rel=0.1)
    assert document["r_w"] == pytest.approx(document["cohen_d"] / document["increment_d"])
    assert document["notes"] == []
    assert found.cos_p_value is not None
    assert readout_geometry(layers, (), d).document()["notes"]


def test_a_difference_in_cosine_is_found() -> None:
    rng = np.random.default_rng(2)
    v = [rng.standard_normal(32)]
    for _ in range(29):
        v.append(v[-1] + 0.7 * rng.standard_normal(32))
    x, label = rng.standard_normal((12, 32)), np.arange(12) % 2
    directions = unit_rows(np.array(v))
    flat = Increments(rng.standard_normal((12, 29)), rng.standard_normal((12, 29)))
    layers = [layer_geometry(x, label, one) for one in directions]
    p_value = readout_geometry(layers, transition_geometry(flat, directions, label), 32).cos_p_value
    assert p_value is not None
    assert p_value < 1e-6


def naive(x: np.ndarray, y: np.ndarray) -> float:

    def centred(values: np.ndarray) -> np.ndarray:
        distance = np.abs(values[:, None] - values)
        return np.asarray(distance - distance.mean(axis=0) - distance.mean(axis=1)[:, None] + distance.mean())

    a, b = centred(x), centred(y)
    return math.sqrt((a * b).mean() / math.sqrt((a * a).mean() * (b * b).mean()))


def test_distance_correlation_is_its_definition() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(700)
    for y in (rng.standard_normal(700), x + rng.standard_normal(700), x**2, np.round(x), 3 - 2 * x):
        assert distance_correlation(x, y) == pytest.approx(naive(x, y), rel=1e-9)
    assert distance_correlation(x, 3 - 2 * x) == pytest.approx(1)
    assert distance_correlation(x, np.ones(700)) is None


def test_columns_of_known_spreads() -> None:
    rng = np.random.default_rng(0)
    n = 100_000
    label = (np.arange(n) < n // 4).astype(int)
    w = rng.standard_normal((n, 9))
    w[label == 1] *= 2  # variances 4 and 1, shares 1/4 and 3/4
    w += 0.7 * label[:, None]
    found = kappa_table(w, label)
    assert found.kappa_mean == pytest.approx(4, rel=0.03)
    assert found.kappa_median == pytest.approx(4, rel=0.03)
    assert found.effect_size == pytest.approx(0.7 / math.sqrt(0.25 * 4 + 0.75), rel=0.05)
    assert found.worst_case_snr == pytest.approx(0.35, rel=0.05)
    assert found.degradation == pytest.approx(1 - math.sqrt(1.75 / 4), abs=0.02)
    assert found.factual_wider == 1
    assert found.transitions == 6  # of 10 layers, the middle ones


def test_a_class_without_spread_is_counted_out() -> None:
    w = np.random.default_rng(2).standard_normal((10, 4))
    label = np.arange(10) % 2
    w[label == 0, 1] = 3.0
    found = kappa_table(w, label)
    assert found.kappa_by_layer[1] is None
    assert "1 of" in found.notes[0]
    assert kappa_table(np.zeros((4, 3)), [0, 0, 1, 1]).kappa_mean is None
