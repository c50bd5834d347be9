"""Pooled activations equal a plain forward pass pooled by hand, in any batch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from service.engines.checks import beyond_onset
from service.engines.tokens import Tokens
from service.engines.transformers.batching import pad
from service.engines.transformers.pooling import ContentWords, PooledBuffer, is_content, windows
from service.engines.vllm.engine import VllmEngine
from service.errors import EngineError, NonFiniteReadout
from service.readout import Geometry, Pooling, Site
from tests.engines import tiny
from tests.scripted_engine import ScriptedEngine

BOTH = list(Site)
LENGTHS = [3, 20, 7, 1, 33, 12, 7]
OTHERS = [pooling for pooling in Pooling if pooling is not Pooling.LAST_1]
CPU = torch.device("cpu")
# One token per byte: a letter or digit is a word, but for "a" and "i", and a byte beyond ASCII is no letter.
CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = Tokens(tiny.tokenizer())


def ids(text: str) -> list[int]:
    """Without the BOS token."""
    return TOKENS.tokenize(text)[1:]


def is_word(token: int) -> bool:
    """A second definition, independent of the engine's."""
    text = CHARACTERS[token] if token < len(CHARACTERS) else ""
    return text.isascii() and text.isalnum() and text not in "aAiI"


def mixed_prompts() -> list[list[int]]:
    """Random prompts of every length, one with letters and spaces, and one of punctuation and special tokens alone."""
    text = [tiny.BOS, *ids("I was in Rome 42"), tiny.CHAT]
    return [*tiny.prompts(LENGTHS), text, [tiny.BOS, *ids(" ,.; i"), tiny.CHAT]]


def by_hand(states: NDArray[np.float64], prompt: list[int], pooling: Pooling) -> NDArray[np.float64]:
    """Pool [T, width] of one prompt."""
    content = [place for place, token in enumerate(prompt) if is_word(token)]
    size = {Pooling.LAST_1: 1, Pooling.LAST_4: 4, Pooling.LAST_8: 8, Pooling.LAST_16: 16}
    if pooling in size:
        return states[-size[pooling] :].mean(axis=0)
    if pooling is Pooling.MAX:
        return states.max(axis=0)
    if pooling is Pooling.MEAN or not content:
        return states.mean(axis=0)
    return states[content].max(axis=0) if pooling is Pooling.CONTENT_MAX else states[content].mean(axis=0)


def all_states(engine: Any, prompt: list[int]) -> dict[Site, NDArray[np.float64]]:
    """[m, T, width] of one prompt alone, from hidden states and from hooks of this test's own."""
    seen: list[torch.Tensor] = []
    handles = [
        projection.register_forward_pre_hook(lambda _module, given: seen.append(given[0][0].double()))
        for projection in tiny.projections(engine)
    ]
    try:
        with torch.no_grad():
            output = tiny.modules(engine).model(input_ids=torch.tensor([prompt]), output_hidden_states=True)
            hidden = [states[0].double() for states in output.hidden_states[1:]]
    finally:
        for handle in handles:
            handle.remove()
    return {Site.ATTENTION_HEAD: torch.stack(seen).numpy(), Site.RESIDUAL_STREAM: torch.stack(hidden).numpy()}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("name", "budget"), [("llama", 8192), ("llama", 60), ("gpt2", 8192), ("qwen3_moe", 60)])
def test_pooled_activations_equal_a_plain_forward_pooled_by_hand(name: str, side: str, budget: int) -> None:
    engine = tiny.shared_engine(name, side, budget)
    prompts = mixed_prompts()
    extraction = engine.extract(prompts, BOTH, tuple(Pooling))
    assert set(extraction.pooled) == {(site, pooling) for site in Site for pooling in OTHERS}
    for row, prompt in enumerate(prompts):
        states = all_states(engine, prompt)
        # transformers' last hidden state is after the final norm, so it is not the block's output.
        layers = {Site.ATTENTION_HEAD: slice(None), Site.RESIDUAL_STREAM: slice(0, -1)}
        for site in BOTH:
            for pooling in Pooling:
                onset = pooling is Pooling.LAST_1
                pooled = extraction.activations[site] if onset else extraction.pooled[site, pooling]
                assert pooled.dtype == np.float32
                expected = np.stack([by_hand(layer, prompt, pooling) for layer in states[site][layers[site]]])
                np.testing.assert_allclose(pooled[row][layers[site]], expected, rtol=0, atol=1e-5, err_msg=str(pooling))


