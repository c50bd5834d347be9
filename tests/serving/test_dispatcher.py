"""The dispatcher on the scripted engine: admission, fairness, failures, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from service.engines.base import PrefillResult, Sampling, TokenIds, Update
from service.engines.scheduler import Scheduled
from service.errors import (
    DeadlineExceeded,
    EngineError,
    NonFiniteReadout,
    NotReady,
    Overloaded,
    RequestError,
)
from service.policies.guard import BLOCK, GATE, OBSERVE, Decision
from service.scoring import RiskReport, Scorer
from service.serving.admission import Deadline
from service.serving.dispatcher import Dispatcher, Piece, RequestHandle
from tests.engine_kinds import KINDS, OnOwnLoop, engine_of
from tests.matching import Held, matching_bundle
from tests.running import until_on_loop
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio
Patch = pytest.MonkeyPatch
ANSWER: dict[str, Any] = {"sampling": Sampling(), "policy": OBSERVE}
LONG: dict[str, Any] = {"sampling": Sampling(max_tokens=400), "policy": OBSERVE}


class Bench:
    """A dispatcher with its parts in reach; it is the metrics, too, and remembers what it was
    told."""

    def __init__(self, tmp_path: Path, kind: str) -> None:
        self.tmp_path = tmp_path
        self.kind = kind
        self.script = ScriptedEngine()
        self.holding = Held()
        self.batches: list[int] = []
        self.last = (0, 0)  # waiting, decoding
        self.broke: list[BaseException] = []
        self.dispatcher: Dispatcher
        self.now = 0.0  # where engines may stall

    def batch(self, prompts: int, tokens: int) -> None:
        self.batches.append(prompts)

    def queue(self, waiting: int, decoding: int) -> None:
        self.last = (waiting, decoding)

    @asynccontextmanager
    async def open(
        self,
        *,
        max_queue: int = 64,
        max_kv_tokens: int = 4096,
        max_batch_tokens: int = 8192,
        **options: Any,
    ) -> AsyncIterator[Bench]:
        self.script.max_batch_tokens = max_batch_tokens
        self.engine = engine_of(self.script, self.kind, max_kv_tokens=max_kv_tokens, max_wait_s=0.0)
        bundles = [
            matching_bundle(self.script, self.tmp_path, name, seed)
            for seed, name in enumerate(("one", "two"))
        ]
        if "stall_s" in options:
            options["clock"] = lambda: self.now
        self.scorers = [Scorer(self.engine, bundle) for bundle in bundles]
        self.dispatcher = Dispatcher(
            self.engine, self, max_queue=max_queue, on_broken=self.broke.append, **options
        )  # type: ignore[arg-type]
        try:
            yield self
        finally:
            closing = asyncio.create_task(asyncio.to_thread(self.dispatcher.close))
            await until_on_loop(lambda: not self.dispatcher.alive)
            self.holding.release.set()
            await closing
            await until_on_loop(lambda: self.script.counters.open_continuations == 0)
            assert self.last == (0, 0)
            queue = self.dispatcher._queue
            assert not any((queue._prompts, *queue._tokens.values()))
            assert not self.dispatcher._tasks
            await asyncio.to_thread(self.engine.close)

    def admit(
        self, prompts: int, seconds: float = 20, scorer: int = 0, **options: Any
    ) -> RequestHandle:
        options = {"policy": GATE, "deadline": Deadline(seconds)} | options
        return self.dispatcher.admit(prompts, self.scorers[scorer], **options)

    def request(self, *texts: str, **options: Any) -> RequestHandle:
        prompts = [self.script.tokenize(text) for text in texts]
        handle = self.admit(len(prompts), **options)
        handle.start(prompts)
        return handle

    async def hold(self) -> RequestHandle:
        """Make the engine stand still inside a forward pass until ``release`` is set."""
        self.script.before = self.holding
        handle = self.request("the one that is held")
        await asyncio.to_thread(self.holding.entered.wait, 20)
        return handle

    def report(self, text: str, scorer: int = 0) -> RiskReport:
        """What the prompt gets by itself; before any is asked about."""
        return self.scorers[scorer].score([self.script.tokenize(text)])[0]


async def text_of(handle: RequestHandle) -> list[Piece]:
    return [piece async for pieces in handle.pieces() for piece in pieces]


def opened(**options: Any) -> Callable[[Any], Any]:
    """Have the test's bench opened with these options."""

    def marked(test: Any) -> Any:
        test.options = options
        return test

    return marked


