from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engines.transformers.batching import micro_batches, pad

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200), st.booleans())
def test_every_prompt_is_in_one_batch_within_budget(lengths: list[int], budget: int, equal: bool):
    groups = micro_batches(lengths, budget, equal_lengths=equal)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert len(group) == 1 or len(group) * longest <= budget
        if equal:
            assert len({lengths[index] for index in group}) == 1


def test_batches_are_as_full_as_the_budget_allows():
    assert micro_batches([4, 4, 4, 4], 16) == [[0, 1, 2, 3]]
    assert micro_batches([4, 4, 4, 5], 16) == [[0, 1, 2], [3]]
    assert micro_batches([9, 2], 1) == [[1], [0]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_keeps_ids_and_finds_the_onset(side: str):
    prompts = [[1, 2, 3], [4], [5, 6]]
    batch = pad(prompts, [2, 0, 1], side, 9, CPU)
    assert batch.index == (2, 0, 1)
    for row, index in enumerate(batch.index):
        start, length = batch.starts[row], batch.lengths[row]
        assert batch.input_ids[row, start : start + length].tolist() == prompts[index]
        assert batch.input_ids[row, batch.onsets[row]] == prompts[index][-1]
        assert (batch.input_ids[row] == 9).sum() == 3 - length


def test_left_padding_is_masked_and_positions_start_at_the_first_real_token():
    batch = pad([[1, 2, 3], [4]], [0, 1], "left", 0, CPU)
    assert batch.position_ids is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_no_mask_where_causal_attention_hides_the_padding():
    assert pad([[1, 2, 3], [4]], [0, 1], "right", 0, CPU).attention_mask is None
    assert pad([[1, 2], [3, 4]], [0, 1], "left", 0, CPU).attention_mask is None
