"""Probes: the paper's mapping, selection, and what happens at the edges."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from service.data.run_folder import RowsFile
from service.errors import NoDirection, TrainingError
from service.fitting.fit import ProbeFit, Readouts, Task, fit_head, fit_probes, require, within_class_std
from service.fitting.folds import group_folds
from service.fitting.scores import auroc
from service.readout import Geometry, Site

ClassBalance = Literal["weights", "downsample"]


def fit_one(x: np.ndarray, label: np.ndarray, c: float, site: Site, balance: ClassBalance) -> tuple[np.ndarray, float]:
    """One head, one task, all rows."""
    every = np.arange(len(x))
    [found] = fit_head(x, label, [Task(every, every, c)], site, balance)
    assert found is not None
    return found


GEOMETRY = Geometry(num_layers=3, num_heads=4, head_dim=6, hidden_size=10)


def readouts(tmp_path: Path, rows: np.ndarray, label: np.ndarray, site: Site = Site.ATTENTION_HEAD) -> Readouts:
    """rows [N, m, width] on disk."""
    path = tmp_path / f"{site}.f32"
    np.ascontiguousarray(rows.transpose(1, 0, 2), "<f4").tofile(path)
    return Readouts(RowsFile(path, GEOMETRY, site, len(rows)), np.arange(len(rows)), label)


def sample(count: int = 300, seed: int = 0, site: Site = Site.ATTENTION_HEAD) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    label = (rng.random(count) < 0.6).astype(np.int64)
    rows = rng.standard_normal((count, 3, GEOMETRY.width(site))) * 3 + 1
    rows[:, :, 8:10] += 2.0 * label[:, None, None]  # head 1 of 4, or anywhere in the residual stream
    return rows.astype(np.float32), label


@pytest.mark.parametrize("site", list(Site))
def test_raw_space_logits_are_the_pipelines_up_to_a_positive_factor(site: Site) -> None:
    rng = np.random.default_rng(1)
    label = (rng.random(400) < 0.3).astype(np.int64)
    x = (
        rng.standard_normal((400, 6)) * [1, 20, 0.1, 3, 1, 1]
        + [0, 50, -2, 0, 0, 7]
        + label[:, None] * [1, 9, 0, 0, 0, 0]
    )
    x[:, 5] = 7.1  # constant
    weight, bias = fit_one(x, label, 0.3, site, "weights")
    scaler = StandardScaler().fit(x)
    z = scaler.transform(x)
    z[:, 5] = 0.0
    l1 = site is Site.ATTENTION_HEAD
    model = LogisticRegression(
        C=0.3, l1_ratio=1.0 if l1 else 0.0, solver="saga", class_weight="balanced", max_iter=20000, tol=1e-8
    ).fit(z, label)
    expected = model.decision_function(z)
    found = x @ weight + bias
    norm = np.linalg.norm(weight)
    np.testing.assert_allclose(found / norm, expected / norm, atol=0.01 * expected.std() / norm)
    assert weight[5] == 0.0


def test_the_intercept_is_practically_free() -> None:
    """With far more rows of one class and no class weights, a penalised intercept would show in the mean prediction."""
    rng = np.random.default_rng(2)
    label = (rng.random(500) < 0.95).astype(np.int64)
    x = rng.standard_normal((500, 4)) + 0.4 * label[:, None]
    balanced = fit_one(x, label, 0.1, Site.ATTENTION_HEAD, "weights")
    z = x @ balanced[0] + balanced[1]
    p = 1 / (1 + np.exp(-z))
    # A free intercept makes the weighted mean prediction of the classes sum to one.
    assert p[label == 1].mean() + p[label == 0].mean() == pytest.approx(1.0, abs=1e-3)


def test_directions_are_unit_and_selection_is_by_training_auroc(tmp_path: Path) -> None:
    rows, label = sample()
    data = readouts(tmp_path, rows, label)
    train, test = np.arange(0, 200), np.arange(200, 300)
    fit = require(fit_probes(data, [Task(train, test, 0.3)], balance="weights", jobs=1))[0]
    np.testing.assert_allclose(np.linalg.norm(fit.direction, axis=1), 1.0)
    assert fit.head.tolist() == [1, 1, 1]
    for layer in range(3):
        best = []
        for head in range(4):
            x = rows[train, layer, head * 6 : head * 6 + 6]
            weight, _ = fit_one(x, label[train], 0.3, Site.ATTENTION_HEAD, "weights")
            best.append(auroc(label[train], x @ weight))
        assert fit.auroc[layer] == pytest.approx(max(best))
        x = rows[:, layer, 6:12].astype(np.float64)
        logits = x @ fit.direction[layer] + fit.bias[layer]
        np.testing.assert_allclose(fit.trajectory[:, layer], logits[test])
        assert fit.scale[layer] == pytest.approx(within_class_std(label[train], logits[train]))


def test_ties_go_to_the_lowest_head(tmp_path: Path) -> None:
    rows, label = sample()
    rows[:, :, 18:24] = rows[:, :, 6:12]  # head 3 repeats head 1
    fit = require(
        fit_probes(
            readouts(tmp_path, rows, label), [Task(np.arange(300), np.arange(3), 0.3)], balance="weights", jobs=1
        )
    )[0]
    assert fit.head.tolist() == [1, 1, 1]


def test_processes_change_nothing(tmp_path: Path) -> None:
    rows, label = sample()
    data = readouts(tmp_path, rows, label)
    tasks = [Task(np.arange(0, 200), np.arange(200, 300), c) for c in (0.05, 0.3)]
    alone = require(fit_probes(data, tasks, balance="weights", jobs=1))
    shared = require(fit_probes(data, tasks, balance="weights", jobs=3))
    for one, other in zip(alone, shared, strict=True):
        assert one.direction.tobytes() == other.direction.tobytes()
        assert one.trajectory.tobytes() == other.trajectory.tobytes()
        assert one.bias.tobytes() == other.bias.tobytes()


def test_a_subset_of_layers_and_heads(tmp_path: Path) -> None:
    rows, label = sample()
    task = Task(np.arange(300), np.arange(300), 0.3)
    data = readouts(tmp_path, rows, label)
    fit = require(fit_probes(data, [task], balance="weights", jobs=1, layers=[0, 2], heads=[1, 3]))[0]
    whole = require(fit_probes(data, [task], balance="weights", jobs=1, heads=[1, 3]))[0]
    assert np.array_equal(fit.trajectory, whole.trajectory[:, [0, 2]])
    assert set(fit.head.tolist()) <= {1, 3}


def test_a_layer_without_a_probe_at_the_chosen_c_takes_a_larger_one_by_itself(tmp_path: Path) -> None:
    rows, label = sample()
    rows[:, 1] = np.random.default_rng(5).standard_normal(rows[:, 1].shape) + 0.1 * label[:, None]
    data, everything = readouts(tmp_path, rows, label), np.arange(300)
    grid = np.geomspace(1e-4, 1, 40)
    found = fit_probes(data, [Task(everything, everything, c) for c in grid], balance="weights", jobs=1)
    weak = grid[next(place for place, fit in enumerate(found) if isinstance(fit, ProbeFit)) - 1]
    task = Task(everything, everything, weak)
    assert isinstance(fit_probes(data, [task], balance="weights", jobs=1)[0], NoDirection)
    (fit,) = require(fit_probes(data, [task], balance="weights", jobs=1, relax=True))
    others = [layer for layer in range(rows.shape[1]) if layer != 1]
    plain = require(fit_probes(data, [task], balance="weights", jobs=1, layers=others))[0]
    assert np.array_equal(fit.trajectory[:, others], plain.trajectory)
    larger = require(fit_probes(data, [Task(everything, everything, 3 * weak)], balance="weights", jobs=1, layers=[1]))[
        0
    ]
    assert np.array_equal(fit.trajectory[:, [1]], larger.trajectory)
    rows[:, 1] = 5.0
    data = readouts(tmp_path, rows, label)
    assert isinstance(fit_probes(data, [task], balance="weights", jobs=1, relax=True)[0], NoDirection)
    (fit,) = require(fit_probes(data, [task], balance="weights", jobs=1, relax=True, blank=True))
    assert np.array_equal(fit.trajectory[:, others], plain.trajectory)
    assert np.all(fit.trajectory[:, 1] == 0)
    assert (fit.scale[1], fit.auroc[1]) == (1.0, 0.5)


def test_zero_fits_are_skipped_and_a_layer_of_them_is_an_error(tmp_path: Path) -> None:
    rows, label = sample()
    rows[:, 1] = 5.0  # every readout of layer 1 is constant
    data = readouts(tmp_path, rows, label)
    found = fit_probes(data, [Task(np.arange(300), np.arange(3), 0.3)], balance="weights", jobs=1)
    assert isinstance(found[0], NoDirection)
    with pytest.raises(NoDirection, match=r"layer 1: all 4 probes are zero at C = 0.3 on 300 rows.*larger C"):
        require(found)
    rows[:, 1, 12:18] = sample()[0][:, 0, 6:12]  # head 2 alone has something to say
    fit = require(
        fit_probes(
            readouts(tmp_path, rows, label), [Task(np.arange(300), np.arange(3), 0.3)], balance="weights", jobs=1
        )
    )[0]
    assert fit.head[1] == 2


def test_residual_stream_has_one_probe_a_layer(tmp_path: Path) -> None:
    rows, label = sample(site=Site.RESIDUAL_STREAM)
    data = readouts(tmp_path, rows, label, Site.RESIDUAL_STREAM)
    fit = require(fit_probes(data, [Task(np.arange(300), np.arange(300), 0.1)], balance="weights", jobs=1))[0]
    assert fit.direction.shape == (3, 10)
    assert fit.head.tolist() == [0, 0, 0]
    assert np.all(fit.direction != 0)  # L2 leaves every weight


def test_downsampling_uses_as_many_rows_of_each_class() -> None:
    rng = np.random.default_rng(0)
    label = np.r_[np.ones(270, int), np.zeros(30, int)]
    x = rng.standard_normal((300, 3)) + label[:, None]
    down = fit_one(x, label, 0.3, Site.ATTENTION_HEAD, "downsample")
    weighted = fit_one(x, label, 0.3, Site.ATTENTION_HEAD, "weights")
    again = fit_one(x, label, 0.3, Site.ATTENTION_HEAD, "downsample")
    assert not np.allclose(down[0], weighted[0])
    assert down[0].tolist() == again[0].tolist()


def test_folds_are_disjoint_by_group_and_cover_the_rows() -> None:
    rng = np.random.default_rng(0)
    group, label = rng.integers(0, 40, 200), rng.integers(0, 2, 200)
    rows = np.flatnonzero(rng.random(200) < 0.8)
    pairs = group_folds(label, group, rows, 5, seed=3)
    assert sorted(np.concatenate([test for _, test in pairs]).tolist()) == rows.tolist()
    for train, test in pairs:
        assert not set(group[train]) & set(group[test])
        assert sorted([*train.tolist(), *test.tolist()]) == rows.tolist()


def test_a_fold_without_a_class_is_named() -> None:
    group = np.arange(40) // 4
    label = (group < 8).astype(int)  # two hallucinated groups for five folds
    with pytest.raises(TrainingError, match=r"seed 1, fold \d of 5: the test side has no hallucinated row"):
        group_folds(label, group, np.arange(40), 5, seed=1)
    with pytest.raises(TrainingError, match="need 5 groups, there are 2"):
        group_folds(label, np.arange(40) // 20, np.arange(40), 5, seed=1)
