"""Small networks on activations: widths 256, 128 and 64, one thread, one seed, so that a fit
repeats bit by bit.

``iris`` (App. baseline-impl): two outputs on the last layer's heads; soft bootstrapping (Reed et
al. 2015) with beta = 0.8; Adam; stopped where a group-disjoint fifth has not improved for 5
epochs.  Learning rate and batch size are ours. ``saplma`` (Azaria and Mitchell 2023): logistic
loss, Adam, 5 epochs, batches of 32; there on a statement's last token, here on the prompt's.  Inner
folds choose between the middle, three quarters of the depth and the last layer.
``attention_pooled`` (arXiv 2606.21917): one learned query weighs the prompt's last 32 tokens by a
softmax, and a linear probe reads their weighted mean.  A group-disjoint fifth chooses the layer and
the weight decay, and stops the training.
``attention_pooled_soft``: the same, taught the share of sampled answers that are right, and chosen
by the labels. ``mind`` (Su et al. 2024): features and training of its published code: the last
token's residual stream, mean over layers, beside the last layer's, mean over tokens; dropout 0.2,
balanced loss, Adam at 5e-4, weight decay 1e-5, the best of 20 epochs on a fifth.  **Supervised:**
the paper's learns from Wikipedia, here from the training side's labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hallutracer_research.evaluation.methods.base import (
    Fold,
    Rows,
    fit_at_best_layer,
    required,
)
from service.engines.base import TracedAnswer
from service.fitting.probes import Floats, Index, standardise
from service.fitting.scores import auroc, risk_auroc
from service.fitting.solver import CONSTANT, one_torch_thread

# Of IRIS
BETA = 0.8
PATIENCE, MAX_EPOCHS = 5, 100
VALIDATION_FOLDS = 5  # one of them is the validation split


def mlp(width: int, outputs: int, dropout: float = 0.0) -> nn.Sequential:
    """Return ``width`` inputs, ReLU layers of 256, 128 and 64, and ``outputs``."""
    sizes = (width, 256, 128, 64)
    layers: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    for inputs, next_width in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(inputs, next_width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with one_torch_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _scaled(rows: Rows, *parts: Rows) -> list[torch.Tensor]:
    """Return ``parts`` standardised by the training ``rows`` [n, d]; a column that is constant
    there says nothing."""
    mean, std = rows.mean(axis=0, dtype=np.float64), rows.std(axis=0, dtype=np.float64)
    std[std <= CONSTANT * np.abs(mean)] = np.inf
    return [torch.from_numpy(((part - mean) / std).astype(np.float32)) for part in parts]


def _epoch(optimizer: Any, order: torch.Tensor, batch: int, loss_of: Any) -> None:
    """Step once for each batch of ``order``; ``loss_of`` takes a batch's rows."""
    for chunk in torch.split(order, batch):
        optimizer.zero_grad()
        loss_of(chunk).backward()
        optimizer.step()


def _keep_best_epoch(
    network: nn.Module,
    train: Callable[[], None],
    quality: Callable[[], float],
    *,
    epochs: int,
    patience: int,
) -> tuple[float, int, int]:
    """Train one epoch after the other until ``quality`` has not risen for ``patience`` of them, and
    give the network the weights of the best.  Return its quality, the number of epochs, the best
    epoch."""
    best, weights = -np.inf, deepcopy(network.state_dict())
    best_epoch = epoch = 0
    while epoch < epochs and epoch - best_epoch < patience:
        epoch += 1
        train()
        with torch.no_grad():
            current = quality()
        if current > best:
            best, weights = current, deepcopy(network.state_dict())
            best_epoch = epoch
    network.load_state_dict(weights)
    return best, epoch, best_epoch


def iris(fold: Fold) -> Floats:
    """Return differences of logits, [n_test].  Raises TrainingError where a split lacks a class."""
    return fit_iris(fold)[0]


