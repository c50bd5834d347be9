"""Traced answers: the tokens of plain decoding, log-probabilities and states as whole forward passes give them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from service.engines.base import Sampling, TracedAnswer
from service.engines.transformers.engine import TransformersEngine
from service.engines.vllm.engine import VllmEngine
from service.errors import EngineError, RequestError
from service.readout import Site
from tests.engines import tiny
from tests.scripted_engine import ScriptedEngine

LENGTHS = [3, 20, 7, 11]


def check_trace(engine: TransformersEngine, prompt: list[int], answer: TracedAnswer) -> None:
    """Against one whole forward pass for the log-probabilities, and ``extract`` of every beginning for states."""
    ids = list(answer.completion.token_ids)
    model = tiny.modules(engine).model
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), dim=-1)[torch.arange(len(ids)), torch.tensor(ids)]
    np.testing.assert_allclose(answer.log_prob, expected.numpy(), atol=2e-4)
    begun = [[*prompt, *ids[:count]] for count in range(len(ids))]
    states = engine.extract(begun, [Site.RESIDUAL_STREAM]).activations[Site.RESIDUAL_STREAM]
    np.testing.assert_allclose(answer.last, states[-1], rtol=1e-3, atol=1e-3)
    of_answer = states[1:] if len(ids) > 1 else states
    np.testing.assert_allclose(answer.mean, of_answer.mean(axis=0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", tiny.ALL)
def test_a_greedy_trace_is_that_of_plain_decoding(name: str) -> None:
    engine = tiny.engine(name, max_batch_tokens=60)
    prompts = tiny.prompts(LENGTHS)
    plain = engine.generate(prompts, Sampling(max_tokens=6))
    traced = engine.sample(prompts, Sampling(max_tokens=6), [[0]] * len(prompts))
    assert [one.completion for (one,) in traced] == plain
    for prompt, (answer,) in zip(prompts, traced, strict=True):
        check_trace(engine, prompt, answer)


@pytest.mark.parametrize("name", ["llama", "mistral"])  # a cache in full, and one with windows
def test_samples_share_one_prefill_and_each_is_that_of_its_seed(name: str) -> None:
    engine = tiny.engine(name)
    prompts = tiny.prompts(LENGTHS)
    sampling = Sampling(max_tokens=7, temperature=1.3, top_p=0.9)
    seeds = [[10 * row + number for number in range(3)] for row in range(len(prompts))]
    traced = engine.sample(prompts, sampling, seeds)
    written = sum(len(one.completion.token_ids) for of_prompt in traced for one in of_prompt)
    assert engine.counters.prefills == len(prompts)
    assert engine.counters.forward_tokens == sum(LENGTHS) + written - 3 * len(prompts)
    for prompt, own, of_prompt in zip(prompts, seeds, traced, strict=True):
        assert len({one.completion.token_ids for one in of_prompt}) > 1
        for seed, one in zip(own, of_prompt, strict=True):
            alone = Sampling(max_tokens=7, temperature=1.3, top_p=0.9, seed=seed)
            assert one.completion == engine.generate([prompt], alone)[0]
            check_trace(engine, prompt, one)


def test_an_answer_of_one_token_has_the_states_of_the_onset() -> None:
    engine = tiny.shared_engine("llama")
    prompt = tiny.prompts([9])[0]
    (answer,) = engine.sample([prompt], Sampling(max_tokens=1), [[0]])[0]
    check_trace(engine, prompt, answer)
    np.testing.assert_array_equal(answer.last, answer.mean)


def test_seeds_are_one_list_for_each_prompt() -> None:
    engine = tiny.shared_engine("llama")
    prompts = tiny.prompts([4, 5])
    assert engine.sample([], Sampling(), []) == []
    for seeds in ([[1]], [[1], [1, 2]], [[], []]):
        with pytest.raises(EngineError, match="2 prompts need as many lists of seeds"):
            engine.sample(prompts, Sampling(max_tokens=2), seeds)


def test_next_token_is_the_softmax_of_the_logits() -> None:
    engine = tiny.engine("qwen2", max_batch_tokens=40)
    prompts = tiny.prompts(LENGTHS)
    found = engine.next_token(prompts, [7, 100, 7])
    for prompt, own in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = tiny.modules(engine).model(torch.tensor([prompt])).logits[0, -1]
        np.testing.assert_allclose(own, torch.log_softmax(logits, -1)[[7, 100, 7]].numpy(), atol=1e-4)
    with pytest.raises(RequestError, match="token id 264"):
        engine.next_token(prompts, [tiny.VOCABULARY])


@pytest.mark.parametrize("engine", [ScriptedEngine(), cast(Any, VllmEngine)], ids=["scripted", "vllm"])
def test_engines_that_cannot_trace_say_so_even_without_prompts(engine: Any) -> None:
    own = () if isinstance(engine, ScriptedEngine) else (None,)
    for call in (lambda: engine.sample(*own, [], Sampling(), []), lambda: engine.next_token(*own, [], [1])):
        with pytest.raises(EngineError, match="load the model with the transformers engine") as caught:
            call()
        assert caught.value.param == "methods"
