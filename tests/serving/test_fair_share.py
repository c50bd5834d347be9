"""Callers take turns, and the last places of the queue are for newcomers."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush

from hypothesis import given
from hypothesis import strategies as st

from service.serving.fair_share import FairShare

COSTS = st.lists(st.integers(1, 500), min_size=1, max_size=60)


@given(st.lists(COSTS, min_size=2, max_size=5))
def test_while_both_wait_no_caller_is_served_more_than_one_prompt_ahead(sent: list[list[int]]) -> None:
    shares = FairShare(10_000)
    queue: list[tuple[int, int, int, int]] = []
    for caller, costs in enumerate(sent):  # one after the other: the first has sent everything before the last begins
        for number, cost in enumerate(costs):
            heappush(queue, (shares.place(str(caller), cost), number, caller, cost))
    left, served = Counter(caller for caller, costs in enumerate(sent) for _ in costs), Counter[int]()
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


def test_one_caller_cannot_fill_the_queue() -> None:
    shares = FairShare(1024)
    taken: dict[str, int] = {}
    for caller in ("first", "second", "third"):
        while shares.waiting < shares.most_waiting(caller):
            shares.add(caller, 1)
        taken[caller] = 1024 - sum(taken.values()) - (1024 - shares.waiting)
    assert taken == {"first": 896, "second": 112, "third": 14}
    shares.add("first", -896)
    assert shares.waiting == 126
    assert shares.most_waiting("fourth") == 1024  # whoever has nothing may take all that is free


def test_the_wait_of_one_caller_is_not_that_of_another() -> None:
    shares = FairShare(1024)
    shares.add_tokens("busy", 5000, answers=False)
    shares.add_tokens("busy", 3000, answers=True)
    shares.add_tokens("other", 100, answers=False)
    assert shares.tokens_ahead("busy", answers=True) == 8100
    assert shares.tokens_ahead("busy", answers=False) == 5100
    assert shares.tokens_ahead("other", answers=True) == 200
    assert shares.tokens_ahead("new", answers=True) == 0
    for caller, tokens, answers in [("busy", 5000, False), ("busy", 3000, True), ("other", 100, False)]:
        assert not shares.is_empty
        shares.add_tokens(caller, -tokens, answers=answers)
    assert shares.is_empty
