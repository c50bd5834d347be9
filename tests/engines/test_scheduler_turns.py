"""Whose turn it is on the engine, by a clock that only passes of prompts and steps of decoding move
on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.engines import shares
from service.engines.base import Sampling, Turn
from service.engines.request_queue import RequestQueue
from service.engines.shares import Account, Kind, Shares
from service.errors import EngineError
from tests.engines import tiny
from tests.engines.test_scheduler import Bench, holds, logits, request
from tests.matching import Held
from tests.running import until, until_on_loop
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio
STEP_S = 1 / 64  # of decoding: a quantum has four; a pass takes a second
LONG = "x" * 31  # four passes of 8 tokens


class Timed(Bench):
    """A bench with such a clock; ``log`` has each pass and step as it begins, and ``held_at`` where
    to stand still."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.log = list[str]()
        self.held_at = dict[int, Held]()
        self._passing = False
        self.script.max_batch_tokens, self.script.answer = 8, "x" * 300
        self.script.before, self.script.wait = self.before, self.wait  # type: ignore[method-assign]

    def before(self, method: str) -> None:
        self._begin(method, 1.0)
        self._passing = True

    def wait(self) -> None:
        if not self._passing:
            self._begin("step", STEP_S)
        self._passing = False

    def _begin(self, name: str, seconds: float) -> None:
        self.log.append(name)
        if (held := self.held_at.get(len(self.log) - 1)) is not None:
            held(name)
        self.now += seconds

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Timed]:
        try:
            async with super().open(clock=lambda: self.now, **options):
                yield self
        finally:
            for held in self.held_at.values():
                held.release.set()

    @asynccontextmanager
    async def held_in(self, number: int, meanwhile: int = 0) -> AsyncIterator[None]:
        """Inside, the engine stands still in this pass or step; it goes on once so many prompts
        wait."""
        held = self.held_at[number]
        assert await asyncio.to_thread(held.entered.wait, 20)
        yield
        await until_on_loop(lambda: len(self.engine._queue.waiting) >= meanwhile)
        held.release.set()


@pytest.fixture
def timed() -> Timed:
    return Timed()


@pytest.mark.parametrize("caller", ["long", "other"])
@pytest.mark.parametrize(
    ("options", "last"), [({}, "score"), ({"sampling": Sampling(max_tokens=1)}, "begin")]
)
async def test_short_prompts_run_between_the_passes_of_a_long_one(
    timed: Timed, caller: str, options: dict[str, Any], last: str
) -> None:
    timed.held_at[0] = Held()
    async with timed.open():
        long = timed.start(LONG, turn=Turn("long"), **options)
        async with timed.held_in(0, meanwhile=3):
            texts = [str(n) * 7 for n in range(3)]
            shorts = [
                timed.start(text, turn=Turn(caller, 32 + number))
                for number, text in enumerate(texts)
            ]
        assert [logits(await short) for short in shorts] == [timed.logits(text) for text in texts]
        first, *_ = await long
        assert logits([first]) == timed.logits(LONG)
        assert first.prefill_s == 7, "from its first pass to its last"
    assert timed.log == [*["chunk", "score"] * 3, last]
    assert timed.batches == [1] * 7


@pytest.mark.parametrize("options", [{"first_token": True}, {"last": [1, 2, 3]}])
async def test_callers_have_their_turns_between_synchronous_scores(
    timed: Timed, options: dict[str, Any]
) -> None:
    """As a reload's golden prompts are scored while prompts are being served, and its golden
    answers are read."""
    answers, order = "last" in options, list[str]()
    golden = [timed.script.tokenize(f"golden{n}") for n in range(3)]
    expected = ScriptedEngine(answer=timed.script.answer).score(golden, [timed.probe], **options)
    score = timed.script.score

    def recorded(prompts: Any, *arguments: Any, **options: Any) -> Any:
        order.extend(timed.script.detokenize(prompt)[:-1] for prompt in prompts)
        if answers and order[-1] == "caller" and 0 < order.count("golden") < 3:
            until(lambda: bool(timed.engine._calls))  # its thread asks for the next one
        return score(prompts, *arguments, **options)

    timed.script.score = recorded  # type: ignore[method-assign]
    timed.held_at[0] = Held()
    async with timed.open():
        caller = [timed.start(f"caller{n}", turn=Turn("caller")) for n in range(4)]
        async with timed.held_in(0, meanwhile=3 if answers else 6):
            work = asyncio.to_thread(timed.engine.score, golden, [timed.probe], **options)
            scoring = asyncio.create_task(work)
            await until_on_loop(lambda: not answers or bool(timed.engine._calls))
        for scored, result in zip(await scoring, expected, strict=True):
            tiny.check_same(scored, result, tokens=not answers, rtol=0, atol=0)
        await asyncio.wait(caller)
    assert order[:5] == ["caller", "golden", "caller", "golden", "caller"]
    assert sorted(order) == ["caller"] * 4 + ["golden"] * 3


