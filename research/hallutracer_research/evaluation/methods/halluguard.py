"""HalluGuard: a score of the finished answer from gradients of its tokens (App. baseline-impl; Zeng
et al. 2026).

The model answers greedily.  g_t is the gradient of log p(y_t | x, y_<t) with respect to the last
block's parameters, scaled to unit norm; K = G G^T [T, T], lambda its eigenvalues; sigma_max the
largest |h_t - h_(t-1)| /
|h_(t-1) - h_(t-2)| of the answer tokens' last hidden states; kappa = lambda_max / lambda_min.

    score = det(K) + log sigma_max - 2 log kappa

**Direction.** A high score means a sound answer, as its authors maximise it in search: the risk is
minus the score. (log sigma_max has a plus although amplification is their hazard: the formula is as
published.)  It reads the answer, so it is no peer of the pre-decoding methods.  One token scores
1.  Works on the transformers engine only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from service.engines.base import LoadedModel, Sampling, TokenIds, TorchModel
from service.errors import EngineError
from service.fitting.probes import Floats

Tensor = torch.Tensor
_NOT_TWICE = (
    "halluguard cannot differentiate this model twice: {reason}. Load it with attn_implementation"
    " sdpa or eager, or leave the method out"
)
_AT_ONCE = 32  # prompts answered between two steps of the progress bar


def halluguard_scores(
    engine: LoadedModel, prompts: Sequence[TokenIds], max_new_tokens: int = 64
) -> Floats:
    """Return the published score of each prompt's greedy answer, [n]; high means sound.

    T is at most ``max_new_tokens``: time grows with T (three passes back through the last block for
    each token) and K with T^2; memory is three copies of the block's parameters.  The dtype's
    rounding limits kappa: prefer float32. Raises EngineError: another engine, kernels that cannot
    be differentiated twice, a full context; RequestError: the engine's."""
    torch_model = engine.torch_model
    if torch_model is None:
        raise EngineError(
            f"halluguard needs gradients and {type(engine).__name__} computes none: run it on the"
            " transformers engine, or leave the method out",
            param="methods",
        )
    floor = float(torch.finfo(getattr(torch, engine.identity.dtype)).eps)
    scores = np.empty(len(prompts))
    with tqdm(total=len(prompts), desc="halluguard", mininterval=1) as bar:
        for start in range(0, len(prompts), _AT_ONCE):
            some = prompts[start : start + _AT_ONCE]
            answers = engine.generate(some, Sampling(max_tokens=max_new_tokens))
            for number, (prompt, answer) in enumerate(zip(some, answers, strict=True), start):
                if not answer.token_ids:
                    raise EngineError(
                        f"prompt {number} fills the model's context of"
                        f" {engine.identity.max_tokens} tokens: there is no answer to score;"
                        " shorten it or leave the method out"
                    )
                kernel, states = answer_kernel(torch_model, prompt, answer.token_ids)
                scores[number] = score(kernel, states, floor)
                bar.update()
    return scores


def answer_kernel(
    torch_model: TorchModel, prompt: TokenIds, answer: TokenIds
) -> tuple[Floats, Floats]:
    """Return K [T, T] of unit-norm gradients, and the answer tokens' last hidden states
    [T, hidden_size].  The states are those that the language-model head reads, after the final
    norm."""
    block = torch_model.blocks[-1]
    ids = torch.tensor([[*prompt, *answer]], device=torch_model.device)
    states: list[Tensor] = []
    handle = torch_model.head.register_forward_pre_hook(
        lambda _module, inputs: states.append(inputs[0].detach())
    )
    try:
        with _differentiable(block) as parameters, _twice():
            logits = torch_model.model(
                input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1
            ).logits[0, -len(answer) - 1 : -1]
            log_prob = torch.log_softmax(logits.float(), dim=-1)
            chosen = log_prob.gather(1, ids[0, -len(answer) :, None])[:, 0]
            kernel = unit_gram(chosen, parameters)
    finally:
        handle.remove()
    return kernel, states[0][0, -len(answer) :].double().cpu().numpy()


