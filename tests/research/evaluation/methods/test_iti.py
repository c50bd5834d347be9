"""ITI-Probe: the head it picks, the probes it averages, and what its own scores of training rows are worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hallutracer_research.evaluation.methods.iti import Iti, group_bootstrap
from hallutracer_research.evaluation.methods.linear import fit_linear
from service.errors import TrainingError
from service.fitting.scores import auroc
from service.readout import Site
from tests.research.evaluation.methods.made import BEST, GEOMETRY, made_inputs, noise, plant, readouts, split

D = GEOMETRY.head_dim


def test_the_planted_head_is_found_and_three_probes_are_averaged(tmp_path: Path) -> None:
    data = made_inputs(tmp_path)
    train, test = split(data)
    layer, head, quality = Iti(jobs=1).best_head(data.heads, train)
    assert (layer, head) == BEST
    x = np.asarray(data.heads.file.layer(BEST[0])[3:, BEST[1] * D : (BEST[1] + 1) * D])
    rng = np.random.default_rng(5)
    expected = np.zeros(len(test))
    for _ in range(3):
        drawn = train[group_bootstrap(data.label[train], data.group[train], rng)]
        expected -= fit_linear(x[drawn], data.label[drawn], 1.0, "l2").logits(x[test]) / 3
    np.testing.assert_allclose(Iti(jobs=1).fit(data, train, test, 5), expected, rtol=1e-9)
    fitted = fit_linear(x[train], data.label[train], 1.0, "l2")
    assert quality == pytest.approx(auroc(data.label[train], fitted.logits(x[train])))


def test_ties_go_to_the_lowest_layer_and_head(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    label = np.arange(80) % 2
    rows = noise(rng, 80, Site.ATTENTION_HEAD)
    plant(rows, label, 2, D, 2.0)
    for layer, head in ((2, 2), (4, 0), (5, 2)):  # the same head again, later
        rows[:, layer, head * D : (head + 1) * D] = rows[:, 2, D : 2 * D]
    data = replace(
        made_inputs(tmp_path, 80),
        label=label,
        group=np.arange(80),
        heads=readouts(tmp_path, rows, label, Site.ATTENTION_HEAD),
    )
    assert Iti(jobs=1).best_head(data.heads, split(data)[0])[:2] == (2, 1)


def test_processes_change_nothing(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 120)
    alone, shared = (Iti(jobs=jobs).fit(data, *split(data), 1) for jobs in (1, 2))
    assert alone.tobytes() == shared.tobytes()


def test_bootstrap_draws_whole_groups_with_replacement() -> None:
    group = np.array([5, 5, 5, 2, 2, 9])
    label = np.array([1, 1, 1, 0, 0, 1])
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(50):
        drawn = group_bootstrap(label, group, rng)
        counts = np.bincount(drawn, minlength=6)
        for name in (5, 2, 9):
            assert len(set(counts[group == name])) == 1  # all rows of a group, equally often
        times = tuple(int(counts[group == name][0]) for name in (5, 2, 9))
        assert sum(times) == 3
        assert times[1] > 0  # the only hallucinated group: a sample without it is drawn again
        seen.add(times)
    assert len(seen) > 3
    with pytest.raises(TrainingError, match="only one class"):
        group_bootstrap(np.ones(4, np.int64), np.arange(4), rng)
