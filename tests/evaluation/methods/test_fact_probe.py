"""Fact-Probe: which window it picks, what it fits there, and which windows it looks at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.errors import TrainingError
from service.evaluation.methods.base import inner_pairs
from service.evaluation.methods.fact_probe import FactProbe, starts, window
from service.evaluation.methods.linear import fit_linear
from service.fitting.scores import auroc
from service.readout import Geometry, Site
from tests.evaluation.methods.made import WIDE, material, noise, plant, readouts, split


def test_a_signal_spread_over_layers_is_read_from_a_window(tmp_path: Path) -> None:
    data = material(tmp_path, 400)
    assert data.residual is not None
    train, test = split(data)
    found = FactProbe(jobs=1).fit(data, train, test, 2)
    assert found.note.startswith(f"layers {WIDE[0]}-{WIDE[-1]}, C = ")
    assert "searched" not in found.note
    c = float(found.note.split("C = ")[1].split(",")[0])
    assert c in (0.1, 0.5)
    x = np.concatenate([np.asarray(data.residual.file.layer(layer)[3:]) for layer in WIDE], axis=1)
    np.testing.assert_array_equal(window(data.residual, 1, 5, np.arange(400)), x)
    probe = fit_linear(x[train], data.label[train], c, "l1")
    np.testing.assert_allclose(found.test, -probe.logits(x[test]), rtol=1e-9)
    quality = []
    assert found.train_oof is not None
    for fit, held in inner_pairs(data, train, 3, 2, "fold"):  # train is 0, 1, 2 ...: rows are positions
        logits = fit_linear(x[fit], data.label[fit], c, "l1").logits(x[held])
        np.testing.assert_allclose(found.train_oof[held], -logits, rtol=1e-9)
        quality.append(auroc(data.label[held], logits))
    assert f"inner AUROC {np.mean(quality):.3f}" in found.note


def test_of_equally_good_ones_the_smallest_is_taken(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    label = np.arange(200) % 2
    rows = noise(rng, 200, Site.RESIDUAL_STREAM)
    plant(rows, label, 3, 2, 8.0)  # separable: every window that holds layer 3 is perfect
    data = replace(
        material(tmp_path, 200),
        label=label,
        group=np.arange(200),
        residual=readouts(tmp_path, rows, label, Site.RESIDUAL_STREAM),
    )
    train, test = split(data)
    found = FactProbe(jobs=1).fit(data, train, test, 0)
    assert found.note.startswith("layer 3, C = 0.1, inner AUROC 1.000, ")


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


def test_the_note_says_where_windows_were_left_out(tmp_path: Path) -> None:
    geometry = Geometry(num_layers=17, num_heads=1, head_dim=2, hidden_size=2)
    rng = np.random.default_rng(2)
    base = material(tmp_path, 90)
    rows = noise(rng, 90, Site.RESIDUAL_STREAM, geometry)
    data = replace(base, residual=readouts(tmp_path, rows, base.label, Site.RESIDUAL_STREAM, geometry))
    found = FactProbe(jobs=1, c_grid=(0.5,)).fit(data, *split(data), 0)
    assert found.note.endswith("searched 24 of 30 windows, evenly spaced")


def test_a_model_of_few_layers_has_only_single_ones(tmp_path: Path) -> None:
    geometry = Geometry(num_layers=3, num_heads=1, head_dim=2, hidden_size=4)
    base = material(tmp_path, 90)
    rows = noise(np.random.default_rng(3), 90, Site.RESIDUAL_STREAM, geometry)
    plant(rows, base.label, 1, 0, 2.0)
    data = replace(base, residual=readouts(tmp_path, rows, base.label, Site.RESIDUAL_STREAM, geometry))
    assert FactProbe(jobs=1).fit(data, *split(data), 0).note.startswith("layer 1, ")


def test_processes_change_nothing(tmp_path: Path) -> None:
    data = material(tmp_path, 120)
    alone, shared = (FactProbe(jobs=jobs).fit(data, *split(data), 1) for jobs in (1, 2))
    assert alone.test.tobytes() == shared.test.tobytes()
    assert alone.note == shared.note


def test_it_cannot_choose_without_inner_folds(tmp_path: Path) -> None:
    data = material(tmp_path, 60)
    with pytest.raises(TrainingError, match="2 or more"):
        FactProbe(inner_folds=1).fit(data, *split(data), 0)
