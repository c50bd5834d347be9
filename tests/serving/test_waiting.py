"""Who may wait, and who makes the next batch."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engines.base import Sampling
from service.errors import Overloaded
from service.guard import GATE
from service.serving.admission import LONGEST_RETRY_S
from service.serving.job import Job
from service.serving.waiting import FREE_PADDING, MOST_PADDING, WaitingRoom

NOBODY = cast(Any, None)


def job(length: int, answer: int | None = None) -> Job:
    sampling = None if answer is None else Sampling(max_tokens=answer)
    return Job([1] * length, NOBODY, GATE, sampling, False, NOBODY)


def room(jobs: list[Job], *, prompts: int = 1000, batch: int = 4096, kv: int = 1000) -> WaitingRoom:
    made = WaitingRoom(prompts, batch, kv)
    made.add(jobs)
    return made


JOBS = st.lists(st.builds(job, st.integers(1, 700), st.one_of(st.none(), st.integers(1, 300))), min_size=1, max_size=60)


@settings(deadline=None)
@given(JOBS)
def test_every_job_leaves_once_in_batches_that_fit(jobs: list[Job]) -> None:
    waiting = room(jobs, batch=1024, kv=500)
    out: list[Job] = []
    while len(waiting):
        oldest = next(job for job in jobs if job not in out)
        batch = waiting.gather(kv_held=0)
        assert batch[0] is oldest  # nobody waits for ever
        assert len({one.continues for one in batch}) == 1
        lengths = [len(one.token_ids) for one in batch]
        padded = max(lengths) * len(batch)
        if len(batch) > 1:
            assert padded <= 1024
            assert padded <= max(FREE_PADDING, MOST_PADDING * sum(lengths))
            assert not batch[0].continues or sum(one.kv_tokens for one in batch) <= 500
        out += batch
    assert sorted(map(id, out)) == sorted(map(id, jobs))


def test_like_lengths_are_gathered_and_others_left_for_the_next_batch() -> None:
    jobs = [job(400), job(40), job(410), job(42), job(395)]
    waiting = room(jobs)
    assert waiting.gather(0) == [jobs[0], jobs[4], jobs[2]]  # nearest first
    assert waiting.gather(0) == [jobs[1], jobs[3]]


def test_short_prompts_go_together_whatever_their_lengths() -> None:
    jobs = [job(length) for length in (5, 30, 9, 25)]
    assert set(room(jobs).gather(0)) == set(jobs)


def test_answers_wait_for_room_in_the_cache_and_scores_pass_them() -> None:
    jobs = [job(400, 300), job(50, 50), job(60)]
    waiting = room(jobs, kv=1000)
    assert waiting.gather(kv_held=600) == [jobs[2]]
    assert waiting.gather(kv_held=600) == []  # the small answer does not overtake the large one
    assert waiting.gather(kv_held=300) == [jobs[0]]
    assert waiting.gather(kv_held=0) == [jobs[1]]


def test_an_answer_beyond_the_whole_cache_goes_alone() -> None:
    jobs = [job(400, 3000), job(50, 50)]
    waiting = room(jobs, kv=1000)
    assert waiting.gather(kv_held=10) == []
    assert waiting.gather(kv_held=0) == [jobs[0]]


def test_a_full_room_says_when_to_come_back() -> None:
    waiting = room([job(100)] * 8, prompts=10)
    waiting.check_space(2, 30, None)
    with pytest.raises(Overloaded, match="8 of at most 10") as full:
        waiting.check_space(3, 30, None)
    assert full.value.retry_after_s == 1
    with pytest.raises(Overloaded) as slow:
        waiting.check_space(3, 30, tokens_per_second=100)
    assert slow.value.retry_after_s == 8
    with pytest.raises(Overloaded) as crawling:
        waiting.check_space(3, 30, tokens_per_second=0.001)
    assert crawling.value.retry_after_s == LONGEST_RETRY_S


def test_what_cannot_be_answered_in_time_is_refused_at_once() -> None:
    waiting = room([job(100)] * 8)
    waiting.check_space(1, seconds=11, tokens_per_second=100)
    with pytest.raises(Overloaded, match="about 8.0 s of work"):
        waiting.check_space(1, seconds=10, tokens_per_second=100)


def test_answers_that_wait_count_for_answers_only() -> None:
    waiting = room([job(100, 50)] * 8)
    waiting.check_space(1, seconds=1, tokens_per_second=100)
    with pytest.raises(Overloaded):
        waiting.check_space(1, seconds=1, tokens_per_second=100, continues=True)
    assert waiting.startable(kv_held=0)
    assert not waiting.startable(kv_held=999)


def test_tokens_are_forgotten_with_their_jobs() -> None:
    jobs = [job(100) for _ in range(8)]
    waiting = room(jobs)
    assert waiting.remove(lambda one: one in jobs[:4]) == jobs[:4]
    waiting.gather(0)
    waiting.check_space(1, seconds=0.01, tokens_per_second=1)
    assert len(waiting) == 0
