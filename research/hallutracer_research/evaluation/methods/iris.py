"""IRIS: a small MLP on the last layer's heads, trained against noisy labels (App. baseline-impl).

Linear layers to 256, 128, 64 and 2 with ReLU between them; input: the last layer's heads side by side, standardised
with the training rows; loss: soft bootstrapping (Reed et al. 2015) with beta = 0.8; Adam.  A group-disjoint fifth of
the training rows stops the training once its loss has not fallen for 5 epochs, and the best epoch's weights are kept.
The paper gives neither learning rate nor batch size: Adam's usual 1e-3, and 64 rows.

One thread and one seed, so that a fit can be repeated bit by bit; torch's settings and its global random state are
left as they were.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs
from service.fitting.folds import group_folds
from service.fitting.solver import CONSTANT, one_torch_thread

Tensor = torch.Tensor


@dataclass(frozen=True)
class Iris:
    """The MLP and how it is trained."""

    hidden: tuple[int, ...] = (256, 128, 64)
    beta: float = 0.8
    patience: int = 5  # epochs
    max_epochs: int = 100
    learning_rate: float = 1e-3
    batch: int = 64  # rows
    validation_folds: int = 5  # one of them is the validation split

    def fit(self, inputs: MethodInputs, train: Index, test: Index, seed: int) -> Floats:
        """Train on ``train``; scores are differences of logits.  Raises TrainingError where a split lacks a class."""
        return self.train(inputs, train, test, seed)[0]

    @one_torch_thread()
    def train(self, inputs: MethodInputs, train: Index, test: Index, seed: int) -> tuple[Floats, int, int]:
        """Scores, the number of epochs, and the epoch whose weights were kept."""
        readouts = inputs.heads
        rows = readouts.file.layer(readouts.file.geometry.num_layers - 1)[readouts.index]
        fit, check = group_folds(
            inputs.label, inputs.group, train, self.validation_folds, seed, what="IRIS validation fold"
        )[0]
        # The network never sees ``check`` but to stop, so the scaling leaves it out as well.
        mean, std = rows[fit].mean(axis=0, dtype=np.float64), rows[fit].std(axis=0, dtype=np.float64)
        std[std <= CONSTANT * np.abs(mean)] = np.inf  # a constant column says nothing
        x, x_check, x_test = (
            torch.from_numpy(((rows[part] - mean) / std).astype(np.float32)) for part in (fit, check, test)
        )
        y, y_check = torch.from_numpy(inputs.label[fit]), torch.from_numpy(inputs.label[check])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = mlp(rows.shape[1], self.hidden)
        order = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(network.parameters(), self.learning_rate)
        best, kept, best_epoch, epoch = float("inf"), deepcopy(network.state_dict()), 0, 0
        while epoch < self.max_epochs and epoch - best_epoch < self.patience:
            epoch += 1
            for chunk in torch.split(torch.randperm(len(x), generator=order), self.batch):
                optimizer.zero_grad()
                loss = soft_bootstrapping(network(x[chunk]), y[chunk], self.beta)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                quality = float(soft_bootstrapping(network(x_check), y_check, self.beta))
            if quality < best:
                best, kept, best_epoch = quality, deepcopy(network.state_dict()), epoch
        network.load_state_dict(kept)
        with torch.no_grad():
            logits = network(x_test).double().numpy()
        return logits[:, 0] - logits[:, 1], epoch, best_epoch


def mlp(width: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """``width`` inputs, ReLU layers of the ``hidden`` widths, 2 outputs: hallucinated, factual."""
    sizes = [width, *hidden]
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 2))


def soft_bootstrapping(logits: Tensor, label: Tensor, beta: float) -> Tensor:
    """Mean of -sum_k (beta t_k + (1 - beta) q_k) log q_k, q the network's own softmax: logits [n, 2], label [n].

    Gradients run through q in the target too, which makes it cross-entropy plus a minimum-entropy term (Reed et al.).
    """
    log_q = torch.log_softmax(logits, dim=-1)
    target = beta * nn.functional.one_hot(label, 2).to(log_q.dtype) + (1.0 - beta) * log_q.exp()
    return -(target * log_q).sum(dim=-1).mean()