def unit_gram(values: Tensor, parameters: Sequence[Tensor]) -> Floats:
    """Return the Gram matrix [T, T] of the gradients of ``values`` [T], each scaled to unit norm
    (zero ones stay zero). Column u is J g_u, and J v is the derivative of u -> J^T u along v
    (differentiating twice), so no more than one gradient is held at a time, whatever the number of
    parameters. Raises EngineError where the diagonal is not the gradients' squared norms, which
    happens where a kernel with a derivative of its own takes its second one for zero."""
    gradients = torch.autograd.grad(values.sum(), parameters, retain_graph=True, allow_unused=True)
    used = [
        parameter
        for parameter, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None
    ]
    del gradients
    weights = torch.zeros_like(values, requires_grad=True)
    pulled = torch.autograd.grad(values, used, grad_outputs=weights, create_graph=True)
    columns, squares = [], []
    for value in values:
        gradient = torch.autograd.grad(value, used, retain_graph=True)
        columns.append(
            torch.autograd.grad(pulled, weights, grad_outputs=gradient, retain_graph=True)[0]
        )
        squares.append(sum(float(part.float().square().sum()) for part in gradient))
    gram = torch.stack(columns, dim=1).double().cpu().numpy()
    tolerance = max(float(np.sqrt(torch.finfo(parameter.dtype).eps)) for parameter in used)
    # A sure token's gradient is rounding beside the others': it is compared with theirs.
    allowed = tolerance * np.maximum(squares, 0.01 * max(squares))
    if np.any(np.abs(np.diag(gram) - squares) > allowed):
        raise EngineError(_NOT_TWICE.format(reason="a kernel has no second derivative"))
    norm = np.sqrt(np.maximum(np.diag(gram), 0.0))
    scale = np.divide(1.0, norm, out=np.zeros_like(norm), where=norm > 0)
    return np.asarray((gram + gram.T) / 2 * scale[:, None] * scale)


def score(kernel: NDArray[np.floating], states: NDArray[np.floating], floor: float) -> float:
    """Return det(K) + log sigma_max - 2 log kappa: kernel [T, T], states [T, d].  Finite for every
    input that is. Eigenvalues are raised to ``floor``, since equal gradients make K singular.  It
    is the rounding unit of the model's type (float32: 1.2e-7) and not the 1e-8 of the published
    code: below it, log kappa would be noise."""
    eigenvalues = np.maximum(np.linalg.eigvalsh(np.asarray(kernel, np.float64)), floor)
    kappa = eigenvalues[-1] / eigenvalues[0]
    return float(
        np.exp(np.log(eigenvalues).sum()) + np.log(displacement_ratio(states)) - 2.0 * np.log(kappa)
    )


def displacement_ratio(states: NDArray[np.floating]) -> float:
    """Return sigma_max: the largest |h_t - h_(t-1)| / |h_(t-1) - h_(t-2)| of states [T, d]; 1 where
    T < 3.  Steps are raised to 1e-8, so that a state that repeats divides by no zero."""
    if len(states) < 3:
        return 1.0
    steps = np.maximum(
        np.linalg.norm(np.diff(np.asarray(states, np.float64), axis=0), axis=1), 1e-8
    )
    return float(np.max(steps[1:] / steps[:-1]))


@contextmanager
def _differentiable(block: Any) -> Iterator[list[Tensor]]:
    """Give one block's parameters gradients, only for as long as they are wanted."""
    parameters = list(block.parameters())
    before = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield parameters
    finally:
        for parameter, wanted in zip(parameters, before, strict=True):
            parameter.requires_grad_(wanted)


@contextmanager
def _twice() -> Iterator[None]:
    """Allow only attention kernels that can be differentiated twice; refuse a model with other such
    kernels."""
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch has no type of its own for a missing derivative
        raise EngineError(_NOT_TWICE.format(reason=error)) from error
