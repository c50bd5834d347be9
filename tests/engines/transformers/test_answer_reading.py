"""What is read of an answer's own tokens: while it is written, of those that write beside it, and
of a text at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.engines.base import Sampling
from service.errors import NonFiniteReadout
from service.readout import Probes, Site
from tests.engines import tiny
from tests.engines.transformers.test_decoding import KINDS, LENGTHS, beginnings


def by_hand(engine: Any, prompt: list[int], answer: list[int], probes: Probes) -> np.ndarray:
    """Mean truth logits [m] at the onsets of the beginnings that end in one of the answer's
    tokens."""
    return tiny.trajectories(engine, beginnings(prompt, answer)[1:], probes).mean(axis=0)


@pytest.mark.parametrize("name", KINDS)
def test_answers_that_write_together_are_each_read_by_their_own_probes(name: str) -> None:
    engine, prompts = tiny.engine(name), tiny.prompts(LENGTHS)
    plain = engine.generate(prompts, Sampling(max_tokens=9))
    scaled, unscaled = tiny.probes_of(engine, scaled=True), tiny.probes_of(engine, seed=5)
    read_by = [scaled, None, unscaled, scaled, unscaled, None]
    scored = engine.score(prompts, [scaled], first_token=True)
    counters, before = engine.counters, replace(engine.counters)
    continuations = engine.begin(prompts, [scaled])
    assert counters.open_continuations == len(prompts)
    for continuation, onset, probes in zip(continuations, scored, read_by, strict=True):
        tiny.check_same(continuation.prefill, onset, tokens=True, atol=1e-6)
        continuation.answer_probes = probes
    streams = [continuation.decode(Sampling(max_tokens=9)) for continuation in continuations]
    assert [continuation.reading for continuation in continuations] == [None] * len(prompts)
    tiny.come_and_go(engine, continuations, streams)
    assert [continuation.completion for continuation in continuations] == plain
    # The first token comes from the prefill, and none is run twice.
    steps = sum(len(completion.token_ids) for completion in plain) - len(prompts)
    assert counters.decode_steps - before.decode_steps == steps
    assert counters.forward_tokens - before.forward_tokens == sum(LENGTHS) + steps
    assert counters.open_continuations == 0
    for prompt, continuation, probes in zip(prompts, continuations, read_by, strict=True):
        if probes is None:
            assert continuation.reading is None
            continue
        went_on = list(continuation.completion.token_ids[:-1])
        assert continuation.reading.tokens == len(went_on)
        expected = by_hand(engine, prompt, went_on, probes)
        np.testing.assert_allclose(continuation.reading.trajectory, expected, rtol=1e-3, atol=1e-4)
        [whole] = engine.score([[*prompt, *went_on]], [probes], last=[len(went_on)])
        np.testing.assert_allclose(whole.trajectories[0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("site", list(Site))
@pytest.mark.parametrize("name", KINDS[:4])
def test_training_reads_the_tokens_that_serving_reads(name: str, site: Site) -> None:
    engine, prompts = tiny.engine(name, max_batch_tokens=90), tiny.prompts(LENGTHS)
    plain = engine.extract(prompts, [site], sampling=Sampling(max_tokens=6))
    assert plain.answers is None
    extraction = engine.extract(prompts, [site], sampling=Sampling(max_tokens=6), answer_site=site)
    assert extraction.completions == plain.completions
    np.testing.assert_array_equal(extraction.activations[site], plain.activations[site])
    assert extraction.answers is not None
    for prompt, completion, read in zip(
        prompts, extraction.completions, extraction.answers, strict=True
    ):
        ends = beginnings(prompt, completion.token_ids[:-1])[1:]
        expected = engine.extract(ends, [site]).activations[site].mean(axis=0)
        np.testing.assert_allclose(read, expected, rtol=1e-3, atol=1e-4)
    short = engine.extract(prompts[:2], [site], sampling=Sampling(max_tokens=1), answer_site=site)
    assert short.answers is not None
    assert not short.answers.any(), "zeros: no token was read"


def test_many_rows_are_read_over_spans_of_their_own_and_a_shared_beginning_is_among_them() -> None:
    engine = tiny.engine("llama", max_batch_tokens=64)
    probes = tiny.probes_of(engine), tiny.probes_of(engine, Site.RESIDUAL_STREAM, seed=5)
    chats = [
        engine.render_chat([{"role": "user", "content": text}])
        for text in ("who was it?", "where", "a")
    ]
    rows, last = [*tiny.prompts([9, 14, 4]), *chats], [3, 13, 1, 4, 2, len(chats[2])]
    for row, count, result in zip(rows, last, engine.score(rows, probes, last=last), strict=True):
        for probe, trajectory in zip(probes, result.trajectories, strict=True):
            expected = by_hand(engine, row[: len(row) - count], row[len(row) - count :], probe)
            np.testing.assert_allclose(trajectory, expected, rtol=1e-3, atol=1e-4)


def test_a_nan_in_an_answer_s_activations_is_refused_in_training() -> None:
    engine = tiny.engine("llama")
    calls: list[int] = []

    def spoil(_module: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        calls.append(given[0].shape[1])
        return (given[0] * float("nan"),) if given[0].shape[1] == 1 else None  # decode steps alone

    handle = tiny.projections(engine)[-1].register_forward_pre_hook(spoil)
    with pytest.raises(NonFiniteReadout):
        engine.extract(
            tiny.prompts([5, 5]),
            [Site.ATTENTION_HEAD],
            sampling=Sampling(max_tokens=3),
            answer_site=Site.ATTENTION_HEAD,
        )
    handle.remove()
    assert 1 in calls
