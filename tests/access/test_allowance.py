"""Requests per minute and prompt tokens per day, by a clock of the test's own."""

from __future__ import annotations

import inspect
import random
import time

import pytest

from service.access.allowance import DAY_S, Allowance, duration
from service.access.callers import Key
from service.errors import QuotaExceeded, RateLimited


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(per_minute: int | None = None, per_day: int | None = None) -> Key:
    return Key(name="k", digest="0", requests_per_minute=per_minute, prompt_tokens_per_day=per_day)


def test_a_minutes_worth_at_once_then_one_by_one() -> None:
    clock, own = Clock(), key(6)
    allowance = Allowance(clock)
    for left in range(5, -1, -1):
        allowance.take_request(own)
        assert allowance.headers(own)["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(RateLimited) as refused:
        allowance.take_request(own)
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "rate_limit_exceeded", 10)
    assert allowance.headers(own)["x-ratelimit-reset-requests"] == "1m0s"
    clock.now += refused.value.retry_after_s
    allowance.take_request(own)
    with pytest.raises(RateLimited):
        allowance.take_request(own)
    clock.now += 1000
    assert allowance.headers(own) == {
        "x-ratelimit-limit-requests": "6", "x-ratelimit-remaining-requests": "6", "x-ratelimit-reset-requests": "0s",
    }  # fmt: skip


@pytest.mark.parametrize("limit", [1, 7, 60])
def test_no_minute_has_more_than_two_minutes_worth_and_the_mean_is_the_limit(limit: int) -> None:
    clock, own, draw = Clock(), key(limit), random.Random(0)
    allowance, passed = Allowance(clock), []
    while clock.now < 1000 + 600:
        clock.now += draw.expovariate(limit / 3)
        try:
            allowance.take_request(own)
        except RateLimited:
            continue
        passed.append(clock.now)
    assert len(passed) <= 11 * limit + 1
    assert len(passed) >= 9 * limit
    for start in passed:
        assert sum(start <= one < start + 60 for one in passed) <= 2 * limit


def test_the_days_tokens_end_and_come_back_a_day_after_the_first() -> None:
    clock, own = Clock(), key(None, 100)
    allowance = Allowance(clock)
    allowance.take_request(own)
    allowance.take_tokens(own, 60)
    clock.now += 3600
    with pytest.raises(
        QuotaExceeded, match="has 50 prompt tokens; of its 100 of the day key 'k' has 40 left"
    ) as refused:
        allowance.take_tokens(own, 50)
    assert (refused.value.code, refused.value.retry_after_s) == ("insufficient_quota", int(DAY_S) - 3600)
    allowance.take_tokens(own, 40)  # the refused ones were not counted
    assert allowance.headers(own) == {
        "x-ratelimit-limit-tokens": "100", "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "23h0m0s",
    }  # fmt: skip
    with pytest.raises(QuotaExceeded, match="has used its 100"):
        allowance.take_request(own)
    clock.now = 1000 + DAY_S
    allowance.take_request(own)
    allowance.take_tokens(own, 100)


def test_new_limits_hold_from_the_next_request_on_and_what_was_used_counts() -> None:
    clock = Clock()
    allowance = Allowance(clock)
    allowance.take_tokens(key(None, 100), 80)
    with pytest.raises(QuotaExceeded):
        allowance.take_request(key(None, 50))
    allowance.take_tokens(key(None, 200), 120)
    allowance.take_tokens(key(), 10**9)
    assert allowance.headers(key()) == {}
    for _ in range(10):
        allowance.take_request(key(10))
    with pytest.raises(RateLimited):
        allowance.take_request(key(5))
    clock.now += 1
    allowance.take_request(key(600))


def test_durations_are_written_as_openai_writes_them() -> None:
    written = [duration(seconds) for seconds in (0, 0.5, 12.3456, 60, 360, 3661.5, 86_400)]
    assert written == ["0s", "0.5s", "12.346s", "1m0s", "6m0s", "1h1m1.5s", "24h0m0s"]


def test_nobody_can_set_the_clock_that_counts() -> None:
    assert inspect.signature(Allowance).parameters["clock"].default is time.monotonic


def test_the_last_token_is_given_and_not_one_more() -> None:
    key = Key(name="one", digest="", prompt_tokens_per_day=10)
    allowance = Allowance()
    with pytest.raises(QuotaExceeded):
        allowance.take_tokens(key, 11)
    allowance.take_tokens(key, 9)
    with pytest.raises(QuotaExceeded):
        allowance.take_tokens(key, 2)
    allowance.take_tokens(key, 1)
    with pytest.raises(QuotaExceeded):
        allowance.take_request(key)
