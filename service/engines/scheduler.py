"""An ``Engine`` on any batch engine: one thread that runs batches of similar lengths and decodes
callers in turn.

Each turn is one forward pass for a batch and all of its bundles, one of the passes of a long
prompt, or steps of decoding for about ``QUANTUM_S``.  ``request_queue`` says for whom.

The thread starts with the first ``answer``.  Until then, as in training, synchronous calls run on
the caller's thread: when two threads have run torch, OpenMP stops spinning, which makes small
forward passes 2.5 times slower."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from service.engines import base
from service.engines.base import (
    FIRST_COME,
    BatchEngine,
    EngineGate,
    PrefillResult,
    Sampling,
    TokenIds,
    Turn,
    Update,
)
from service.engines.bridge import Outboxes, fulfil, gather_all, receive, wait_for
from service.engines.checks import WithTokens, check_sampling
from service.engines.pass_times import PassTimes
from service.engines.request_queue import EngineRequest, RequestQueue
from service.errors import EngineError
from service.readout import Probes
from service.settings import KV_TOKENS

log = logging.getLogger("hallutracer")
T = TypeVar("T")
P = ParamSpec("P")
# how long decoding holds the engine, one step at least, before prompts may have their turn
QUANTUM_S = 0.05


class Scheduled(WithTokens):
    """Implements ``base.Engine`` on a batch engine, which it owns and closes."""

    scores_overtake_answers = True

    def __init__(
        self,
        batch: BatchEngine,
        *,
        max_kv_tokens: int = KV_TOKENS,
        max_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own ``batch``; ``max_kv_tokens``: of all answers; ``max_wait_s``: for a batch as large as
        the last."""
        super().__init__(batch)
        self.batch, self._clock = batch, clock
        self.identity, self.counters = batch.identity, batch.counters
        self.max_batch_tokens: int = batch.max_batch_tokens
        self.reads_answers, self.answer_bytes = batch.reads_answers, batch.answer_bytes
        self.check, self.prepared = batch.check, batch.prepared
        # While prompts are being served, these run between turns.
        self._score = self._between_turns(batch.score)
        self.extract = self._between_turns(batch.extract)
        self.generate = self._between_turns(batch.generate)
        self.sample = self._between_turns(batch.sample)
        self.next_token = self._between_turns(batch.next_token)
        self.on_prefill: Callable[[int, int], None] = lambda prompts, tokens: None
        self._max_wait_s = max_wait_s
        self._outboxes = Outboxes()
        self._queue = RequestQueue(batch.max_batch_tokens, max_kv_tokens)
        self._changed = threading.Condition()
        self._running = threading.Lock()  # held by whoever runs the model
        self._thread: threading.Thread | None = None
        self._calls: list[Callable[[], None]] = []  # synchronous calls, run between turns
        self._closed = self._broken = False
        self._last_batch = 0
        self._pass_times = PassTimes(batch.max_batch_tokens, clock)

    @property
    def torch_model(self) -> base.TorchModel | None:
        """The model's modules."""
        return self.batch.torch_model

    def seconds_to_read(self, prompt: TokenIds) -> float | None:
        """As ``base.Engine.seconds_to_read``."""
        return self._pass_times.expected_s(self.batch.pass_costs(prompt))

    @property
    def waited_for_cpu_s(self) -> float:
        """As Linux counts it, with the time for which a container's limit held the thread; 0
        elsewhere."""
        with suppress(OSError, ValueError, IndexError):
            number = None if self._thread is None else self._thread.native_id
            return (
                int(Path(f"/proc/self/task/{number}/schedstat").read_text("ascii").split()[1]) / 1e9
            )
        return 0.0

    @property
    def alive(self) -> bool:
        """False after ``close``, and once the thread has failed."""
        return not (self._closed or self._broken)

    async def answer(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        sampling: Sampling | None = None,
        gate: EngineGate | None = None,
        turn: Turn = FIRST_COME,
        answer_probes: Probes | None = None,
    ) -> AsyncGenerator[Update, None]:
        """Yield the updates of ``base.Engine.answer``."""
        if sampling is not None:
            check_sampling(sampling)
        outbox = self._outboxes.of(asyncio.get_running_loop())
        request = EngineRequest(
            prompt,
            probes,
            first_token,
            sampling,
            gate,
            outbox,
            turn,
            answer_probes,
            queued=self._clock(),
        )
        with self._changed:
            if not self.alive:
                raise EngineError("the engine is closed or has failed; restart the service")
            self._queue.add(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            async with aclosing(receive(request.inbox)) as updates:
                async for update in updates:
                    yield update
        finally:
            if not request.finished:
                request.cancelled = True

    def score(
        self,
        prompts: base.Prompts,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        last: Sequence[int] = (),
    ) -> list[PrefillResult]:
        """As ``base.LoadedModel.score``; while prompts are being served, each has its turn among
        those of callers."""
        with self._changed:
            serving = self._serving
        if not serving:
            return self._score(prompts, probes, first_token=first_token, last=last)
        if last:
            pairs = zip(prompts, last, strict=True)
            return [self._score([prompt], probes, last=[tokens])[0] for prompt, tokens in pairs]

        async def scored(prompt: TokenIds) -> PrefillResult:
            async with aclosing(self.answer(prompt, probes, first_token=first_token)) as updates:
                async for update in updates:
                    return base.prefill_of(update)
            raise base.unfinished()

        return wait_for(gather_all([scored(prompt) for prompt in prompts]))

    @property
    def _serving(self) -> bool:
        return self._thread is not None and self.alive

    def close(self) -> None:
        """Finish the current forward pass, end the thread and free the model."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self.batch.close()

    def _between_turns(self, method: Callable[P, T]) -> Callable[P, T]:
        """Return ``method`` as one that runs while no other forward pass does."""

        def run(*arguments: P.args, **options: P.kwargs) -> T:
            done, work = Future[T](), partial(method, *arguments, **options)
            with self._changed:
                serving = self._serving
                if serving:
                    self._calls.append(partial(fulfil, done, work))
                    self._changed.notify()
            if not serving:
                with self._running:
                    return work()
            return done.result()

        return run

    # On the engine's thread.

    def _run(self) -> None:
        batch: list[EngineRequest] = []
        try:
            while not self._closed:
                calls, batch = self._next_turn()
                with self._running:
                    for call in calls:
                        call()
                    if batch:
                        self._prefill(batch)
                    else:
                        self._decode()
                    self._outboxes.flush()
        except BaseException:
            self._broken = True
            log.critical(
                "the engine's thread failed; nothing more can be scored: restart the service",
                exc_info=True,
            )
        finally:
            self._abandon(batch)

    def _next_turn(self) -> tuple[list[Callable[[], None]], list[EngineRequest]]:
        """Return the calls to run and the prompts to prefill now; no prompts if it is an answer's
        turn, or on close."""
        queue = self._queue
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed or self._calls or queue.answering or queue.reading or queue.waiting
                )
            )
            if not queue.answering and not queue.reading and self._last_batch > 1:
                # the batching delay; a single client never waits
                self._changed.wait_for(
                    lambda: self._closed or self._calls or len(queue.waiting) >= self._last_batch,
                    self._max_wait_s,
                )
            calls, self._calls = self._calls, []
            return calls, [] if self._closed else queue.next_batch()

    def _decode(self) -> None:
        until = self._clock() + QUANTUM_S
        while answers := self._queue.next_step():
            with self._counted(answers):
                self._step(answers)
            self._outboxes.flush()
            if self._clock() >= until:
                break

    @contextmanager
    def _counted(self, requests: Sequence[EngineRequest]) -> Iterator[None]:
        """Count the time of one pass as given to ``requests``, whether or not it fails."""
        started = self._clock()
        try:
            yield
        finally:
            self._queue.give(requests, self._clock() - started)

    def _read_on(self, request: EngineRequest) -> None:
        """Run the next pass of a long prompt."""
        started, tokens = self._clock(), self.counters.forward_tokens
        if request.passes is None:
            kept, request.begun = request.sampling is not None, started
            request.passes = self.batch.in_chunks(
                request.prompt, request.probes, first_token=request.first_token, kept=kept
            )
            request.costs = iter(self.batch.pass_costs(request.prompt))
        try:
            with self._counted([request]):
                result = next(request.passes)
        except Exception as error:
            self._queue.reading.remove(request)
            request.finish(error)
            return
        self._pass_times.note(next(request.costs, 0.0), started)
        self.on_prefill(1, self.counters.forward_tokens - tokens)
        if result is None:
            return
        self._queue.reading.remove(request)
        continuation = None if isinstance(result, PrefillResult) else result
        prefill = result if isinstance(result, PrefillResult) else result.prefill
        self._prefilled(request, prefill, continuation, request.begun)

    def _prefill(self, batch: Sequence[EngineRequest]) -> None:
        if batch[0].long:
            self._read_on(batch[0])
            return
        started = self._clock()
        # In a fixed order, because an engine caches what it prepares for a list of probes.
        distinct = {id(probe): probe for request in batch for probe in request.probes}
        columns = {key: column for column, key in enumerate(sorted(distinct))}
        probes = [distinct[key] for key in columns]
        prompts = [request.prompt for request in batch]
        continuations: Sequence[base.Continuation | None] = [None] * len(batch)
        results: Sequence[PrefillResult]
        try:
            with self._counted(batch):
                if batch[0].sampling is None:
                    first_token = any(request.first_token for request in batch)
                    results = self.batch.score(prompts, probes, first_token=first_token)
                else:
                    continuations = begun = self.batch.begin(prompts, probes)
                    results = [continuation.prefill for continuation in begun]
        except Exception as error:
            if len(batch) == 1:
                batch[0].finish(error)
            else:
                for request in batch:  # each by itself, so that one prompt cannot fail the others
                    if not request.cancelled:
                        self._prefill([request])
            return
        cost = sum(sum(self.batch.pass_costs(prompt)) for prompt in prompts)
        self._pass_times.note(cost, started)
        self.on_prefill(len(batch), sum(len(prompt) for prompt in prompts))
        self._last_batch = len(batch)
        for request, result, continuation in zip(batch, results, continuations, strict=True):
            trajectories = tuple(
                result.trajectories[columns[id(probe)]] for probe in request.probes
            )
            own = PrefillResult(trajectories, result.first_token, result.prompt_tokens)
            self._prefilled(request, own, continuation, started)

    def _prefilled(
        self,
        request: EngineRequest,
        result: PrefillResult,
        continuation: base.Continuation | None,
        started: float,
    ) -> None:
        request.continuation = continuation
        request.send(
            Update(result, queue_s=started - request.queued, prefill_s=self._clock() - started)
        )
        closed = request.gate is not None and request.gate.closes(result)
        if continuation is None or request.sampling is None or request.cancelled or closed:
            request.finish()
        else:
            continuation.answer_probes = request.answer_probes
            request.pieces = continuation.decode(
                request.sampling, partial(getattr, request, "cancelled")
            )
            self._queue.answering.insert(0, request)

    def _step(self, answers: Sequence[EngineRequest]) -> None:
        """Decode one token of each answer, and remove those that have ended."""
        running = [request for request in answers if not request.cancelled]
        failed = self._go_on(running)
        for request in running:
            try:
                if (failure := failed.get(request)) is not None:
                    raise failure
                piece = next(request.pieces, None)
            except Exception as error:
                request.finish(error)
                continue
            continuation = request.continuation
            assert continuation is not None
            if piece is not None:
                request.send(Update(piece=piece, tokens=1, answer=continuation.reading))
                continue
            request.send(Update(completion=continuation.completion, answer=continuation.reading))
            request.finish()
        for request in answers:
            if request.cancelled and not request.finished:
                request.finish()
            if request.finished:
                self._queue.answering.remove(request)

    def _go_on(self, requests: Sequence[EngineRequest]) -> dict[EngineRequest, Exception]:
        """Run the next step; return those that failed.  A step that fails is run again by halves:
        one may fail all."""
        try:
            self.batch.step_together([request.continuation for request in requests])
        except Exception as error:
            if len(requests) <= 1:
                return dict.fromkeys(requests, error)
            log.warning(
                "a step of %d answers failed (%s); it is run again by halves", len(requests), error
            )
            half = len(requests) // 2
            return self._go_on(requests[:half]) | self._go_on(requests[half:])
        return {}

    def _abandon(self, batch: Sequence[EngineRequest]) -> None:
        error = EngineError(
            "the engine was closed" if self._closed else "the engine's thread failed"
        )
        with self._changed:
            left = [*batch, *self._queue.waiting, *self._queue.reading, *self._queue.answering]
            self._queue.waiting = []
            self._queue.reading = []
            self._queue.answering = []
            calls, self._calls = self._calls, []
        for request in left:
            if not request.finished:
                request.finish(error)
        self._outboxes.flush()
        for call in calls:
            call()  # raises on a closed engine
