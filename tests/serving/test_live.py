"""The live room on the scripted online engine: what the engine room does, and nothing left in the engine."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.engines.base import Sampling
from service.engines.online import OnlineEngine, Update
from service.engines.scripted import ScriptedEngine
from service.errors import DeadlineExceeded, EngineError, NonFiniteReadout, NotReady, Overloaded, RequestError
from service.guard import BLOCK, GATE, OBSERVE, Decision, Policy
from service.scoring import RiskReport, Scorer
from service.serving.deadline import Deadline
from service.serving.job import Ticket
from service.serving.live import LiveRoom
from tests.matching import matching_bundle
from tests.scripted_online import ScriptedOnlineEngine
from tests.serving.test_room import Watch

pytestmark = pytest.mark.anyio


class Bench:
    """A live room with its parts in reach; ``one_loop``: the engine lives on the loop that submits."""

    def __init__(self, tmp_path: Path, one_loop: bool) -> None:
        self.tmp_path, self.one_loop = tmp_path, one_loop
        self.script = ScriptedEngine()
        self.watch = Watch()
        self.entered, self.release = threading.Event(), threading.Event()
        self.engine: ScriptedOnlineEngine
        self.scorers: list[Scorer]
        self.plain: list[Scorer]  # the same bundles on the script itself
        self.room: LiveRoom

    @asynccontextmanager
    async def open(self, *, max_queue: int = 64, **options: Any) -> AsyncIterator[Bench]:
        self.engine = ScriptedOnlineEngine(self.script, asyncio.get_running_loop() if self.one_loop else None)
        bundles = [matching_bundle(self.script, self.tmp_path, name, seed) for seed, name in enumerate(("one", "two"))]
        self.scorers = await asyncio.to_thread(lambda: [Scorer(self.engine, bundle) for bundle in bundles])
        self.plain = [Scorer(self.script, bundle) for bundle in bundles]
        self.room = LiveRoom(self.scorers, self.watch, max_queue=max_queue, **options)
        try:
            yield self
        finally:
            closing = asyncio.create_task(asyncio.to_thread(self.room.close))
            await until(lambda: not self.room.alive)
            self.release.set()
            await closing
            assert self.engine.open == 0
            await until(lambda: self.script.counters.open_continuations == 0)
            assert self.watch.last == (0, 0)
            await asyncio.to_thread(self.engine.close)

    def ticket(
        self, *texts: str, scorer: int = 0, policy: Policy = GATE, seconds: float = 20, **options: Any
    ) -> Ticket:
        prompts = [self.script.tokenize(text) for text in texts]
        ticket = Ticket(prompts, self.scorers[scorer], policy, deadline=Deadline(seconds), **options)
        self.room.submit(ticket)
        return ticket

    async def hold(self) -> Ticket:
        """Make the engine stand still inside a step until ``release`` is set."""

        def block(_: str) -> None:
            self.entered.set()
            assert self.release.wait(20)

        self.script.before = block
        ticket = self.ticket("the one that is held")
        await asyncio.to_thread(self.entered.wait, 20)
        return ticket


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail where it does not come."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never became true")


@pytest.fixture(params=["one loop", "two loops"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    return Bench(tmp_path, request.param == "one loop")


def alone(bench: Bench, text: str, scorer: int = 0) -> RiskReport:
    return bench.plain[scorer].score([bench.script.tokenize(text)])[0]


async def test_every_prompt_gets_its_own_risk_by_its_own_bundle(bench: Bench) -> None:
    async with bench.open():
        held = await bench.hold()
        tickets = [bench.ticket(f"{n} one", f"{n} two", scorer=n % 2) for n in range(12)]
        await until(lambda: bench.engine.open == 25)  # nobody waits outside the engine
        bench.release.set()
        await held.answers()
        reports = [await ticket.answers() for ticket in tickets]
        for n, pair in enumerate(reports):
            assert [one.risk for one in pair] == [alone(bench, f"{n} {name}", n % 2).risk for name in ("one", "two")]
            assert all(one.completion is None for one in pair)
        assert sum(bench.watch.batches) == 25


async def test_answers_have_risk_text_and_times(bench: Bench) -> None:
    async with bench.open():
        bench.engine.cached_tokens = 3
        ticket = bench.ticket("a", "b", sampling=Sampling(), policy=OBSERVE)
        reports = await ticket.answers()
        assert [one.completion.text for one in reports if one.completion] == ["It is so."] * 2
        assert [one.cached_tokens for one in reports] == [3, 3]
        assert [one.risk for one in reports] == [alone(bench, text).risk for text in "ab"]
        for job in ticket.jobs:
            assert job.tokens == len("It is so.")
            assert job.timings.decode is not None
            assert job.timings.prefill > 0
            assert min(job.timings.queue, job.timings.probe, job.timings.decode) >= 0


@pytest.mark.parametrize("policy", [GATE, BLOCK])
@pytest.mark.parametrize("honoured", [True, False])
async def test_a_gated_prompt_gives_no_token(bench: Bench, policy: Policy, honoured: bool) -> None:
    async with bench.open():
        bench.engine.gates = honoured
        ticket = bench.ticket("a", sampling=Sampling(), policy=policy.at(0.0), streams=True)
        (report,) = await ticket.answers()
        assert [piece async for piece in ticket.pieces()] == []
        assert report.completion is None
        assert ticket.jobs[0].tokens == 0
        assert ticket.jobs[0].timings.decode is None
        await until(lambda: bench.script.counters.open_continuations == 0)
        assert bench.engine.gated == honoured
        assert bench.script.counters.decode_steps <= (0 if honoured else 2)


async def test_a_gate_that_closes_an_answer_of_ours_is_an_error(bench: Bench) -> None:
    async with bench.open():
        bench.engine.gates_all = True
        with pytest.raises(EngineError, match="before its answer was whole"):
            await bench.ticket("a", sampling=Sampling(), policy=GATE.at(0.999999)).answers()
        assert bench.room.alive


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


async def test_a_token_without_text_counts_and_is_no_piece(bench: Bench) -> None:
    bench.script.answer = "é" * 20
    async with bench.open():
        ticket = bench.ticket("a", sampling=Sampling(max_tokens=40), policy=OBSERVE, streams=True)
        assert [piece async for piece in ticket.pieces()] == ["é"] * 20
        assert ticket.jobs[0].tokens == 40


async def test_cancelling_frees_the_engine_at_once(bench: Bench) -> None:
    bench.script.answer = "x" * 400
    async with bench.open():
        held = await bench.hold()
        prefills = bench.script.counters.prefills
        waiting = [bench.ticket(f"prompt {n}") for n in range(5)]
        await until(lambda: bench.engine.open == 6)
        for ticket in waiting:
            ticket.cancel(NotReady("gone"))
            with pytest.raises(NotReady):
                await ticket.answers()
        assert bench.watch.last == (1, 0)
        await until(lambda: bench.engine.open == 1)  # while the engine still stands still
        bench.release.set()
        await held.answers()
        assert bench.script.counters.prefills == prefills + 1
        bench.script.sleep_s = 0.02
        decoding = bench.ticket("a", sampling=Sampling(max_tokens=400), policy=OBSERVE)
        await decoding.risks()
        assert bench.watch.last == (0, 1)
        decoding.cancel(NotReady("gone"))
        assert bench.watch.last == (0, 0)
        await until(lambda: bench.engine.open == 0 and bench.script.counters.open_continuations == 0)
        assert bench.script.counters.decode_steps < 300


async def test_one_prompts_fault_is_not_its_neighbours(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    poison = bench.script.tokenize("poison")
    rows = bench.script.rows

    def refusing(prompt: Any, site: Any) -> Any:
        if prompt == poison:
            raise RuntimeError("poison")
        return rows(prompt, site)

    async with bench.open():
        held = await bench.hold()
        monkeypatch.setattr(bench.script, "rows", refusing)
        tickets = [bench.ticket("a"), bench.ticket("b", "poison"), bench.ticket("c")]
        bench.release.set()
        await held.answers()
        with pytest.raises(RuntimeError, match="poison"):
            await tickets[1].answers()
        for ticket, text in ((tickets[0], "a"), (tickets[2], "c")):
            assert (await ticket.answers())[0].risk == alone(bench, text).risk
        assert bench.room.alive


async def test_a_nan_is_an_error_and_no_risk(bench: Bench) -> None:
    async with bench.open():
        bench.script.nan_layer = 1
        with pytest.raises(NonFiniteReadout):
            await bench.ticket("a", sampling=Sampling(), policy=OBSERVE).answers()
        bench.script.nan_layer = None
        await bench.ticket("a").answers()


async def test_a_failure_while_decoding_ends_that_answer_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    def wait() -> None:
        nonlocal turns
        turns += 1
        if turns == 5:
            raise RuntimeError("no memory")

    async with bench.open():
        monkeypatch.setattr(bench.script, "wait", wait)
        ticket = bench.ticket("a", sampling=Sampling(), policy=OBSERVE, streams=True)
        with pytest.raises(RuntimeError, match="no memory"):
            _ = [piece async for piece in ticket.pieces()]
        (report,) = await bench.ticket("b", sampling=Sampling(), policy=OBSERVE).answers()
        assert report.completion is not None


async def test_a_deadline_that_passes_in_the_queue_costs_no_forward(bench: Bench) -> None:
    async with bench.open():
        held = await bench.hold()
        prefills = bench.script.counters.prefills
        late = bench.ticket("late", seconds=0.05)
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await late.answers()
        await until(lambda: bench.engine.open == 1)
        bench.release.set()
        await held.answers()
        await bench.ticket("next").answers()
        assert bench.script.counters.prefills == prefills + 2


async def test_a_deadline_that_passes_while_decoding_ends_the_answer(bench: Bench) -> None:
    bench.script.answer = "x" * 400
    async with bench.open():
        bench.script.sleep_s = 0.05
        ticket = bench.ticket("a", sampling=Sampling(max_tokens=400), policy=OBSERVE, streams=True, seconds=3)
        await ticket.risks()
        with pytest.raises(DeadlineExceeded):
            _ = [piece async for piece in ticket.pieces()]
        await until(lambda: bench.engine.open == 0)


async def test_a_full_room_refuses_and_takes_all_or_none(bench: Bench) -> None:
    async with bench.open(max_queue=4):
        held = await bench.hold()
        kept = bench.ticket("a", "b")
        bench.room.check_not_full()
        with pytest.raises(Overloaded, match="3 of at most 4"):
            bench.ticket("c", "d")
        with pytest.raises(Overloaded):
            bench.room.check_space(2, Deadline(5))
        last = bench.ticket("e")
        assert bench.watch.last == (4, 0)
        with pytest.raises(Overloaded):
            bench.room.check_not_full()
        last.cancel()
        bench.room.check_not_full()  # those who left hold no place
        last = bench.ticket("f")
        bench.release.set()
        for ticket in (held, kept, last):
            await ticket.answers()
        bench.room.check_space(4, Deadline(5))


async def test_answers_under_way_hold_no_place(bench: Bench) -> None:
    bench.script.answer = "x" * 100
    async with bench.open(max_queue=1):
        bench.script.sleep_s = 0.01
        first = bench.ticket("a", sampling=Sampling(max_tokens=100), policy=OBSERVE)
        await first.risks()
        second = bench.ticket("b", sampling=Sampling(max_tokens=100), policy=OBSERVE)
        await second.risks()
        assert bench.watch.last == (0, 2)
        first.cancel()
        second.cancel()


async def test_what_cannot_be_answered_in_time_is_refused_at_once(bench: Bench) -> None:
    async with bench.open(max_queue=1000):
        bench.script.sleep_s = 0.01
        text = "x" * 99  # 100 tokens, 10 ms
        tickets = [bench.ticket(text) for _ in range(200)]  # 2 s of work
        bench.room.check_space(1, Deadline(0.5))  # nothing is known yet
        await tickets[100].answers()
        bench.room.check_space(1, Deadline(30))
        with pytest.raises(Overloaded, match="s of work is waiting") as refused:
            bench.ticket("y", seconds=0.1)
        assert refused.value.retry_after_s
        speed = bench.room._speed.value
        assert speed is not None
        assert speed < 15_000  # it is never more than 10,000; what is left is for the clock
        for ticket in tickets:
            ticket.cancel()
        bench.room.check_space(1, Deadline(0.1))


async def test_a_lone_client_says_nothing_about_speed(bench: Bench) -> None:
    async with bench.open():
        bench.script.sleep_s = 0.03
        for n in range(12):
            await bench.ticket(f"prompt {n}").answers()
        assert bench.room._speed.value is None


async def test_closing_ends_everything_with_not_ready(bench: Bench) -> None:
    bench.script.answer = "x" * 400
    async with bench.open():
        bench.script.sleep_s = 0.01
        decoding = bench.ticket("a", sampling=Sampling(max_tokens=400), policy=OBSERVE)
        await decoding.risks()
        held = await bench.hold()
        waiting = bench.ticket("waits", "and", "waits")
        await asyncio.to_thread(bench.room.close)
        assert bench.engine.open == 0
        for ticket in (held, waiting, decoding):
            with pytest.raises(NotReady, match="shutting down"):
                await ticket.answers()
        assert not bench.room.alive
        with pytest.raises(NotReady):
            bench.ticket("too late")
        with pytest.raises(NotReady):
            bench.room.check_space(1, Deadline(5))


async def test_an_engine_that_fails_whatever_it_is_given_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.serving.live.MOST_FAILURES", 4)
    broke: list[BaseException] = []
    async with bench.open(on_broken=broke.append):
        for failure, times in ((RequestError("not its fault"), 9), (RuntimeError("no memory"), 3), (None, 1)):
            bench.script.fail = failure
            for n in range(times):
                ticket = bench.ticket(f"prompt {n}")
                if failure is None:
                    await ticket.answers()
                else:
                    with pytest.raises(type(failure)):
                        await ticket.answers()
        assert bench.room.alive
        bench.script.fail = RuntimeError("device-side assert")
        for n in range(4):
            with pytest.raises(RuntimeError, match="device-side"):
                await bench.ticket(f"prompt {n}").answers()
            assert bench.room.alive == (n < 3)
        assert "4 prompts in a row failed" in str(broke[0])
        assert len(broke) == 1


async def test_a_dead_engine_is_given_up_at_its_first_word(bench: Bench) -> None:
    bench.script.answer = "x" * 400
    broke: list[BaseException] = []
    async with bench.open(on_broken=broke.append):
        bench.script.sleep_s = 0.01
        decoding = [bench.ticket(f"{n}", sampling=Sampling(max_tokens=400), policy=OBSERVE) for n in range(3)]
        for ticket in decoding:
            await ticket.risks()
        bench.engine.loop.call_soon_threadsafe(bench.engine.lose)
        for ticket in decoding:
            with pytest.raises((EngineError, NotReady)):
                await ticket.answers()
        assert not bench.room.alive
        assert len(broke) == 1
        assert "the engine is gone" in str(broke[0])


async def test_an_engine_that_drops_a_request_leaves_nobody_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: Any, **__: Any) -> AsyncGenerator[Update, None]:
        return
        yield Update()

    async def dropped(*_: Any, **__: Any) -> AsyncGenerator[Update, None]:
        raise asyncio.CancelledError
        yield Update()

    async def mute(*_: Any, **__: Any) -> AsyncGenerator[Update, None]:
        yield Update(piece="x")

    async with bench.open():
        for answer in (silent, dropped, mute):
            monkeypatch.setattr(bench.engine, "answer", answer)
            with pytest.raises(EngineError):
                await bench.ticket("a").answers()
        assert bench.room.alive


async def test_a_room_that_breaks_leaves_nobody_waiting(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(prompts: int, tokens: int) -> None:
        raise MemoryError

    broke: list[BaseException] = []
    async with bench.open(on_broken=broke.append):
        monkeypatch.setattr(bench.watch, "batch", broken)
        tickets = [bench.ticket("a"), bench.ticket("b", sampling=Sampling(), policy=OBSERVE)]
        for ticket in tickets:
            with pytest.raises(NotReady):
                await ticket.answers()
        assert not bench.room.alive
        assert isinstance(broke[0], MemoryError)


async def test_an_engines_loop_that_has_closed_is_a_dead_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.serving.live.LOOK_S", 600.0)  # the room's own look would find it dead by its flag
    bench, broke = Bench(tmp_path, one_loop=False), list[BaseException]()
    async with bench.open(on_broken=broke.append):
        await asyncio.to_thread(bench.engine.close)
        bench.engine.loop.close()
        bench.engine.alive = True  # as far as it knows
        with pytest.raises(NotReady):
            await bench.ticket("a").answers()
        assert not bench.room.alive
        assert "event loop has closed" in str(broke[0])


async def test_an_engine_that_ends_while_nobody_asks_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.serving.live.LOOK_S", 0.01)
    broke: list[BaseException] = []
    async with bench.open(on_broken=broke.append):
        await asyncio.sleep(0.03)
        assert bench.room.alive
        bench.engine.alive = False
        while not broke:
            await asyncio.sleep(0.01)
        assert not bench.room.alive
        assert "ended by itself" in str(broke[0])


async def test_whoever_comes_and_goes_leaves_nothing_behind(bench: Bench) -> None:
    """``open`` looks, after the last one, that neither the engine nor the gauges hold anything."""
    luck = random.Random(0)

    async def visit(n: int) -> str:
        await asyncio.sleep(luck.random() * 0.2)
        sampling = luck.choice([None, Sampling(max_tokens=luck.randint(1, 40))])
        policy = luck.choice([GATE, BLOCK.at(0.0), OBSERVE])
        texts = [f"{n} {place}" for place in range(luck.randint(1, 3))]
        ticket = bench.ticket(*texts, scorer=n % 2, policy=policy, sampling=sampling, streams=len(texts) == 1)
        if luck.random() < 0.4:
            await asyncio.sleep(luck.random() * 0.1)
            ticket.cancel(NotReady("gone"))
        try:
            reports = await ticket.answers()
        except NotReady:
            return "left"
        assert [one.risk for one in reports] == [alone(bench, text, n % 2).risk for text in texts]
        for report in reports:
            goes_on = sampling is not None and report.decision is Decision.CONTINUE
            assert (report.completion is not None) == goes_on
        return "stayed"

    bench.script.answer = "x" * 30
    async with bench.open(max_queue=1000):
        bench.script.sleep_s = 0.0002
        outcomes = await asyncio.gather(*(visit(n) for n in range(120)))
        assert set(outcomes) == {"left", "stayed"}
        await until(lambda: bench.engine.open == 0)
        assert bench.watch.last == (0, 0)
        assert bench.room._ahead == 0


def test_only_the_online_engine_is_one() -> None:
    script = ScriptedEngine()
    engine: OnlineEngine = ScriptedOnlineEngine(script)
    assert isinstance(engine, OnlineEngine)
    assert not isinstance(script, OnlineEngine)
    engine.close()