def fit_iris(fold: Fold, max_epochs: int = MAX_EPOCHS) -> tuple[Floats, int, int]:
    """Return the scores, the number of epochs, and the epoch whose weights were kept."""
    readouts, label = fold.inputs.heads, fold.inputs.label
    rows = readouts.file.layer(readouts.file.geometry.num_layers - 1)[readouts.index]
    fit, check = fold.folds(VALIDATION_FOLDS, "IRIS validation fold")[0]
    # The network never sees ``check`` but to stop, so the scaling leaves it out as well.
    x, x_check, x_test = _scaled(rows[fit], rows[fit], rows[check], rows[fold.test])
    y, y_check = torch.from_numpy(label[fit]), torch.from_numpy(label[check])
    with _seeded(fold.seed):
        network = mlp(rows.shape[1], 2)
        order = torch.Generator().manual_seed(fold.seed)
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)

        def loss(at: torch.Tensor) -> torch.Tensor:
            return soft_bootstrapping(network(x[at]), y[at], BETA)

        _, epochs, best_epoch = _keep_best_epoch(
            network,
            lambda: _epoch(optimizer, torch.randperm(len(x), generator=order), 64, loss),
            lambda: -float(soft_bootstrapping(network(x_check), y_check, BETA)),
            epochs=max_epochs,
            patience=PATIENCE,
        )
        with torch.no_grad():
            logits = network(x_test).double().numpy()
    return logits[:, 0] - logits[:, 1], epochs, best_epoch


