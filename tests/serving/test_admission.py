"""The speed that the estimated wait rests on.  The rule itself is tested through the waiting room and the live room."""

from __future__ import annotations

import pytest

from service.serving.admission import NEW_SPEED, Speed


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
    speed = Speed(least_s=0.25)
    for burst in range(40):
        for prompt in range(8):
            speed.note(10, burst * 0.1 + prompt * 1e-5, crowded=True)
    assert speed.value == pytest.approx(800, rel=0.01)


def test_a_crowd_that_was_too_short_says_nothing() -> None:
    speed = Speed(least_s=0.25)
    for prompt in range(8):
        speed.note(10, prompt * 1e-5, crowded=True)
    speed.note(10, 0.1, crowded=False)
    assert speed.value is None