@pytest.fixture(params=KINDS)
async def bench(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: Patch
) -> AsyncIterator[Bench]:
    options = dict(getattr(request.function, "options", {}))
    monkeypatch.setattr("service.serving.dispatcher.WATCH_S", options.pop("watch_s", 1.0))
    async with Bench(tmp_path, request.param).open(**options) as made:
        yield made


# What is decided before an engine hears of it needs one kind of engine only.
ON_ONE = pytest.mark.parametrize("bench", KINDS[:1], indirect=True)


@ON_ONE
@opened(max_queue=2)
async def test_a_request_that_ends_before_it_starts_gives_its_places_back(bench: Bench) -> None:
    prefills = bench.script.counters.prefills
    handle = bench.admit(2)
    with pytest.raises(Overloaded):
        bench.request("a")
    handle.cancel()
    assert bench.last == (0, 0)
    handle.start([[1], [2]])  # a request that its client has left while it was tokenized
    await bench.request("a", "b").answers()
    assert bench.script.counters.prefills == prefills + 2


@ON_ONE
@opened(max_queue=4)
async def test_a_full_queue_refuses_and_takes_all_or_none(bench: Bench) -> None:
    held = await bench.hold()
    kept = bench.request("a", "b")
    bench.dispatcher.check_space("")
    with pytest.raises(Overloaded, match="3 of at most 4"):
        bench.request("c", "d")
    last = bench.request("e")
    assert bench.last == (4, 0)
    with pytest.raises(Overloaded):
        bench.dispatcher.check_space("")
    last.cancel()
    bench.dispatcher.check_space("")  # a cancelled request holds no place
    last = bench.request("f")
    bench.holding.release.set()
    for handle in (held, kept, last):
        await handle.answers()
    bench.admit(4, 5).cancel()


@ON_ONE
@opened(max_queue=1024, max_batch_tokens=64)
async def test_whoever_sends_much_does_not_delay_another(bench: Bench, monkeypatch: Patch) -> None:
    """A newcomer's prompt begins the next batch but one at the latest, although 200 of another
    caller came before."""
    batches: list[list[TokenIds]] = []
    score = bench.script.score

    def recording(
        prompts: Sequence[TokenIds], *arguments: Any, **options: Any
    ) -> list[PrefillResult]:
        batches.append(list(prompts))
        return score(prompts, *arguments, **options)

    held = await bench.hold()
    monkeypatch.setattr(bench.script, "score", recording)
    texts = [f"prompt {number}" for number in range(200)]
    busy = [bench.request(*texts[n : n + 10], caller="busy") for n in range(0, 200, 10)]
    other = bench.request("mine", caller="other")
    await until_on_loop(lambda: len(bench.engine._queue.waiting) == 201)
    bench.holding.release.set()
    for handle in (held, other, *busy):
        await handle.answers()
    assert bench.script.tokenize("mine") in batches[0] + batches[1]
    assert len(batches) > 10


@ON_ONE
@opened(max_queue=16)
async def test_the_last_places_are_for_others(bench: Bench) -> None:
    await bench.hold()
    bench.request(*"abcdefghijklm", caller="busy")
    with pytest.raises(Overloaded, match="14 of at most 15"):
        bench.request("n", "o", caller="busy")
    bench.request("n", "o", caller="other")


@opened(stall_s=20, watch_s=0.001)
async def test_an_engine_that_stands_still_is_stalled_until_it_goes_on(bench: Bench) -> None:
    """Also when the prompts that waited for it have given up; one that is slow, or has nothing to
    do, is not."""

    async def stalled() -> bool:
        await asyncio.sleep(0.03)
        return bench.dispatcher.stalled

    bench.now += 60
    assert not await stalled()  # nothing waits
    bench.script.before = bench.holding
    waiting = bench.request("a", seconds=0.2)
    bench.now += 20
    assert not await stalled()
    bench.now += 1
    await until_on_loop(lambda: bench.dispatcher.stalled)
    with pytest.raises(DeadlineExceeded):
        await waiting.answers()
    assert await stalled()
    bench.holding.release.set()
    await until_on_loop(lambda: not bench.dispatcher.stalled)
    bench.script.answer, bench.script.sleep_s = "x" * 20, 0.005
    async for _ in bench.request("b", streams=True, **LONG).pieces():
        bench.now += 19
        assert not await stalled()


