"""Pooled activations equal a plain forward pass pooled by hand, and cost the engine's own numbers
nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from hallutracer_research.evaluation.pooling import PoolingEngine, is_content, pool
from service.engines.base import Sampling
from service.engines.checks import Tokens, beyond_onset
from service.engines.vllm.engine import VllmEngine
from service.errors import EngineError, NonFiniteReadout
from service.readout import Pooling, Site
from tests.engines import tiny
from tests.scripted_engine import ScriptedEngine

BOTH = list(Site)
OTHERS = [pooling for pooling in Pooling if pooling is not Pooling.LAST_1]
# One token per byte: a letter or digit is a word, but for "a" and "i", and a byte beyond ASCII is
# no letter.
CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = Tokens(tiny.tokenizer())


def is_word(token: int) -> bool:
    """A second definition, independent of the module's."""
    text = CHARACTERS[token] if token < len(CHARACTERS) else ""
    return text.isascii() and text.isalnum() and text not in "aAiI"


def mixed_prompts() -> list[list[int]]:
    """Random prompts, one with letters and spaces, and one of punctuation and special tokens
    alone."""
    text, marks = (TOKENS.tokenize(text)[1:] for text in ("I was in Rome 42", " ,.; i"))
    return [
        *tiny.prompts([3, 20, 1, 33]),
        [tiny.BOS, *text, tiny.CHAT],
        [tiny.BOS, *marks, tiny.CHAT],
    ]


