from __future__ import annotations

import numpy as np
import pytest

from hallutracer_research.paper.diagnostics.increments import crossings, decompose
from service.errors import TrainingError
from service.readout import Geometry, Site
from service.risk import truth_logits


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
