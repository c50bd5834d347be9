"""IRIS: a small MLP on the last layer's heads, trained against noisy labels (App. baseline-impl).

The network of ``network`` with two outputs; input: the last layer's heads side by side, standardised with the training
rows; loss: soft bootstrapping (Reed et al. 2015) with beta = 0.8; Adam.  A group-disjoint fifth of the training rows
stops the training once its loss has not fallen for 5 epochs, and the best epoch's weights are kept.  The paper gives
neither learning rate nor batch size: Adam's usual 1e-3, and 64 rows.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs
from hallutracer_research.evaluation.methods.network import mlp, scaled, seeded
from service.fitting.folds import group_folds

BETA, PATIENCE, MAX_EPOCHS, LEARNING_RATE, BATCH = 0.8, 5, 100, 1e-3, 64
VALIDATION_FOLDS = 5  # one of them is the validation split


def iris(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Return differences of logits, [n_test].  Raises TrainingError where a split lacks a class."""
    return fit_network(inputs, train, test, seed)[0]


def fit_network(
    inputs: MethodInputs, train: Index, test: Index, seed: int, max_epochs: int = MAX_EPOCHS
) -> tuple[Floats, int, int]:
    """Return the scores, the number of epochs, and the epoch whose weights were kept."""
    readouts, label = inputs.heads, inputs.label
    rows = readouts.file.layer(readouts.file.geometry.num_layers - 1)[readouts.index]
    fit, check = group_folds(label, inputs.group, train, VALIDATION_FOLDS, seed, what="IRIS validation fold")[0]
    # The network never sees ``check`` but to stop, so the scaling leaves it out as well.
    x, x_check, x_test = scaled(rows[fit], rows[fit], rows[check], rows[test])
    y, y_check = torch.from_numpy(label[fit]), torch.from_numpy(label[check])
    with seeded(seed):
        network = mlp(rows.shape[1], 2)
        order = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
        best, kept, best_epoch, epoch = float("inf"), deepcopy(network.state_dict()), 0, 0
        while epoch < max_epochs and epoch - best_epoch < PATIENCE:
            epoch += 1
            for chunk in torch.split(torch.randperm(len(x), generator=order), BATCH):
                optimizer.zero_grad()
                loss = soft_bootstrapping(network(x[chunk]), y[chunk], BETA)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                quality = float(soft_bootstrapping(network(x_check), y_check, BETA))
            if quality < best:
                best, kept, best_epoch = quality, deepcopy(network.state_dict()), epoch
        network.load_state_dict(kept)
        with torch.no_grad():
            logits = network(x_test).double().numpy()
    return logits[:, 0] - logits[:, 1], epoch, best_epoch


def soft_bootstrapping(logits: torch.Tensor, label: torch.Tensor, beta: float) -> torch.Tensor:
    """Mean of -sum_k (beta t_k + (1 - beta) q_k) log q_k, q the network's own softmax: logits [n, 2], label [n].

    Gradients run through q in the target too, which makes it cross-entropy plus a minimum-entropy term (Reed et al.).
    """
    log_q = torch.log_softmax(logits, dim=-1)
    target = beta * nn.functional.one_hot(label, 2).to(log_q.dtype) + (1.0 - beta) * log_q.exp()
    return -(target * log_q).sum(dim=-1).mean()
