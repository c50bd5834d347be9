"""Probes: the paper's mapping, selection, what happens at the edges; a soft label counts as that
many answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from service.errors import NoDirection
from service.fitting import ClassBalance, probes
from service.fitting.estimator import fit_classifier
from service.fitting.joint import fit_joint
from service.fitting.scores import auroc
from service.readout import Site
from tests.fitting.made import readouts

EVERY = np.arange(300)


def fit_one(
    x: np.ndarray,
    label: np.ndarray,
    c: float,
    site: Site = Site.ATTENTION_HEAD,
    balance: ClassBalance = "weights",
    soft_label: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """One head, one task, all rows."""
    every = np.arange(len(x))
    tasks = [probes.Task(every, every, c)]
    [found] = probes.fit_head(x, label, tasks, site, balance, soft_label)
    assert found is not None
    return found


def fit_all(data: probes.Readouts, *tasks: probes.Task, **options: Any) -> list[probes.ProbeFit]:
    return probes.fit_probes(data, tasks, balance="weights", **{"jobs": 1, **options})


def sample(count: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, 3 layers, 4 heads, 6], of which head 1 knows the label."""
    rng = np.random.default_rng(seed)
    label = (rng.random(count) < 0.6).astype(np.int64)
    rows = rng.standard_normal((count, 3, 24)) * 3 + 1
    rows[:, :, 8:10] += 2.0 * label[:, None, None]
    return rows.reshape(count, 3, 4, 6).astype(np.float32), label


@pytest.mark.parametrize("site", list(Site))
def test_raw_space_logits_are_the_pipelines_up_to_a_positive_factor(site: Site) -> None:
    rng = np.random.default_rng(1)
    label = (rng.random(400) < 0.3).astype(np.int64)
    x = rng.standard_normal((400, 6)) * [1, 20, 0.1, 3, 1, 1] + [0, 50, -2, 0, 0, 7]
    x += label[:, None] * [1, 9, 0, 0, 0, 0]
    x[:, 5] = 7.1  # constant
    weight, bias = fit_one(x, label, 0.3, site)
    z = StandardScaler().fit_transform(x)
    z[:, 5] = 0.0
    options = {"solver": "saga", "class_weight": "balanced", "max_iter": 20000, "tol": 1e-8}
    model = LogisticRegression(C=0.3, l1_ratio=float(site is Site.ATTENTION_HEAD), **options)
    expected = model.fit(z, label).decision_function(z)
    np.testing.assert_allclose(x @ weight + bias, expected, atol=0.01 * expected.std())
    assert weight[5] == 0.0


def test_directions_are_unit_and_selection_is_by_training_auroc() -> None:
    rows, label = sample()
    train, test = EVERY[:200], EVERY[200:]
    (fit,) = fit_all(readouts(rows, label), probes.Task(train, test, 0.3))
    np.testing.assert_allclose(np.linalg.norm(fit.direction, axis=1), 1.0)
    assert fit.head.tolist() == [1, 1, 1]
    own = label[train]
    for layer in range(3):
        x = rows[:, layer].astype(np.float64)
        weights = [fit_one(rows[train, layer, head], own, 0.3)[0] for head in range(4)]
        best = max(auroc(own, x[train, head] @ weights[head]) for head in range(4))
        assert fit.auroc[layer] == pytest.approx(best)
        logits = x[:, 1] @ fit.direction[layer] + fit.bias[layer]
        np.testing.assert_allclose(fit.trajectory[:, layer], logits[test])
        assert fit.scale[layer] == pytest.approx(probes.within_class_std(own, logits[train]))
    rows[:, :, 3] = rows[:, :, 1]
    (fit,) = fit_all(readouts(rows, label), probes.Task(EVERY, test, 0.3))
    assert fit.head.tolist() == [1, 1, 1], "a tie goes to the lowest head"


def test_processes_and_a_choice_of_layers_and_heads_change_no_other_s_bits() -> None:
    data = readouts(*sample())
    tasks = [probes.Task(EVERY[:200], EVERY[200:], c) for c in (0.05, 0.3)]
    for here, elsewhere in zip(fit_all(data, *tasks), fit_all(data, *tasks, jobs=2), strict=True):
        for field in ("direction", "trajectory", "bias"):
            assert getattr(here, field).tobytes() == getattr(elsewhere, field).tobytes()
    (some,) = fit_all(data, tasks[0], heads=[1, 3], layers=[0, 2])
    (whole,) = fit_all(data, tasks[0], heads=[1, 3])
    assert np.array_equal(some.trajectory, whole.trajectory[:, [0, 2]])
    assert set(some.head.tolist()) <= {1, 3}


