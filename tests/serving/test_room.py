"""The engine room on the scripted engine: batching, sharing, fairness, failures, and nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.engines.base import Sampling
from service.engines.scripted import ScriptedEngine
from service.errors import DeadlineExceeded, NotReady, Overloaded, RequestError
from service.guard import BLOCK, GATE, OBSERVE, Policy
from service.scoring import RiskReport, Scorer
from service.serving.deadline import Deadline
from service.serving.job import Ticket
from service.serving.room import EngineRoom
from tests.matching import matching_bundle

pytestmark = pytest.mark.anyio


class Watch:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.last = (0, 0)

    def batch(self, prompts: int, tokens: int) -> None:
        self.batches.append(prompts)

    def queue(self, waiting: int, decoding: int) -> None:
        self.last = (waiting, decoding)


class Bench:
    """A room with its parts in reach."""

    def __init__(self, tmp_path: Path) -> None:
        self.engine = ScriptedEngine()
        self.scorers = [
            Scorer(self.engine, matching_bundle(self.engine, tmp_path, name, seed))
            for seed, name in enumerate(("one", "two", "three"))
        ]
        self.watch = Watch()
        self.entered, self.release = threading.Event(), threading.Event()
        self.room: EngineRoom

    @asynccontextmanager
    async def open(self, **limits: Any) -> AsyncIterator[Bench]:
        given = {"max_queue": 64, "max_batch_tokens": 2048, "max_kv_tokens": 4096, "max_wait_s": 0.0} | limits
        self.room = EngineRoom(self.scorers, self.watch, **given)
        try:
            yield self
        finally:
            self.release.set()
            await asyncio.to_thread(self.room.close)
            assert self.engine.counters.open_continuations == 0
            assert self.watch.last == (0, 0)

    def ticket(
        self, *texts: str, scorer: int = 0, policy: Policy = GATE, seconds: float = 20, **options: Any
    ) -> Ticket:
        prompts = [self.engine.tokenize(text) for text in texts]
        ticket = Ticket(prompts, self.scorers[scorer], policy, deadline=Deadline(seconds), **options)
        self.room.submit(ticket)
        return ticket

    async def hold(self) -> Ticket:
        """Make the engine's thread stand still inside a forward pass until ``release`` is set."""

        def block(_: str) -> None:
            self.entered.set()
            assert self.release.wait(20)

        self.engine.before = block
        ticket = self.ticket("the one that is held")
        await asyncio.to_thread(self.entered.wait, 20)
        self.watch.batches.clear()
        return ticket


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def alone(bench: Bench, text: str, scorer: int = 0) -> RiskReport:
    return bench.scorers[scorer].score([bench.engine.tokenize(text)])[0]


async def test_requests_that_wait_share_one_forward(bench: Bench) -> None:
    async with bench.open():
        held = await bench.hold()
        tickets = [bench.ticket(f"prompt {n}") for n in range(9)]
        bench.release.set()
        await held.answers()
        reports = [(await ticket.answers())[0] for ticket in tickets]
    assert bench.watch.batches == [1, 9]
    assert [one.risk for one in reports] == [alone(bench, f"prompt {n}").risk for n in range(9)]


