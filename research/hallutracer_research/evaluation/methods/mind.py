"""MIND: a network on the states of the answer's tokens (Su et al. 2024, "Unsupervised Real-Time Hallucination Detection
based on the Internal States of Large Language Models").

Features are those of its published code: the last token's residual stream, mean over layers, beside the last layer's,
mean over the answer's tokens.  The network, too: dropout of 0.2 before that of ``network``, a loss in which both
classes weigh the same, Adam at 5e-4 with a weight decay of 1e-5 (not on biases), batches of 32, 20 epochs, of which
the best on held-out rows is kept: here by AUROC, on a fifth of the training side.

**Supervised.** The paper's network learns from continuations of Wikipedia that are labelled without people.  Here it
learns from the training side's labels, as every other probe: more than the paper asks for.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs
from hallutracer_research.evaluation.methods.network import mlp, seeded
from service.engines.base import TracedAnswer
from service.errors import TrainingError
from service.fitting.folds import group_folds
from service.fitting.probes import standardise
from service.fitting.scores import risk_auroc

DROPOUT, EPOCHS, BATCH, LEARNING_RATE, DECAY = 0.2, 20, 32, 5e-4, 1e-5
HELD_OUT = 5  # one part of so many chooses the epoch


def features(answer: TracedAnswer) -> NDArray[np.float32]:
    """Return what the network reads of an answer, [2 hidden_size]."""
    return np.asarray(np.concatenate([answer.last.mean(axis=0), answer.mean[-1]]), np.float32)


def mind(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Return the scores [n_test].  Raises TrainingError where a side of the training rows lacks a class."""
    states = inputs.answers.states
    if states is None:
        raise TrainingError("mind reads the answers' states, and none were read; leave it out", param="methods")
    fitted, held = group_folds(inputs.label, inputs.group, train, HELD_OUT, seed, what="MIND inner fold")[0]
    z, mean, std = standardise(states[fitted])
    held_rows, test_rows = (_tensor((states[rows] - mean) / std) for rows in (held, test))
    rows, target = _tensor(z), torch.from_numpy(1 - inputs.label[fitted])
    count = torch.bincount(target, minlength=2).double()
    loss_of = nn.CrossEntropyLoss(weight=(1 - count / count.sum()).float())
    with seeded(seed):
        network = mlp(rows.shape[1], 2, DROPOUT)
        biases = [one for one in network.parameters() if one.ndim == 1]
        weights = [one for one in network.parameters() if one.ndim > 1]
        groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": DECAY}, {"params": biases}]
        optimizer = torch.optim.Adam(groups, LEARNING_RATE)
        best, kept = -1.0, network
        for _ in range(EPOCHS):
            network.train()
            for chunk in torch.split(torch.randperm(len(rows)), BATCH):
                optimizer.zero_grad()
                loss_of(network(rows[chunk]), target[chunk]).backward()
                optimizer.step()
            found = risk_auroc(inputs.label[held], _risk(network, held_rows))
            if found > best:
                best, kept = found, deepcopy(network)
        return _risk(kept, test_rows)


def _risk(network: nn.Module, rows: torch.Tensor) -> Floats:
    network.eval()
    with torch.no_grad():
        logits = network(rows).double()
    return np.asarray((logits[:, 1] - logits[:, 0]).numpy())


def _tensor(rows: NDArray[np.floating]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, np.float32))
