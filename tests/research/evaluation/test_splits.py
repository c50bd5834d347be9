"""One split: nothing of the test side reaches the fits, and kept results are read back, not computed again."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.splits import (
    HeadProbes,
    Split,
    cross,
    fit_all_heads,
    kept,
    kept_split,
    outer_splits,
    pooled_depth_mean,
    residual_depth_mean,
)
from service.fitting.probes import Readouts, Task, fit_probes, require
from service.fitting.scores import auroc
from tests.research.made import COUNT, OPTIONS, level_inputs

CHOSEN = replace(OPTIONS, seeds=1)
TASK = Task(np.arange(0, 160), np.arange(160, COUNT), 0.3)


@pytest.fixture
def inputs(tmp_path: Path) -> MethodInputs:
    return level_inputs(tmp_path, strength=0.8)


@pytest.fixture
def probes(inputs: MethodInputs) -> HeadProbes:
    return fit_all_heads(inputs.heads, [TASK], jobs=1)[0]


def first_split(folder: Path, inputs: MethodInputs) -> Split:
    return kept_split(folder, inputs, *outer_splits(inputs, CHOSEN)[0], CHOSEN)


def arrays(value: Split | HeadProbes) -> dict[str, bytes]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: array.tobytes() for name, array in found.items() if isinstance(array, np.ndarray)}


def test_the_heads_probes_are_what_the_trainer_fits(inputs: MethodInputs, probes: HeadProbes) -> None:
    [fit] = require(fit_probes(inputs.heads, [TASK], balance="weights", jobs=1))
    assert probes.selected.tolist() == fit.head.tolist()
    direction, bias = probes.of(probes.selected)
    np.testing.assert_allclose(direction, fit.direction)
    np.testing.assert_allclose(bias, fit.bias)
    np.testing.assert_allclose(probes.trajectory(), fit.trajectory, rtol=1e-5, atol=1e-5)
    [shared] = fit_all_heads(inputs.heads, [TASK], jobs=3)
    assert arrays(shared) == arrays(probes)


def test_the_crossed_readout_is_the_next_layers_same_head(inputs: MethodInputs, probes: HeadProbes) -> None:
    crossed = cross(inputs.heads, probes, TASK.test)
    geometry, head = inputs.heads.file.geometry, probes.selected
    direction, bias = probes.of(head)
    for layer in range(geometry.num_layers - 1):
        rows = inputs.heads.file.layer(layer + 1)[TASK.test].reshape(-1, geometry.num_heads, geometry.head_dim)
        expected = rows[:, head[layer]] @ direction[layer] + bias[layer]
        np.testing.assert_allclose(crossed[:, layer], expected, rtol=1e-5, atol=1e-5)


def test_labels_of_the_test_side_change_nothing(tmp_path: Path, inputs: MethodInputs) -> None:
    _, _, train, test = outer_splits(inputs, CHOSEN)[0]
    label = inputs.label.copy()
    label[test] = 1 - label[test]
    heads = Readouts(inputs.heads.file, inputs.heads.index, label)
    splits = [
        kept_split(tmp_path / name, given, 0, 0, train, test, CHOSEN)
        for name, given in (("a", inputs), ("b", replace(inputs, label=label, heads=heads)))
    ]
    assert arrays(splits[0]) == arrays(splits[1])
    assert arrays(splits[0].probes) == arrays(splits[1].probes)


def test_rows_without_a_signal_have_none_out_of_fold(tmp_path: Path) -> None:
    """In-sample trajectories would separate noise: these must not."""
    inputs = level_inputs(tmp_path, strength=0.0)
    aurocs = []
    for fold in outer_splits(inputs, CHOSEN):
        split = kept_split(tmp_path / "fits", inputs, *fold, CHOSEN)
        for rows, trajectory in ((split.test, split.test_trajectory), (split.train, split.train_trajectory)):
            aurocs.append(auroc(inputs.label[rows], trajectory.mean(axis=1)))
    assert 0.35 < np.mean(aurocs) < 0.62


def test_both_readouts_find_a_planted_signal(tmp_path: Path, inputs: MethodInputs) -> None:
    split = first_split(tmp_path / "fits", inputs)
    label, mean = inputs.label[split.test], split.test_trajectory.mean(axis=1)
    assert auroc(label, mean) > 0.8
    assert auroc(label, residual_depth_mean(inputs, split, CHOSEN)) > 0.8
    np.testing.assert_allclose(pooled_depth_mean(inputs.heads, split, CHOSEN), mean, rtol=1e-4)


def test_a_kept_split_is_read_back_and_not_fitted_again(tmp_path: Path, inputs: MethodInputs) -> None:
    before = first_split(tmp_path / "fits", inputs)
    inputs.heads.file.path.unlink()  # another fit would fail
    after = first_split(tmp_path / "fits", inputs)
    assert arrays(before) == arrays(after)
    assert arrays(before.probes) == arrays(after.probes)
    assert after.c == 0.3


def test_an_interrupted_computation_leaves_no_file(tmp_path: Path) -> None:
    def fails() -> dict[str, np.ndarray]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept(tmp_path / "x" / "one.npz", fails)
    assert not (tmp_path / "x" / "one.npz").exists()
    assert kept(tmp_path / "x" / "one.npz", lambda: {"score": np.arange(3.0)})["score"].tolist() == [0, 1, 2]
