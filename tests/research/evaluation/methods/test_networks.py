"""IRIS, SAPLMA and MIND: the networks of the papers, what they can learn, and fits that repeat bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hallutracer_research.evaluation.methods.base import Floats, fit_linear
from hallutracer_research.evaluation.methods.iris import fit_network, iris, soft_bootstrapping
from hallutracer_research.evaluation.methods.mind import features, mind
from hallutracer_research.evaluation.methods.network import mlp
from hallutracer_research.evaluation.methods.saplma import network_logits
from service.engines.base import Completion, TracedAnswer
from service.fitting.scores import auroc, risk_auroc
from service.readout import Site
from tests.research.evaluation.methods.made import GEOMETRY, made_inputs, noise, readouts, split

LAST = GEOMETRY.num_layers - 1


def ring(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Points whose class is their distance from the centre, which no line separates."""
    x = np.random.default_rng(0).standard_normal((rows, 4)) * [1, 30, 0.1, 1] + [0, 50, -2, 0]
    radius = ((x - [0, 50, -2, 0]) / [1, 30, 0.1, 1])[:, :3]
    return x.astype(np.float32), (np.sum(radius**2, axis=1) < 2.4).astype(np.int64)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_network_has_the_papers_widths(outputs: int) -> None:
    network = mlp(15, outputs)
    shapes = [tuple(one.weight.shape) for one in network if isinstance(one, torch.nn.Linear)]
    assert shapes == [(256, 15), (128, 256), (64, 128), (outputs, 64)]
    assert sum(isinstance(one, torch.nn.ReLU) for one in network) == 3
    first = mlp(15, outputs, dropout=0.2)[0]
    assert isinstance(first, torch.nn.Dropout)
    assert first.p == 0.2


@pytest.mark.parametrize("method", ["iris", "saplma", "mind"])
def test_a_fit_repeats_bit_by_bit_and_leaves_torch_alone(tmp_path: Path, method: str) -> None:
    data = made_inputs(tmp_path, 120)
    x, label = ring(160)
    fits: dict[str, Callable[[int], Floats]] = {
        "iris": lambda seed: iris(data, *split(data), seed),
        "saplma": lambda seed: network_logits(seed, x[:120], label[:120], x[120:]),
        "mind": lambda seed: mind(data, *split(data), seed),
    }
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = fits[method](4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.rand(3)
    assert fits[method](4).tobytes() == first.tobytes()
    assert fits[method](5).tobytes() != first.tobytes()


def test_the_loss_of_iris_against_hand_computed_values() -> None:
    q = np.array([[0.25, 0.75], [0.9, 0.1]])
    label, logits = torch.tensor([1, 1]), torch.tensor(np.log(q))
    cross_entropy, entropy = -(np.log(0.75) + np.log(0.1)) / 2, -np.sum(q * np.log(q)) / 2
    for beta, expected in ((1.0, cross_entropy), (0.0, entropy), (0.8, 0.8 * cross_entropy + 0.2 * entropy)):
        assert float(soft_bootstrapping(logits, label, beta)) == pytest.approx(expected)


def test_gradients_run_through_the_target() -> None:
    """d/dz of the entropy part is q (log q + H) negated, which a target held fixed would not give."""
    logits = torch.tensor([[0.3, -0.9]], dtype=torch.float64, requires_grad=True)
    soft_bootstrapping(logits, torch.tensor([0]), 0.0).backward()
    q = torch.softmax(logits.detach(), dim=-1)
    torch.testing.assert_close(logits.grad, -q * (q.log() - (q * q.log()).sum()))


def test_iris_reads_the_last_layer_and_learns_what_no_line_can(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = noise(rng, 600, Site.ATTENTION_HEAD)
    z = (rows[:, LAST] - rows[:, LAST].mean(axis=0)) / rows[:, LAST].std(axis=0)
    label = (z[:, 1] * z[:, 12] > 0).astype(np.int64)  # columns of two heads; each alone says nothing
    base = made_inputs(tmp_path, 600)
    heads = readouts(tmp_path, rows, label, Site.ATTENTION_HEAD)
    data = replace(base, label=label, group=np.arange(600), heads=heads)
    train, test = split(data)
    assert risk_auroc(label[test], iris(data, train, test, 0)) > 0.75
    line = fit_linear(rows[train, LAST], label[train], 1.0, "l2").logits(rows[test, LAST])
    assert risk_auroc(label[test], -line) < 0.6
    rows[:, LAST] = rows[rng.permutation(600), LAST]  # the other layers keep everything
    blind = replace(data, heads=readouts(tmp_path, rows, label, Site.ATTENTION_HEAD))
    assert risk_auroc(label[test], iris(blind, train, test, 0)) < 0.65


def test_iris_stops_early_and_keeps_the_best_epoch(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 120, strength=0.0)
    train, test = split(data)
    long, epochs, kept = fit_network(data, train, test, 0)
    assert kept + 5 == epochs < 100
    assert fit_network(data, train, test, 0, max_epochs=kept)[0].tobytes() == long.tobytes()


def test_saplma_learns_what_no_line_can_and_logits_rise_with_factuality() -> None:
    x, label = ring(1200)
    assert auroc(label[800:], network_logits(0, x[:800], label[:800], x[800:])) > 0.9


def test_a_constant_column_is_ignored() -> None:
    x, label = ring(160)
    x[:, 3] = 0.1
    scores = network_logits(0, x[:120], label[:120], x[120:])
    x[120:, 3] = 1e6  # never varied in training, so nothing is known about it
    assert network_logits(0, x[:120], label[:120], x[120:]).tobytes() == scores.tobytes()


def test_mind_reads_the_last_token_over_layers_and_the_last_layer_over_tokens(tmp_path: Path) -> None:
    last, mean = np.arange(12.0).reshape(3, 4), 100 + np.arange(12.0).reshape(3, 4)
    answer = TracedAnswer(Completion("", (1, 2), "stop"), np.zeros(2), last.astype("f4"), mean.astype("f4"))
    np.testing.assert_array_equal(features(answer), [4, 5, 6, 7, 108, 109, 110, 111])
    data = made_inputs(tmp_path, strength=1.0)
    train, test = split(data)
    rare = replace(data, answers=replace(data.answers, states=data.answers.states * 1e3 + 1e5))  # type: ignore[operator]
    for one in (data, rare):  # standardised by the training side
        assert risk_auroc(data.label[test], mind(one, train, test, 1)) > 0.85
