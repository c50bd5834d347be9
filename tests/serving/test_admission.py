"""Admission: the rule, the speed that its estimate is based on, fair shares, and the lanes in front
of the queue."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from heapq import heappop, heappush
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.request_schema import ScoreRequest, size_of
from service.errors import NotReady, Overloaded
from service.serving import admission
from service.serving.admission import (
    INLINE,
    LONG,
    Deadline,
    FairShare,
    Speed,
    Tokenizing,
    check_space,
)
from tests.running import until_on_loop

COSTS = st.lists(st.integers(1, 500), min_size=1, max_size=60)


def noted(speed: Speed, *notes: tuple[int, float], crowded: bool = True) -> float | None:
    for tokens, at in notes:
        speed.note(tokens, at, crowded=crowded)
    return speed.value


@pytest.mark.parametrize(
    ("seconds", "spare"), [(60, 3), (30, 1.5), (10, 0.5), (2, 0.5), (0.6, 0.3)]
)
def test_a_long_answer_keeps_time_to_be_sent_but_at_most_half_of_it(
    monkeypatch: pytest.MonkeyPatch, seconds: float, spare: float
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    assert Deadline(seconds).nearly == pytest.approx(100 + seconds - spare)


def test_speed_is_measured_from_note_to_note_in_a_crowd() -> None:
    speed = Speed()
    for at in range(admission.LEAST_MEASUREMENTS):  # of the first nobody knows when it began
        assert noted(speed, (1000, float(at))) is None
    speed = Speed()
    spans = [(50, 10.5 - span / 2) for span in range(admission.LEAST_MEASUREMENTS, -1, -1)]
    assert noted(speed, *spans) == pytest.approx(100)
    assert noted(speed, (100, 11.0), crowded=False) == pytest.approx(
        100 + admission.NEW_SPEED * 100
    )
    noted(speed, (10**6, 12.0), crowded=False)
    assert noted(speed, (10**6, 13.0)) == pytest.approx(120)
    slow_start = [
        (20, 0.0),
        (20, 2.0),
        *((500, 2.0 + span / 2) for span in range(1, admission.LEAST_MEASUREMENTS)),
    ]
    assert noted(Speed(), *slow_start) == pytest.approx((10 + 3 * 1000) / 4), (
        "one slow start is not the speed"
    )


def test_bursts_do_not_look_fast_and_a_short_crowd_says_nothing() -> None:
    """Eight prompts of ten tokens come out together, every 0.1 s."""
    bursts = [(10, burst * 0.1 + prompt * 1e-5) for burst in range(40) for prompt in range(8)]
    assert noted(Speed(min_span_s=0.25), *bursts) == pytest.approx(800, rel=0.01)
    speed = Speed(min_span_s=0.25)
    noted(speed, *bursts[:8])
    assert noted(speed, (10, 0.1), crowded=False) is None


def test_a_full_queue_says_when_to_retry_and_what_would_end_too_late_is_refused() -> None:
    full: dict[str, Any] = {"waiting": 8, "max_waiting": 10, "ahead": 800}
    check_space(2, **full, seconds=30.0, tokens_per_second=None)
    for speed, retry in ((None, 1), (100, 8), (0.001, admission.MAX_RETRY_S)):
        with pytest.raises(Overloaded) as refused:
            check_space(3, **full, seconds=30.0, tokens_per_second=speed)
        assert refused.value.retry_after_s == retry
    check_space(1, **full, seconds=11, tokens_per_second=100.0)
    with pytest.raises(Overloaded):
        check_space(1, **full, seconds=10, tokens_per_second=100.0)


@given(st.lists(COSTS, min_size=2, max_size=5))
def test_while_both_wait_no_caller_is_served_more_than_one_prompt_ahead(
    sent: list[list[int]],
) -> None:
    shares = FairShare(10_000)
    queue: list[tuple[int, int, int, int]] = []
    for caller, costs in enumerate(
        sent
    ):  # one after the other: the first has sent everything before the last begins
        for number, cost in enumerate(costs):
            heappush(queue, (shares.place(str(caller), cost), number, caller, cost))
    left = Counter(caller for caller, costs in enumerate(sent) for _ in costs)
    served = Counter[int]()
    most = max(map(max, sent))
    while queue:
        place, _, caller, cost = heappop(queue)
        shares.served(place)
        served[caller] += cost
        left[caller] -= 1
        waiting = [other for other in range(len(sent)) if left[other]]
        assert all(abs(served[one] - served[two]) <= 2 * most for one in waiting for two in waiting)


def test_a_newcomer_is_next_and_a_pause_earns_nothing() -> None:
    shares = FairShare(1000)
    places = [shares.place("busy", 10) for _ in range(100)]
    for place in places[:50]:
        shares.served(place)
    assert places[49] <= shares.place("new", 10) < places[51]
    assert shares.place("new", 10) < places[52]  # not a hundred places ahead for having been away
    assert shares.place("new", 10) > places[49]


def test_the_wait_of_one_caller_is_not_that_of_another() -> None:
    shares = FairShare(1024)
    shares.add_tokens("busy", 5000, answers=False)
    shares.add_tokens("busy", 3000, answers=True)
    shares.add_tokens("other", 100, answers=False)
    assert shares.tokens_ahead("busy", answers=True) == 8100
    assert shares.tokens_ahead("busy", answers=False) == 5100
    assert shares.tokens_ahead("other", answers=True) == 200
    assert shares.tokens_ahead("new", answers=True) == 0
    for caller, tokens, answers in [
        ("busy", 5000, False),
        ("busy", 3000, True),
        ("other", 100, False),
    ]:
        shares.add_tokens(caller, -tokens, answers=answers)
    assert not any(shares._tokens.values())


@pytest.fixture
def lanes() -> Iterator[Tokenizing]:
    yield (made := Tokenizing(4))
    made.close()


@pytest.mark.anyio
async def test_short_texts_pass_a_long_one_and_results_come_back(lanes: Tokenizing) -> None:
    release = threading.Event()
    long = asyncio.create_task(lanes.run("me", LONG, lambda: release.wait(20)))
    assert await lanes.run("me", LONG - 1, lambda: "short") == "short"
    assert not long.done()
    release.set()
    assert await long is True
    for size, here in (
        (INLINE, True),
        (INLINE + 1, False),
    ):  # only the shortest are rendered on the loop
        assert (
            await lanes.run("me", size, threading.current_thread) is threading.current_thread()
        ) is here
        with pytest.raises(ZeroDivisionError):  # what a text does wrong is raised
            await lanes.run("me", size, lambda: 1 // 0)


def test_many_empty_prompts_are_not_short() -> None:
    """A template is rendered for each of them."""
    for body in ({"prompt": [""] * 1000}, {"messages": [{"role": "user", "content": ""}] * 1000}):
        assert size_of(*ScoreRequest.model_validate(body).given()) > INLINE


@pytest.mark.anyio
@pytest.mark.parametrize("size", [INLINE + 1, LONG])
async def test_one_callers_texts_lock_nobody_out_and_callers_take_turns(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(admission, "MAX_LONG", 4)
    lanes = Tokenizing(4)
    begun = threading.Event()
    release = threading.Event()
    order = list[str]()

    def work(caller: str) -> None:
        begun.set()
        assert release.wait(60)
        order.append(caller)

    async def refused(caller: str) -> bool:
        further = asyncio.create_task(lanes.run(caller, size, lambda: None))
        await asyncio.sleep(0)
        if not further.done():
            return not further.cancel()
        return isinstance(further.exception(), Overloaded)

    waiting, turned_away = [], dict[str, bool]()
    for caller, places in [
        ("a", 4),
        ("b", 2),
        ("c", 1),
        ("d", 1),
    ]:  # half of what the others leave, and one at least
        for _ in range(places):
            waiting.append(asyncio.create_task(lanes.run(caller, size, partial(work, caller))))
            await asyncio.sleep(0)
            assert await asyncio.to_thread(begun.wait, 60), (
                "the first one runs before the next comes"
            )
        turned_away[caller] = await refused(caller)
    turned_away["e"] = await refused("e")  # all places are taken
    waiting.pop(3).cancel()  # the last of a's, which makes room
    await asyncio.sleep(0.05)
    waiting.append(asyncio.create_task(lanes.run("e", size, partial(work, "e"))))
    await asyncio.sleep(0)  # it waits before the first one ends
    release.set()
    await asyncio.gather(*waiting)
    assert turned_away == dict.fromkeys("abcde", True)
    assert order == ["a", *"abcde", *"ab"]
    lanes_used = (lanes._fast, lanes._slow)
    queues = [queue for lane in lanes_used for queue in (lane._pending, lane._waiting)]
    await until_on_loop(lambda: not any(queues), 60)
    lanes.close()


@pytest.mark.anyio
async def test_closing_ends_the_texts_that_wait() -> None:
    own = Tokenizing(4)
    begun = threading.Event()
    release = threading.Event()

    def work() -> bool:
        begun.set()
        return release.wait(60)

    running = asyncio.create_task(own.run("me", LONG, work))
    assert await asyncio.to_thread(begun.wait, 60)
    waiting = asyncio.create_task(own.run("me", LONG, lambda: True))
    waiting.add_done_callback(lambda _: release.set())  # it does not wait for what runs
    await asyncio.sleep(0)
    await asyncio.to_thread(own.close)
    assert await running is True
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(NotReady):
        await own.run("me", LONG, lambda: True)


@pytest.mark.anyio
async def test_a_callers_formats_wait_for_its_own_and_for_no_other_callers(
    lanes: Tokenizing,
) -> None:
    release, began = threading.Event(), []

    def slow(name: str) -> str:
        began.append(name)
        assert release.wait(60)
        return name

    mine = [asyncio.create_task(lanes.compile("me", partial(slow, f"mine {n}"))) for n in range(3)]
    assert await asyncio.wait_for(lanes.compile("you", lambda: "yours"), 60) == "yours"
    assert began == ["mine 0"]
    mine[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await mine[1]
    with pytest.raises(ZeroDivisionError):
        await lanes.compile("you", lambda: 1 // 0)
    release.set()
    assert [await mine[0], await mine[2]] == ["mine 0", "mine 2"]
    assert began == ["mine 0", "mine 2"]
    await until_no_format_waits(lanes)


async def until_no_format_waits(lanes: Tokenizing) -> None:
    await until_on_loop(lambda: not (lanes._formats.pending or lanes._formats._turns), 60)


@pytest.mark.anyio
async def test_one_whose_time_is_up_leaves_its_turn_only_when_its_work_has_ended(
    lanes: Tokenizing,
) -> None:
    release = threading.Event()
    late = asyncio.create_task(lanes.compile("me", lambda: release.wait(60)))
    await asyncio.sleep(0.05)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    following = asyncio.create_task(lanes.compile("me", lambda: "next"))
    await asyncio.sleep(0.05)
    assert not following.done(), "two of one caller are never compiled at once"
    release.set()
    assert await following == "next"
    await until_no_format_waits(lanes)


@pytest.mark.anyio
async def test_formats_that_wait_are_bounded_by_caller_and_in_all(
    lanes: Tokenizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_FORMATS_OF_CALLER", 2)
    monkeypatch.setattr(admission, "MAX_FORMATS", 3)
    release = threading.Event()
    waiting = [
        asyncio.create_task(lanes.compile(caller, lambda: release.wait(60)))
        for caller in ("a", "a", "b")
    ]
    await asyncio.sleep(0.05)
    for caller in ("a", "c"):
        with pytest.raises(Overloaded, match="for their formats"):
            await lanes.compile(caller, lambda: True)
    release.set()
    assert await asyncio.gather(*waiting) == [True] * 3
    await until_no_format_waits(lanes)


@pytest.mark.anyio
async def test_closing_does_not_wait_for_a_format() -> None:
    release, own = threading.Event(), Tokenizing(4)
    running = asyncio.create_task(own.compile("me", lambda: release.wait(60)))
    waiting = asyncio.create_task(own.compile("me", lambda: True))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(own.close)
    assert not running.done()
    release.set()
    assert await running is True
    with pytest.raises(NotReady):
        await waiting
