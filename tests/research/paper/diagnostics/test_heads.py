"""Isotropy of planted directions, and the likeness of a layer's heads."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import kstest

from hallutracer_research.paper.diagnostics.classes import as_document
from hallutracer_research.paper.diagnostics.geometry import expected_cosine
from hallutracer_research.paper.diagnostics.heads import isotropy, permutation_p_value, uniformity
from service.errors import TrainingError
from tests.research.paper.diagnostics.simulate import Floats, unit_rows

TESTS = ("ks_ambient_p", "shapiro_p", "trend_p", "anova_p", "permutation_ambient_p")


def random_directions(m: int, d: int, rng: np.random.Generator) -> Floats:
    return unit_rows(rng.standard_normal((m, d)))


def test_random_directions_are_rejected_at_the_nominal_rate() -> None:
    rng = np.random.default_rng(0)
    runs = [isotropy(random_directions(32, 64, rng), permutations=200, seed=run) for run in range(300)]
    for name in TESTS:
        rate = np.mean([getattr(run, name) < 0.05 for run in runs])
        assert 0.015 < rate < 0.10, name  # 0.05 with a standard error of 0.0126
    cosines = np.mean([run.mean_abs_cos for run in runs])
    assert cosines == pytest.approx(expected_cosine(64), rel=0.03)
    assert {run.pairs for run in runs} == {20}


def test_a_chain_of_slowly_turning_directions_fails_every_comparison_with_random_ones() -> None:
    rng = np.random.default_rng(1)
    v = [rng.standard_normal(64)]
    for _ in range(31):
        v.append(v[-1] + 0.5 * rng.standard_normal(64))
    found = isotropy(unit_rows(np.array(v)), permutations=2000)
    assert found.mean_abs_cos > 0.5
    for name in ("ks_ambient_p", "trend_p", "anova_p", "permutation_ambient_p"):
        assert getattr(found, name) < 0.001, name
    assert found.trend_slope is not None
    assert found.trend_slope < 0
    assert found.permutation_ambient_p == 1 / 2001  # no random set is as far out


def test_directions_of_fewer_dimensions_match_their_rank_and_not_the_space() -> None:
    rng = np.random.default_rng(2)
    v = np.zeros((80, 128))
    v[:, :6] = random_directions(80, 6, rng)
    found = isotropy(v, effective_rank=6.2, permutations=500)
    assert found.permutation_ambient_p is not None
    assert found.permutation_ambient_p < 0.01
    assert found.permutation_rank_p is not None
    assert found.permutation_rank_p > 0.01
    assert found.expected_rank == pytest.approx(expected_cosine(6.2))


def test_permutation_p_value_is_near_the_exact_kolmogorov_smirnov_one() -> None:
    rng = np.random.default_rng(4)
    v = random_directions(21, 3, rng)  # on the ordinary sphere an inner product is uniform on [-1, 1]
    inner = np.sum(v[1:] * v[:-1], axis=1)
    exact = float(kstest(inner, "uniform", args=(-1, 2)).pvalue)
    assert permutation_p_value(inner, 3, 10_000, rng) == pytest.approx(exact, abs=0.02)


def test_few_layers_are_said() -> None:
    found = isotropy(random_directions(3, 8, np.random.default_rng(5)), permutations=50)
    assert found.pairs == 2
    assert found.shapiro_p is None
    assert len(found.gap_means) == 2
    assert any("gaps 1 .. 2 of 9" in note for note in found.notes)
    json.dumps(as_document(found), allow_nan=False)
    with pytest.raises(TrainingError, match="at least 3"):
        isotropy(np.eye(2))
    with pytest.raises(TrainingError, match="layer 1 is not of unit length"):
        isotropy(np.diag([1.0, 2.0, 1.0]))


def by_layer(scores: np.ndarray) -> Callable[[int], np.ndarray]:
    return lambda layer: scores[:, layer]


def equicorrelated(n: int, m: int, heads: int, rho: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((n, m, 1))
    return np.asarray(np.sqrt(rho) * shared + np.sqrt(1 - rho) * rng.standard_normal((n, m, heads)))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_equicorrelated_scores_have_a_known_rank(rho: float) -> None:
    heads = 8
    found = uniformity(np.full((4, heads), 0.7), by_layer(equicorrelated(20_000, 4, heads, rho)))
    values = np.array([1 + (heads - 1) * rho] + [1 - rho] * (heads - 1)) / heads
    rank = np.exp(-np.sum(values * np.log(values)))
    assert found.correlation == pytest.approx(rho, abs=0.02)
    assert found.effective_rank == pytest.approx(rank, rel=0.03)
    assert found.rank_share == pytest.approx(rank / heads, rel=0.03)


def test_variation_and_switches_by_hand() -> None:
    quality = np.array([[0.6, 0.8], [0.7, 0.7], [0.5, 0.9], [0.9, 0.5]])
    found = uniformity(quality, by_layer(equicorrelated(50, 4, 2, 0.2)))
    expected = np.mean([0.1 / 0.7, 0, 0.2 / 0.7, 0.2 / 0.7])
    assert found.auc_cv == pytest.approx(expected)
    assert found.switch_rate == 1.0  # best heads 1, 0 (tie: lowest), 1, 0
    assert uniformity(quality[[0, 2, 2]], by_layer(equicorrelated(50, 3, 2, 0.2))).switch_rate == 0


def test_one_head_and_constant_heads() -> None:
    single = uniformity(np.full((3, 1), 0.6), by_layer(np.random.default_rng(0).standard_normal((9, 3, 1))))
    assert single.correlation is None
    assert single.rank_share is None
    assert single.notes
    scores = equicorrelated(100, 2, 3, 0.5)
    scores[:, 0, 1] = 1.0
    assert "1 heads have constant scores" in uniformity(np.full((2, 3), 0.6), by_layer(scores)).notes[0]
    with pytest.raises(TrainingError, match="auroc 4"):
        uniformity(np.full((2, 4), 0.6), by_layer(scores))