def by_hand(
    states: NDArray[np.float64], prompt: list[int], pooling: Pooling
) -> NDArray[np.float64]:
    """Pool [T, width] of one prompt."""
    content = [place for place, token in enumerate(prompt) if is_word(token)]
    size = {Pooling.LAST_4: 4, Pooling.LAST_8: 8, Pooling.LAST_16: 16}
    if pooling in size:
        return states[-size[pooling] :].mean(axis=0)
    if pooling is Pooling.MAX:
        return states.max(axis=0)
    if pooling is Pooling.MEAN or not content:
        return states.mean(axis=0)
    return (
        states[content].max(axis=0)
        if pooling is Pooling.CONTENT_MAX
        else states[content].mean(axis=0)
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen3_moe"])
def test_pooled_activations_are_the_onsets_of_every_beginning_pooled_by_hand(name: str) -> None:
    """Attention is causal: the activation at token t is that at the onset of the first t + 1
    tokens."""
    engine = tiny.shared_engine(name)
    found = PoolingEngine(engine).extract(mixed_prompts(), BOTH, tuple(Pooling))
    assert set(found.pooled) == {(site, pooling) for site in Site for pooling in OTHERS}
    for row, prompt in enumerate(mixed_prompts()):
        states = engine.extract([prompt[: end + 1] for end in range(len(prompt))], BOTH).activations
        for (site, pooling), pooled in found.pooled.items():
            layers = states[site].astype(np.float64).swapaxes(0, 1)
            expected = np.stack([by_hand(layer, prompt, pooling) for layer in layers])
            assert pooled.dtype == np.float32
            assert_allclose(pooled[row], expected, rtol=0, atol=1e-5, err_msg=f"{pooling} of {row}")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_spans_are_means_of_onsets_of_beginnings_and_the_last_token_s_distribution_is_the_row_s(
    name: str,
) -> None:
    engine = tiny.shared_engine(name)
    layers = [0, 2]
    rows = [[*prompt, 7, 11, 5] for prompt in mixed_prompts()]
    ends = [len(row) - 3 for row in rows]
    spans = [[(max(0, end - 8), end), (end, end + 2), (end + 2, end + 3)] for end in ends]
    found = PoolingEngine(engine).spans(rows, spans, layers=layers, count=6, ends=ends)
    assert (found.states.shape[:3], found.states.dtype) == ((len(rows), 2, 6), np.float16)
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        onsets = engine.extract([row[: token + 1] for token in range(len(row))], BOTH)
        heads = onsets.activations[Site.ATTENTION_HEAD]
        for number, (start, stop) in enumerate(spans[index]):
            expected = heads[start:stop].mean(axis=0)
            assert_allclose(found.heads[number][index], expected, rtol=0, atol=1e-5)
        last = onsets.first_tokens[-1]
        signals = (last.log_max_prob, last.entropy)
        assert_allclose(found.first_token[index], signals, rtol=1e-4, atol=1e-5)
        residual = onsets.activations[Site.RESIDUAL_STREAM][max(0, end - 6) : end, layers]
        before, states = np.split(found.states[index], [6 - len(residual)], axis=1)
        assert_allclose(states, residual.swapaxes(0, 1), rtol=2e-3, atol=2e-3)
        assert not before.any()
    alone = PoolingEngine(engine).spans(rows, [of_row[:1] for of_row in spans])
    assert_array_equal(alone.heads, found.heads[:1])
    assert alone.states.size == 0


def test_what_the_engine_itself_reads_does_not_change_by_a_bit() -> None:
    engine = tiny.shared_engine("llama")
    plain = engine.extract(mixed_prompts(), BOTH, sampling=Sampling(max_tokens=3))
    ablation = PoolingEngine(engine).extract(mixed_prompts(), BOTH, OTHERS, Sampling(max_tokens=3))
    assert (plain.first_tokens, plain.completions) == (ablation.first_tokens, ablation.completions)
    for site in BOTH:
        assert_array_equal(plain.activations[site], ablation.activations[site])
    assert PoolingEngine(engine).extract(mixed_prompts(), BOTH).pooled == {}
    assert PoolingEngine(engine).identity is engine.identity


def test_half_types_are_pooled_in_float32() -> None:
    states = torch.full(
        (3000, 1), 30.0, dtype=torch.float16
    )  # whose sum, 90,000, is beyond float16
    states[0] = 30.5
    assert float(pool(states, Pooling.MEAN, torch.ones(3000).bool())) == pytest.approx(
        30.0 + 0.5 / 3000, abs=1e-4
    )


def test_a_nan_away_from_t_is_refused_and_named() -> None:
    engine = tiny.engine("llama")
    prompts = tiny.prompts([6, 6])

    def poison(_module: Any, _inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        states[:, 0] = torch.nan
        return output

    handle = tiny.modules(engine).blocks[-1].register_forward_hook(poison)
    try:
        assert np.isfinite(engine.extract(prompts, BOTH).activations[Site.RESIDUAL_STREAM]).all()
        with pytest.raises(NonFiniteReadout, match=r"layer 2 .*residual_stream, mean.* prompt 0"):
            PoolingEngine(engine).extract(prompts, [Site.RESIDUAL_STREAM], [Pooling.MEAN])
    finally:
        handle.remove()


def test_a_content_word_holds_a_letter_or_digit_and_is_no_stop_word() -> None:
    words = ["Paris", " capital", "42", "ing", '("Rome', "город"]
    others = ["the", " The", "(the", "\n", "", " —,.;", "\ufffd"]
    assert [text for text in (*words, *others) if is_content(text)] == words


def test_other_poolings_are_listed_once_and_in_order() -> None:
    assert beyond_onset(()) == beyond_onset([Pooling.LAST_1]) == []
    poolings = [Pooling.MAX, Pooling.LAST_1, Pooling.LAST_4, Pooling.MAX]
    assert beyond_onset(poolings) == [Pooling.LAST_4, Pooling.MAX]


@pytest.mark.parametrize(
    "make",
    [
        ScriptedEngine,
        lambda: PoolingEngine(ScriptedEngine()),
        lambda: object.__new__(VllmEngine),
        lambda: tiny.shared_engine("llama"),
    ],
)
def test_engines_that_read_only_t_name_the_alternative(make: Any) -> None:
    with pytest.raises(EngineError, match=r"last_8, mean.*transformers engine") as caught:
        make().extract(
            [[1, 2]], [Site.ATTENTION_HEAD], [Pooling.MEAN, Pooling.LAST_1, Pooling.LAST_8]
        )
    assert caught.value.param == "poolings"
