"""The scheduler on the scripted engine: which prompts make a batch, turns, the KV budget,
synchronous calls."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engines import request_queue
from service.engines.base import FIRST_COME, Engine, Sampling, Turn, Update, prefill_of
from service.engines.bridge import wait_for
from service.engines.request_queue import FREE_PADDING, MAX_PADDING, EngineRequest, RequestQueue
from service.engines.scheduler import Scheduled
from service.engines.vllm.engine import VllmEngine
from service.errors import EngineError, RequestError
from service.readout import Probes
from tests.engines import tiny
from tests.matching import Held
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


def request(
    length: int, answer: int | None = None, caller: str = "", rank: int = 0
) -> EngineRequest:
    sampling = None if answer is None else Sampling(max_tokens=answer)
    turn = Turn(caller, rank) if caller else FIRST_COME
    return EngineRequest(
        [1] * length, [], False, sampling, None, cast(Any, None), turn, inbox=cast(Any, None)
    )


def queue(
    requests: list[EngineRequest], *, batch: int = 4096, kv: int = 1000, **held: int
) -> RequestQueue:
    """A queue whose answers hold so many tokens by caller."""
    waiting = RequestQueue(batch, kv)
    for entry in requests:
        waiting.add(entry)
    holds(waiting, **held)
    return waiting


def holds(waiting: RequestQueue, **held: int) -> None:
    waiting.answering = [request(1, tokens - 1, caller) for caller, tokens in held.items()]


REQUESTS = st.lists(
    st.builds(request, st.integers(1, 700), st.one_of(st.none(), st.integers(1, 300))),
    min_size=1,
    max_size=60,
)


@settings(deadline=None)
@given(REQUESTS)
def test_every_request_leaves_once_in_batches_that_fit(requests: list[EngineRequest]) -> None:
    waiting = queue(requests, batch=1024, kv=500)
    batched: list[EngineRequest] = []
    while waiting.waiting:
        oldest = next(entry for entry in requests if entry not in batched)
        batch = waiting.next_batch()
        assert batch[0] is oldest  # none starves
        assert len({entry.sampling is None for entry in batch}) == 1
        lengths = [len(entry.prompt) for entry in batch]
        if len(batch) > 1:
            most = min(1024, max(FREE_PADDING, MAX_PADDING * sum(lengths)))
            assert max(lengths) * len(batch) <= most
            assert sum(map(waiting._kv_tokens, batch)) <= 500
        batched += batch
    assert sorted(map(id, batched)) == sorted(map(id, requests))


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([400, 40, 410, 42, 395], [[0, 4, 2], [1, 3]]),  # nearest first, the others with the next
        ([5, 30, 9, 25], [[0, 2, 3, 1]]),  # short prompts go together whatever their lengths
    ],
)
def test_similar_lengths_are_batched(lengths: list[int], batches: list[list[int]]) -> None:
    requests = list(map(request, lengths))
    waiting = queue(requests)
    for batch in batches:
        assert waiting.next_batch() == [requests[number] for number in batch]


@pytest.mark.parametrize(
    ("requests", "turns"),
    [
        # Answers wait for space in the cache, scores overtake them, and the small answer not the
        # large one.
        (
            [request(400, 300), request(50, 50), request(60)],
            [({"another": 600}, [2]), ({"another": 600}, []), ({"another": 300}, [0]), ({}, [1])],
        ),
        # The last part of the cache is for those who hold nothing, and those are served by their
        # places.
        ([request(50, 50, "greedy", 900)], [({"greedy": 800}, []), ({"greedy": 700}, [0])]),
        (
            [request(50, 50, "greedy", 900), request(50, 50, "newcomer", 800)],
            [({"greedy": 800}, [1]), ({"greedy": 700}, [0])],
        ),
        # One beyond the whole cache goes alone.
        ([request(400, 3000), request(50, 50)], [({"another": 10}, []), ({}, [0]), ({}, [1])]),
    ],
)
def test_answers_begin_where_the_cache_has_room(
    requests: list[EngineRequest], turns: list[Any]
) -> None:
    waiting = queue(requests)
    for held, batch in turns:
        holds(waiting, **held)
        assert waiting.next_batch() == [requests[number] for number in batch]


def test_more_callers_than_a_step_holds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "MAX_TOGETHER", 2)
    waiting = queue([])
    waiting.answering = [request(9, 9, caller) for caller in ("many", *"ab", *["many"] * 20)]
    served = [answer.turn.caller for _ in range(30) for answer in waiting.next_step()]
    assert Counter(served) == {"many": 20, "a": 20, "b": 20}
    waiting.answering = waiting.answering[:1]
    assert len(waiting.next_step()) == 1


class Bench:
    """A scheduler on a scripted engine that can be blocked inside a forward pass."""

    def __init__(self) -> None:
        self.script = ScriptedEngine()
        self.probe = tiny.probes_of(self.script)
        self.batches: list[int] = []
        self.holding = Held()
        self.engine: Scheduled

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Bench]:
        self.engine = Scheduled(self.script, **options)
        self.engine.on_prefill = lambda prompts, tokens: self.batches.append(prompts)
        try:
            yield self
        finally:
            self.holding.release.set()
            await asyncio.to_thread(self.engine.close)
            assert self.script.counters.open_continuations == 0

    async def answer(self, text: str, probe: Probes | None = None, **options: Any) -> list[Update]:
        tokens, probes = self.script.tokenize(text), [probe or self.probe]
        async with aclosing(self.engine.answer(tokens, probes, **options)) as updates:
            return [update async for update in updates]

    def start(self, *request: Any, **options: Any) -> asyncio.Task[list[Update]]:
        return asyncio.create_task(self.answer(*request, **options))

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        """Inside, the engine stands still in a prompt's forward pass; it goes on once what was
        started waits."""
        self.script.before = self.holding
        held = self.start("held")
        await asyncio.to_thread(self.holding.entered.wait, 20)
        yield
        await asyncio.sleep(0)
        self.holding.release.set()
        await held

    def logits(self, text: str, probe: Probes | None = None) -> list[float]:
        """The prompt's truth logits alone."""
        prompt = self.script.tokenize(text)
        return tiny.trajectories(ScriptedEngine(), [prompt], probe or self.probe)[0].tolist()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def text_of(updates: Sequence[Update]) -> str:
    return "".join(update.piece for update in updates)


