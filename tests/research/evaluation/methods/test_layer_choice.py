"""The choice inside the training side: which layer, which way to fit, and p(IK), the plainest method that makes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hallutracer_research.evaluation.methods.layer_choice import INNER_FOLDS, at_depths, choose
from hallutracer_research.evaluation.methods.linear import fit_linear
from hallutracer_research.evaluation.methods.p_ik import C_GRID, DEPTHS, logistic, p_ik
from service.errors import TrainingError
from service.fitting.folds import group_folds, usable_folds
from service.fitting.scores import auroc
from service.readout import Site
from tests.research.evaluation.methods.made import made_inputs, noise, plant, readouts, split


def test_depths_become_layers_once_each_and_in_order() -> None:
    assert at_depths(30, (0.2, 0.4, 0.6, 0.8, 1.0)) == [6, 12, 17, 23, 29]
    assert at_depths(2, (0.5, 0.75, 1.0)) == [0, 1]
    assert at_depths(1, (0.5, 1.0)) == [0]


def test_the_best_layer_and_fit_of_the_inner_folds_are_taken(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 200)
    train, test = split(data)
    layers = at_depths(6, DEPTHS)
    pairs = group_folds(data.label, data.group, train, INNER_FOLDS, 2)
    best = max(
        (
            np.mean([auroc(data.label[held], logistic(c, x[inside], data.label[inside], x[held]))
                     for inside, held in pairs]),
            layer,
            c,
        )
        for layer in layers
        for x in [np.asarray(data.residual.file.layer(layer)[3:])]
        for c in C_GRID
    )  # fmt: skip
    fits = [partial(logistic, c) for c in C_GRID]
    layer, fit = choose(data, train, 2, layers=layers, fits=fits, jobs=1, what="fold")
    assert (layer, C_GRID[fit]) == best[1:]
    x = np.asarray(data.residual.file.layer(layer)[3:])
    expected = -fit_linear(x[train], data.label[train], C_GRID[fit], "l2").logits(x[test])
    np.testing.assert_allclose(p_ik(data, train, test, 2, jobs=1), expected, rtol=1e-9)


def test_ties_go_to_the_lowest_layer_and_the_first_fit(tmp_path: Path) -> None:
    label = np.arange(120) % 2
    rows = noise(np.random.default_rng(1), 120, Site.RESIDUAL_STREAM)
    plant(rows, label, 2, 2, 2.0)
    rows[:, 4] = rows[:, 2]
    data = replace(
        made_inputs(tmp_path, 120),
        label=label,
        group=np.arange(120),
        residual=readouts(tmp_path, rows, label, Site.RESIDUAL_STREAM),
    )
    fits = [partial(logistic, 0.01)] * 2
    assert choose(data, split(data)[0], 0, layers=[1, 2, 4], fits=fits, jobs=1, what="fold") == (2, 0)


def test_the_method_is_named_where_a_fold_lacks_a_class(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 60)
    label = np.zeros(60, np.int64)
    train, test = split(data)
    label[train[0]] = 1
    with pytest.raises(TrainingError, match=r"none of the 3 p\(IK\) inner folds has both classes"):
        p_ik(replace(data, label=label), train, test, 0, jobs=1)


def test_a_fold_that_lacks_a_class_is_left_out_of_the_choice(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 60)
    train, _ = split(data)
    label = np.zeros(60, np.int64)
    label[train[:2]] = 1  # one in each of two folds' test sides; the third has none
    data = replace(data, label=label, group=np.arange(60))
    pairs = usable_folds(label, data.group, train, INNER_FOLDS, 0)
    assert [label[held].sum() for _, held in pairs] == [1, 1]
    with pytest.raises(TrainingError, match="has no factual row"):
        group_folds(label, data.group, train, INNER_FOLDS, 0)
    fits = [partial(logistic, c) for c in C_GRID]
    choose(data, train, 0, layers=[1, 2], fits=fits, jobs=1, what="fold")
