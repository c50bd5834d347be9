"""The dispatcher on the scripted engine: admission, fairness, failures, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.engines.base import EngineGate, PrefillResult, Sampling, TokenIds, Update
from service.errors import DeadlineExceeded, EngineError, NonFiniteReadout, NotReady, Overloaded, RequestError
from service.policies.guard import BLOCK, GATE, OBSERVE, Decision, Policy
from service.scoring import RiskReport, Scorer
from service.serving.admission import Deadline
from service.serving.dispatcher import Dispatcher
from service.serving.dispatcher import RequestHandle
from tests.engine_kinds import KINDS, OnOwnLoop, engine_of
from tests.matching import Held, matching_bundle
from tests.scripted_engine import ScriptedEngine

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
    """A dispatcher with its parts in reach."""

    def __init__(self, tmp_path: Path, kind: str) -> None:
        self.tmp_path, self.kind = tmp_path, kind
        self.script = ScriptedEngine()
        self.watch = Watch()
        self.holding = Held()
        self.dispatcher: Dispatcher
        self.plain = engine_of(self.script)  # never asked to answer: it scores on the caller's thread

    @asynccontextmanager
    async def open(
        self, *, max_queue: int = 64, max_kv_tokens: int = 4096, max_wait_s: float = 0.0, **options: Any
    ) -> AsyncIterator[Bench]:
        self.engine = engine_of(self.script, self.kind, max_kv_tokens=max_kv_tokens, max_wait_s=max_wait_s)
        bundles = [matching_bundle(self.script, self.tmp_path, name, seed) for seed, name in enumerate(("one", "two"))]
        self.scorers = [Scorer(self.engine, bundle) for bundle in bundles]
        self.alone = [Scorer(self.plain, bundle) for bundle in bundles]
        self.dispatcher = Dispatcher(self.engine, self.watch, max_queue=max_queue, **options)
        try:
            yield self
        finally:
            closing = asyncio.create_task(asyncio.to_thread(self.dispatcher.close))
            await until(lambda: not self.dispatcher.alive)
            self.holding.release.set()
            await closing
            await until(lambda: self.script.counters.open_continuations == 0)
            assert self.watch.last == (0, 0)
            assert self.dispatcher._queue.is_empty
            assert not self.dispatcher._tasks
            await asyncio.to_thread(self.engine.close)

    def request(
        self, *texts: str, scorer: int = 0, policy: Policy = GATE, seconds: float = 20, **options: Any
    ) -> RequestHandle:
        prompts = [self.script.tokenize(text) for text in texts]
        handle = self.dispatcher.admit(
            len(prompts), self.scorers[scorer], policy, deadline=Deadline(seconds), **options
        )
        handle.start(prompts)
        return handle

    async def hold(self) -> RequestHandle:
        """Make the engine stand still inside a forward pass until ``release`` is set."""
        self.script.before = self.holding
        handle = self.request("the one that is held")
        await asyncio.to_thread(self.holding.entered.wait, 20)
        return handle

    def report(self, text: str, scorer: int = 0) -> RiskReport:
        """What the prompt gets by itself."""
        return self.alone[scorer].score([self.script.tokenize(text)])[0]

    def check_space(self, prompts: int, seconds: float) -> None:
        self.dispatcher.admit(prompts, self.scorers[0], GATE, deadline=Deadline(seconds)).cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail where it does not come."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never became true")


async def text_of(handle: RequestHandle) -> list[str]:
    return [piece async for pieces in handle.pieces() for piece in pieces]


@pytest.fixture(params=KINDS)
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    return Bench(tmp_path, request.param)


ANSWER = {"sampling": Sampling(), "policy": OBSERVE}
LONG = {"sampling": Sampling(max_tokens=400), "policy": OBSERVE}


async def test_every_prompt_gets_its_own_risk_by_its_own_bundle(bench: Bench) -> None:
    async with bench.open():
        held = await bench.hold()
        handles = [bench.request(f"{n} one", f"{n} two", scorer=n % 2) for n in range(12)]
        assert bench.watch.last == (25, 0)
        bench.holding.release.set()
        await held.answers()
        for n, handle in enumerate(handles):
            pair = await handle.answers()
            assert [one.risk for one in pair] == [bench.report(f"{n} {name}", n % 2).risk for name in ("one", "two")]
            assert all(one.completion is None for one in pair)
        assert sum(bench.watch.batches) == 25


async def test_answers_have_risk_text_and_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench.open():
        answer = bench.engine.answer

        async def cached(*arguments: Any, **options: Any) -> AsyncGenerator[Update, None]:
            async for update in answer(*arguments, **options):
                yield replace(update, cached_tokens=3)

        monkeypatch.setattr(bench.engine, "answer", cached)
        handle = bench.request("a", "b", **ANSWER)
        reports = await handle.answers()
        assert [one.completion.text for one in reports if one.completion] == ["It is so."] * 2
        assert [one.cached_tokens for one in reports] == [3, 3]
        assert [one.risk for one in reports] == [bench.report(text).risk for text in "ab"]
        for job in handle.jobs:
            assert job.tokens == len("It is so.")
            assert job.decode_s is not None
            assert job.timings.prefill > 0
            assert min(job.timings.queue, job.timings.probe, job.decode_s) >= 0


@pytest.mark.parametrize("policy", [GATE, BLOCK])
@pytest.mark.parametrize("honoured", [True, False])
async def test_a_gated_prompt_gives_no_token(
    bench: Bench, policy: Policy, honoured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not honoured:
        monkeypatch.setattr(EngineGate, "closes", lambda *_: False)
    async with bench.open():
        handle = bench.request("a", sampling=Sampling(), policy=policy.at(0.0), streams=True)
        (report,) = await handle.answers()
        assert await text_of(handle) == []
        assert report.completion is None
        assert handle.jobs[0].tokens == 0
        assert handle.jobs[0].decode_s is None
        await until(lambda: bench.script.counters.open_continuations == 0)
        if honoured:
            assert bench.script.counters.decode_steps == 0


async def test_an_answer_that_the_engine_alone_gated_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineGate, "closes", lambda *_: True)
    async with bench.open():
        with pytest.raises(EngineError, match="complete"):
            await bench.request("a", sampling=Sampling(), policy=GATE.at(0.999999)).answers()
        assert bench.dispatcher.alive


async def test_a_stream_has_the_risk_before_its_pieces(bench: Bench) -> None:
    async with bench.open():
        handle = bench.request("a", sampling=Sampling(max_tokens=5), policy=OBSERVE, streams=True)
        (report,) = await handle.risks()
        assert report.risk == bench.report("a").risk
        assert report.completion is None
        assert await text_of(handle) == list("It is")
        (answer,) = await handle.answers()
        assert answer.completion is not None
        assert (answer.completion.text, answer.completion.finish_reason) == ("It is", "length")


async def test_a_token_without_text_counts_and_is_no_piece(bench: Bench) -> None:
    bench.script.answer = "é" * 20
    async with bench.open():
        handle = bench.request("a", sampling=Sampling(max_tokens=40), policy=OBSERVE, streams=True)
        assert await text_of(handle) == ["é"] * 20
        assert handle.jobs[0].tokens == 40


async def test_cancelling_frees_the_engine_at_once(bench: Bench) -> None:
    bench.script.answer = "x" * 400
    async with bench.open():
        held = await bench.hold()
        prefills = bench.script.counters.prefills
        waiting = [bench.request(f"prompt {n}") for n in range(5)]
        for handle in waiting:
            handle.cancel(NotReady("gone"))
            with pytest.raises(NotReady):
                await handle.answers()
        assert bench.watch.last == (1, 0)
        bench.holding.release.set()
        await held.answers()
        bench.script.sleep_s = 0.02
        decoding = bench.request("a", **LONG)
        await decoding.risks()
        assert bench.watch.last == (0, 1)
        assert bench.script.counters.prefills == prefills + 2
        decoding.cancel(NotReady("gone"))
        assert bench.watch.last == (0, 0)
        await until(lambda: bench.script.counters.open_continuations == 0)
        assert bench.script.counters.decode_steps < 300


async def test_a_request_that_ends_before_it_starts_gives_its_places_back(bench: Bench) -> None:
    async with bench.open(max_queue=2):
        prefills = bench.script.counters.prefills
        handle = bench.dispatcher.admit(2, bench.scorers[0], GATE, deadline=Deadline(20))
        with pytest.raises(Overloaded):
            bench.request("a")
        handle.cancel()
        assert bench.watch.last == (0, 0)
        handle.start([[1], [2]])  # a request that its client has left while it was tokenized
        await bench.request("a", "b").answers()
        assert bench.script.counters.prefills == prefills + 2


async def test_one_prompts_fault_does_not_fail_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    poison = bench.script.tokenize("poison")
    activations = bench.script.activations

    def refusing(prompt: Any, site: Any) -> Any:
        if prompt == poison:
            raise RuntimeError("poison")
        return activations(prompt, site)

    async with bench.open():
        held = await bench.hold()
        monkeypatch.setattr(bench.script, "activations", refusing)
        handles = [bench.request("a"), bench.request("b", "poison"), bench.request("c")]
        bench.holding.release.set()
        await held.answers()
        with pytest.raises(RuntimeError):
            await handles[1].answers()
        for handle, text in ((handles[0], "a"), (handles[2], "c")):
            assert (await handle.answers())[0].risk == bench.report(text).risk
        assert bench.dispatcher.alive


async def test_a_nan_is_an_error_and_no_risk(bench: Bench) -> None:
    async with bench.open():
        bench.script.nan_layer = 1
        with pytest.raises(NonFiniteReadout):
            await bench.request("a", **ANSWER).answers()
        bench.script.nan_layer = None
        await bench.request("a").answers()


async def test_a_failure_while_decoding_ends_that_answer_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    def wait() -> None:
        nonlocal turns
        turns += 1
        if turns == 5:
            raise RuntimeError("no memory")

    async with bench.open():
        monkeypatch.setattr(bench.script, "wait", wait)
        handle = bench.request("a", streams=True, **ANSWER)
        with pytest.raises(RuntimeError):
            await text_of(handle)
        (report,) = await bench.request("b", **ANSWER).answers()
        assert report.completion is not None


async def test_a_deadline_that_passes_in_the_queue_costs_no_forward(bench: Bench) -> None:
    async with bench.open():
        held = await bench.hold()
        prefills = bench.script.counters.prefills
        late = bench.request("late", seconds=0.05)
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await late.answers()
        await asyncio.sleep(0.05)  # on its own loop, the engine learns of it a moment later
        bench.holding.release.set()
        await held.answers()
        await bench.request("next").answers()
        assert bench.script.counters.prefills == prefills + 2


async def test_a_deadline_that_passes_while_decoding_ends_the_answer(bench: Bench) -> None:
    bench.script.answer = "x" * 400
    async with bench.open():
        bench.script.sleep_s = 0.05
        handle = bench.request("a", streams=True, seconds=3, **LONG)
        await handle.risks()
        with pytest.raises(DeadlineExceeded):
            await text_of(handle)
        await until(lambda: bench.script.counters.open_continuations == 0)


async def test_a_full_queue_refuses_and_takes_all_or_none(bench: Bench) -> None:
    async with bench.open(max_queue=4):
        held = await bench.hold()
        kept = bench.request("a", "b")
        bench.dispatcher.check_not_full("")
        with pytest.raises(Overloaded, match="3 of at most 4"):
            bench.request("c", "d")
        last = bench.request("e")
        assert bench.watch.last == (4, 0)
        with pytest.raises(Overloaded):
            bench.dispatcher.check_not_full("")
        last.cancel()
        bench.dispatcher.check_not_full("")  # a cancelled request holds no place
        last = bench.request("f")
        bench.holding.release.set()
        for handle in (held, kept, last):
            await handle.answers()
        bench.check_space(4, 5)


async def test_whoever_sends_much_does_not_delay_another(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer's prompt begins the next batch but one at the latest, although 200 of another caller came before."""
    bench.script.max_batch_tokens = 64
    batches: list[list[TokenIds]] = []
    score = bench.script.score

    def recording(prompts: Sequence[TokenIds], *arguments: Any, **options: Any) -> list[PrefillResult]:
        batches.append(list(prompts))
        return score(prompts, *arguments, **options)

    async with bench.open(max_queue=1024):
        held = await bench.hold()
        monkeypatch.setattr(bench.script, "score", recording)
        busy = [bench.request(*(f"{n} {m}" for m in range(10)), caller="busy") for n in range(20)]
        other = bench.request("mine", caller="other")
        await until(lambda: len(bench.engine._queue.waiting) == 201)
        bench.holding.release.set()
        for handle in (held, other, *busy):
            await handle.answers()
    assert bench.script.tokenize("mine") in batches[0] + batches[1]
    assert len(batches) > 10


