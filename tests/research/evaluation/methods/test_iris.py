"""IRIS: its loss against closed forms, what it can learn, and that it leaves torch as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hallutracer_research.evaluation.methods.iris import Iris, mlp, soft_bootstrapping
from hallutracer_research.evaluation.methods.linear import fit_linear
from service.fitting.scores import risk_auroc
from service.readout import Site
from tests.research.evaluation.methods.made import GEOMETRY, made_inputs, noise, readouts, split

LAST = GEOMETRY.num_layers - 1


def test_the_loss_against_hand_computed_values() -> None:
    q = np.array([[0.25, 0.75], [0.9, 0.1]])
    label = torch.tensor([1, 1])
    logits = torch.tensor(np.log(q))
    cross_entropy = -(np.log(0.75) + np.log(0.1)) / 2
    entropy = -np.sum(q * np.log(q)) / 2
    assert float(soft_bootstrapping(logits, label, 1.0)) == pytest.approx(cross_entropy)
    assert float(soft_bootstrapping(logits, label, 0.0)) == pytest.approx(entropy)
    assert float(soft_bootstrapping(logits, label, 0.8)) == pytest.approx(0.8 * cross_entropy + 0.2 * entropy)


def test_gradients_run_through_the_target() -> None:
    """d/dz of the entropy part is q (log q + H) negated, which a target held fixed would not give."""
    logits = torch.tensor([[0.3, -0.9]], dtype=torch.float64, requires_grad=True)
    soft_bootstrapping(logits, torch.tensor([0]), 0.0).backward()
    q = torch.softmax(logits.detach(), dim=-1)
    entropy = -(q * q.log()).sum()
    torch.testing.assert_close(logits.grad, -q * (q.log() + entropy))


def test_the_network_has_the_paper_s_widths() -> None:
    shapes = [tuple(one.weight.shape) for one in mlp(15, (256, 128, 64)) if isinstance(one, torch.nn.Linear)]
    assert shapes == [(256, 15), (128, 256), (64, 128), (2, 64)]
    assert sum(isinstance(one, torch.nn.ReLU) for one in mlp(15, (256, 128, 64))) == 3


def test_it_reads_the_last_layer_and_learns_what_no_line_can(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = noise(rng, 600, Site.ATTENTION_HEAD)
    z = (rows[:, LAST] - rows[:, LAST].mean(axis=0)) / rows[:, LAST].std(axis=0)
    label = (z[:, 1] * z[:, 12] > 0).astype(np.int64)  # columns of two heads; each alone says nothing
    data = replace(
        made_inputs(tmp_path, 600),
        label=label,
        group=np.arange(600),
        heads=readouts(tmp_path, rows, label, Site.ATTENTION_HEAD),
    )
    train, test = split(data)
    found = Iris().fit(data, train, test, 0)
    assert risk_auroc(label[test], found) > 0.75
    line = fit_linear(rows[train, LAST], label[train], 1.0, "l2").logits(rows[test, LAST])
    assert risk_auroc(label[test], -line) < 0.6
    shuffled = rows.copy()
    shuffled[:, LAST] = rows[rng.permutation(600), LAST]  # the other layers keep everything
    blind = replace(data, heads=readouts(tmp_path, shuffled, label, Site.ATTENTION_HEAD))
    assert risk_auroc(label[test], Iris().fit(blind, train, test, 0)) < 0.65


def test_a_fit_repeats_bit_by_bit_and_leaves_torch_alone(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 120)
    train, test = split(data)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = Iris().fit(data, train, test, 4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.rand(3)
    assert Iris().fit(data, train, test, 4).tobytes() == first.tobytes()
    assert Iris().fit(data, train, test, 5).tobytes() != first.tobytes()


def test_it_stops_early_and_keeps_the_best_epoch(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 120, strength=0.0)
    train, test = split(data)
    long, epochs, kept = Iris().train(data, train, test, 0)
    assert kept + 5 == epochs < 100
    assert Iris(max_epochs=kept).fit(data, train, test, 0).tobytes() == long.tobytes()


def test_a_constant_column_is_ignored(tmp_path: Path) -> None:
    base = made_inputs(tmp_path, 120)
    rows = noise(np.random.default_rng(1), 120, Site.ATTENTION_HEAD)
    rows[:, LAST, 3] = 0.1
    data = replace(base, heads=readouts(tmp_path, rows, base.label, Site.ATTENTION_HEAD))
    train, test = split(data)
    scores = Iris().fit(data, train, test, 0)
    rows[test, LAST, 3] = 1e6  # never varied in training, so nothing is known about it
    moved = replace(base, heads=readouts(tmp_path, rows, base.label, Site.ATTENTION_HEAD))
    assert Iris().fit(moved, train, test, 0).tobytes() == scores.tobytes()