@ON_ONE
@opened(stall_s=20, watch_s=0.001)
async def test_an_engine_that_waits_for_a_cpu_is_slow_and_does_not_stand_still(
    bench: Bench, monkeypatch: Patch
) -> None:
    waited = [0.0]
    monkeypatch.setattr(Scheduled, "waited_for_cpu_s", property(lambda _: waited[0]))
    await asyncio.sleep(0.03)  # the watch has looked
    await bench.hold()
    for _ in range(3):
        waited[0] += 18
        await asyncio.sleep(0.03)
        bench.now += 18.5
        await asyncio.sleep(0.03)
        assert not bench.dispatcher.stalled
    bench.now += 21
    await until_on_loop(lambda: bench.dispatcher.stalled)


@ON_ONE
@opened(max_kv_tokens=700)
async def test_scores_are_not_refused_for_answers_that_wait_for_the_cache(bench: Bench) -> None:
    bench.script.answer = "x" * 300
    bench.script.sleep_s = 0.002
    answers = [
        bench.request(f"answer {n}", sampling=Sampling(max_tokens=300), policy=OBSERVE)
        for n in range(12)
    ]
    await answers[0].risks()
    for n in range(30):
        bench.admit(1, 0.5).cancel()
        await bench.request(f"score {n}", seconds=0.5).answers()


@ON_ONE
@opened(max_queue=1000, max_batch_tokens=100)
async def test_what_cannot_be_answered_in_time_is_refused_at_once(bench: Bench) -> None:
    bench.script.sleep_s = 0.01
    # 100 tokens and 10 ms each, 6 s of work: a pause of the machine does not use it up
    handles = [bench.request("x" * 99, seconds=3600) for _ in range(600)]
    bench.admit(1, 0.5).cancel()  # nothing is known yet
    for handle in handles[100:500]:  # the speed is known once enough of them have waited
        await handle.answers()
        if bench.dispatcher._speeds[False].value is not None:
            break
    bench.admit(1, 3600).cancel()
    with pytest.raises(Overloaded, match="s of work is waiting") as refused:
        bench.request("y", seconds=0.1)
    assert refused.value.retry_after_s
    speed = bench.dispatcher._speeds[False].value
    assert speed is not None
    assert speed < 15_000  # it is never more than 10,000; what is left is for the clock
    for handle in handles:
        handle.cancel()
    bench.admit(1, 0.1).cancel()


@ON_ONE
async def test_a_single_client_gives_no_measurement_of_speed(bench: Bench) -> None:
    bench.script.sleep_s = 0.03
    for n in range(12):
        await bench.request(f"prompt {n}").answers()
    assert [speed.value for speed in bench.dispatcher._speeds.values()] == [None, None]


@ON_ONE
@opened(max_queue=1000, max_batch_tokens=100)
async def test_neither_answers_nor_an_empty_queue_make_scores_look_slow(
    bench: Bench, monkeypatch: Patch
) -> None:
    now = 0.0
    monkeypatch.setattr(bench.dispatcher, "_clock", lambda: now)
    scores, answers = bench.dispatcher._speeds[False], bench.dispatcher._speeds[True]

    async def crowd(seconds: float, number: int, **options: Any) -> None:
        """So many prompts of 100 tokens that waited together and are read one after the other,
        ``seconds`` each."""
        nonlocal now
        held = await bench.hold()
        handles = [bench.request("x" * 99, **options) for _ in range(number)]
        real = bench.dispatcher._note_scored

        def noted(request: RequestHandle, job: Any, report: Any, update: Update) -> None:
            nonlocal now
            now += seconds
            real(request, job, report, Update(update.prefill, queue_s=1.0, prefill_s=0.5))

        with monkeypatch.context() as patch:
            patch.setattr(bench.dispatcher, "_note_scored", noted)
            bench.holding.release.set()
            await held.answers()
            await asyncio.gather(*(handle.scored.wait() for handle in handles))
        for handle in handles:
            await handle.answers()
        bench.script.before = None
        bench.holding.release.clear()
        bench.holding.entered.clear()

    await crowd(1.0, 8)
    assert scores.value == pytest.approx(100)
    assert answers.value is None
    now += 1000.0  # nothing waits
    await crowd(1.0, 8)
    assert scores.value == pytest.approx(100)
    await crowd(50.0, 12, **ANSWER)  # decoding, too
    assert scores.value == pytest.approx(100)
    assert answers.value == pytest.approx(2)
    now += 1000.0
    await crowd(1.0, 8)
    assert scores.value == pytest.approx(100)