async def test_the_last_places_are_for_others(bench: Bench) -> None:
    async with bench.open(max_queue=16):
        await bench.hold()
        bench.request(*"abcdefghijklm", caller="busy")
        with pytest.raises(Overloaded, match="14 of at most 15"):
            bench.request("n", "o", caller="busy")
        bench.request("n", "o", caller="other")


async def test_an_engine_that_stands_still_is_stalled_until_it_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the prompts that waited for it have given up; one that is slow, or has nothing to do, is not."""
    monkeypatch.setattr("service.serving.dispatcher.WATCH_S", 0.001)
    now = 0.0

    async def looked_at() -> None:
        await asyncio.sleep(0.02)

    async with bench.open(stall_s=20, clock=lambda: now):
        now += 60
        await looked_at()
        assert not bench.dispatcher.stalled  # nothing waits
        bench.script.before = bench.holding
        waiting = bench.request("a", seconds=0.2)
        now += 20
        await looked_at()
        assert not bench.dispatcher.stalled
        now += 1
        await until(lambda: bench.dispatcher.stalled)
        with pytest.raises(DeadlineExceeded):
            await waiting.answers()
        await looked_at()
        assert bench.dispatcher.stalled
        bench.holding.release.set()
        await until(lambda: not bench.dispatcher.stalled)
        bench.script.answer, bench.script.sleep_s = "x" * 20, 0.005
        slow = bench.request("b", streams=True, **LONG)
        async for _ in slow.pieces():
            now += 19
            await looked_at()
            assert not bench.dispatcher.stalled


async def test_answers_being_decoded_hold_no_place(bench: Bench) -> None:
    bench.script.answer = "x" * 100
    async with bench.open(max_queue=1):
        bench.script.sleep_s = 0.01
        first = bench.request("a", **LONG)
        await first.risks()
        second = bench.request("b", **LONG)
        await second.risks()
        assert bench.watch.last == (0, 2)
        first.cancel()
        second.cancel()


async def test_scores_are_not_refused_for_answers_that_wait_for_the_cache(bench: Bench) -> None:
    bench.script.answer = "x" * 300
    async with bench.open(max_kv_tokens=700):
        bench.script.sleep_s = 0.002
        answers = [bench.request(f"answer {n}", sampling=Sampling(max_tokens=300), policy=OBSERVE) for n in range(12)]
        await answers[0].risks()
        for n in range(30):
            bench.check_space(1, 0.5)
            await bench.request(f"score {n}", seconds=0.5).answers()
        for answer in answers:
            answer.cancel()


async def test_what_cannot_be_answered_in_time_is_refused_at_once(bench: Bench) -> None:
    bench.script.max_batch_tokens = 100
    async with bench.open(max_queue=1000):
        bench.script.sleep_s = 0.01
        text = "x" * 99  # 100 tokens, 10 ms
        handles = [bench.request(text) for _ in range(600)]  # 6 s of work: a pause of the machine does not use it up
        bench.check_space(1, 0.5)  # nothing is known yet
        for handle in handles[100:500]:  # the speed is known once enough of them have waited
            await handle.answers()
            if bench.dispatcher._speed.value is not None:
                break
        bench.check_space(1, 30)
        with pytest.raises(Overloaded, match="s of work is waiting") as refused:
            bench.request("y", seconds=0.1)
        assert refused.value.retry_after_s
        speed = bench.dispatcher._speed.value
        assert speed is not None
        assert speed < 15_000  # it is never more than 10,000; what is left is for the clock
        for handle in handles:
            handle.cancel()
        bench.check_space(1, 0.1)


async def test_a_single_client_gives_no_measurement_of_speed(bench: Bench) -> None:
    async with bench.open():
        bench.script.sleep_s = 0.03
        for n in range(12):
            await bench.request(f"prompt {n}").answers()
        assert bench.dispatcher._speed.value is None


async def test_closing_ends_everything_with_not_ready(bench: Bench) -> None:
    bench.script.answer = "x" * 400
    async with bench.open():
        bench.script.sleep_s = 0.01
        decoding = bench.request("a", **LONG)
        await decoding.risks()
        held = await bench.hold()
        waiting = bench.request("waits", "and", "waits")
        await asyncio.to_thread(bench.dispatcher.close)
        for handle in (held, waiting, decoding):
            with pytest.raises(NotReady):
                await handle.answers()
        assert not bench.dispatcher.alive
        with pytest.raises(NotReady):
            bench.request("too late")


async def test_an_engine_that_fails_on_everything_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.serving.dispatcher.MAX_FAILURES", 4)
    broke: list[BaseException] = []
    async with bench.open(on_broken=broke.append):
        for failure, times in ((RequestError("not its fault"), 9), (RuntimeError("no memory"), 3), (None, 1)):
            bench.script.fail = failure
            for n in range(times):
                handle = bench.request(f"prompt {n}")
                if failure is None:
                    await handle.answers()
                else:
                    with pytest.raises(type(failure)):
                        await handle.answers()
        assert bench.dispatcher.alive
        bench.script.fail = RuntimeError("device-side assert")
        for n in range(4):
            with pytest.raises(RuntimeError):
                await bench.request(f"prompt {n}").answers()
            assert bench.dispatcher.alive == (n < 3)
        assert "4 prompts in a row failed" in str(broke[0])
        assert len(broke) == 1


async def test_an_engine_whose_thread_fails_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    broke: list[BaseException] = []

    def broken(prompts: int, tokens: int) -> None:
        raise MemoryError

    async with bench.open(on_broken=broke.append):
        monkeypatch.setattr(bench.engine, "on_prefill", broken)
        handles = [bench.request("a"), bench.request("b", **ANSWER)]
        for handle in handles:
            with pytest.raises((EngineError, NotReady)):
                await handle.answers()
        await until(lambda: not bench.dispatcher.alive)
        assert len(broke) == 1


async def test_a_dead_engine_is_given_up_at_its_first_error(bench: Bench) -> None:
    bench.script.answer = "x" * 400
    broke: list[BaseException] = []
    async with bench.open(on_broken=broke.append):
        bench.script.sleep_s = 0.01
        decoding = [bench.request(f"{n}", **LONG) for n in range(3)]
        for handle in decoding:
            await handle.risks()
        await asyncio.to_thread(bench.engine.close)
        for handle in decoding:
            with pytest.raises((EngineError, NotReady)):
                await handle.answers()
        assert not bench.dispatcher.alive
        assert len(broke) == 1


async def test_an_engine_that_ends_while_idle_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.serving.dispatcher.WATCH_S", 0.01)
    broke: list[BaseException] = []
    async with bench.open(on_broken=broke.append):
        await asyncio.sleep(0.03)
        assert bench.dispatcher.alive
        await asyncio.to_thread(bench.engine.close)
        await until(lambda: bool(broke))
        assert not bench.dispatcher.alive
        assert "ended by itself" in str(broke[0])


async def test_an_engine_that_drops_a_request_leaves_no_caller_waiting(
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
                await bench.request("a").answers()
        assert bench.dispatcher.alive


async def test_an_engines_loop_that_has_closed_fails_its_requests(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "own loop")
    async with bench.open():
        assert isinstance(bench.engine, OnOwnLoop)
        await asyncio.to_thread(bench.engine.end_loop)
        with pytest.raises(EngineError):
            await bench.request("a").answers()


async def test_random_clients_leave_nothing_behind(bench: Bench) -> None:
    """``open`` checks, after the last one, that neither the engine nor the gauges hold anything."""
    luck = random.Random(0)

    async def visit(n: int) -> str:
        await asyncio.sleep(luck.random() * 0.2)
        sampling = luck.choice([None, Sampling(max_tokens=luck.randint(1, 40))])
        policy = luck.choice([GATE, BLOCK.at(0.0), OBSERVE])
        texts = [f"{n} {place}" for place in range(luck.randint(1, 3))]
        handle = bench.request(
            *texts, scorer=n % 2, policy=policy, sampling=sampling, streams=len(texts) == 1, seconds=600
        )
        if luck.random() < 0.4:
            await asyncio.sleep(luck.random() * 0.1)
            handle.cancel(NotReady("gone"))
        try:
            reports = await handle.answers()
        except NotReady:
            return "left"
        assert [one.risk for one in reports] == [bench.report(text, n % 2).risk for text in texts]
        for report in reports:
            continues = sampling is not None and report.decision is Decision.CONTINUE
            assert (report.completion is not None) == continues
        return "stayed"

    bench.script.answer = "x" * 30
    async with bench.open(max_queue=1000):
        bench.script.sleep_s = 0.0002
        outcomes = await asyncio.gather(*(visit(n) for n in range(120)))
        assert set(outcomes) == {"left", "stayed"}
        assert bench.watch.last == (0, 0)