async def test_several_bundles_share_one_forward(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    score = bench.engine.score

    def counted(prompts: Sequence[Any], probes: Sequence[Any], **options: Any) -> Any:
        calls.append(len(probes))
        return score(prompts, probes, **options)

    async with bench.open():
        await bench.hold()
        monkeypatch.setattr(bench.engine, "score", counted)
        tickets = [bench.ticket("same", scorer=n % 3) for n in range(6)]
        bench.release.set()
        reports = [(await ticket.answers())[0] for ticket in tickets]
    assert calls == [3]  # one call, every bundle's probes
    assert [one.risk for one in reports] == [alone(bench, "same", n % 3).risk for n in range(6)]
    assert len({one.risk for one in reports}) == 3


async def test_one_requests_fault_is_not_its_neighbours(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    poison = bench.engine.tokenize("poison")
    score = bench.engine.score

    def refusing(prompts: Sequence[Any], probes: Sequence[Any], **options: Any) -> Any:
        if poison in list(prompts):
            raise RuntimeError("poison")
        return score(prompts, probes, **options)

    async with bench.open():
        await bench.hold()
        monkeypatch.setattr(bench.engine, "score", refusing)
        tickets = [bench.ticket(text) for text in ("a", "poison", "b")]
        bench.release.set()
        assert (await tickets[0].answers())[0].risk == alone(bench, "a").risk
        with pytest.raises(RuntimeError, match="poison"):
            await tickets[1].answers()
        assert (await tickets[2].answers())[0].risk == alone(bench, "b").risk
        assert bench.room.alive


async def test_a_batch_that_breaks_while_it_begins_is_tried_one_by_one(bench: Bench) -> None:
    async with bench.open():
        bench.engine.fail = RuntimeError("no memory")
        ticket = bench.ticket("a", "b", sampling=Sampling(), policy=OBSERVE)
        with pytest.raises(RuntimeError, match="no memory"):
            await ticket.answers()
        bench.engine.fail = None
        again = bench.ticket("a", "b", sampling=Sampling(), policy=OBSERVE)
        assert [one.completion.text for one in await again.answers() if one.completion] == ["It is so."] * 2


@pytest.mark.parametrize("policy", [GATE, BLOCK])
async def test_a_gated_prompt_decodes_nothing(bench: Bench, policy: Policy) -> None:
    async with bench.open():
        (report,) = await bench.ticket("a", sampling=Sampling(), policy=policy.at(0.0)).answers()
        assert report.completion is None
        assert bench.engine.counters.decode_steps == 0


async def test_a_stream_tells_the_risk_before_its_pieces(bench: Bench) -> None:
    async with bench.open():
        ticket = bench.ticket("a", sampling=Sampling(max_tokens=5), policy=OBSERVE, streams=True)
        (report,) = await ticket.risks()
        assert report.risk == alone(bench, "a").risk
        assert report.completion is None
        assert [piece async for piece in ticket.pieces()] == list("It is")
        (answer,) = await ticket.answers()
        assert answer.completion is not None
        assert (answer.completion.text, answer.completion.finish_reason) == ("It is", "length")
        timings = ticket.jobs[0].timings
        assert timings.decode is not None
        assert min(timings.queue, timings.prefill, timings.probe, timings.decode) >= 0


async def test_scores_do_not_wait_for_a_long_answer(bench: Bench) -> None:
    bench.engine.answer = "x" * 400
    async with bench.open():
        bench.engine.sleep_s = 0.005
        answer = bench.ticket("long", sampling=Sampling(max_tokens=400), policy=OBSERVE, streams=True)
        await answer.risks()
        for n in range(5):
            await bench.ticket(f"score {n}").answers()
        assert not answer.finished
        answer.cancel()


async def test_answers_take_turns(bench: Bench) -> None:
    bench.engine.answer = "x" * 40
    async with bench.open():
        bench.engine.sleep_s = 0.03
        long = bench.ticket("long", sampling=Sampling(max_tokens=40), policy=OBSERVE)
        await long.risks()
        short = bench.ticket("short", sampling=Sampling(max_tokens=3), policy=OBSERVE)
        await short.answers()
        assert not long.finished
        (report,) = await long.answers()
        assert report.completion is not None
        assert len(report.completion.text) == 40


async def test_caches_of_answers_under_way_are_bounded(bench: Bench) -> None:
    most = 0
    begin = bench.engine.begin

    def watched(*arguments: Any) -> Any:
        nonlocal most
        opened = begin(*arguments)
        most = max(most, bench.engine.counters.open_continuations)
        return opened

    bench.engine.begin = watched  # type: ignore[method-assign]
    async with bench.open(max_kv_tokens=3 * 40):
        tickets = [bench.ticket(f"prompt {n}", sampling=Sampling(max_tokens=30), policy=OBSERVE) for n in range(10)]
        for ticket in tickets:
            await ticket.answers()
    assert 1 <= most <= 3


async def test_cancelled_work_is_dropped(bench: Bench) -> None:
    bench.engine.answer = "x" * 400
    async with bench.open():
        held = await bench.hold()
        waiting = [bench.ticket(f"prompt {n}") for n in range(5)]
        for ticket in waiting:
            ticket.cancel(NotReady("gone"))
            with pytest.raises(NotReady):
                await ticket.answers()
        bench.release.set()
        await held.answers()
        bench.engine.sleep_s = 0.02
        decoding = bench.ticket("a", sampling=Sampling(max_tokens=400), policy=OBSERVE)
        await decoding.risks()
        assert bench.engine.counters.open_continuations == 1
        decoding.cancel(NotReady("gone"))
        for _ in range(500):
            if not bench.engine.counters.open_continuations:
                break
            await asyncio.sleep(0.01)
        assert bench.engine.counters.open_continuations == 0
        assert bench.engine.counters.decode_steps < 300
    assert bench.watch.batches == [1, 1]


async def test_a_deadline_that_passes_in_the_queue_costs_no_forward(bench: Bench) -> None:
    async with bench.open():
        held = await bench.hold()
        late = bench.ticket("late", seconds=0.05)
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await late.answers()
        bench.release.set()
        await held.answers()
        await bench.ticket("next").answers()
    assert bench.watch.batches == [1, 1]


async def test_a_deadline_that_passes_while_decoding_ends_the_answer(bench: Bench) -> None:
    bench.engine.answer = "x" * 400
    async with bench.open():
        bench.engine.sleep_s = 0.05
        ticket = bench.ticket("a", sampling=Sampling(max_tokens=400), policy=OBSERVE, streams=True, seconds=3)
        await ticket.risks()
        with pytest.raises(DeadlineExceeded):
            _ = [piece async for piece in ticket.pieces()]


async def test_a_full_queue_refuses_and_takes_all_or_none(bench: Bench) -> None:
    async with bench.open(max_queue=3):
        held = await bench.hold()
        kept = bench.ticket("a", "b")
        with pytest.raises(Overloaded):
            bench.ticket("c", "d")
        with pytest.raises(Overloaded):
            bench.room.check_space(2, Deadline(5))
        last = bench.ticket("e")
        bench.release.set()
        for ticket in (held, kept, last):
            await ticket.answers()


async def test_those_who_left_hold_no_place_in_the_queue(bench: Bench) -> None:
    async with bench.open(max_queue=3):
        held = await bench.hold()
        bench.ticket("a", "b", "c").cancel()
        kept = bench.ticket("d", "e", "f")
        bench.release.set()
        for ticket in (held, kept):
            await ticket.answers()


async def test_scores_are_not_refused_for_answers_that_wait_for_room(bench: Bench) -> None:
    bench.engine.answer = "x" * 300
    async with bench.open(max_kv_tokens=700):
        bench.engine.sleep_s = 0.002
        answers = [bench.ticket(f"answer {n}", sampling=Sampling(max_tokens=300), policy=OBSERVE) for n in range(12)]
        await answers[0].risks()
        for n in range(30):
            bench.room.check_space(1, Deadline(0.5))
            await bench.ticket(f"score {n}", seconds=0.5).answers()
        for answer in answers:
            answer.cancel()


async def test_a_token_without_text_is_still_one_turn(bench: Bench) -> None:
    bench.engine.answer = "é" * 20
    async with bench.open():
        ticket = bench.ticket("a", sampling=Sampling(max_tokens=40), policy=OBSERVE, streams=True)
        assert [piece async for piece in ticket.pieces()] == ["é"] * 20
        assert ticket.jobs[0].tokens == 40


async def test_closing_finishes_the_forward_and_refuses_the_rest(bench: Bench) -> None:
    async with bench.open():
        held = await bench.hold()
        waiting = bench.ticket("waits")
        closing = asyncio.create_task(asyncio.to_thread(bench.room.close))
        while bench.room.alive:
            await asyncio.sleep(0.01)
        bench.release.set()
        await closing
        assert len(await held.answers()) == 1
        with pytest.raises(NotReady):
            await waiting.answers()
        with pytest.raises(NotReady):
            bench.ticket("too late")


async def test_an_engine_that_fails_whatever_it_is_given_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.serving.room.MOST_FAILURES", 4)
    broke: list[BaseException] = []
    async with bench.open(on_broken=broke.append):
        for failure, times in ((RequestError("not its fault"), 9), (RuntimeError("no memory"), 3), (None, 1)):
            bench.engine.fail = failure
            for n in range(times):
                ticket = bench.ticket(f"prompt {n}")
                if failure is None:
                    await ticket.answers()
                else:
                    with pytest.raises(type(failure)):
                        await ticket.answers()
        bench.engine.fail = RuntimeError("device-side assert")
        with pytest.raises(RuntimeError):
            await bench.ticket("a", "b", "c", "d", "e").answers()
        bench.room._thread.join(20)
        await asyncio.sleep(0)
        assert not bench.room.alive
        assert "4 prompts in a row failed" in str(broke[0])


async def test_a_thread_that_breaks_leaves_nobody_waiting(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(prompts: int, tokens: int) -> None:
        raise MemoryError

    async with bench.open():
        monkeypatch.setattr(bench.watch, "batch", broken)
        ticket = bench.ticket("a")
        with pytest.raises(NotReady):
            await ticket.answers()
        bench.room._thread.join(20)
        assert not bench.room.alive


async def test_a_batch_waits_a_moment_for_as_many_as_last_time(bench: Bench) -> None:
    async with bench.open(max_wait_s=5.0):
        held = await bench.hold()
        tickets = [bench.ticket(f"first {n}") for n in range(4)]
        bench.release.set()
        for ticket in (held, *tickets):
            await ticket.answers()
        again = []
        for n in range(4):
            again.append(bench.ticket(f"second {n}"))
            await asyncio.sleep(0.02)
        for ticket in again:
            await ticket.answers()
    assert bench.watch.batches == [1, 4, 4]