@ON_ONE
@pytest.mark.parametrize("overtake", [True, False])
async def test_scores_wait_behind_answers_where_they_do_not_overtake(
    bench: Bench, monkeypatch: Patch, overtake: bool
) -> None:
    monkeypatch.setattr(bench.engine, "scores_overtake_answers", overtake)
    held = await bench.hold()
    for speed in bench.dispatcher._speeds.values():
        for second in range(40):
            speed.note(1, float(second), crowded=True)
    waiting = bench.request("x" * 99, seconds=3600, **ANSWER)
    if overtake:
        bench.dispatcher.check_space("", 1, 100.0, continues=False)
    else:
        with pytest.raises(Overloaded, match="s of work is waiting"):
            bench.dispatcher.check_space("", 1, 100.0, continues=False)

    def paused() -> dict[bool, bool]:
        return {
            answers: speed._since is None for answers, speed in bench.dispatcher._speeds.items()
        }

    assert paused() == {True: False, False: False}
    waiting.cancel()
    assert paused() == {True: overtake, False: not overtake}, "only a score waits"
    held.cancel()
    assert paused() == {True: True, False: True}
    bench.holding.release.set()


async def test_an_engine_that_fails_on_everything_is_given_up(
    bench: Bench, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("service.serving.dispatcher.MAX_FAILURES", 4)
    innocent = [
        (RequestError("not its fault"), 9),
        (NonFiniteReadout("a NaN"), 9),
        (RuntimeError("no memory"), 3),
    ]
    for failure, times in innocent:
        bench.script.fail = failure
        for n in range(times):
            with pytest.raises(EngineError if isinstance(failure, RuntimeError) else type(failure)):
                await bench.request(f"prompt {n}", **ANSWER).answers()
    bench.script.fail = None
    await bench.request("a").answers()
    assert bench.dispatcher.alive
    bench.script.fail = RuntimeError("device-side assert")
    for n in range(4):
        with pytest.raises(EngineError):
            await bench.request(f"prompt {n}").answers()
        assert bench.dispatcher.alive == (n < 3)
    (broke,) = bench.broke
    assert str(broke) == "4 forward passes in a row failed; the last: device-side assert"


class FailingSteps:
    """``Engine.answer`` whose answers fail after their risks, once ``now`` is set, with what
    ``error`` gives."""

    def __init__(self, answer: Any, error: Callable[[], Exception]) -> None:
        self._answer = answer
        self._error = error
        self.now = asyncio.Event()

    async def __call__(self, *prompt: Any, **options: Any) -> AsyncGenerator[Update, None]:
        async with aclosing(self._answer(*prompt, **options)) as updates:
            yield await anext(updates)
            await self.now.wait()
            raise self._error()


@pytest.mark.parametrize("together", [True, False])
async def test_what_is_counted_are_failing_passes_and_not_the_answers_in_them(
    bench: Bench, together: bool, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("service.serving.dispatcher.MAX_FAILURES", 8)
    step = RuntimeError("out of memory")
    failing = FailingSteps(
        bench.engine.answer, lambda: step if together else RuntimeError("out of memory")
    )
    monkeypatch.setattr(bench.engine, "answer", failing)
    handles = [bench.request(f"prompt {n}", **LONG) for n in range(12)]
    for handle in handles:
        await handle.risks()
    failing.now.set()
    ends = await asyncio.gather(*(handle.answers() for handle in handles), return_exceptions=True)
    if together:  # one step of twelve answers
        assert {type(end) for end in ends} == {EngineError}
        assert (bench.dispatcher.alive, bench.dispatcher._failures) == (True, 1)
        assert bench.dispatcher._failed_step is None  # nothing is kept of it
    else:
        assert [type(end) for end in ends].count(EngineError) == 8
        assert not bench.dispatcher.alive


def _has_more(handle: RequestHandle, tokens: int) -> bool:
    return handle.jobs[0].tokens > tokens


async def test_a_step_that_succeeds_between_failing_passes_begins_the_count_anew(
    bench: Bench, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("service.serving.dispatcher.MAX_FAILURES", 4)
    bench.script.answer, bench.script.sleep_s = "x" * 400, 0.02
    going_on = bench.request("long", streams=True, **LONG)
    pieces = going_on.pieces()
    for n in range(6):
        await anext(pieces)  # a step of the answer that goes on
        bench.script.fail = RuntimeError("no memory")  # of prefills
        with pytest.raises(EngineError):
            await bench.request(f"prompt {n}").answers()
        bench.script.fail = None
        await until_on_loop(partial(_has_more, going_on, going_on.jobs[0].tokens))
    assert bench.dispatcher.alive
    going_on.cancel()


async def test_a_dead_engine_is_given_up_at_its_first_error(bench: Bench) -> None:
    bench.script.answer = "x" * 400
    bench.script.sleep_s = 0.01
    decoding = [bench.request(f"{n}", **LONG) for n in range(3)]
    for handle in decoding:
        await handle.risks()
    assert bench.last == (0, 3)
    await asyncio.to_thread(bench.engine.close)
    for handle in decoding:
        with pytest.raises((EngineError, NotReady)):
            await handle.answers()
    assert not bench.dispatcher.alive
    assert len(bench.broke) == 1


@opened(watch_s=0.01)
async def test_an_engine_that_ends_while_idle_is_noticed(bench: Bench) -> None:
    await asyncio.sleep(0.03)
    assert bench.dispatcher.alive
    await asyncio.to_thread(bench.engine.close)
    await until_on_loop(lambda: bool(bench.broke))
    assert not bench.dispatcher.alive


async def test_an_engine_that_drops_a_request_leaves_no_caller_waiting(
    bench: Bench, monkeypatch: Patch
) -> None:
    async def silent(*_: Any, **__: Any) -> AsyncGenerator[Update, None]:
        return
        yield Update()

    async def dropped(*_: Any, **__: Any) -> AsyncGenerator[Update, None]:
        raise asyncio.CancelledError
        yield Update()

    async def mute(*_: Any, **__: Any) -> AsyncGenerator[Update, None]:
        yield Update(piece="x")

    for answer in (silent, dropped, mute):
        monkeypatch.setattr(bench.engine, "answer", answer)
        with pytest.raises(EngineError):
            await bench.request("a").answers()
    assert bench.dispatcher.alive


async def test_an_engines_loop_that_has_closed_fails_its_requests(tmp_path: Path) -> None:
    async with (bench := Bench(tmp_path, "own loop")).open():
        assert isinstance(bench.engine, OnOwnLoop)
        await asyncio.to_thread(bench.engine.end_loop)
        with pytest.raises(EngineError):
            await bench.request("a").answers()


@opened(max_queue=4000, max_batch_tokens=16)
@pytest.mark.parametrize("failing", [False, True])
async def test_random_clients_leave_nothing_behind(bench: Bench, failing: bool) -> None:
    """``open`` checks, after the last one, that neither the engine nor the gauges hold anything;
    also where passes and steps fail at random, of which each request is told."""
    luck, failures = random.Random(0), 0
    risks = [{size: bench.report("y" * size, n).risk for size in range(1, 60)} for n in (0, 1)]

    def fail(*_: Any) -> None:
        nonlocal failures
        if luck.random() < 0.1:
            failures += 1
            raise RuntimeError("injected")

    async def visit(n: int) -> str:
        await asyncio.sleep(luck.random() * 0.2)
        sampling = luck.choice([None, Sampling(max_tokens=luck.randint(1, 40))])
        policy = luck.choice([GATE, BLOCK.at(0.0), OBSERVE])
        sizes = [luck.randrange(1, 60) for _ in range(luck.randint(1, 3))]  # up to four passes
        streams = len(sizes) == 1
        options: dict[str, Any] = {"policy": policy, "sampling": sampling, "streams": streams}
        options |= {"scorer": n % 2, "caller": str(n % 3), "seconds": 600}
        handle = bench.request(*("y" * size for size in sizes), **options)
        if luck.random() < 0.4:
            await asyncio.sleep(luck.random() * 0.1)
            handle.cancel(NotReady("gone"))
        try:
            reports = await handle.answers()
        except NotReady:
            return "left"
        except EngineError as failed:
            return repr(failed.__cause__)
        for size, report, job in zip(sizes, reports, handle.jobs, strict=True):
            assert report.risk == pytest.approx(risks[n % 2][size])
            continues = sampling is not None and report.decision is Decision.CONTINUE
            assert (report.completion is not None) == (job.decode_s is not None) == continues
            assert job.tokens == (len(report.completion.token_ids) if report.completion else 0)
            assert job.timings.prefill > 0
            assert min(job.timings.queue, job.timings.probe, job.decode_s or 0.0) >= 0
            if report.completion is not None and streams:
                pieces = "".join(piece.text for piece in await text_of(handle))
                assert pieces == report.completion.text == bench.script.answer[: len(pieces)] != ""
        return "stayed"

    bench.script.answer = "Zürich, 日本 and 🙂"
    bench.script.sleep_s = 0.0002
    if failing:
        bench.script.before = bench.script.wait = fail  # type: ignore[method-assign]
    ends = set(await asyncio.gather(*(visit(n) for n in range(500 if failing else 80))))
    told = {"RuntimeError('injected')"} if failing else set()
    assert ends == {"left", "stayed"} | told
    assert failures > 100 or not failing
    assert (bench.broke, bench.engine.alive, bench.last) == ([], True, (0, 0))
    bench.script.before = None


class Gate:
    """A script's ``before`` that lets so many forward passes begin as were allowed, and counts
    those that wanted to."""

    def __init__(self) -> None:
        self.allowed, self.begun = threading.Semaphore(0), 0

    def __call__(self, _: str) -> None:
        self.begun += 1
        assert self.allowed.acquire(timeout=30)


@opened(stall_s=20, watch_s=0.001, max_batch_tokens=8)
async def test_each_pass_of_a_long_prompt_is_a_sign_of_life(bench: Bench) -> None:
    bench.script.before = gate = Gate()
    handle = bench.request("x" * 31)
    for passes in range(1, 5):
        await until_on_loop(lambda: gate.begun == passes)  # noqa: B023
        await asyncio.sleep(0.03)  # what the engine's thread has sent is there
        bench.now += 19
        await asyncio.sleep(0.03)
        assert not bench.dispatcher.stalled
        gate.allowed.release()
    await handle.answers()
    assert sum(bench.batches) == 4


@opened(max_batch_tokens=8)
async def test_a_deadline_that_passes_between_two_passes_ends_the_prompt(bench: Bench) -> None:
    bench.script.before = gate = Gate()
    handle = bench.request("x" * 31, seconds=0.1)
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
        await handle.answers()
    await until_on_loop(
        lambda: bench.engine._queue.reading[0].cancelled
    )  # on its own loop the engine learns of it later
    gate.allowed.release(2)
    await bench.request("next").answers()
    assert gate.begun == 2
    assert bench.engine._queue.reading == []


@ON_ONE
@opened(max_batch_tokens=8)
async def test_a_prompt_that_cannot_be_read_in_its_time_is_refused_at_once(
    bench: Bench, monkeypatch: Patch
) -> None:
    prefills = bench.script.counters.prefills

    def reads(speed: float | None) -> None:
        def seconds_to_read(_: Scheduled, prompt: TokenIds) -> float | None:
            return None if speed is None else len(prompt) / speed

        monkeypatch.setattr(Scheduled, "seconds_to_read", seconds_to_read)

    for speed, seconds, refused in (
        (None, 1, False),
        (8.0, 1, True),
        (8.0, 5, False),
        (64.0, 1, False),
    ):
        reads(speed)
        handle = bench.request("x" * 31, seconds=seconds)
        if not refused:
            await handle.answers()
            continue
        with pytest.raises(
            Overloaded, match=r"32 tokens takes about 4 s, at 8 tokens/s.*deadline of 1 s"
        ) as late:
            await handle.answers()
        assert late.value.retry_after_s == 60
        assert bench.last == (0, 0)
    assert bench.script.counters.prefills == prefills + 3
    reads(1.0)
    shorts = ["short"] * 9  # of one pass each: nothing is known of what they share
    await bench.request(*shorts, seconds=10).answers()
    with pytest.raises(Overloaded, match=r"reading 6 tokens takes about 6 s, at 1 tokens/s"):
        await bench.request(*shorts, seconds=5).answers()
    with pytest.raises(Overloaded, match=r"reading 38 tokens takes about 38 s"):
        await bench.request(*shorts, "x" * 31, seconds=35).answers()


@opened(max_queue=1000, max_batch_tokens=100)
async def test_others_wait_for_one_pass_of_a_long_prompt(bench: Bench) -> None:
    await bench.hold()
    bench.request("a", caller="busy")
    ahead = [bench.dispatcher._queue.tokens_ahead("busy", answers=True)]
    for length in (399, 50):
        bench.request("x" * (length - 1), caller="busy")
        ahead.append(bench.dispatcher._queue.tokens_ahead("busy", answers=True))
    held = len(
        bench.script.tokenize("the one that is held")
    )  # another caller's, of which it counts what it asks for
    assert [ahead[1] - held - 2, ahead[2] - ahead[1]] == [100, 50]
