"""The admission rule, and the speed that its estimate is based on."""

from __future__ import annotations

import pytest

from service.errors import Overloaded
from service.serving.admission import MAX_RETRY_S, NEW_SPEED, Speed, check_space


def test_speed_is_measured_from_note_to_note_in_a_crowd() -> None:
    speed = Speed()
    speed.note(1000, 10.0, crowded=True)
    assert speed.value is None  # nobody knows when this one began
    speed.note(50, 10.5, crowded=True)
    assert speed.value == pytest.approx(100)
    speed.note(100, 11.0, crowded=False)
    assert speed.value == pytest.approx(100 + NEW_SPEED * 100)
    speed.note(10**6, 12.0, crowded=False)
    speed.note(10**6, 13.0, crowded=True)
    assert speed.value == pytest.approx(120)


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