@pytest.mark.parametrize("site", BOTH)
def test_the_last_layer_is_pooled_from_the_blocks_own_output(site: Site) -> None:
    engine = tiny.shared_engine("llama")
    prompt = mixed_prompts()[-2]
    prefixes = [prompt[: end + 1] for end in range(len(prompt))]
    # Attention is causal: the activation at token t is that at the onset of the first t + 1 tokens.
    onsets = engine.extract(prefixes, [site]).activations[site].astype(np.float64)
    pooled = engine.extract([prompt], [site], OTHERS).pooled
    for pooling in OTHERS:
        expected = np.stack([by_hand(onsets[:, layer], prompt, pooling) for layer in range(onsets.shape[1])])
        np.testing.assert_allclose(pooled[site, pooling][0], expected, rtol=0, atol=1e-5, err_msg=str(pooling))


@pytest.mark.parametrize("side", ["right", "left"])
def test_poolings_cost_no_pass_and_activations_at_t_do_not_change_by_a_bit(side: str) -> None:
    engine = tiny.engine("llama", padding_side=side, max_batch_tokens=60)
    prompts = mixed_prompts()
    plain, ablation = engine.extract(prompts, BOTH), engine.extract(prompts, BOTH, tuple(Pooling))
    assert engine.counters.prefills == 2 * len(prompts)
    assert engine.counters.forward_tokens == 2 * sum(map(len, prompts))
    assert plain.pooled == {}
    assert plain.first_tokens == ablation.first_tokens
    for site in BOTH:
        np.testing.assert_array_equal(plain.activations[site], ablation.activations[site])
    alone = engine.extract(prompts, [Site.RESIDUAL_STREAM], [Pooling.MAX])
    assert list(alone.pooled) == [(Site.RESIDUAL_STREAM, Pooling.MAX)]
    np.testing.assert_array_equal(alone.activations[Site.RESIDUAL_STREAM], plain.activations[Site.RESIDUAL_STREAM])
    np.testing.assert_array_equal(
        alone.pooled[Site.RESIDUAL_STREAM, Pooling.MAX], ablation.pooled[*list(alone.pooled)[0]]
    )


def test_a_window_longer_than_the_prompt_is_the_whole_prompt() -> None:
    pooled = tiny.shared_engine("llama").extract(tiny.prompts([3, 9]), BOTH, OTHERS).pooled
    for site in BOTH:
        short, long = pooled[site, Pooling.MEAN]
        for pooling in (Pooling.LAST_4, Pooling.LAST_8, Pooling.LAST_16):
            np.testing.assert_allclose(pooled[site, pooling][0], short, rtol=0, atol=1e-6)
        assert np.abs(pooled[site, Pooling.LAST_8][1] - long).max() > 1e-3
        np.testing.assert_allclose(pooled[site, Pooling.LAST_16][1], long, rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_never_enters_not_even_as_a_nan(side: str) -> None:
    geometry = Geometry(num_layers=1, num_heads=1, head_dim=2, hidden_size=2)
    words = ContentWords(TOKENS.detokenize)
    prompts = [ids("x, y!"), ids("?"), ids("z")]
    batch = pad(prompts, [2, 0, 1], side, tiny.PAD, CPU)
    buffer = PooledBuffer([Site.RESIDUAL_STREAM], geometry, batch, windows(batch, prompts, OTHERS, words), CPU)
    states = torch.full((3, 5, 2), torch.nan)
    values = {}
    for row, (index, start, length) in enumerate(zip(batch.index, batch.starts, batch.lengths, strict=True)):
        values[index] = -1.0 - torch.arange(2.0 * length).reshape(length, 2) - 100 * index  # below any zero left behind
        states[row, start : start + length] = values[index]
    buffer.take(Site.RESIDUAL_STREAM, 0, states)
    for row, index in enumerate(batch.index):
        for pooling in OTHERS:
            expected = by_hand(values[index].double().numpy(), prompts[index], pooling)
            found = buffer.buffers[Site.RESIDUAL_STREAM, pooling][0, row].numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"{pooling} of prompt {index}")


