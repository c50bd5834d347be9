"""Fact-Probe: which window it picks, what it fits there, and which windows it looks at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hallutracer_research.evaluation.methods.fact_probe import FactProbe, starts, window
from hallutracer_research.evaluation.methods.linear import fit_linear
from service.fitting.folds import group_folds
from service.fitting.scores import auroc
from service.readout import Geometry, Site
from tests.research.evaluation.methods.made import WIDE, made_inputs, noise, plant, readouts, split


def test_a_signal_spread_over_layers_is_read_from_a_window(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 400)
    train, test = split(data)
    method = FactProbe(jobs=1)
    start, size, c, quality = method.search(data, train, 2)
    assert (start, size) == (WIDE[0], len(WIDE))
    assert c in (0.1, 0.5)
    x = np.concatenate([np.asarray(data.residual.file.layer(layer)[3:]) for layer in WIDE], axis=1)
    np.testing.assert_array_equal(window(data.residual, 1, 5, np.arange(400)), x)
    probe = fit_linear(x[train], data.label[train], c, "l1")
    np.testing.assert_allclose(method.fit(data, train, test, 2), -probe.logits(x[test]), rtol=1e-9)
    inner = [
        auroc(data.label[held], fit_linear(x[fit], data.label[fit], c, "l1").logits(x[held]))
        for fit, held in group_folds(data.label, data.group, train, 3, 2)
    ]
    assert quality == pytest.approx(np.mean(inner))


def test_of_equally_good_ones_the_smallest_is_taken(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    label = np.arange(200) % 2
    rows = noise(rng, 200, Site.RESIDUAL_STREAM)
    plant(rows, label, 3, 2, 8.0)  # separable: every window that holds layer 3 is perfect
    data = replace(
        made_inputs(tmp_path, 200),
        label=label,
        group=np.arange(200),
        residual=readouts(tmp_path, rows, label, Site.RESIDUAL_STREAM),
    )
    assert FactProbe(jobs=1).search(data, split(data)[0], 0) == (3, 1, 0.1, 1.0)


def test_windows_are_thinned_evenly_and_with_both_ends() -> None:
    assert starts(12, 1) == list(range(12))
    assert starts(6, 5) == [0, 1]
    assert starts(4, 5) == []
    for layers, size in ((13, 1), (28, 1), (28, 5), (80, 5)):
        found = starts(layers, size)
        assert len(found) == 12
        assert (found[0], found[-1]) == (0, layers - size)
        gaps = np.diff(found)
        assert gaps.max() - gaps.min() <= 1


def test_a_model_of_few_layers_has_only_single_ones(tmp_path: Path) -> None:
    geometry = Geometry(num_layers=3, num_heads=1, head_dim=2, hidden_size=4)
    base = made_inputs(tmp_path, 90)
    rows = noise(np.random.default_rng(3), 90, Site.RESIDUAL_STREAM, geometry)
    plant(rows, base.label, 1, 0, 2.0)
    data = replace(base, residual=readouts(tmp_path, rows, base.label, Site.RESIDUAL_STREAM, geometry))
    assert FactProbe(jobs=1).search(data, split(data)[0], 0)[:2] == (1, 1)


def test_processes_change_nothing(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 120)
    alone, shared = (FactProbe(jobs=jobs).fit(data, *split(data), 1) for jobs in (1, 2))
    assert alone.tobytes() == shared.tobytes()
