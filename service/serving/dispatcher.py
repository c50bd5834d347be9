"""Between the API and an engine: admission, one task for each prompt, cancellation, and giving up a broken engine.

Which prompts run together and in what order is the engine's matter.  Runs on the event loop of the API.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

from service.engines.base import Engine, Sampling, Turn, Update, unfinished
from service.errors import EngineError, NonFiniteReadout, NotReady, ProbeReplaced, RequestError
from service.policies.guard import OBSERVE, Decision, Policy
from service.scoring import RiskReport, Scorer
from service.serving.admission import Deadline, FairShare, Speed, check_space
from service.serving.judgement import PromptTimings
from service.serving.metrics import Metrics
from service.serving.request_handle import Job, RequestHandle

log = logging.getLogger("hallutracer")
MAX_FAILURES = 32  # prompts in a row that fail through no fault of theirs, before the engine is given up
SPEED_SPAN_S = 0.25  # prompts come out of the engine in bursts: a measurement spans several
WATCH_S = 1.0  # how often an idle dispatcher checks that its engine is alive
CLOSING_S = 10.0  # how long closing waits for an engine to let go of its requests


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

        ``max_queue`` prompts may wait for their risk; ``stall_s`` seconds without anything from the engine although
        prompts wait make it ``stalled``.  ``on_broken`` is called once if the dispatcher ends by itself: a
        bug, or an engine that is gone or fails on every prompt.
        """
        self._engine, self._clock = engine, clock
        self._metrics = metrics
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._requests: set[RequestHandle] = set()  # admitted and not ended
        self._queue = FairShare(max_queue)  # prompts that are still being tokenized wait, too
        self._decoding = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._speed = Speed(SPEED_SPAN_S)
        self._failures = 0  # in a row
        self._stall_s = stall_s
        self._progress_at = self._clock()  # of the engine's newest sign of life, or of the first prompt since
        self._scorer: Scorer | None = None  # of the newest request
        self._trial: asyncio.Task[None] | None = None  # tries a stalled engine
        self.stalled = False
        engine.on_prefill = metrics.batch
        self._watch = self._loop.create_task(self._watch_engine())

    @property
    def alive(self) -> bool:
        """Return whether requests are admitted."""
        return not self._closing

    def check_not_full(self, caller: str) -> None:
        """Raise Overloaded where not even one more prompt may wait: cheap enough to call before a body is read."""
        self._check_space(caller, 1, math.inf, continues=True)

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
    ) -> RequestHandle:
        """Reserve places for a request's prompts, all or none, before they are tokenized.

        ``caller`` names whom the request counts for.  ``sampling`` None scores only; with ``streams`` the answer's text
        comes piece by piece.
        Raises Overloaded, or NotReady after ``close``.
        """
        if self._closing:
            raise _shutting_down()
        self._check_space(caller, prompts, deadline.left, continues=sampling is not None)
        request = RequestHandle(
            prompts, scorer, policy, sampling, deadline, streams, caller, self._start, self._cancelled, shadows
        )
        self._requests.add(request)
        self._queue.add(caller, prompts)
        self._report_queue()
        return request

    def close(self) -> None:
        """Refuse everything with NotReady and wait until the engine has let go.  Not on the loop's thread."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        self._give_up()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSING_S)
            if late:
                log.warning("the engine still held %d requests %g s after they were ended", len(late), CLOSING_S)

    def _check_space(self, caller: str, prompts: int, seconds: float, *, continues: bool) -> None:
        scores_only = self._engine.scores_overtake_answers and not continues
        check_space(
            prompts,
            waiting=self._queue.waiting,
            max_waiting=self._queue.most_waiting(caller),
            ahead=self._queue.tokens_ahead(caller, answers=not scores_only),
            seconds=seconds,
            tokens_per_second=self._speed.value,
        )

    def _start(self, request: RequestHandle) -> None:
        self._scorer = request.scorer
        if not self._tasks:
            self._progress_at = self._clock()
        for job in request.jobs:
            answers = request.sampling.max_tokens if request.sampling is not None else 0
            self._queue.add_tokens(request.caller, len(job.token_ids), answers=request.sampling is not None)
            job.turn = Turn(request.caller, self._queue.place(request.caller, len(job.token_ids) + answers))
            job.task = task = self._loop.create_task(self._run(request, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, request: RequestHandle, job: Job) -> None:
        """See one prompt through."""
        scored_at = 0.0
        try:
            steps = request.scorer.run(
                job.token_ids, request.policy, request.sampling, turn=job.turn, shadows=request.shadows
            )
            async with aclosing(steps):
                async for report, update in steps:
                    self._note_progress()
                    if job.report is None:
                        scored_at = self._clock()
                        self._note_scored(request, job, report, update)
                    job.report = report
                    job.tokens += update.tokens
                    if request.streams and update.piece:
                        request.note_piece(update.piece)
        except asyncio.CancelledError:
            if not request.finished:  # ended by the engine and not by us
                self._fail(request, job, unfinished())
            raise
        except Exception as error:
            self._fail(request, job, error)
            return
        if request.finished:
            return
        if job.result().completion is not None:
            job.decode_s = self._clock() - scored_at
        if job.state == "decoding":
            self._leave(request, job)
            self._report_queue()
        request.note_finished()
        if request.finished:
            self._requests.discard(request)

    def _note_scored(self, request: RequestHandle, job: Job, report: RiskReport, update: Update) -> None:
        self._failures = 0
        job.timings = PromptTimings(update.queue_s, update.prefill_s, report.judge_s)
        # Where capacity is left, a new prompt waits at most for the step that is running.
        self._speed.note(len(job.token_ids), self._clock(), crowded=update.queue_s > update.prefill_s)
        self._leave(request, job)
        self._queue.served(job.turn.place)
        if request.sampling is not None and report.decision is Decision.CONTINUE:
            job.state = "decoding"
            self._decoding += 1
        self._report_queue()
        job.report = report
        request.note_scored()

    def _fail(self, request: RequestHandle, job: Job, error: Exception) -> None:
        if not self._engine.alive:
            self._break(EngineError(f"the engine is gone: {error}"))
        request.cancel(error)
        # A device in an error state (CUDA keeps one until the process ends) fails every prompt from then on.
        self._failures += not isinstance(error, RequestError | NonFiniteReadout | ProbeReplaced)
        if self._failures >= MAX_FAILURES:
            self._break(EngineError(f"{self._failures} prompts in a row failed; the last: {error}"))

    def _cancelled(self, request: RequestHandle) -> None:
        """The request has ended early: end its tasks, and with them its prompts in the engine."""
        self._requests.discard(request)
        if not request.jobs:
            self._queue.add(request.caller, -request.prompts)
        for job in request.jobs:
            self._leave(request, job)
            if job.task is not None and job.task is not asyncio.current_task():
                job.task.cancel()
        self._report_queue()

    def _leave(self, request: RequestHandle, job: Job) -> None:
        """``job`` neither waits nor decodes any more.  Safe to call twice."""
        if job.state == "waiting":
            self._queue.add(request.caller, -1)
            self._queue.add_tokens(request.caller, -len(job.token_ids), answers=request.sampling is not None)
        elif job.state == "decoding":
            self._decoding -= 1
        job.state = "over"

    async def _watch_engine(self) -> None:
        """Notice an engine that ends while no request runs, and one that stands still while some do."""
        while self._engine.alive:
            await asyncio.sleep(WATCH_S)
            if self._tasks and not self.stalled and self._clock() - self._progress_at > self._stall_s:
                self.stalled = True
                log.error("the engine has given nothing for %g s although prompts wait: not ready", self._stall_s)
            if self.stalled and self._trial is None and self._scorer is not None:
                self._trial = self._loop.create_task(self._try(self._scorer))
        self._break(EngineError("the engine has ended by itself; restart the service"))

    async def _try(self, scorer: Scorer) -> None:
        """While it is stalled nothing is admitted, so that nobody else would notice that it goes on."""
        try:
            async with aclosing(scorer.run(scorer.bundle.golden.prompts()[0], OBSERVE)) as steps:
                async for _ in steps:
                    self._note_progress()
        except Exception as error:
            log.warning("the stalled engine failed: %s", error)
        finally:
            self._trial = None

    def _note_progress(self) -> None:
        self._progress_at = self._clock()
        if self.stalled:
            self.stalled = False
            log.warning("the engine goes on")

    def _break(self, error: Exception) -> None:
        if not self._closing:
            log.critical("the engine broke; nothing can be scored any more", exc_info=error)
            self._give_up()
            self._on_broken(error)

    def _give_up(self) -> None:
        """End everything, whether the dispatcher was closed or its engine broke."""
        self._closing = True
        if self._watch is not asyncio.current_task():
            self._watch.cancel()
        if self._trial is not None:
            self._trial.cancel()
        for request in list(self._requests):
            request.cancel(_shutting_down())

    def _report_queue(self) -> None:
        self._metrics.queue(self._queue.waiting, self._decoding)


def _shutting_down() -> NotReady:
    return NotReady("the service is shutting down")
