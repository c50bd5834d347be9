"""HalluGuard: the Gram matrix against plain autograd, the score against closed forms, and who may
ask for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from hallutracer_research.evaluation.methods.halluguard import (
    answer_kernel,
    displacement_ratio,
    halluguard_scores,
    score,
    unit_gram,
)
from service.engines.base import Sampling
from service.engines.transformers.engine import TransformersEngine
from service.errors import EngineError, RequestError
from tests.engines import tiny
from tests.scripted_engine import ScriptedEngine

EPSILON = float(np.finfo(np.float32).eps)


def naive(
    engine: TransformersEngine, prompt: list[int], answer: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """G row by row from one whole forward pass per token, and the last hidden states, all by
    transformers' own ways."""
    model = engine._model
    block = list(tiny.modules(engine).blocks[-1].parameters())
    rows, states = [], None
    for parameter in block:
        parameter.requires_grad_(True)
    for number, token in enumerate(answer):
        before = torch.tensor([[*prompt, *answer[:number]]])
        logits = model(before, use_cache=False).logits[0, -1]
        gradient = torch.autograd.grad(
            torch.log_softmax(logits, -1)[token], block, allow_unused=True
        )
        parts = [
            torch.zeros_like(p) if g is None else g for p, g in zip(block, gradient, strict=True)
        ]
        row = torch.cat([part.reshape(-1) for part in parts]).double()
        rows.append(row / row.norm())
    for parameter in block:
        parameter.requires_grad_(False)
    with torch.no_grad():
        output = model(
            torch.tensor([[*prompt, *answer]]), output_hidden_states=True, use_cache=False
        )
        states = output.hidden_states[-1][0, len(prompt) :].double().numpy()
    g = torch.stack(rows)
    return (g @ g.T).numpy(), states


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "gpt2"])
def test_the_kernel_is_the_gram_matrix_of_plain_gradients(family: str) -> None:
    engine = tiny.shared_engine(family)
    prompt = tiny.prompts([9])[0]
    answer = list(engine.generate([prompt], Sampling(max_tokens=5))[0].token_ids)
    kernel, states = answer_kernel(tiny.modules(engine), prompt, answer)
    expected, expected_states = naive(engine, prompt, answer)
    assert_allclose(kernel, expected, atol=1e-5)
    assert_allclose(states, expected_states, rtol=1e-4, atol=1e-5)
    assert np.abs(np.diag(kernel) - 1).max() < 1e-12
    assert all(not one.requires_grad for one in engine._model.parameters())


def test_the_gram_matrix_of_known_gradients() -> None:
    """f = A theta has the rows of A as its gradients."""
    a = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
    theta, unused = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    gram = unit_gram(
        (a * theta.exp()).sum(dim=1), [theta, unused]
    )  # exp: its derivative at 0 is 1, and not constant
    assert_allclose(gram, [[1.0, 0.6, 0.0], [0.6, 1.0, 0.0], [0.0, 0.0, 0.0]], atol=1e-6)


STEPS = np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0], [5.0, 5.0]])  # of 5, 1 and 2


@pytest.mark.parametrize(
    ("kernel", "states", "expected"),
    [
        (
            np.array([[1.0, 0.4], [0.4, 1.0]]),
            np.array([[0.0], [1.0]]),
            1 - 0.4**2 - 2 * np.log(1.4 / 0.6),
        ),
        (np.eye(4), STEPS, 1 + np.log(2.0)),
        (np.eye(1), np.zeros((1, 3)), 1.0),  # det 1, no ratio, condition number 1
        (np.ones((4, 4)), np.zeros((4, 3)), -2 * np.log(4 / 1e-8)),  # one token over and over
        (np.zeros((3, 3)), np.zeros((3, 2)), 0.0),
    ],
)
def test_the_score_in_closed_form_and_of_degenerate_answers(
    kernel: np.ndarray, states: np.ndarray, expected: float
) -> None:
    assert displacement_ratio(STEPS) == pytest.approx(2.0)
    assert score(kernel, states, 1e-8) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_scores_of_prompts_are_those_of_each_alone(capsys: pytest.CaptureFixture[str]) -> None:
    engine = tiny.shared_engine("llama")
    prompts = tiny.prompts([4, 11, 7])
    found = halluguard_scores(engine, prompts, 4)
    assert "halluguard" in capsys.readouterr().err
    assert found.shape == (3,)
    for number, prompt in enumerate(prompts):
        answer = engine.generate([prompt], Sampling(max_tokens=4))[0].token_ids
        assert found[number] == pytest.approx(
            score(*naive(engine, prompt, list(answer)), EPSILON), rel=1e-3
        )


class _Once(torch.autograd.Function):
    """A kernel with a derivative of its own, which refuses to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2 * ctx.saved_tensors[0]


class _Silent(torch.autograd.Function):
    """One whose derivative is taken for a constant, without a word."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].detach() * 2


@pytest.mark.parametrize("kernel", [_Once, _Silent])
def test_a_model_that_cannot_be_differentiated_twice_is_refused(kernel: Any) -> None:
    engine = tiny.engine("llama")
    prompt, answer = tiny.prompts([4])[0], [5, 6]
    norm = (
        tiny.modules(engine).blocks[-1].post_attention_layernorm
    )  # beside the residual path, which stays whole
    kept = norm.register_forward_hook(lambda _module, _inputs, output: kernel.apply(output))
    with pytest.raises(EngineError, match="differentiate this model twice"):
        answer_kernel(tiny.modules(engine), prompt, answer)
    kept.remove()
    assert all(not one.requires_grad for one in engine._model.parameters())
    assert answer_kernel(tiny.modules(engine), prompt, answer)[0].shape == (2, 2)


def test_what_cannot_be_answered_and_an_engine_without_gradients_are_refused() -> None:
    engine = tiny.shared_engine("llama")
    with pytest.raises(EngineError, match=f"context of {tiny.CONTEXT} tokens"):
        halluguard_scores(engine, tiny.prompts([tiny.CONTEXT]), 4)
    with pytest.raises(RequestError, match="max_tokens"):
        halluguard_scores(engine, tiny.prompts([3]), 0)
    with pytest.raises(EngineError, match="ScriptedEngine"):
        halluguard_scores(ScriptedEngine(), [[1]], 4)
