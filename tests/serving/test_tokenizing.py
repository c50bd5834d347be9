"""The two lanes in front of the queue."""

from __future__ import annotations

import asyncio
import threading

import pytest

from service.errors import Overloaded
from service.serving.tokenizing import LONG, MAX_LONG, Tokenizing

pytestmark = pytest.mark.anyio


async def test_short_texts_pass_a_long_one_and_results_come_back() -> None:
    lanes, release = Tokenizing(4), threading.Event()
    long = asyncio.create_task(lanes.run(LONG, lambda: release.wait(20)))
    assert await lanes.run(LONG - 1, lambda: "short") == "short"
    assert not long.done()
    release.set()
    assert await long is True
    lanes.close()


async def test_what_a_text_does_wrong_is_raised() -> None:
    lanes = Tokenizing(4)
    with pytest.raises(ZeroDivisionError):
        await lanes.run(1, lambda: 1 // 0)
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
