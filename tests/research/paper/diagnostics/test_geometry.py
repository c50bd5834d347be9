from __future__ import annotations

import math

import numpy as np
import pytest

from hallutracer_research.paper.diagnostics.dependence import distance_correlation
from hallutracer_research.paper.diagnostics.geometry import (
    adjacent_cosines,
    expected_cosine,
    expected_cosine_exact,
    layer_geometry,
    readout_geometry,
    transition_geometry,
)
from hallutracer_research.paper.diagnostics.increments import Increments
from service.errors import TrainingError
from tests.research.paper.diagnostics.simulate import unit_rows


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
    """Distance correlation by double centring."""

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
