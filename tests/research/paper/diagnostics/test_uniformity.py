from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hallutracer_research.paper.diagnostics.uniformity import uniformity
from service.errors import TrainingError


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