def test_half_types_are_pooled_in_float32() -> None:
    geometry = Geometry(num_layers=1, num_heads=1, head_dim=1, hidden_size=1)
    prompt = [5] * 3000
    batch = pad([prompt], [0], "right", 0, CPU)
    counted = windows(batch, [prompt], [Pooling.MEAN], ContentWords(TOKENS.detokenize))
    buffer = PooledBuffer([Site.RESIDUAL_STREAM], geometry, batch, counted, CPU)
    states = torch.full((1, 3000, 1), 30.0, dtype=torch.float16)  # whose sum, 90,000, is beyond float16
    states[0, 0, 0] = 30.5
    buffer.take(Site.RESIDUAL_STREAM, 0, states)
    mean = float(buffer.buffers[Site.RESIDUAL_STREAM, Pooling.MEAN].item())
    assert mean == pytest.approx(30.0 + 0.5 / 3000, abs=1e-4)


def test_a_nan_away_from_t_is_refused_and_named() -> None:
    engine = tiny.engine("llama")
    prompt = tiny.prompts([6])[0]
    engine.extract([prompt], [Site.RESIDUAL_STREAM], [Pooling.MEAN])

    def poison(_module: Any, _inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        states[:, 0] = torch.nan
        return output

    handle = tiny.modules(engine).blocks[-1].register_forward_hook(poison)
    try:
        assert np.isfinite(engine.extract([prompt], [Site.RESIDUAL_STREAM]).activations[Site.RESIDUAL_STREAM]).all()
        with pytest.raises(NonFiniteReadout, match=r"layer 2 .*residual_stream, mean.* prompt 0"):
            engine.extract([prompt], [Site.RESIDUAL_STREAM], [Pooling.MEAN])
    finally:
        handle.remove()


def test_a_content_word_holds_a_letter_or_digit_and_is_no_stop_word() -> None:
    words = ["Paris", " capital", "42", "ing", '("Rome', "город"]
    others = ["the", " The", "(the", "\n", "", " —,.;", "\ufffd"]
    assert [text for text in (*words, *others) if is_content(text)] == words


def test_content_words_are_decided_from_ids_and_special_tokens_are_none() -> None:
    words = ContentWords(TOKENS.detokenize)
    prompt = [tiny.BOS, *ids("I am R2, ok"), tiny.CHAT, tiny.EOS]
    counted = "".join(CHARACTERS[token] for token, content in zip(prompt, words.of(prompt), strict=True) if content)
    assert counted == "mR2ok"
    assert words.of(prompt).shape == (len(prompt),)
    assert not words.of(ids("é")).any()  # two halves of a letter


def test_a_special_token_with_letters_is_none_and_the_same_letters_as_text_are_some() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|Paris|>"]})
    tokenizer.add_tokens(["Paris", "because"])
    special, word, stop = tokenizer.convert_tokens_to_ids(["<|Paris|>", "Paris", "because"])
    assert ContentWords(Tokens(tokenizer).detokenize).of([special, word, stop, word]).tolist() == [
        False,
        True,
        False,
        True,
    ]


def test_other_poolings_are_listed_once_and_in_order() -> None:
    assert beyond_onset(()) == beyond_onset([Pooling.LAST_1]) == []
    poolings = [Pooling.MAX, Pooling.LAST_1, Pooling.LAST_4, Pooling.MAX]
    assert beyond_onset(poolings) == [Pooling.LAST_4, Pooling.MAX]


@pytest.mark.parametrize("engine", [ScriptedEngine(), object.__new__(VllmEngine)], ids=["scripted", "vllm"])
def test_engines_that_read_only_t_name_the_alternative(engine: Any) -> None:
    with pytest.raises(EngineError, match=r"last_8, mean.*transformers engine"):
        engine.extract([[1, 2]], [Site.ATTENTION_HEAD], [Pooling.MEAN, Pooling.LAST_1, Pooling.LAST_8])
    assert ScriptedEngine().extract([[1, 2]], BOTH, [Pooling.LAST_1]).pooled == {}


def test_stop_words_are_loaded_on_demand() -> None:
    module = "service.engines.transformers.pooling"
    code = f"import sys, {module}; sys.exit(any(m.startswith('sklearn.feature') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
