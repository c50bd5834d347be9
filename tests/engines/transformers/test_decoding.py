"""Text in pieces: whole characters only, without stop strings, and the pieces join to the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engines.base import Sampling
from service.engines.transformers.decoding import TextStream, generator_for, pick


def from_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def sentencepiece_like(ids: Sequence[int]) -> str:
    """Words with a leading space each; decoding drops the first one, as Llama 2's does.  0 is special: no text."""
    return "".join(f" w{token}" for token in ids if token).removeprefix(" ")


def run(stream: TextStream, ids: Sequence[int]) -> list[str]:
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.finish()]


@given(st.text(max_size=40))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str):
    stream = TextStream(from_bytes)
    pieces = run(stream, text.encode())
    assert "".join(pieces) == text.rstrip("\ufffd") == stream.text.rstrip("\ufffd")
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.binary(max_size=30))
def test_any_bytes_join_to_their_decoding_less_an_unfinished_end(ids: bytes):
    stream = TextStream(from_bytes)
    assert "".join(run(stream, ids)) == stream.text == from_bytes(ids).rstrip("\ufffd")


@given(st.lists(st.integers(0, 3), max_size=12))
def test_spaces_between_words_survive_tokens_without_text(ids: list[int]):
    assert "".join(run(TextStream(sentencepiece_like), ids)) == sentencepiece_like(ids)


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_the_answer_ends_at_the_first_stop_string(text: str, stops: list[str]):
    stream = TextStream(from_bytes, stops)
    joined = "".join(run(stream, text.encode()))
    # Byte by byte, the stop that is complete first ends the answer; of those that end there, the longest counts.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert joined == (text[: min(ends)[1]] if ends else text)
    assert stream.stopped == bool(ends)
    assert stream.text == joined


def test_text_that_may_begin_a_stop_string_waits_and_is_not_lost():
    stream = TextStream(from_bytes, ["END"])
    assert [stream.push(byte) for byte in b"aENx"] == ["a", "", "", "ENx"]
    assert [stream.push(byte) for byte in b"EN"] == ["", ""]
    assert stream.finish() == "EN"
    assert stream.text == "aENxEN"


def test_half_a_character_waits():
    stream = TextStream(from_bytes)
    assert [stream.push(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert stream.push("é".encode()[0]) == ""
    assert stream.finish() == ""


def test_top_p_keeps_the_token_that_crosses_it_and_nothing_beyond():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    sampling = Sampling(temperature=1.0, top_p=0.6, seed=0)
    generator = generator_for(sampling, torch.device("cpu"))
    drawn = {pick(logits, sampling, generator) for _ in range(300)}
    assert drawn == {0, 1}


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_the_nucleus_is_that_of_the_whole_vocabulary_sorted(top_p: float, spread: float):
    logits = spread * torch.randn(3000, generator=torch.Generator().manual_seed(1))
    ordered, order = torch.softmax(logits, -1).sort(descending=True)
    count = int((ordered.cumsum(-1) - ordered < top_p).sum())
    kept = torch.zeros(3000).scatter(0, order[:count], ordered[:count])
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=0)
    for seed in range(20):
        drawn = int(torch.multinomial(kept, 1, generator=torch.Generator().manual_seed(seed)))
        found = pick(logits, sampling, torch.Generator().manual_seed(seed))
        assert found == drawn or spread == 0.0  # of equal probabilities it does not matter which are kept


def test_sampling_follows_the_probabilities():
    probabilities = torch.tensor([0.7, 0.2, 0.1])
    sampling = Sampling(temperature=1.0, seed=3)
    generator = generator_for(sampling, torch.device("cpu"))
    counts = torch.zeros(3)
    for _ in range(3000):
        counts[pick(probabilities.log(), sampling, generator)] += 1
    assert counts / 3000 == pytest.approx(probabilities, abs=0.04)


def test_greedy_needs_no_generator():
    assert generator_for(Sampling(), torch.device("cpu")) is None
    assert pick(torch.tensor([0.0, 3.0, 1.0]), Sampling(), None) == 1
