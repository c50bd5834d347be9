"""Batched decoding for labelling equals decoding each prompt alone."""

from __future__ import annotations

import numpy as np
import pytest

from service.engines.base import Sampling
from service.readout import Pooling, Site
from tests.engines import tiny
from tests.engines.transformers.test_continuation import reference

LENGTHS = [3, 25, 7, 7, 14, 1]


@pytest.mark.parametrize("name", tiny.ALL)
def test_mixed_lengths_equal_single_prompts(name: str):
    engine = tiny.engine(name, max_batch_tokens=90)
    prompts = tiny.prompts(LENGTHS)
    for prompt, completion in zip(prompts, engine.generate(prompts, Sampling(max_tokens=12)), strict=True):
        assert list(completion.token_ids) == reference(tiny.modules(engine).model, prompt, 12)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == tiny.EOS else "length")


@pytest.mark.parametrize("name", tiny.ALL)
def test_readouts_and_answers_come_from_one_prefill(name: str):
    engine = tiny.engine(name, max_batch_tokens=90)
    prompts, sampling = tiny.prompts(LENGTHS), Sampling(max_tokens=12)
    sites, poolings = list(Site), (Pooling.MEAN, Pooling.CONTENT_MAX)
    apart, answers = engine.extract(prompts, sites, poolings), engine.generate(prompts, sampling)
    before = engine.counters.prefills
    together = engine.extract(prompts, sites, poolings, sampling)
    assert engine.counters.prefills == before + len(prompts)
    assert list(together.completions) == answers
    assert apart.completions == ()
    for ours, theirs in ((together.activations, apart.activations), (together.pooled, apart.pooled)):
        assert ours.keys() == theirs.keys()
        for key in ours:
            np.testing.assert_allclose(ours[key], theirs[key], rtol=0, atol=1e-5)
    for here, there in zip(together.first_tokens, apart.first_tokens, strict=True):
        assert here.token == there.token
        assert here.entropy == pytest.approx(there.entropy, abs=1e-5)


def test_rows_that_finish_early_leave_and_the_rest_go_on_rightly():
    model = tiny.model("llama")
    prompts = tiny.prompts([4, 9, 9, 17, 6, 12, 3, 8])
    answers = [reference(model, prompt, 14) for prompt in prompts]
    ends = [answers[0][2], answers[1][0], answers[2][5], answers[5][1]]
    model.generation_config.eos_token_id = ends
    engine = tiny.TransformersEngine(model, tiny.tokenizer())
    completions = engine.generate(prompts, Sampling(max_tokens=14))
    reasons = set()
    for answer, completion in zip(answers, completions, strict=True):
        stops = [at for at, token in enumerate(answer) if token in ends]
        expected = answer[: stops[0] + 1] if stops else answer
        assert list(completion.token_ids) == expected
        assert completion.finish_reason == ("stop" if stops else "length")
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}
    produced = sum(len(completion.token_ids) for completion in completions)
    assert engine.counters.decode_steps == produced - len(prompts)
    assert engine.counters.forward_tokens == sum(map(len, prompts)) + produced - len(prompts)
    assert engine.counters.prefills == len(prompts)


def test_sampled_answers_do_not_depend_on_batch_mates():
    engine = tiny.shared_engine("llama")
    prompts = tiny.prompts([4, 9, 15])
    sampling = Sampling(max_tokens=10, temperature=1.2, top_p=0.9, seed=7)
    together = engine.generate(prompts, sampling)
    alone = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    assert together == alone
    other = engine.generate(prompts, Sampling(max_tokens=10, temperature=1.2, top_p=0.9, seed=8))
    assert other != together


def test_generate_and_decode_agree_on_text_and_stop_strings():
    engine = tiny.shared_engine("qwen2")
    prompts = tiny.prompts([5] * 12, seed=3)
    plain = engine.generate(prompts, Sampling(max_tokens=16))
    stop = tuple({completion.text[4:6] for completion in plain if len(completion.text) > 6})
    assert stop
    sampling = Sampling(max_tokens=16, stop=stop)
    for prompt, completion in zip(prompts, engine.generate(prompts, sampling), strict=True):
        continuation = engine.begin([prompt], [])[0]
        pieces = list(continuation.decode(sampling))
        assert continuation.completion == completion
        assert "".join(pieces) == completion.text
        assert not any(end in completion.text for end in stop)


def test_a_full_context_leaves_no_room_and_says_length():
    engine = tiny.shared_engine("gpt2")
    prompts = tiny.prompts([tiny.CONTEXT, 5, tiny.CONTEXT - 2])
    full, short, nearly = engine.generate(prompts, Sampling(max_tokens=6))
    assert (full.token_ids, full.finish_reason, full.text) == ((), "length", "")
    assert list(short.token_ids) == reference(tiny.modules(engine).model, prompts[1], 6)
    assert len(nearly.token_ids) == 2
    assert engine.generate([], Sampling()) == []


def test_longrope_answers_do_not_depend_on_longer_batch_mates():
    engine = tiny.longrope_engine()
    prompts = tiny.prompts([5, 60, 30])
    for limit in (6, 200):
        together = engine.generate(prompts, Sampling(max_tokens=limit))
        assert together == [engine.generate([prompt], Sampling(max_tokens=limit))[0] for prompt in prompts]
