"""Which waiting prompts make the next batch."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from service.engines.base import FIRST_COME, Sampling, Turn
from service.engines.request_queue import FREE_PADDING, MAX_PADDING, EngineRequest, RequestQueue


def request(length: int, answer: int | None = None, turn: Turn = FIRST_COME) -> EngineRequest:
    sampling = None if answer is None else Sampling(max_tokens=answer)
    return EngineRequest([1] * length, [], False, sampling, None, cast(Any, None), turn, inbox=cast(Any, None))


def held(**tokens: int) -> Counter[str]:
    """Tokens of the KV cache by caller."""
    return Counter(tokens)


def queue(requests: list[EngineRequest], *, batch: int = 4096, kv: int = 1000) -> RequestQueue:
    waiting = RequestQueue(batch, kv)
    for entry in requests:
        waiting.add(entry)
    return waiting


REQUESTS = st.lists(
    st.builds(request, st.integers(1, 700), st.one_of(st.none(), st.integers(1, 300))), min_size=1, max_size=60
)


@settings(deadline=None)
@given(REQUESTS)
def test_every_request_leaves_once_in_batches_that_fit(requests: list[EngineRequest]) -> None:
    waiting = queue(requests, batch=1024, kv=500)
    batched: list[EngineRequest] = []
    while len(waiting):
        oldest = next(entry for entry in requests if entry not in batched)
        batch = waiting.next_batch(held())
        assert batch[0] is oldest  # none starves
        assert len({entry.continues for entry in batch}) == 1
        lengths = [len(entry.prompt) for entry in batch]
        padded = max(lengths) * len(batch)
        if len(batch) > 1:
            assert padded <= 1024
            assert padded <= max(FREE_PADDING, MAX_PADDING * sum(lengths))
            assert not batch[0].continues or sum(entry.kv_tokens for entry in batch) <= 500
        batched += batch
    assert sorted(map(id, batched)) == sorted(map(id, requests))


def test_similar_lengths_are_batched_and_others_left_for_the_next_batch() -> None:
    requests = [request(400), request(40), request(410), request(42), request(395)]
    waiting = queue(requests)
    assert waiting.next_batch(held()) == [requests[0], requests[4], requests[2]]  # nearest first
    assert waiting.next_batch(held()) == [requests[1], requests[3]]


def test_short_prompts_go_together_whatever_their_lengths() -> None:
    requests = [request(length) for length in (5, 30, 9, 25)]
    assert set(queue(requests).next_batch(held())) == set(requests)


def test_answers_wait_for_space_in_the_cache_and_scores_overtake_them() -> None:
    requests = [request(400, 300), request(50, 50), request(60)]
    waiting = queue(requests, kv=1000)
    assert waiting.next_batch(held(another=600)) == [requests[2]]
    assert waiting.next_batch(held(another=600)) == []  # the small answer does not overtake the large one
    assert waiting.next_batch(held(another=300)) == [requests[0]]
    assert waiting.next_batch(held()) == [requests[1]]


def test_the_last_part_of_the_cache_is_for_those_who_hold_nothing() -> None:
    greedy, newcomer = request(50, 50, Turn("greedy", 900)), request(50, 50, Turn("newcomer", 800))
    assert queue([greedy], kv=1000).next_batch(held(greedy=800)) == []
    waiting = queue([greedy, newcomer], kv=1000)
    assert waiting.next_batch(held(greedy=800)) == [newcomer]
    assert waiting.next_batch(held(greedy=700)) == [greedy]


def test_an_answer_beyond_the_whole_cache_goes_alone() -> None:
    requests = [request(400, 3000), request(50, 50)]
    waiting = queue(requests, kv=1000)
    assert waiting.next_batch(held(another=10)) == []
    assert waiting.next_batch(held()) == [requests[0]]


def test_removed_requests_are_in_no_batch() -> None:
    requests = [request(100) for _ in range(8)]
    waiting = queue(requests)
    assert waiting.remove(lambda entry: entry in requests[:4]) == requests[:4]
    assert set(waiting.next_batch(held())) == set(requests[4:])
    assert len(waiting) == 0
