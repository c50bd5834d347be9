"""SAPLMA: an MLP on one layer's hidden state (Azaria and Mitchell 2023, "The Internal State of an LLM Knows When It's
Lying").

The network of ``network`` with one output; the loss is the logistic one of a sigmoid output; Adam for 5 epochs, all as
there.  Its published code takes batches of 32 rows and Adam's usual 1e-3.  There the state is that of a statement's
last token, here that of the prompt's last token.  The paper compares layers from the middle to the last on held-out
data; inner folds choose between the middle, three quarters of the depth and the last.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs, Rows, fit_at_best_layer
from hallutracer_research.evaluation.methods.network import mlp, scaled, seeded

DEPTHS = (0.5, 0.75, 1.0)
EPOCHS, BATCH, LEARNING_RATE = 5, 32, 1e-3


def saplma(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Return the scores [n_test].  Raises TrainingError where an inner fold lacks a class."""
    fits = [partial(network_logits, seed)]
    return fit_at_best_layer(inputs, train, test, seed, jobs, fits=fits, depths=DEPTHS, what="SAPLMA inner fold")


def network_logits(seed: int, x: Rows, label: NDArray[np.int64], x_test: Rows) -> Floats:
    """Return truth logits [t] of a network trained on x [n, d], label [n]."""
    rows, rows_test = scaled(x, x, x_test)
    target = torch.from_numpy(label.astype(np.float32))
    with seeded(seed):
        network = mlp(rows.shape[1], 1)
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
