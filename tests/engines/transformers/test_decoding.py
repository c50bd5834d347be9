"""Decoding: text in pieces, answers from the prefill's cache alone, together, sampled and traced:
the model's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engines.base import Completion, Continuation, Sampling, TracedAnswer
from service.engines.families import family_of, text_config
from service.engines.transformers import hooks
from service.engines.transformers.decoding import TextStream, generator_for, pick
from service.errors import EngineError, NonFiniteReadout, RequestError
from service.readout import Site
from tests.engines import tiny
from tests.engines.test_families import EVERY

LENGTHS = [3, 20, 7, 30, 1, 11]


# plain, windows in turn, no rotation, windows, experts
KINDS = ["llama", "gemma2", "gpt2", "mistral", "qwen3_moe"]
CPU = torch.device("cpu")


def from_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def sentencepiece_like(ids: Sequence[int]) -> str:
    """Words with a leading space each; decoding drops the first one, as Llama 2's does.  0 is
    special: no text."""
    return "".join(f" w{token}" for token in ids if token).removeprefix(" ")


def run(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*map(stream.push, ids), stream.finish()]


@given(st.one_of(st.text(max_size=40).map(str.encode), st.binary(max_size=30)))
def test_pieces_are_whole_characters_and_join_to_the_text_less_an_unfinished_end(
    ids: bytes,
) -> None:
    stream = TextStream(from_bytes)
    pieces = run(stream, ids)
    assert "".join(pieces) == stream.text == from_bytes(ids).rstrip("\ufffd")
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in from_bytes(ids)


@given(st.lists(st.integers(0, 3), max_size=12))
def test_spaces_between_words_survive_tokens_without_text(ids: list[int]) -> None:
    assert "".join(run(TextStream(sentencepiece_like), ids)) == sentencepiece_like(ids)


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=20), max_size=4),
)
def test_what_may_begin_a_stop_text_is_held_back_and_the_first_one_ends_the_answer(
    pieces: list[str], stops: list[str]
) -> None:
    stream = TextStream(lambda ids: "".join(pieces[piece] for piece in ids), stops)
    sent = held = ""
    for piece, text in enumerate(pieces):
        out = stream.push(piece)
        held += text
        if starts := [held.find(stop) for stop in stops if stop in held]:
            first = min(starts)
            assert (out, stream.text) == (held[:first], sent + held[:first])
            assert stream.stopped in [stop for stop in stops if held.startswith(stop, first)]
            return
        begins = [
            size for stop in stops for size in range(1, len(stop)) if held.endswith(stop[:size])
        ]
        size = len(held) - max(begins, default=0)
        assert (out, stream.stopped) == (held[:size] if text else "", None)
        sent, held = sent + held[:size], held[size:]
    assert (stream.finish(), stream.text) == (held, sent + held)


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_the_nucleus_is_that_of_the_whole_vocabulary_sorted(top_p: float, spread: float) -> None:
    logits = spread * torch.randn(3000, generator=torch.Generator().manual_seed(1))
    ordered, order = torch.softmax((logits - logits.max()) / 0.8, -1).sort(descending=True)
    count = int((ordered.cumsum(-1) - ordered < top_p).sum())
    nucleus = torch.zeros(3000).scatter(0, order[:count], ordered[:count])
    for seed in range(20):
        sampling = Sampling(temperature=0.8, top_p=top_p, seed=seed)
        drawn = int(torch.multinomial(nucleus, 1, generator=torch.Generator().manual_seed(seed)))
        picked = pick(logits, sampling, generator_for(sampling, CPU))
        # Of equal probabilities it does not matter which are kept.
        assert picked == drawn or spread == 0.0
    for temperature in (0.0, 1e-30):
        sampling = Sampling(temperature=temperature)
        assert pick(logits, sampling, generator_for(sampling, CPU)) == int(logits.argmax())
    unseeded: list[Any] = [generator_for(Sampling(temperature=1.0), CPU) for _ in range(2)]
    assert unseeded[0].initial_seed() != unseeded[1].initial_seed()


# One prompt at a time


def reference(engine: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers' own greedy decoding gives, end token included."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = tiny.modules(engine).model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            use_cache=False,
        )
    return out[0, len(prompt) :].tolist()


FIFTY = Sampling(max_tokens=50)


def decoded(continuation: Continuation, sampling: Sampling = FIFTY, *rest: Any) -> Completion:
    """Decode to the end: the pieces join to the text, and the cache is freed."""
    pieces = list(continuation.decode(sampling, *rest))
    assert continuation.completion is not None
    assert "".join(pieces) == continuation.completion.text
    return continuation.completion


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_padding_does_not_push_a_short_prompt_out_of_its_window(name: str) -> None:
    engine = tiny.engine(name)
    short, long = tiny.prompts([tiny.WINDOW + 2, 60])
    [together, _], [alone] = engine.begin([short, long], []), engine.begin([short], [])
    layers = together.cache.layers
    assert {layer.keys.shape[-2] for layer in layers if layer.is_sliding} == {tiny.WINDOW - 1}
    for layer, same in zip(layers, alone.cache.layers, strict=True):
        assert layer.get_seq_length() == same.get_seq_length() == len(short)
        pairs = (layer.keys, layer.values), (same.keys, same.values)
        torch.testing.assert_close(*pairs, rtol=0, atol=1e-5)
    token_ids = decoded(together, Sampling(max_tokens=20)).token_ids
    assert list(token_ids) == reference(engine, short, 20)


def test_each_continuation_has_its_own_memory() -> None:
    begun = tiny.engine("qwen3").begin(tiny.prompts([5, 40]), [])

    def addresses(continuation: Any) -> set[int]:
        return {layer.keys.untyped_storage().data_ptr() for layer in continuation.cache.layers}

    assert not addresses(begun[0]) & addresses(begun[1])
    short = begun[0].cache.layers[0].keys
    assert short.untyped_storage().nbytes() == short.numel() * short.element_size()
    assert short.shape[-2] == 5


def test_an_answer_ends_at_its_time_and_where_the_context_is_full() -> None:
    engine = tiny.engine("gpt2")
    prompts, sampling = tiny.prompts([8, tiny.CONTEXT - 3, tiny.CONTEXT]), Sampling(max_tokens=20)
    alone = []
    for continuation, until, tokens in zip(
        engine.begin(prompts, []), (0.0, np.inf, np.inf), (1, 3, 0), strict=True
    ):
        alone.append(decoded(continuation, replace(sampling, until=until)))
        assert (len(alone[-1].token_ids), alone[-1].finish_reason) == (tokens, "length")
    assert engine.generate(prompts[1:], sampling) == alone[1:]
    assert engine.generate([], sampling) == []
    assert engine.counters.open_continuations == 0


@pytest.mark.parametrize("way", ["cancelled", "iterator", "continuation"])
def test_an_answer_that_is_left_ends_before_its_next_step_and_frees_the_cache(way: str) -> None:
    engine, left = tiny.engine("llama"), list[str]()
    [continuation] = engine.begin(tiny.prompts([8]), [])
    stream: Any = continuation.decode(FIFTY, lambda: bool(left))
    list(islice(stream, 3))
    if way == "cancelled":
        left.append(way)
    else:
        (stream if way == "iterator" else continuation).close()
    assert (list(stream), continuation.cache) == ([], None)
    completion = continuation.completion
    assert completion is not None
    assert (completion.finish_reason, len(completion.token_ids)) == ("cancelled", 3)
    continuation.close()
    # The first token was free, the fourth never ran.
    assert (engine.counters.open_continuations, engine.counters.decode_steps) == (0, 2)


def test_a_continuation_is_decoded_once_and_not_after_close() -> None:
    first, second = tiny.engine("llama").begin(tiny.prompts([4, 5]), [])
    assert first.completion is None
    list(first.decode(Sampling(max_tokens=2)))
    stream = second.decode(Sampling(max_tokens=2))
    for continuation, named in ((first, "closed"), (second, "already")):
        with pytest.raises(EngineError, match=named):
            continuation.decode(Sampling(max_tokens=2))
    list(stream)


def test_impossible_sampling_is_refused_by_name() -> None:
    engine = tiny.engine("llama")
    [continuation] = engine.begin(tiny.prompts([4]), [])
    for option, bad in (
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("stop", ("",)),
        ("stop", ("a" * 257,)),
        ("stop", ("a",) * 9),
        ("seed", 2**63),
    ):
        sampling = Sampling(**{option: bad})  # type: ignore[arg-type]
        for call in (continuation.decode, partial(engine.generate, tiny.prompts([4]))):
            with pytest.raises(RequestError) as caught:
                call(sampling)
            assert caught.value.param == option
    # It is usable still.
    assert decoded(continuation, Sampling(max_tokens=1)).finish_reason == "length"


# Several that come and go


def begun(engine: Any, lengths: list[int], sampling: Sampling) -> tuple[list[Any], list[Any]]:
    """Continuations and their pieces, of which one is taken."""
    continuations = engine.begin(tiny.prompts(lengths), [])
    streams = [continuation.decode(sampling) for continuation in continuations]
    for stream in streams:
        next(stream)
    return continuations, streams


def test_a_step_reads_the_weights_once() -> None:
    engine = tiny.engine("llama")
    continuations, streams = begun(engine, LENGTHS, Sampling(max_tokens=5))
    rows: list[int] = []
    handle = tiny.projections(engine)[0].register_forward_pre_hook(
        lambda _, given: rows.append(len(given[0]))
    )
    engine.step_together(continuations)
    engine.step_together(continuations)  # all have their next token's logits already
    for stream in streams:
        next(stream)
    handle.remove()
    assert rows == [len(LENGTHS)]


def test_a_nan_ends_the_answer_that_has_it_and_no_other() -> None:
    engine = tiny.engine("llama")
    [bad, good], streams = begun(engine, [4, 9], Sampling(max_tokens=8))
    with torch.inference_mode():
        bad.cache.layers[1].values.fill_(float("nan"))
    engine.step_together([bad, good])
    with pytest.raises(NonFiniteReadout):
        next(streams[0])
    list(streams[1])
    expected = reference(engine, tiny.prompts([4, 9])[1], 8)
    assert list(good.completion.token_ids) == expected
    assert engine.counters.open_continuations == 0


# All to the end, for labelling

MIXED = [3, 25, 7, 7, 14, 1]


@pytest.mark.parametrize("name", EVERY)
def test_answers_of_mixed_lengths_come_from_one_prefill_with_the_readouts(name: str) -> None:
    engine = tiny.engine(name, max_batch_tokens=90)
    prompts, sampling = tiny.prompts(MIXED), Sampling(max_tokens=8)
    sites = family_of(tiny.modules(engine).model.config).sites
    apart = engine.extract(prompts, sites)
    before = engine.counters.prefills
    together = engine.extract(prompts, sites, sampling=sampling)
    assert engine.counters.prefills == before + len(prompts)
    for prompt, completion in zip(prompts, together.completions, strict=True):
        assert list(completion.token_ids) == reference(engine, prompt, 8)
        ended = completion.token_ids[-1] == tiny.EOS
        assert completion.finish_reason == ("stop" if ended else "length")
    assert apart.completions == ()
    for site in sites:
        np.testing.assert_allclose(
            together.activations[site], apart.activations[site], rtol=0, atol=1e-5
        )
    for first, same in zip(together.first_tokens, apart.first_tokens, strict=True):
        tiny.check_first(first, same)


# The generation config's tokens, the model's own, and which end an answer: where the first says
# nothing of that, whatever it holds, the other does.
END_TOKENS = json.loads(Path(__file__).with_name("end_tokens.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("generation", "own", "ends"), [*END_TOKENS, ((7,), 5, [7])])
def test_an_answer_ends_where_the_first_config_that_names_a_token_says(
    generation: Any, own: Any, ends: list[int]
) -> None:
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation),
        config=SimpleNamespace(eos_token_id=own),
    )
    assert hooks.end_tokens(model) == {*ends}


def test_rows_that_finish_early_leave_and_the_rest_go_on_rightly() -> None:
    prompts = tiny.prompts([4, 9, 9, 17, 6, 12, 3, 8])
    answers = [reference(tiny.shared_engine("llama"), prompt, 14) for prompt in prompts]
    ends = [answers[0][2], answers[1][0], answers[2][5], answers[5][1]]
    model = tiny.model("llama")
    model.generation_config.eos_token_id = ends
    engine = tiny.TransformersEngine(model, tiny.tokenizer())
    completions = engine.generate(prompts, Sampling(max_tokens=14))
    for answer, completion in zip(answers, completions, strict=True):
        stops = [at for at, token in enumerate(answer) if token in ends]
        assert list(completion.token_ids) == (answer[: stops[0] + 1] if stops else answer)
        assert completion.finish_reason == ("stop" if stops else "length")
        # The text has no end token.
        shown = completion.token_ids[:-1] if stops else completion.token_ids
        assert completion.text == engine.detokenize(shown).rstrip("\ufffd")
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    steps = sum(len(completion.token_ids) for completion in completions) - len(prompts)
    counters = engine.counters
    assert (counters.decode_steps, counters.prefills) == (steps, len(prompts))
    assert counters.forward_tokens == sum(map(len, prompts)) + steps


def test_longrope_prompts_and_answers_keep_their_own_frequencies_beside_long_ones() -> None:
    engine, sampling = tiny.longrope_engine(), Sampling(max_tokens=16)
    prompts, probes = tiny.prompts([5, 30, 20]), [tiny.probes_of(engine)]
    answers = engine.generate(prompts, sampling)
    for prompt, onset, answer in zip(prompts, engine.score(prompts, probes), answers, strict=True):
        [alone] = engine.score([prompt], probes)
        tiny.check_same(onset, alone, tokens=False, rtol=0, atol=1e-6)
        assert engine.generate([prompt], sampling) == [answer]


def test_stop_strings_end_the_answer_before_themselves() -> None:
    engine = tiny.engine("qwen2")
    prompts = tiny.prompts([5] * 6, seed=3)
    plain = engine.generate(prompts, Sampling(max_tokens=16))
    stop = tuple({completion.text[4:6] for completion in plain if len(completion.text) > 6})
    sampling, stopped = Sampling(max_tokens=16, stop=stop), 0
    for prompt, whole, completion in zip(
        prompts, plain, engine.generate(prompts, sampling), strict=True
    ):
        assert decoded(engine.begin([prompt], [])[0], sampling) == completion
        ends = any(end in whole.text for end in stop)
        stopped += ends
        assert not any(end in completion.text for end in stop)
        assert whole.text.startswith(completion.text)
        assert completion.finish_reason == "stop" or not ends
        assert completion.stop in (stop if ends else [None])
    assert stopped
    assert engine.counters.open_continuations == 0


# Traced


def beginnings(prompt: list[int], ids: Sequence[int]) -> list[list[int]]:
    """The prompt with each number of the first of these tokens, from none to all."""
    return [[*prompt, *ids[:count]] for count in range(len(ids) + 1)]


def check_trace(engine: Any, prompt: list[int], answer: TracedAnswer) -> None:
    """Against one whole forward pass for the log-probabilities, and ``extract`` of every beginning
    for states."""
    ids = list(answer.completion.token_ids)
    with torch.no_grad():
        output = tiny.modules(engine).model(torch.tensor([[*prompt, *ids]]), use_cache=False)
    log_prob = torch.log_softmax(output.logits[0, len(prompt) - 1 : -1].double(), dim=-1)
    np.testing.assert_allclose(
        answer.log_prob, log_prob[torch.arange(len(ids)), torch.tensor(ids)].numpy(), atol=2e-4
    )
    site, *written = Site.RESIDUAL_STREAM, *beginnings(prompt, ids[:-1])
    states = engine.extract(written, [site]).activations[site]
    np.testing.assert_allclose(answer.last, states[-1], rtol=1e-3, atol=1e-3)
    of_answer = states[1:] if len(ids) > 1 else states
    np.testing.assert_allclose(answer.mean, of_answer.mean(axis=0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [*((name, 0.0) for name in KINDS), ("llama", 1.3), ("mistral", 1.3)],  # in full, and windows
)
def test_traces_share_one_prefill_and_each_is_that_of_its_seed(
    name: str, temperature: float
) -> None:
    engine = tiny.engine(name, max_batch_tokens=60)
    prompts = tiny.prompts(LENGTHS[:4])
    sampling = Sampling(max_tokens=7, temperature=temperature, top_p=0.9)
    samples = 3 if temperature else 1
    seeds = [[10 * row + number for number in range(samples)] for row in range(len(prompts))]
    traced = engine.sample(prompts, sampling, seeds)
    written = sum(len(answer.completion.token_ids) for of_prompt in traced for answer in of_prompt)
    assert engine.counters.prefills == len(prompts)
    assert engine.counters.forward_tokens == sum(map(len, prompts)) + written - samples * len(
        prompts
    )
    for prompt, own, of_prompt in zip(prompts, seeds, traced, strict=True):
        assert not temperature or len({answer.completion.token_ids for answer in of_prompt}) > 1
        for seed, answer in zip(own, of_prompt, strict=True):
            assert answer.completion == engine.generate([prompt], replace(sampling, seed=seed))[0]
            check_trace(engine, prompt, answer)


def test_an_answer_of_one_token_has_the_states_of_the_onset_and_each_prompt_its_seeds() -> None:
    engine = tiny.shared_engine("llama")
    prompts = tiny.prompts([9, 5])
    (answer,) = engine.sample(prompts[:1], Sampling(max_tokens=1), [[0]])[0]
    check_trace(engine, prompts[0], answer)
    np.testing.assert_array_equal(answer.last, answer.mean)
    assert engine.sample([], Sampling(), []) == []
    for seeds in ([[1]], [[1], [1, 2]], [[], []]):
        with pytest.raises(EngineError, match="seeds"):
            engine.sample(prompts, Sampling(max_tokens=2), seeds)


def test_next_token_is_the_softmax_of_the_logits() -> None:
    engine = tiny.engine("qwen2", max_batch_tokens=40)
    prompts = tiny.prompts(LENGTHS[:4])
    for prompt, own in zip(prompts, engine.next_token(prompts, [7, 100, 7]), strict=True):
        with torch.no_grad():
            logits = tiny.modules(engine).model(torch.tensor([prompt])).logits[0, -1]
        expected = torch.log_softmax(logits, -1)[[7, 100, 7]]
        np.testing.assert_allclose(own, expected.numpy(), atol=1e-4)
    with pytest.raises(RequestError, match="264"):
        engine.next_token(prompts, [tiny.VOCABULARY])


@pytest.mark.parametrize("name", [*KINDS, "falcon"])  # which runs its rows one by one
@pytest.mark.parametrize("layer", [0, 1, -1])
def test_a_step_that_failed_behind_some_layer_leaves_all_answers_as_they_were(
    name: str, layer: int
) -> None:
    """Each step of several fails once and is run again by halves; in and beyond the windows."""
    engine: Any = tiny.engine(name)
    prompts, sampling = tiny.prompts(LENGTHS), Sampling(max_tokens=14)
    probe, fails = tiny.probes_of(engine), False
    config = text_config(tiny.modules(engine).model.config)
    attention = config._attn_implementation

    def fail(*_: Any) -> None:
        if fails:
            raise RuntimeError("no memory")

    tiny.modules(engine).blocks[layer].register_forward_hook(fail)
    ended: list[list[Any]] = []
    for failing in (False, True):
        continuations = engine.begin(prompts, [])
        for continuation in continuations:
            continuation.answer_probes = probe
        running = {each: each.decode(sampling) for each in continuations}
        failed = 0
        while running:
            rows = [each for each, pieces in running.items() if next(pieces, None) is not None]
            running = {each: running[each] for each in rows}
            if failing and sum(continuation.waits for continuation in rows) > 1:
                fails = True
                with pytest.raises(RuntimeError):
                    engine.step_together(rows)
                assert config._attn_implementation == attention
                fails, failed = False, failed + 1
            engine.step_together(rows[: len(rows) // 2])
            engine.step_together(rows[len(rows) // 2 :])
        assert failed == (13 if failing else 0)
        ended.append(continuations)
    for continuation, same in zip(*ended, strict=True):
        assert continuation.completion == same.completion
        readings = continuation.reading, same.reading
        if None in readings:  # of the first token alone nothing is read
            assert readings == (None, None)
            continue
        assert readings[0].tokens == readings[1].tokens
        trajectories = (reading.trajectory for reading in readings)
        np.testing.assert_allclose(*trajectories, rtol=0, atol=1e-5)


def test_an_answer_whose_recurrent_state_is_half_changed_is_not_gone_on_with() -> None:
    engine: Any = tiny.engine("qwen3_5_text")
    prompts = tiny.prompts(LENGTHS[:3])
    sampling = Sampling(max_tokens=5)
    fails = 0

    def fail(*_: Any) -> None:
        nonlocal fails
        fails -= 1
        if fails == 0:
            raise RuntimeError("no memory")

    answers = [answer.token_ids for answer in engine.generate(prompts, sampling)]
    tiny.modules(engine).blocks[1].register_forward_hook(fail)
    continuations = engine.begin(prompts, [])
    streams = [answer.decode(sampling) for answer in continuations]
    for stream in streams:
        next(stream)
    fails = 2  # the second one's pass
    for group in (continuations, continuations[1:2], continuations[1:]):
        with pytest.raises(RuntimeError, match="no memory"):
            engine.step_together(group)
    continuations[1].close()
    for number in (0, 2):
        list(streams[number])
        assert continuations[number].completion.token_ids == answers[number]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_a_token_keeps_as_many_bytes_as_the_estimate_of_a_run_counts(name: str) -> None:
    model = tiny.modules(tiny.shared_engine(name)).model
    cache = model(input_ids=torch.tensor(tiny.prompts([20])), use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert hooks.kv_bytes(model) * 20 == kept
