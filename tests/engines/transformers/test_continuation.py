"""Going on from the prefill's cache: the prompt never runs twice, and the answer is the model's own."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from service.engines.base import BatchEngine, Continuation, Sampling
from service.errors import EngineError, NonFiniteReadout, RequestError
from tests.engines import tiny

LENGTHS = [3, 20, 7, 30]


def reference(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers' own greedy decoding gives, end token included."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


def read(continuation: Continuation, sampling: Sampling) -> tuple[int, ...]:
    pieces = list(continuation.decode(sampling))
    completion = continuation.completion
    assert completion is not None
    assert "".join(pieces) == completion.text
    return completion.token_ids


@pytest.mark.parametrize("name", tiny.ALL)
@pytest.mark.parametrize("side", ["right", "left"])
def test_greedy_equals_generate_and_the_prompt_runs_once(name: str, side: str):
    engine: BatchEngine = tiny.engine(name, padding_side=side)
    prompts = tiny.prompts(LENGTHS)
    continuations = engine.begin(prompts, [tiny.probes(engine.identity.geometry)])
    assert engine.counters.forward_tokens == sum(LENGTHS)
    assert engine.counters.open_continuations == len(LENGTHS)
    steps = 0
    for prompt, continuation in zip(prompts, continuations, strict=True):
        ids = read(continuation, Sampling(max_tokens=12))
        assert list(ids) == reference(tiny.modules(engine).model, prompt, 12)
        steps += len(ids) - 1  # the first token comes from the prefill
        assert engine.counters.decode_steps == steps
        assert engine.counters.forward_tokens == sum(LENGTHS) + steps
    assert engine.counters.open_continuations == 0


@pytest.mark.parametrize("name", tiny.SLIDING_FAMILIES)
def test_padding_does_not_push_a_short_prompt_out_of_its_window(name: str):
    engine = tiny.engine(name)
    short, long = tiny.prompts([tiny.WINDOW + 2, 60])
    together = engine.begin([short, long], [])
    alone = engine.begin([short], [])
    window = [layer.keys.shape[-2] for layer in together[0].cache.layers if layer.is_sliding]
    assert window
    assert set(window) == {tiny.WINDOW - 1}
    for ours, own in zip(together[0].cache.layers, alone[0].cache.layers, strict=True):
        assert ours.get_seq_length() == own.get_seq_length() == len(short)
        torch.testing.assert_close(ours.keys, own.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.values, own.values, rtol=0, atol=1e-5)
    assert list(read(together[0], Sampling(max_tokens=20))) == reference(tiny.modules(engine).model, short, 20)


def test_begin_reads_the_same_onset_as_score():
    engine = tiny.shared_engine("qwen3")
    prompts, probe = tiny.prompts(LENGTHS), tiny.probes(engine.identity.geometry)
    scored = engine.score(prompts, [probe], first_token=True)
    for onset, continuation in zip(scored, engine.begin(prompts, [probe]), strict=True):
        assert continuation.prefill.trajectories[0] == pytest.approx(onset.trajectories[0], abs=1e-6)
        assert continuation.prefill.first_token is not None
        assert onset.first_token is not None
        assert continuation.prefill.first_token.token == onset.first_token.token
        continuation.close()


def test_each_continuation_owns_its_memory():
    engine = tiny.shared_engine("llama")
    continuations = engine.begin(tiny.prompts([5, 40]), [])
    storages = [
        {layer.keys.untyped_storage().data_ptr() for layer in continuation.cache.layers}
        for continuation in continuations
    ]
    assert not storages[0] & storages[1]
    short = continuations[0].cache.layers[0].keys
    assert short.untyped_storage().nbytes() == short.numel() * short.element_size()
    assert short.shape[-2] == 5


def test_interleaved_continuations_do_not_disturb_each_other():
    engine = tiny.engine("llama")
    prompts = tiny.prompts([6, 15])
    first, second = engine.begin(prompts, [])
    streams = [first.decode(Sampling(max_tokens=10)), second.decode(Sampling(max_tokens=10))]
    while streams:
        for stream in list(streams):
            if next(stream, None) is None:
                streams.remove(stream)
    for continuation, prompt in zip((first, second), prompts, strict=True):
        assert continuation.completion is not None
        assert list(continuation.completion.token_ids) == reference(tiny.modules(engine).model, prompt, 10)


@pytest.mark.parametrize("as_list", [True, False])
def test_end_tokens_stop_the_answer(as_list: bool):
    model = tiny.model("llama")
    prompt = tiny.prompts([8])[0]
    answer = reference(model, prompt, 10)
    end = answer[4]
    model.generation_config.eos_token_id = [tiny.EOS, end] if as_list else end
    engine = tiny.TransformersEngine(model, tiny.tokenizer())
    continuation = engine.begin([prompt], [])[0]
    ids = read(continuation, Sampling(max_tokens=10))
    assert list(ids) == answer[: answer.index(end) + 1]
    assert continuation.completion is not None
    assert continuation.completion.finish_reason == "stop"
    assert continuation.completion.text == tiny.shared_engine("llama").detokenize(ids[:-1]).rstrip("\ufffd")


def test_stop_strings_end_the_answer_before_themselves():
    engine = tiny.engine("llama", max_batch_tokens=64)
    text = None
    for seed in range(200):  # a random model rarely says a few plain characters in a row
        prompt = tiny.prompts([6], seed)[0]
        ids = reference(tiny.modules(engine).model, prompt, 16)
        text = engine.detokenize(ids)
        if len(text) > 6 and "\ufffd" not in text[:6] and text.find(text[3:5]) == 3:
            break
    assert text is not None
    assert "\ufffd" not in text[:6]
    continuation = engine.begin([prompt], [])[0]
    pieces = list(continuation.decode(Sampling(max_tokens=16, stop=(text[3:5], "never said"))))
    assert "".join(pieces) == text[:3]
    assert continuation.completion is not None
    assert continuation.completion.finish_reason == "stop"
    assert engine.counters.open_continuations == 0


def test_cancelling_stops_before_the_next_step():
    engine = tiny.engine("llama")
    continuation = engine.begin(tiny.prompts([8]), [])[0]
    checks = []

    def cancelled() -> bool:
        checks.append(engine.counters.decode_steps)
        return len(checks) > 3

    list(continuation.decode(Sampling(max_tokens=50), cancelled))
    assert engine.counters.decode_steps == 2  # tokens 2 and 3; the first was free, the fourth never ran
    assert continuation.completion is not None
    assert continuation.completion.finish_reason == "cancelled"
    assert len(continuation.completion.token_ids) == 3
    assert engine.counters.open_continuations == 0


def test_an_answer_ends_at_its_time_as_one_of_full_length():
    engine = tiny.engine("llama")
    continuation = engine.begin(tiny.prompts([8]), [])[0]
    list(continuation.decode(Sampling(max_tokens=50, until=0.0)))
    assert continuation.completion is not None
    assert (continuation.completion.finish_reason, len(continuation.completion.token_ids)) == ("length", 1)
    assert engine.counters.open_continuations == 0


def test_closing_the_iterator_frees_the_cache():
    engine = tiny.engine("llama")
    continuation = engine.begin(tiny.prompts([8]), [])[0]
    stream = continuation.decode(Sampling(max_tokens=50))
    list(islice(stream, 1))
    steps = engine.counters.decode_steps
    stream.close()
    assert continuation.cache is None
    assert engine.counters.open_continuations == 0
    assert continuation.completion is not None
    assert continuation.completion.finish_reason == "cancelled"
    assert engine.counters.decode_steps == steps
    continuation.close()
    assert engine.counters.open_continuations == 0


def test_closing_the_continuation_ends_a_stream_under_way():
    engine = tiny.engine("llama")
    continuation = engine.begin(tiny.prompts([8]), [])[0]
    stream = continuation.decode(Sampling(max_tokens=50))
    next(stream)
    continuation.close()
    steps = engine.counters.decode_steps
    list(stream)
    assert engine.counters.decode_steps == steps


def test_a_continuation_is_decoded_once_and_not_after_close():
    engine = tiny.engine("llama")
    first, second = engine.begin(tiny.prompts([4, 5]), [])
    assert first.completion is None
    list(first.decode(Sampling(max_tokens=2)))
    with pytest.raises(EngineError, match="closed"):
        first.decode(Sampling(max_tokens=2))
    stream = second.decode(Sampling(max_tokens=2))
    with pytest.raises(EngineError, match="already"):
        second.decode(Sampling(max_tokens=2))
    list(stream)


def test_prompt_and_answer_never_exceed_the_context():
    engine = tiny.engine("gpt2")
    nearly, full = engine.begin(tiny.prompts([tiny.CONTEXT - 3, tiny.CONTEXT]), [])
    for continuation, tokens in ((nearly, 3), (full, 0)):
        list(continuation.decode(Sampling(max_tokens=20)))
        assert continuation.completion is not None
        assert len(continuation.completion.token_ids) == tokens
        assert continuation.completion.finish_reason == "length"


def test_a_seed_repeats_a_sample_and_seeds_differ():
    engine = tiny.engine("llama")
    prompt = tiny.prompts([8])[0]

    def sample(seed: int, temperature: float = 1.5, top_p: float = 1.0) -> tuple[int, ...]:
        continuation = engine.begin([prompt], [])[0]
        return read(continuation, Sampling(max_tokens=12, temperature=temperature, seed=seed, top_p=top_p))

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(6)}) > 1
    greedy = tuple(reference(tiny.modules(engine).model, prompt, 12))
    assert sample(1, top_p=1e-6) == greedy
    assert sample(1, temperature=1e-30) == greedy


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (Sampling(max_tokens=0), "max_tokens"),
        (Sampling(temperature=-1.0), "temperature"),
        (Sampling(temperature=float("nan")), "temperature"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(top_p=1.5), "top_p"),
        (Sampling(stop=("",)), "stop"),
    ],
)
def test_impossible_sampling_is_refused_by_name(bad: Sampling, param: str):
    engine = tiny.engine("llama")
    continuation = engine.begin(tiny.prompts([4]), [])[0]
    with pytest.raises(RequestError) as caught:
        continuation.decode(bad)
    assert caught.value.param == param
    with pytest.raises(RequestError):
        engine.generate(tiny.prompts([4]), bad)
    list(continuation.decode(Sampling(max_tokens=1)))  # the refusal left the continuation usable
    assert continuation.completion is not None
    assert continuation.completion.finish_reason == "length"


def test_a_nan_while_decoding_is_an_error_and_frees_the_cache():
    engine = tiny.engine("llama")
    continuation = engine.begin(tiny.prompts([4]), [])[0]
    stream = continuation.decode(Sampling(max_tokens=5))
    with torch.no_grad():
        tiny.projections(engine)[1].weight.fill_(float("nan"))
    with pytest.raises(NonFiniteReadout, match="decode step"):
        list(stream)
    assert engine.counters.open_continuations == 0
