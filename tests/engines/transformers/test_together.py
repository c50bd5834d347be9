"""Answers that are decoded together are those that each prompt gets alone, whoever comes and goes."""

from __future__ import annotations

from random import Random

import pytest
import torch

from service.engines.base import Sampling
from service.errors import NonFiniteReadout
from tests.engines import tiny
from tests.engines.transformers.test_continuation import reference

LENGTHS = [3, 20, 7, 30, 1, 11]


@pytest.mark.parametrize("name", tiny.ALL)
def test_greedy_answers_are_the_models_own(name: str) -> None:
    engine = tiny.engine(name)
    prompts = tiny.prompts(LENGTHS)
    continuations = engine.begin(prompts, [])
    streams = [continuation.decode(Sampling(max_tokens=14)) for continuation in continuations]
    chance, running = Random(0), list(range(len(prompts)))
    while running:
        some = chance.sample(running, chance.randint(1, len(running)))
        engine.step_together([continuations[place] for place in some])
        for place in some:
            if next(streams[place], None) is None:
                running.remove(place)
    produced = 0
    for prompt, continuation in zip(prompts, continuations, strict=True):
        assert continuation.completion is not None
        answer = reference(tiny.modules(engine).model, prompt, 14)
        assert list(continuation.completion.token_ids) == answer
        produced += len(answer)
    assert engine.counters.decode_steps == produced - len(prompts), "no step is run twice, or for nothing"
    assert engine.counters.forward_tokens == sum(LENGTHS) + produced - len(prompts)
    assert engine.counters.open_continuations == 0


def test_a_step_reads_the_weights_once() -> None:
    engine = tiny.engine("llama")
    continuations = engine.begin(tiny.prompts(LENGTHS), [])
    streams = [continuation.decode(Sampling(max_tokens=5)) for continuation in continuations]
    for stream in streams:
        next(stream)
    rows: list[int] = []
    handle = tiny.projections(engine)[0].register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    engine.step_together(continuations)
    engine.step_together(continuations)  # all have their next token's logits already
    for stream in streams:
        next(stream)
    handle.remove()
    assert rows == [len(LENGTHS)]


def test_attention_is_the_models_own_again_afterwards() -> None:
    engine = tiny.engine("llama")
    model = tiny.modules(engine).model
    own = model.config._attn_implementation
    continuations = engine.begin(tiny.prompts([4, 9]), [])
    streams = [continuation.decode(Sampling(max_tokens=5)) for continuation in continuations]
    for stream in streams:
        next(stream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step_together(continuations)
    assert model.config._attn_implementation == own


def test_a_nan_ends_the_answer_that_has_it_and_no_other() -> None:
    engine = tiny.engine("llama")
    prompts = tiny.prompts([4, 9])
    bad, good = engine.begin(prompts, [])
    streams = [continuation.decode(Sampling(max_tokens=8)) for continuation in (bad, good)]
    for stream in streams:
        next(stream)
    with torch.inference_mode():
        bad.cache.layers[1].values.fill_(float("nan"))
    engine.step_together([bad, good])
    with pytest.raises(NonFiniteReadout, match="decode step"):
        next(streams[0])
    list(streams[1])
    assert good.completion is not None
    assert list(good.completion.token_ids) == reference(tiny.modules(engine).model, prompts[1], 8)
    assert engine.counters.open_continuations == 0