def test_a_layer_without_a_probe_at_the_chosen_c_takes_a_larger_one_by_itself() -> None:
    rows, label = sample()
    faint = np.random.default_rng(5).standard_normal(rows[:, 1].shape)
    rows[:, 1] = faint + 0.1 * label[:, None, None]
    data, grid = readouts(rows, label), np.geomspace(1e-4, 1, 40)
    fits = fit_all(data, *(probes.Task(EVERY, EVERY, c) for c in grid), zero_layers=True)
    enough = [fit.direction.any(axis=1).all() for fit in fits].index(True)
    weak = grid[enough - 1]
    task = probes.Task(EVERY, EVERY, weak)
    with pytest.raises(NoDirection):
        fit_all(data, task)
    (fit,), (plain,) = fit_all(data, task, retry_larger_c=True), fit_all(data, task, layers=[0, 2])
    (larger,) = fit_all(data, probes.Task(EVERY, EVERY, 3 * weak), layers=[1])
    assert np.array_equal(fit.trajectory[:, [0, 2]], plain.trajectory)
    assert np.array_equal(fit.trajectory[:, [1]], larger.trajectory)
    rows[:, 1] = 5.0
    data = readouts(rows, label)
    with pytest.raises(NoDirection):
        fit_all(data, task, retry_larger_c=True)
    (fit,) = fit_all(data, task, retry_larger_c=True, zero_layers=True)
    assert np.array_equal(fit.trajectory[:, [0, 2]], plain.trajectory)
    assert np.all(fit.trajectory[:, 1] == 0)
    assert (fit.scale[1], fit.auroc[1]) == (1.0, 0.5)


def test_zero_fits_are_skipped_and_a_layer_of_them_is_an_error() -> None:
    rows, label = sample()
    rows[:, 1] = 5.0  # every readout of layer 1 is constant
    task = probes.Task(EVERY, EVERY[:3], 0.3)
    with pytest.raises(NoDirection, match=r"layer 1: all 4 .* C = 0.3 on 300 rows.*larger C"):
        fit_all(readouts(rows, label), task)
    rows[:, 1, 2] = sample()[0][:, 0, 1]  # head 2 alone has something to say
    assert fit_all(readouts(rows, label), task)[0].head[1] == 2


def test_downsampling_uses_as_many_rows_of_each_class() -> None:
    label = np.r_[np.ones(270, int), np.zeros(30, int)]
    x = np.random.default_rng(0).standard_normal((300, 3)) + label[:, None]
    down, again = (fit_one(x, label, 0.3, balance="downsample")[0] for _ in range(2))
    assert not np.allclose(down, fit_one(x, label, 0.3)[0])
    assert down.tolist() == again.tolist()
    assert probes.row_weights(label, "downsample").sum() == 60


# --- soft labels ---

K = 4  # answers of each row


def shared(least: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows, labels, soft labels, and the answers [n, K] that these are of; each row has ``least``
    of both kinds."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((150, 6)).astype(np.float32)
    agree = np.clip(rng.binomial(K, 1 / (1 + np.exp(-2 * x[:, 0]))), least, K - least)
    label = (x[:, 0] > 0).astype(np.int64)
    return x, label, agree / K, (np.arange(K) < agree[:, None]).astype(np.int64)


@pytest.mark.parametrize("site", list(Site))
def test_a_probe_is_that_of_one_row_for_each_answer(site: Site) -> None:
    x, label, soft_label, answers = (part[:100] for part in shared(1))
    soft = fit_one(x, label, 0.3, site, soft_label=soft_label)
    # As many rows as answers, and a loss K times as large: C is K times smaller.
    hard = fit_one(np.repeat(x, K, axis=0), answers.ravel(), 0.3 / K, site)
    np.testing.assert_allclose(soft[0], hard[0], rtol=2e-3, atol=2e-4)
    assert soft[1] == pytest.approx(hard[1], abs=2e-3)
    assert abs(fit_one(x, label, 0.3, site)[0][0] - soft[0][0]) > 0.05


def test_the_joint_fit_and_the_classifier_are_those_of_one_row_for_each_answer() -> None:
    x, label, soft_label, answers = shared(0)
    assert {0.0, 0.5, 1.0} < set(soft_label), "some rows are of one kind"
    signals = x.astype(np.float64)
    soft = fit_classifier(signals, label, soft_label)
    hard = fit_classifier(np.repeat(signals, K, axis=0), answers.ravel())
    np.testing.assert_allclose(soft.weight, hard.weight, rtol=1e-3, atol=1e-4)
    assert soft.risk(signals).mean() == pytest.approx(1 - soft_label.mean(), abs=1e-4)
    rows = x.reshape(len(x), 2, 3)
    together = fit_joint(rows, label, "weights", c=0.1, soft_label=soft_label)
    many = fit_joint(np.repeat(rows, K, axis=0), answers.ravel(), "weights", c=0.1 / K)
    np.testing.assert_allclose(together.direction, many.direction, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(together.scale, many.scale, rtol=1e-3)