async def test_long_prompts_of_two_callers_take_turns_and_those_of_one_follow_each_other(
    timed: Timed,
) -> None:
    timed.held_at[0] = Held()
    ended: list[asyncio.Task[Any]] = []
    async with timed.open():
        tasks = [timed.start(LONG, turn=Turn("a"))]
        async with timed.held_in(0, meanwhile=2):
            tasks += [timed.start(LONG, turn=turn) for turn in (Turn("a", 32), Turn("b"))]
        for task in tasks:
            task.add_done_callback(ended.append)
        await asyncio.wait(tasks)
        await asyncio.sleep(0)
    assert [tasks.index(task) for task in ended] == [0, 2, 1]


@pytest.mark.parametrize(("text", "kind"), [("a", Kind.PROMPT), (LONG, Kind.LONG)])
@pytest.mark.parametrize("options", [{}, {"sampling": Sampling(max_tokens=1)}])
async def test_a_pass_that_fails_ends_its_prompt_alone_and_its_time_was_given_all_the_same(
    timed: Timed, text: str, kind: Kind, options: dict[str, Any]
) -> None:
    timed.script.fail = RuntimeError("no memory")
    async with timed.open():
        with pytest.raises(RuntimeError, match="no memory"):
            await timed.start(text, turn=Turn("caller"), **options)
        assert timed.engine._queue._shares.given("caller", kind) == (1.0, 1.0)
        timed.script.fail = None
        assert logits(await timed.answer(text)) == timed.logits(text)
        assert timed.engine._queue.reading == []


@pytest.mark.parametrize("text", ["a", LONG])
async def test_closing_ends_what_was_begun_and_refuses_more(timed: Timed, text: str) -> None:
    """Between two steps of an answer, or two passes over a prompt."""
    timed.held_at[1] = Held()
    async with timed.open():
        begun = timed.start(text, sampling=Sampling(max_tokens=300))
        async with timed.held_in(1):
            closing = asyncio.create_task(asyncio.to_thread(timed.engine.close))
            await until_on_loop(lambda: not timed.engine.alive)
        await closing
        for work in (begun, timed.answer("b")):
            with pytest.raises(EngineError):
                await work


async def test_decoding_holds_the_engine_for_a_quantum_beside_a_waiting_prompt(
    timed: Timed,
) -> None:
    """However long the pass before took: what is owed for that, its own caller pays before the next
    one."""
    timed.held_at = {10: Held(), 34: Held()}
    async with timed.open():
        answer = timed.start("a", sampling=Sampling(max_tokens=300), turn=Turn("busy"))
        async with timed.held_in(10, meanwhile=1):
            long = timed.start(LONG, turn=Turn("busy", 9))
        async with timed.held_in(34, meanwhile=1):
            assert timed.log.count("chunk") == 1
            other = timed.start("b", turn=Turn("other"))
        for task in (other, long, answer):
            await task
    assert "score" in timed.log[35:40], "the other caller's, four steps later at most"
    passes = [position for position, name in enumerate(timed.log) if name in ("chunk", "score")]
    chunks = [position for position in passes if timed.log[position] == "chunk"]
    for chunk, next_ in zip(chunks, chunks[1:], strict=False):
        steps = timed.log[chunk:next_].count("step")
        assert 60 <= steps <= 68, "of 64 in a second: half and half"


