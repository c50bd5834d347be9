from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from hallutracer_research.paper.diagnostics.features import zones
from hallutracer_research.paper.diagnostics.geometry import crossings
from hallutracer_research.paper.diagnostics.k_split import KSplit, StandardizedProbes, k_table, split_readout_change
from service.errors import TrainingError
from service.readout import Geometry, Site


def planted(heads_differ: bool = True, seed: int = 0):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    n, m, heads, dim = 60, 6, 3, 8
    geometry = Geometry(m, heads, dim, heads * dim)
    rows = rng.standard_normal((m, n, heads * dim)) * rng.uniform(0.1, 10, (m, 1, heads * dim))
    rows += 5 * rng.standard_normal((m, 1, heads * dim))
    head = rng.integers(0, heads, m) if heads_differ else np.zeros(m, int)
    chosen = geometry.select(rows.transpose(1, 0, 2), head, Site.ATTENTION_HEAD)
    direction = rng.standard_normal((m, dim))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    bias, mean, std = rng.standard_normal(m), chosen.mean(axis=0), chosen.std(axis=0)
    return geometry, rows, head, direction, bias, StandardizedProbes.of(direction, bias, mean, std)


def split(planting) -> KSplit:  # type: ignore[no-untyped-def]
    geometry, rows, head, direction, bias, probes = planting
    steps = crossings(lambda layer: rows[layer], head, geometry, Site.ATTENTION_HEAD)
    return split_readout_change(steps, probes, direction, bias)


def test_standardised_probes_are_the_same_observable() -> None:
    _, rows, _, direction, bias, probes = planted()
    a = rows[2][:, :8]
    assert np.allclose(probes.z(2, a) @ probes.weight[2] + probes.intercept[2], a @ direction[2] + bias[2])


@pytest.mark.parametrize("seed", range(4))
def test_the_four_parts_make_k_up_to_1e_12(seed: int) -> None:
    found = split(planted(seed=seed))
    assert found.reconstruction_error <= 1e-12
    total = found.probe + found.metric + found.head + found.bias
    assert np.allclose(total, found.k, rtol=1e-9, atol=1e-9)


def test_without_a_head_switch_the_head_part_is_zero() -> None:
    found = split(planted(heads_differ=False))
    assert not found.head.any()
    assert found.metric.any()


def test_one_probe_everywhere_leaves_the_head_part_alone() -> None:
    geometry, rows, head, direction, bias, _ = planted()
    direction, bias = np.tile(direction[:1], (6, 1)), np.full(6, bias[0])
    same = StandardizedProbes.of(direction, bias, np.zeros((6, 8)), np.ones((6, 8)))
    found = split((geometry, rows, head, direction, bias, same))
    assert not found.probe.any()
    assert not found.metric.any()
    assert not found.bias.any()
    assert np.allclose(found.head, found.k)


def test_table_agrees_with_scikit_learn_and_numpy() -> None:
    rng = np.random.default_rng(3)
    label = np.repeat([0, 1], 150)
    made = rng.standard_normal((4, 300, 9)) + np.array([0.8, 0.8, 0.0, 0.0])[:, None, None] * label[None, :, None]
    made[3] -= made[2]  # head cancels metric
    found = KSplit(made[0], made[1], made[2], made[3], np.zeros(9), 0.0)
    table = k_table(found, label, permutations=50)
    steps = zones(10).recognition_steps
    for name, values in zip(("k", "probe", "metric", "head"), made, strict=True):
        area = np.array([roc_auc_score(label, values[:, step]) for step in steps])
        assert table.parts[name].signal == pytest.approx(np.maximum(area, 1 - area).mean(), abs=1e-12)
        assert table.parts[name].variance == pytest.approx(values[:, steps].var(axis=0, ddof=1).mean())
        assert 0.5 < table.parts[name].null < 0.55
    covariance = [np.cov(made[2][:, step], made[3][:, step])[0, 1] for step in steps]
    assert table.cov_metric_head == pytest.approx(np.mean(covariance))
    assert table.cov_metric_head < -0.5
    assert table == k_table(found, label, permutations=50)


def test_a_zero_deviation_is_refused() -> None:
    ones = np.ones((2, 3))
    with pytest.raises(TrainingError, match="std above 0"):
        StandardizedProbes.of(ones, np.zeros(2), ones, np.zeros((2, 3)))