def logits(updates: Sequence[Update]) -> list[float]:
    return prefill_of(updates[0]).trajectories[0].tolist()


async def test_waiting_prompts_and_their_bundles_share_one_forward(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = Mock(wraps=bench.script.score)
    three = [tiny.probes_of(bench.script, seed=seed) for seed in range(3)]
    async with bench.open():
        async with bench.standing():
            monkeypatch.setattr(bench.script, "score", score)
            tasks = [bench.start(f"prompt {n}", three[n % 3]) for n in range(9)]
        scored = [logits(await task) for task in tasks]
        assert scored == [bench.logits(f"prompt {n}", three[n % 3]) for n in range(9)]
    assert bench.batches == [1, 9]
    assert [len(call.args[1]) for call in score.mock_calls] == [3]


@pytest.mark.parametrize("options", [{}, {"sampling": Sampling()}])
async def test_a_batch_that_fails_is_tried_one_by_one(
    bench: Bench, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = bench.script.tokenize("poison")

    def refuse(prompts: Sequence[Any]) -> None:
        if poison in prompts:
            raise RuntimeError("poison")

    async with bench.open():
        async with bench.standing():
            monkeypatch.setattr(bench.script, "check", refuse)
            tasks = [bench.start(name, **options) for name in ("a", "poison", "b")]
        assert [logits(await tasks[n]) for n in (0, 2)] == [bench.logits("a"), bench.logits("b")]
        with pytest.raises(RuntimeError, match="poison"):
            await tasks[1]
        assert bench.engine.alive


@pytest.mark.parametrize("poisoned", [set(), {7}])
async def test_a_step_that_fails_loses_at_most_the_answer_that_fails_alone(
    bench: Bench, poisoned: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.script.answer, failed = "x" * 9, list[int]()

    def step_together(rows: Sequence[Any]) -> None:
        numbers = {int(bench.script.detokenize(row._prompt)) for row in rows}
        if numbers & poisoned or not (poisoned or failed):
            failed.append(len(rows))
            raise RuntimeError("no memory")

    async with bench.open():
        async with bench.standing():
            tasks = [bench.start(str(n), sampling=Sampling()) for n in range(32)]
            monkeypatch.setattr(bench.script, "step_together", step_together)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert bench.engine.alive
    assert failed[0] == 32
    lost = {n for n, updates in enumerate(ended) if isinstance(updates, BaseException)}
    assert lost == poisoned
    answers = [updates for updates in ended if not isinstance(updates, BaseException)]
    assert set(map(text_of, answers)) == {"x" * 9}


def test_until_the_first_answer_scores_run_on_the_callers_thread(bench: Bench) -> None:
    threads: list[int] = []
    bench.script.before = lambda _: threads.append(threading.get_ident())
    engine: Engine = Scheduled(bench.script)
    engine.score([[1, 2]], [bench.probe])
    assert threads == [threading.get_ident()]
    engine.close()
    with pytest.raises(EngineError):
        engine.score([[1]], [bench.probe])


async def test_many_answers_of_one_caller_leave_another_every_second_token(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.script.answer, decoded = "x" * 60, list[str]()

    def step_together(rows: Sequence[Any]) -> None:
        decoded.extend(bench.script.detokenize(row._prompt) for row in rows)

    monkeypatch.setattr(bench.script, "step_together", step_together)
    monkeypatch.setattr(request_queue, "MAX_TOGETHER", 2)
    async with bench.open():
        long = Sampling(max_tokens=60)
        async with bench.standing():
            callers = [*["many"] * 12, "few"]
            tasks = [bench.start(caller, sampling=long, turn=Turn(caller)) for caller in callers]
        await asyncio.gather(*tasks)
    ended = len(decoded) - decoded[::-1].index("few")
    assert decoded.count("few") >= 60
    assert decoded[:ended].count("many") <= 90, "by answers it would be 720"


async def test_caches_of_running_answers_are_bounded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, opened = bench.script.counters, list[int]()
    monkeypatch.setattr(
        bench.script, "step_together", lambda _: opened.append(counters.open_continuations)
    )
    async with bench.open(max_kv_tokens=3 * 40):
        tasks = [bench.start(f"prompt {n}", sampling=Sampling(max_tokens=30)) for n in range(10)]
        for task in tasks:
            assert text_of(await task) == bench.script.answer
    assert 1 <= max(opened) <= 3


async def test_a_batch_waits_for_as_many_prompts_as_last_time(bench: Bench) -> None:
    async with bench.open(max_wait_s=5.0):
        async with bench.standing():
            tasks = [bench.start(f"first {n}") for n in range(4)]
        await asyncio.gather(*tasks)
        again = []
        for n in range(4):
            again.append(bench.start(f"second {n}"))
            await asyncio.sleep(0.02)
        await asyncio.gather(*again)
    assert bench.batches == [1, 4, 4]


async def test_synchronous_calls_and_scores_run_between_the_turns_of_a_long_answer(
    bench: Bench,
) -> None:
    """As a reload's golden prompts do, while prompts are being served."""
    bench.script.answer = "x" * 400
    threads: set[int] = set()
    prompts = [bench.script.tokenize(text) for text in "ab"]
    async with bench.open():
        engine, elsewhere = bench.engine, asyncio.to_thread
        bench.script.sleep_s = 0.002
        bench.script.before = lambda _: threads.add(threading.get_ident())
        answer = bench.start("long", sampling=Sampling(max_tokens=400))
        for n in range(5):
            await bench.answer(f"score {n}")
        read = await elsewhere(tiny.trajectories, engine, prompts, bench.probe)
        assert read.tolist() == [bench.logits("a"), bench.logits("b")]
        extraction = await elsewhere(engine.extract, prompts, [bench.probe.site])
        assert len(extraction.first_tokens) == 2
        (completion,) = await elsewhere(engine.generate, prompts[:1], Sampling(max_tokens=3))
        assert completion.text == "xxx"
        with pytest.raises(RequestError):
            await elsewhere(engine.score, [[999]], [bench.probe])
        assert not answer.done()
        assert len(threads) == 1  # the engine's
        answer.cancel()


async def test_synchronous_calls_and_answers_never_run_together(bench: Bench) -> None:
    busy = threading.Lock()

    def alone(_: str) -> None:
        assert busy.acquire(blocking=False), "two forward passes at once"
        threading.Event().wait(0.001)
        busy.release()

    bench.script.before = alone
    async with bench.open():
        prompt = bench.script.tokenize("a")
        calls = [asyncio.to_thread(bench.engine.score, [prompt], [bench.probe]) for _ in range(20)]
        await asyncio.gather(*calls[:10], *(bench.answer(f"{n}") for n in range(20)), *calls[10:])


async def test_after_its_thread_has_failed_no_call_hangs(bench: Bench) -> None:
    """Those who waited for it: tests/serving/test_dispatcher.py."""
    prompt = bench.script.tokenize("a")
    async with bench.open():
        bench.engine.on_prefill = Mock(side_effect=MemoryError)
        with pytest.raises(EngineError):
            await bench.answer("a")
        assert not bench.engine.alive
        assert len(await asyncio.to_thread(bench.engine.score, [prompt], [bench.probe])) == 1


async def test_a_backlog_of_updates_does_not_starve_the_loop(bench: Bench) -> None:
    bench.script.answer = "x" * 300
    async with bench.open():
        iterations = 0
        counting = True
        loop = asyncio.get_running_loop()

        def count() -> None:
            nonlocal iterations
            iterations += 1
            if counting:
                loop.call_soon(count)

        sampling = Sampling(max_tokens=300)
        async with aclosing(bench.engine.answer([1], [bench.probe], sampling=sampling)) as updates:
            await anext(updates)
            await asyncio.sleep(0.2)  # all of the answer waits by now
            loop.call_soon(count)
            async for _ in updates:
                pass
            assert iterations >= 3
        counting = False


def test_waiting_works_inside_a_running_loop() -> None:
    async def work() -> int:
        return 1

    async def notebook() -> int:
        return wait_for(work())

    assert wait_for(notebook()) == 1


@pytest.mark.parametrize("engine", [ScriptedEngine(), cast(Any, object.__new__(VllmEngine))])
def test_engines_that_cannot_trace_say_so_even_without_prompts(engine: Any) -> None:
    for call in (lambda: engine.sample([], Sampling(), []), lambda: engine.next_token([], [1])):
        with pytest.raises(EngineError, match="transformers engine") as caught:
            call()
        assert caught.value.param == "methods"
