"""SAPLMA: the paper's network, a fit that repeats bit by bit, and what it can learn."""

from __future__ import annotations

import numpy as np
import torch

from hallutracer_research.evaluation.methods.saplma import mlp, network_logits
from service.fitting.scores import auroc


def ring(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Points whose class is their distance from the centre, which no line separates."""
    x = np.random.default_rng(0).standard_normal((rows, 4)) * [1, 30, 0.1, 1] + [0, 50, -2, 0]
    radius = ((x - [0, 50, -2, 0]) / [1, 30, 0.1, 1])[:, :3]
    return x.astype(np.float32), (np.sum(radius**2, axis=1) < 2.4).astype(np.int64)


def test_the_network_has_the_paper_s_widths() -> None:
    shapes = [tuple(one.weight.shape) for one in mlp(15) if isinstance(one, torch.nn.Linear)]
    assert shapes == [(256, 15), (128, 256), (64, 128), (1, 64)]
    assert sum(isinstance(one, torch.nn.ReLU) for one in mlp(15)) == 3


def test_it_learns_what_no_line_can_and_logits_rise_with_factuality() -> None:
    x, label = ring(1200)
    assert auroc(label[800:], network_logits(0, x[:800], label[:800], x[800:])) > 0.9


def test_a_fit_repeats_bit_by_bit_and_leaves_torch_alone() -> None:
    x, label = ring(160)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = network_logits(4, x[:120], label[:120], x[120:])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.rand(3)
    assert network_logits(4, x[:120], label[:120], x[120:]).tobytes() == first.tobytes()
    assert network_logits(5, x[:120], label[:120], x[120:]).tobytes() != first.tobytes()


def test_a_constant_column_is_ignored() -> None:
    x, label = ring(160)
    x[:, 3] = 0.1
    scores = network_logits(0, x[:120], label[:120], x[120:])
    x[120:, 3] = 1e6  # never varied in training, so nothing is known about it
    assert network_logits(0, x[:120], label[:120], x[120:]).tobytes() == scores.tobytes()
