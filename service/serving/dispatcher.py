"""Between the API and an engine: a request's handle, admission, a task for each prompt, and giving
up a broken engine.

Which prompts run together and in what order is the engine's matter.  Runs on the event loop of the
API."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from service.engines.base import FIRST_COME, Engine, Sampling, TokenIds, Turn, Update, unfinished
from service.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineError,
    EngineFailed,
    NonFiniteReadout,
    NotReady,
    Overloaded,
    ProbeReplaced,
    RequestError,
    WeightsChanged,
)
from service.judging.guarantee import UNKNOWN, Standing
from service.policies.guard import OBSERVE, Policy
from service.scoring import RiskReport, Scorer
from service.serving.admission import Deadline, FairShare, Speed, check_space, check_time_to_read
from service.serving.judgement import AnswerEnd, PromptTimings
from service.serving.metrics import Metrics
from service.tool_calls import Tools
from service.turn import AnswerRisk, Outcome

log = logging.getLogger("hallutracer")
MAX_PIECES = 64  # pieces of text handed on together
# passes in a row that fail through no fault of their prompts, before the engine is given up
MAX_FAILURES = 32
SPEED_SPAN_S = 0.25  # prompts come out of the engine in bursts: a measurement spans several
WATCH_S = 1.0  # how often an idle dispatcher checks that its engine is alive
CLOSING_S = 10.0  # how long closing waits for an engine to let go of its requests
ENDS = "the service is shutting down"
ENGINE_FAILED = (
    "the engine failed on this request; the service's log has the cause under the request's id"
)
# The engine did not fail: the request is at fault, or what it meets now, or it can be sent again.
NO_FAILURE = (RequestError, NonFiniteReadout, ProbeReplaced, WeightsChanged, Overloaded, EngineBusy)


class Piece(NamedTuple):
    """Text of an answer under way, and the risk of all tokens that were read by then, where it is
    wanted and known."""

    text: str
    answer: AnswerRisk | None


@dataclass(eq=False, slots=True)
class Job:
    """One prompt of a request."""

    token_ids: TokenIds
    standing: Standing = UNKNOWN
    report: RiskReport | None = None  # None until it is scored
    tokens: int = 0  # decoded so far
    timings: PromptTimings = PromptTimings()
    # from the verdict to the last token, other requests' turns included
    decode_s: float | None = None
    task: asyncio.Task[None] | None = None
    turn: Turn = FIRST_COME
    submitted_ns: int = field(default_factory=time.time_ns)  # since 1970, for traces
    state: Literal["waiting", "decoding", "over"] = "waiting"

    def result(self) -> RiskReport:
        """Return the report of a prompt that was scored."""
        assert self.report is not None
        return self.report

    def end(self) -> AnswerEnd:
        """Return how its answer has ended, or how far it had come."""
        if self.report is None:
            return AnswerEnd(self.tokens, self.decode_s)
        return AnswerEnd.of(self.report, self.tokens, self.decode_s)


@dataclass(eq=False)
class RequestHandle:
    """One admitted request.  ``Dispatcher.admit`` makes it; ``start`` begins the work."""

    dispatcher: Dispatcher
    prompts: int
    scorer: Scorer
    policy: Policy
    sampling: Sampling | None  # None: scores only
    deadline: Deadline
    streams: bool  # the answer's text comes piece by piece
    caller: str  # whom it counts for
    shadows: Sequence[Scorer] = ()  # read on the same forward; they decide nothing
    running: bool = False  # whether pieces tell the risk of the answer so far
    tools: Tools | None = None  # that the request offers
    second: Scorer | None = None  # judges the same forward, too: the stricter verdict counts
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unscored = self.unfinished = self.prompts
        self.scored, self.done = asyncio.Event(), asyncio.Event()
        # of a streaming request; None: no more
        self.text: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._error: BaseException | None = None

    def start(self, prompts: Sequence[TokenIds], standings: Sequence[Standing] = ()) -> None:
        """Have the prompts scored, as many as were admitted; nothing happens once the request has
        ended.

        ``standings``: what is known of each beside its ids; none: nothing is."""
        assert len(prompts) == self.prompts
        if not self.done.is_set():
            try:
                self.dispatcher.check_time_to_read(prompts, self.deadline)
            except Overloaded as refused:
                self.cancel(refused)
                return
            known = standings or [UNKNOWN] * len(prompts)
            self.jobs = [
                Job(token_ids, standing) for token_ids, standing in zip(prompts, known, strict=True)
            ]
            self.dispatcher._start(self)

    async def risks(self) -> list[RiskReport]:
        """Return all reports, without answers, once all are scored; raise the first error, or
        DeadlineExceeded."""
        await self._until(self.scored)
        return [job.result().before_answer() for job in self.jobs]

    async def answers(self) -> list[RiskReport]:
        """Return each prompt's report with its completion, once nothing more will come; raise as
        ``risks`` does."""
        await self._until(self.done)
        return [job.result() for job in self.jobs]

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yield a streaming request's text as it is decoded, all pieces that are there; raise as
        ``risks`` does."""
        more = True
        while more:
            try:
                if self.text.empty():
                    # The deadline guards the waiting alone: around a ``yield`` it would fire in the
                    # reader's own code.
                    async with self.deadline.enforced():
                        batch = [await self.text.get()]
                else:
                    batch = [self.text.get_nowait()]
            except DeadlineExceeded as late:
                self.cancel(late)
                break
            while batch[-1] is not None and len(batch) < MAX_PIECES and not self.text.empty():
                batch.append(self.text.get_nowait())
            if not (more := batch[-1] is not None):
                self.text.put_nowait(None)  # found again by the next reader
            if pieces := [piece for piece in batch if piece is not None]:
                yield pieces
        if self._error is not None:
            raise self._error

    def cancel(self, reason: BaseException | None = None) -> None:
        """End the work; callers that wait get ``reason``.  Does nothing to a request that has
        ended."""
        if not self.done.is_set():
            self.end(reason)
            self.dispatcher._cancelled(self)

    def end(self, error: BaseException | None = None) -> None:
        """Wake everybody who waits; for the dispatcher."""
        self._error = self._error or error
        self.scored.set()
        self.done.set()
        self.text.put_nowait(None)

    async def _until(self, event: asyncio.Event) -> None:
        if not event.is_set():
            try:
                async with self.deadline.enforced():
                    await event.wait()
            except DeadlineExceeded as late:
                self.cancel(late)
        if self._error is not None:
            raise self._error


