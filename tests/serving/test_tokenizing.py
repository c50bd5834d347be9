"""The two lanes in front of the queue."""

from __future__ import annotations

import asyncio
import threading

import pytest

from service.api.request_schema import ScoreRequest
from service.errors import Overloaded
from service.serving.tokenizing import INLINE, LONG, MAX_LONG, Tokenizing

pytestmark = pytest.mark.anyio


async def test_short_texts_pass_a_long_one_and_results_come_back() -> None:
    lanes, release = Tokenizing(4), threading.Event()
    long = asyncio.create_task(lanes.run(LONG, lambda: release.wait(20)))
    assert await lanes.run(LONG - 1, lambda: "short") == "short"
    assert not long.done()
    release.set()
    assert await long is True
    lanes.close()


async def test_only_the_shortest_texts_are_rendered_on_the_loop() -> None:
    lanes = Tokenizing(4)
    assert await lanes.run(INLINE, threading.current_thread) is threading.current_thread()
    assert await lanes.run(INLINE + 1, threading.current_thread) is not threading.current_thread()
    lanes.close()


def test_many_empty_prompts_are_not_short() -> None:
    """A template is rendered for each of them."""
    for body in ({"prompt": [""] * 1000}, {"messages": [{"role": "user", "content": ""}] * 1000}):
        assert ScoreRequest.model_validate(body).size() > INLINE


@pytest.mark.parametrize("size", [1, INLINE + 1])
async def test_what_a_text_does_wrong_is_raised(size: int) -> None:
    lanes = Tokenizing(4)
    with pytest.raises(ZeroDivisionError):
        await lanes.run(size, lambda: 1 // 0)
    lanes.close()


async def test_a_lane_is_bounded_and_those_who_leave_make_room() -> None:
    lanes, release = Tokenizing(4), threading.Event()
    waiting = [asyncio.create_task(lanes.run(LONG, lambda: release.wait(20))) for _ in range(MAX_LONG)]
    await asyncio.sleep(0.05)
    with pytest.raises(Overloaded, match="waiting to be tokenized"):
        await lanes.run(LONG, lambda: True)
    waiting[-1].cancel()
    await asyncio.sleep(0.05)
    last = asyncio.create_task(lanes.run(LONG, lambda: True))
    release.set()
    assert await last is True
    await asyncio.gather(*waiting[:-1])
    lanes.close()