async def test_the_time_to_read_a_prompt_is_of_its_passes_at_the_fastest_of_late(
    timed: Timed,
) -> None:
    """A pass takes a second, however small: so says its own size, and large ones the time of
    more."""
    long, short = [timed.script.tokenize(text) for text in (LONG, "a")]
    async with timed.open():
        seconds_to_read = timed.engine.seconds_to_read
        await timed.answer("a")
        assert seconds_to_read(short) is None, "one small pass may have been slow"
        await timed.answer(LONG)
        assert seconds_to_read(long) == 4
        assert seconds_to_read([*long, *long]) == 8
        await timed.answer("xyz")
        assert seconds_to_read(long) == 4, "the fastest"
        assert seconds_to_read(short) == 2 / 8
        for _ in range(3):
            await timed.answer("a")
        assert seconds_to_read(short) == 1
        assert seconds_to_read(short[:1]) == 1 / 2
        timed.script.pass_costs = lambda prompt: [8.0, 24.0]  # type: ignore[method-assign]
        assert seconds_to_read(long) == 4, "of what it costs, not of its tokens"
        timed.now += 61
        assert seconds_to_read(long) is None


async def test_the_cost_of_each_pass_counts_in_what_is_measured(timed: Timed) -> None:
    costs = [8.0, 16.0, 32.0, 16.0]
    timed.script.pass_costs = lambda prompt: costs  # type: ignore[method-assign]
    async with timed.open():
        seconds_to_read = timed.engine.seconds_to_read
        await timed.answer(LONG)
        assert seconds_to_read([]) == 72 / 32
        costs = [4.0]
        for text in "abcd":
            await timed.answer(text)
        assert seconds_to_read([]) == 4 / 32


async def test_how_long_the_engine_waited_for_a_cpu_is_known_where_the_system_counts_it(
    timed: Timed,
) -> None:
    async with timed.open():
        assert timed.engine.waited_for_cpu_s == 0.0, "there is no thread"
        await timed.answer("a")
        thread = timed.engine._thread
        assert thread is not None
        counts = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        if counts.exists():
            before = counts.read_text()
            waited_s = timed.engine.waited_for_cpu_s
            after = counts.read_text()
            assert int(before.split()[1]) <= round(1e9 * waited_s) <= int(after.split()[1])
    assert timed.engine.waited_for_cpu_s == 0.0, "it has ended"


def test_long_scores_hold_at_most_half_of_the_cache() -> None:
    waiting = RequestQueue(100, 1000)
    score, later, short, answer = request(300), request(900), request(50), request(50, 50)
    for entry in (score, later, answer, short):
        waiting.add(entry)
    holds(waiting, another=600)
    assert waiting.next_batch() == [score]
    assert waiting.reading == [score]
    holds(waiting, another=200)
    waiting.reading = [later]
    waiting.waiting.remove(later)
    assert waiting._kv_tokens(later) == 500
    assert [list(waiting._startable())] == [[answer, short]]


def test_whoever_was_given_least_goes_first_and_newcomers_start_where_the_others_are() -> None:
    account = Account[str]()
    for name, seconds in (("a", 5.0), ("b", 2.0), ("b", 2.0)):
        account.begin(name)
        account.give(name, seconds)
    assert (account.given("a"), account.given("b")) == (5.0, 4.0)
    account.begin("b")
    account.give("b", 3.0)
    assert (account.given("b"), account.given("new")) == (7.0, 4.0)
    assert account.forget() == []
    account.begin("a")
    assert account.given("new") == 5.0
    assert account.forget() == ["a"]
    assert account.given("a") == 5.0


def test_callers_share_the_engine_and_their_work_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "MAX_REMEMBERED", 4)
    had = Shares()
    work = [("a", Kind.ANSWER), ("a", Kind.PROMPT), ("b", Kind.PROMPT)]
    seconds = dict.fromkeys(work, 0.0)
    for _ in range(400):
        turn = min(work, key=lambda kind: had.given(*kind))
        had.begin(*turn)
        had.give(*turn, 0.25)
        seconds[turn] += 0.25
    assert list(seconds.values()) == [25.0, 25.0, 50.0]
    for n in range(100):
        had.begin(str(n), Kind.PROMPT)
        had.give(str(n), Kind.PROMPT, 0.0)
    assert len(had._kinds) <= 7