class Dispatcher:
    """Runs requests on one engine."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        *,
        max_queue: int,
        stall_s: float = math.inf,
        on_broken: Callable[[BaseException], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call on the event loop that admits requests.

        ``max_queue`` prompts may wait; ``stall_s`` seconds without anything from the engine
        although prompts wait make it ``stalled``; those for which it waited for a CPU do not
        count.  ``on_broken`` is called once if the engine is gone or fails on every prompt."""
        self._engine = engine
        self._metrics = metrics
        self._stall_s = stall_s
        self._on_broken, self._clock = on_broken, clock
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._requests: set[RequestHandle] = set()  # admitted and not ended
        self._queue = FairShare(max_queue)  # prompts that are still being tokenized wait, too
        self._tasks: set[asyncio.Task[None]] = set()
        # By whether the prompts may be decoded: those wait for space in the cache, too, that is for
        # other answers.
        self._speeds = {answers: Speed(SPEED_SPAN_S) for answers in (True, False)}
        self._decoding = self._failures = 0  # passes in a row that failed
        # what ended the answers of the newest step that failed
        self._failed_step: BaseException | None = None
        # of the engine's newest sign of life, or of the first prompt since
        self._progress_at = clock()
        self._scorer: Scorer | None = None  # of the newest request
        self._trial: asyncio.Task[None] | None = None  # tries a stalled engine
        self.stalled = False
        engine.on_prefill = self._note_pass
        self._watch = self._loop.create_task(self._watch_engine())

    @property
    def alive(self) -> bool:
        """Return whether requests are admitted."""
        return not self._closing

    def check_space(
        self, caller: str, prompts: int = 1, seconds: float = math.inf, *, continues: bool = True
    ) -> None:
        """Raise Overloaded where so many more prompts may not wait; one: cheap enough to call
        before a body is read."""
        answers = self._behind_answers(continues)
        check_space(
            prompts,
            waiting=self._queue.waiting,
            max_waiting=self._queue.most_waiting(caller),
            ahead=self._queue.tokens_ahead(caller, answers=answers),
            seconds=seconds,
            tokens_per_second=self._speeds[answers].value,
        )

    def check_time_to_read(self, prompts: Sequence[TokenIds], deadline: Deadline) -> None:
        """Raise Overloaded where the prompts cannot be read before the deadline, even if nothing
        else ran.

        Long ones are read one after the other.  Of those of one pass the longest counts: they may
        share it."""
        most = self._engine.max_batch_tokens
        read = [prompt for prompt in prompts if len(prompt) > most]
        # Only one of these is asked about: a request may have thousands, on the event loop.
        read += sorted((prompt for prompt in prompts if len(prompt) <= most), key=len)[-1:]
        seconds = sum(self._engine.seconds_to_read(prompt) or 0.0 for prompt in read)
        check_time_to_read(sum(map(len, read)), deadline, seconds)

    def admit(
        self,
        prompts: int,
        scorer: Scorer,
        policy: Policy,
        *,
        caller: str = "",
        sampling: Sampling | None = None,
        deadline: Deadline,
        streams: bool = False,
        shadows: Sequence[Scorer] = (),
        running: bool = False,
        tools: Tools | None = None,
        second: Scorer | None = None,
    ) -> RequestHandle:
        """Reserve places for a request's prompts, all or none, before they are tokenized.

        ``caller`` names whom the request counts for.  ``sampling`` None scores only; with
        ``streams`` the answer's text comes piece by piece.  Raises Overloaded, or NotReady after
        ``close``."""
        if self._closing:
            raise NotReady(ENDS)
        self.check_space(caller, prompts, deadline.left, continues=sampling is not None)
        request = RequestHandle(
            self,
            prompts,
            scorer,
            policy,
            sampling,
            deadline,
            streams,
            caller,
            shadows,
            running,
            tools,
            second,
        )
        self._requests.add(request)
        self._queue.add(caller, prompts)
        self._report_queue()
        return request

    def close(self) -> None:
        """Refuse everything with NotReady and wait until the engine has let go.  Not on the loop's
        thread."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        self.give_up()
        late = (await asyncio.wait(self._tasks, timeout=CLOSING_S))[1] if self._tasks else ()
        if late:
            log.warning(
                "the engine still held %d requests %g s after they were ended", len(late), CLOSING_S
            )

    def _start(self, request: RequestHandle) -> None:
        self._scorer = request.scorer
        if not self._tasks:
            self._progress_at = self._clock()
        answers = request.sampling.max_tokens if request.sampling is not None else 0
        for job in request.jobs:
            self._queue.add_tokens(
                request.caller, self._ahead(job), answers=request.sampling is not None
            )
            job.turn = Turn(
                request.caller, self._queue.place(request.caller, len(job.token_ids) + answers)
            )
            job.task = task = self._loop.create_task(self._run(request, job))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _run(self, request: RequestHandle, job: Job) -> None:
        """See one prompt through."""
        scored_at = 0.0
        try:
            steps = request.scorer.run(
                job.token_ids,
                request.policy,
                request.sampling,
                turn=job.turn,
                shadows=request.shadows,
                second=request.second,
                running=request.running,
                tools=request.tools,
                standing=job.standing,
            )
            async with aclosing(steps):
                async for report, update in steps:
                    self._note_progress()
                    self._failures, self._failed_step = 0, None
                    if job.report is None:
                        scored_at = self._clock()
                        self._note_scored(request, job, report, update)
                    job.report = report
                    job.tokens += update.tokens
                    if request.streams and update.piece:
                        request.text.put_nowait(
                            Piece(update.piece, report.answer if request.running else None)
                        )
        except asyncio.CancelledError:
            if not request.done.is_set():  # ended by the engine and not by us
                self._fail(request, unfinished())
            raise
        except Exception as error:
            self._fail(request, error, decoding=job.report is not None)
            return
        if request.done.is_set():
            return
        if job.result().outcome.shows:
            job.decode_s = self._clock() - scored_at
        if job.state == "decoding":
            self._leave(request, job)
            self._report_queue()
        request.unfinished -= 1
        if not request.unfinished:
            request.end()
            self._requests.discard(request)

    def _note_scored(
        self, request: RequestHandle, job: Job, report: RiskReport, update: Update
    ) -> None:
        job.timings = PromptTimings(update.queue_s, update.prefill_s, report.judge_s)
        # Where capacity is left, a new prompt waits at most for the step that is running.
        answers, tokens = self._behind_answers(request.sampling is not None), len(job.token_ids)
        self._speeds[answers].note(tokens, self._clock(), crowded=update.queue_s > update.prefill_s)
        if not answers:  # which no answer waits for, and the engine all the same
            self._speeds[True].add(tokens)
        self._leave(request, job)
        self._queue.served(job.turn.place)
        if request.sampling is not None and report.outcome is not Outcome.WITHHELD:
            job.state = "decoding"
            self._decoding += 1
        self._report_queue()
        job.report = report
        request.unscored -= 1
        if not request.unscored:
            request.scored.set()

    def _fail(self, request: RequestHandle, error: Exception, *, decoding: bool = False) -> None:
        """End a request by what failed; ``decoding``: in a step of decoding, which may have been of
        many answers."""
        cause = error.__cause__ or error
        why: BaseException = error
        if isinstance(error, EngineFailed):
            why, error = cause, EngineError(ENGINE_FAILED)
            error.__cause__ = cause
        if not self._engine.alive:
            self._break(EngineError(f"the engine is gone: {why}"))
        request.cancel(error)
        if isinstance(error, NO_FAILURE):
            return
        # A device in an error state (CUDA keeps one until the process ends) fails every pass from
        # then on. A prompt whose prefill failed was alone in it; all answers of a step that failed
        # are ended by the same exception.
        if not decoding or cause is not self._failed_step:
            self._failures += 1
        self._failed_step = cause if decoding else None
        if self._failures >= MAX_FAILURES:
            self._break(
                EngineError(f"{self._failures} forward passes in a row failed; the last: {why}")
            )

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._failed_step = None  # its traceback holds what the step had in hand

    def _cancelled(self, request: RequestHandle) -> None:
        """End the tasks of a request that has ended early, and with them its prompts in the
        engine."""
        self._requests.discard(request)
        if not request.jobs:
            self._queue.add(request.caller, -request.prompts)
        for job in request.jobs:
            self._leave(request, job)
            if job.task is not None and job.task is not asyncio.current_task():
                job.task.cancel()
        self._report_queue()

    def _ahead(self, job: Job) -> int:
        """Return for how many tokens another prompt waits for this one: for one forward pass at
        most."""
        return min(len(job.token_ids), self._engine.max_batch_tokens)

    def _leave(self, request: RequestHandle, job: Job) -> None:
        """Count ``job`` neither as waiting nor as decoding any more.  Safe to call twice."""
        if job.state == "waiting":
            self._queue.add(request.caller, -1)
            self._queue.add_tokens(
                request.caller, -self._ahead(job), answers=request.sampling is not None
            )
            self._pause_speeds()
        elif job.state == "decoding":
            self._decoding -= 1
        job.state = "over"

    def _behind_answers(self, continues: bool) -> bool:
        """Return whether prompts wait behind those that may be decoded; ``continues``: they may be
        themselves."""
        return continues or not self._engine.scores_overtake_answers

    def _pause_speeds(self) -> None:
        """End the measurements of what nothing waits for any more."""
        waiting = [continues for continues in self._speeds if self._queue.waits(answers=continues)]
        measured = {self._behind_answers(continues) for continues in waiting}
        for answers, speed in self._speeds.items():
            if answers not in measured:
                speed.pause()

    async def _watch_engine(self) -> None:
        """Notice an engine that ends while no request runs, and one that stands still while some
        do."""
        waited = self._engine.waited_for_cpu_s
        while self._engine.alive:
            await asyncio.sleep(WATCH_S)
            # An engine that gets no CPU is slow, as all of a busy machine is: one that hangs waits
            # for none.
            before, waited = waited, self._engine.waited_for_cpu_s
            self._progress_at = min(self._clock(), self._progress_at + max(0.0, waited - before))
            if (
                self._tasks
                and not self.stalled
                and self._clock() - self._progress_at > self._stall_s
            ):
                self.stalled = True
                log.error(
                    "the engine has given nothing for %g s although prompts wait: not ready",
                    self._stall_s,
                )
            if self.stalled and self._trial is None and self._scorer is not None:
                self._trial = self._loop.create_task(self._try(self._scorer))
        self._break(EngineError("the engine has ended by itself; restart the service"))

    async def _try(self, scorer: Scorer) -> None:
        """Ask a stalled engine: while it is, nothing is admitted, so that nobody else would notice
        that it goes on."""
        try:
            async with aclosing(scorer.run(scorer.bundle.golden.prompts()[0], OBSERVE)) as steps:
                async for _ in steps:
                    self._note_progress()
        except Exception as error:
            log.warning("the stalled engine failed: %s", error)
        finally:
            self._trial = None

    def _note_pass(self, prompts: int, tokens: int) -> None:
        """Count a forward pass, which is a sign of life, too.  On any thread."""
        self._metrics.batch(prompts, tokens)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note_progress)

    def _note_progress(self) -> None:
        self._progress_at = self._clock()
        if self.stalled:
            self.stalled = False
            log.warning("the engine goes on")

    def _break(self, error: Exception) -> None:
        if not self._closing:
            log.critical("the engine broke; nothing can be scored any more", exc_info=error)
            self.give_up()
            self._on_broken(error)

    def give_up(self) -> None:
        """Refuse and end everything with NotReady.  On the event loop, also more than once."""
        self._closing = True
        if self._watch is not asyncio.current_task():
            self._watch.cancel()
        if self._trial is not None:
            self._trial.cancel()
        for request in list(self._requests):
            request.cancel(NotReady(ENDS))

    def _report_queue(self) -> None:
        self._metrics.queue(self._queue.waiting, self._decoding)
