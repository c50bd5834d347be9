"""SAPLMA: an MLP on one layer's hidden state (Azaria and Mitchell 2023, "The Internal State of an LLM Knows When It's
Lying").

Linear layers to 256, 128, 64 and 1 with ReLU between them; the loss is the logistic one of a sigmoid output; Adam for 5
epochs, all as there.  Its published code takes batches of 32 rows and Adam's usual 1e-3.  There the state is that of a
statement's last token, here that of the prompt's last token.  The paper compares layers from the middle to the last on
held-out data; inner folds choose between the middle, three quarters of the depth and the last.  Rows are standardised
with the training rows, as for the other baselines.

One thread and one seed, so that a fit can be repeated bit by bit; torch's settings and its global random state are left
as they were.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs
from hallutracer_research.evaluation.methods.layer_choice import Rows, at_depths, fit_at_best_layer
from service.fitting.solver import CONSTANT, one_torch_thread

DEPTHS = (0.5, 0.75, 1.0)
HIDDEN = (256, 128, 64)
EPOCHS, BATCH, LEARNING_RATE = 5, 32, 1e-3


def saplma(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Scores of the test rows, [n_test].  Raises TrainingError where an inner fold lacks a class."""
    layers = at_depths(inputs.residual.file.geometry.num_layers, DEPTHS)
    fits = [partial(network_logits, seed)]
    return fit_at_best_layer(inputs, train, test, seed, layers=layers, fits=fits, jobs=jobs, what="SAPLMA inner fold")


@one_torch_thread()
def network_logits(seed: int, x: Rows, label: NDArray[np.int64], x_test: Rows) -> Floats:
    """Truth logits [t] of a network trained on x [n, d], label [n]."""
    mean, std = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    std[std <= CONSTANT * np.abs(mean)] = np.inf  # a constant column says nothing
    rows, rows_test = (torch.from_numpy(((part - mean) / std).astype(np.float32)) for part in (x, x_test))
    target = torch.from_numpy(label.astype(np.float32))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = mlp(rows.shape[1])
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)
    for _ in range(EPOCHS):
        for chunk in torch.split(torch.randperm(len(rows), generator=order), BATCH):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(network(rows[chunk])[:, 0], target[chunk])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        return np.asarray(network(rows_test)[:, 0].double().numpy())


def mlp(width: int) -> nn.Sequential:
    """``width`` inputs, ReLU layers of the ``HIDDEN`` widths, one output."""
    sizes = [width, *HIDDEN]
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