def soft_bootstrapping(logits: torch.Tensor, label: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the mean of -sum_k (beta t_k + (1 - beta) q_k) log q_k, q the network's own softmax:
    logits [n, 2]. Gradients run through q in the target too, which makes it cross-entropy plus a
    minimum-entropy term (Reed et al.)."""
    log_q = torch.log_softmax(logits, dim=-1)
    target = beta * nn.functional.one_hot(label, 2).to(log_q.dtype) + (1.0 - beta) * log_q.exp()
    return -(target * log_q).sum(dim=-1).mean()


def saplma(fold: Fold) -> Floats:
    """Return the scores [n_test].  Raises TrainingError where an inner fold lacks a class."""
    fits = [partial(saplma_logits, fold.seed)]
    return fit_at_best_layer(fold, fits, "SAPLMA inner fold", depths=(0.5, 0.75, 1.0))


def saplma_logits(seed: int, x: Rows, label: Index, x_test: Rows) -> Floats:
    """Return truth logits [t] of a network trained on x [n, d], label [n]."""
    rows, rows_test = _scaled(x, x, x_test)
    target = torch.from_numpy(label.astype(np.float32))
    loss = nn.functional.binary_cross_entropy_with_logits
    with _seeded(seed):
        network = mlp(rows.shape[1], 1)
        order = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(network.parameters(), 1e-3, fused=True)
        for _ in range(5):
            shuffled = torch.randperm(len(rows), generator=order)
            _epoch(optimizer, shuffled, 32, lambda at: loss(network(rows[at])[:, 0], target[at]))
        with torch.no_grad():
            return np.asarray(network(rows_test)[:, 0].double().numpy())


DECAYS = (1e-3, 1e-2, 1e-1)
POOL_EPOCHS, POOL_PATIENCE = 60, 10


class _Pooled(nn.Module):
    """Logits of token states [n, t, d]: softmax over the tokens that are there, a weighted mean, a
    linear probe."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))  # at the start a plain mean
        self.probe = nn.Linear(width, 1)

    def forward(self, states: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        score = (states @ self.query / states.shape[-1] ** 0.5).masked_fill(~there, float("-inf"))
        pooled = (torch.softmax(score, dim=1)[..., None] * states).sum(dim=1)
        return self.probe(pooled)[:, 0]  # type: ignore[no-any-return]


def attention_pooled(fold: Fold) -> Floats:
    """Return the scores [n_test].  Raises TrainingError where a side of the training rows lacks a
    class."""
    return _pooled_scores(fold, fold.inputs.label.astype(np.float64))


def attention_pooled_soft(fold: Fold) -> Floats:
    """Return the scores [n_test].  Raises TrainingError where a side of the training rows lacks a
    class."""
    right = required(
        fold.inputs.answers.right,
        "attention-pooled-soft learns from sampled answers, and there are none",
    )
    return _pooled_scores(fold, np.where(np.isnan(right), fold.inputs.label, right))


def _pooled_scores(fold: Fold, target: Floats) -> Floats:
    """Return the scores [n_test] of the best layer and weight decay, taught ``target`` [n]."""
    inputs, problem = fold.inputs, "attention-pooled reads the last tokens, and none were read"
    states = required(inputs.positions, problem).states
    fitted, held = fold.folds(VALIDATION_FOLDS, "pooling inner fold")[0]
    ways = [(layer, decay) for layer in range(states.shape[1]) for decay in DECAYS]
    fits = [
        _fit_pooled(states[:, layer], target, inputs.label, fitted, held, decay, fold.seed)
        for layer, decay in ways
    ]
    best = int(np.argmax([round(quality, 12) for quality, _ in fits]))
    (layer, _), (_, score) = ways[best], fits[best]
    return -score(states[fold.test, layer])


def _fit_pooled(
    states: NDArray[np.float16],
    taught: Floats,
    label: Index,
    fitted: Index,
    held: Index,
    decay: float,
    seed: int,
) -> tuple[float, Callable[[NDArray[np.float16]], Floats]]:
    """Return the best AUROC on the ``held`` rows, and what gives truth logits of other rows: states
    [n, t, d]."""
    there = states[fitted].any(axis=2)
    seen = states[fitted][there].astype(np.float32)
    mean, std = seen.mean(axis=0), seen.std(axis=0) + 1e-6

    def scaled(rows: NDArray[np.float16]) -> tuple[torch.Tensor, torch.Tensor]:
        known = rows.any(axis=2)
        return torch.from_numpy((rows.astype(np.float32) - mean) / std), torch.from_numpy(known)

    target = torch.from_numpy(taught[fitted].astype(np.float32))
    balance = (1 - target.mean()) / target.mean().clamp(min=1e-6)
    criterion = nn.BCEWithLogitsLoss(pos_weight=balance)
    x, known = scaled(states[fitted])
    held_rows = scaled(states[held])
    with _seeded(seed):
        network = _Pooled(x.shape[2])
        optimizer = torch.optim.AdamW(network.parameters(), 1e-2, weight_decay=decay)

        def loss(at: torch.Tensor) -> Any:
            return criterion(network(x[at], known[at]), target[at])

        best, _, _ = _keep_best_epoch(
            network,
            lambda: _epoch(optimizer, torch.randperm(len(x)), 64, loss),
            lambda: auroc(label[held], network(*held_rows).double().numpy()),
            epochs=POOL_EPOCHS,
            patience=POOL_PATIENCE,
        )

    def score(rows: NDArray[np.float16]) -> Floats:
        with torch.no_grad(), one_torch_thread():
            return np.asarray(network(*scaled(rows)).double().numpy(), np.float64)

    return best, score


def features(answer: TracedAnswer) -> NDArray[np.float32]:
    """Return what ``mind`` reads of an answer, [2 hidden_size]."""
    return np.asarray(np.concatenate([answer.last.mean(axis=0), answer.mean[-1]]), np.float32)


MIND_EPOCHS = 20


def mind(fold: Fold) -> Floats:
    """Return the scores [n_test].  Raises TrainingError where a side of the training rows lacks a
    class."""
    label, problem = fold.inputs.label, "mind reads the answers' states, and none were read"
    states = required(fold.inputs.answers.states, problem)
    fitted, held = fold.folds(VALIDATION_FOLDS, "MIND inner fold")[0]
    z, mean, std = standardise(states[fitted])
    parts = (z, (states[held] - mean) / std, (states[fold.test] - mean) / std)
    rows, held_rows, test_rows = (
        torch.from_numpy(np.ascontiguousarray(part, np.float32)) for part in parts
    )
    target = torch.from_numpy(1 - label[fitted])
    count = torch.bincount(target, minlength=2).double()
    criterion = nn.CrossEntropyLoss(weight=(1 - count / count.sum()).float())
    with _seeded(fold.seed):
        network = mlp(rows.shape[1], 2, 0.2)
        biases = [parameter for parameter in network.parameters() if parameter.ndim == 1]
        weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
        groups: list[dict[str, Any]] = [
            {"params": weights, "weight_decay": 1e-5},
            {"params": biases},
        ]
        optimizer = torch.optim.Adam(groups, 5e-4)

        def train() -> None:
            network.train()
            order = torch.randperm(len(rows))
            _epoch(optimizer, order, 32, lambda at: criterion(network(rows[at]), target[at]))

        _keep_best_epoch(
            network,
            train,
            lambda: risk_auroc(label[held], _risk(network, held_rows)),
            epochs=MIND_EPOCHS,
            patience=MIND_EPOCHS,
        )
        return _risk(network, test_rows)


def _risk(network: nn.Module, rows: torch.Tensor) -> Floats:
    network.eval()
    with torch.no_grad():
        logits = network(rows).double()
    return np.asarray((logits[:, 1] - logits[:, 0]).numpy())
