"""The admission rule, and the speed that its estimate is based on."""

from __future__ import annotations

import pytest

from service.errors import Overloaded
from service.serving.admission import LEAST_MEASUREMENTS, MAX_RETRY_S, NEW_SPEED, Speed, check_space


def measured(*, tokens: int, until: float) -> Speed:
    """A speed from ``LEAST_MEASUREMENTS`` spans of half a second, the last of which ends at ``until``."""
    speed = Speed()
    for span in range(LEAST_MEASUREMENTS, -1, -1):
        speed.note(tokens, until - span / 2, crowded=True)
    return speed


def test_speed_is_measured_from_note_to_note_in_a_crowd() -> None:
    speed = Speed()
    for at in range(LEAST_MEASUREMENTS):  # of the first nobody knows when it began
        speed.note(1000, float(at), crowded=True)
        assert speed.value is None
    speed = measured(tokens=50, until=10.5)
    assert speed.value == pytest.approx(100)
    speed.note(100, 11.0, crowded=False)
    assert speed.value == pytest.approx(100 + NEW_SPEED * 100)
    speed.note(10**6, 12.0, crowded=False)
    speed.note(10**6, 13.0, crowded=True)
    assert speed.value == pytest.approx(120)


def test_one_slow_start_is_not_taken_for_the_speed() -> None:
    speed = Speed()
    speed.note(20, 0.0, crowded=True)
    speed.note(20, 2.0, crowded=True)  # ten tokens a second: the first forward pass of all
    for span in range(1, LEAST_MEASUREMENTS):
        speed.note(500, 2.0 + span / 2, crowded=True)
    assert speed.value == pytest.approx((10 + 3 * 1000) / 4)


def test_bursts_do_not_look_fast() -> None:
    """Eight prompts of ten tokens come out together, every 0.1 s."""
    speed = Speed(min_span_s=0.25)
    for burst in range(40):
        for prompt in range(8):
            speed.note(10, burst * 0.1 + prompt * 1e-5, crowded=True)
    assert speed.value == pytest.approx(800, rel=0.01)


def test_a_crowd_that_was_too_short_says_nothing() -> None:
    speed = Speed(min_span_s=0.25)
    for prompt in range(8):
        speed.note(10, prompt * 1e-5, crowded=True)
    speed.note(10, 0.1, crowded=False)
    assert speed.value is None


def test_a_full_queue_says_when_to_retry() -> None:
    full = {"waiting": 8, "max_waiting": 10, "ahead": 800, "seconds": 30.0}
    check_space(2, **full, tokens_per_second=None)
    for speed, retry in ((None, 1), (100, 8), (0.001, MAX_RETRY_S)):
        with pytest.raises(Overloaded, match="8 of at most 10") as refused:
            check_space(3, **full, tokens_per_second=speed)
        assert refused.value.retry_after_s == retry


def test_a_request_that_cannot_be_answered_in_time_is_refused() -> None:
    load = {"waiting": 8, "max_waiting": 1000, "ahead": 800, "tokens_per_second": 100.0}
    check_space(1, **load, seconds=11)
    with pytest.raises(Overloaded, match="about 8.0 s of work"):
        check_space(1, **load, seconds=10)
