"""Makes an ``Engine`` of any batch engine: one thread that runs batches of similar lengths and decodes round-robin.

In each turn it takes a batch from the queue, runs one forward pass for all of its bundles, ends requests whose gate
closes, and decodes for as long as the forward pass took.  Neither many scores nor a few long answers starve the other.

The thread starts with the first ``answer``.  Until then, as in training, synchronous calls run on the caller's thread:
when two threads have run torch, OpenMP counts the threads of both, has too few cores for them and stops spinning, which
makes a small model's forward pass 2.5 times slower.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from service.engines.base import (
    FIRST_COME,
    BatchEngine,
    Completion,
    Continuation,
    Counters,
    Extraction,
    Gate,
    ModelIdentity,
    PrefillResult,
    Sampling,
    TokenIds,
    TorchModel,
    TracedAnswer,
    Turn,
    Update,
)
from service.engines.bridge import Outboxes, receive
from service.engines.checks import check_sampling
from service.engines.decode_rotation import DecodeRotation
from service.engines.request_queue import EngineRequest, RequestQueue
from service.errors import EngineError
from service.readout import Pooling, Probes, Site
from service.settings import KV_TOKENS

log = logging.getLogger("hallutracer")
T = TypeVar("T")


class Scheduled:
    """Implements ``base.Engine`` on a batch engine, which it owns and closes."""

    scores_overtake_answers = True

    def __init__(self, batch: BatchEngine, *, max_kv_tokens: int = KV_TOKENS, max_wait_s: float = 0.0) -> None:
        """``max_kv_tokens`` limits the prompt and answer tokens of all answers being decoded.

        ``max_wait_s`` is the batching delay: the longest wait for a batch as large as the last one.
        """
        self.batch = batch
        self.identity: ModelIdentity = batch.identity
        self.counters: Counters = batch.counters
        self.max_batch_tokens: int = batch.max_batch_tokens
        self.special_tokens = batch.special_tokens
        self.tokenize, self.render_chat, self.detokenize = batch.tokenize, batch.render_chat, batch.detokenize
        self.check = batch.check
        self.on_prefill: Callable[[int, int], None] = lambda prompts, tokens: None
        self._max_wait_s = max_wait_s
        self._outboxes = Outboxes()
        self._queue = RequestQueue(batch.max_batch_tokens, max_kv_tokens)
        self._rotation = DecodeRotation(batch.step_together, self._outboxes.flush)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._calls: deque[Callable[[], None]] = deque()  # synchronous calls, run between turns
        self._calls_outside = 0  # synchronous calls on their callers' threads
        self._closed = self._broken = False
        self._some_cancelled = False
        self._last_batch = 0

    @property
    def torch_model(self) -> TorchModel | None:
        """The model's modules."""
        return self.batch.torch_model

    @property
    def alive(self) -> bool:
        """False after ``close``, and once the thread has failed."""
        return not (self._closed or self._broken)

    def score(
        self, prompts: Sequence[TokenIds], probes: Sequence[Probes], *, first_token: bool = False
    ) -> list[PrefillResult]:
        """Prefill all prompts and wait; runs between turns while prompts are being served."""
        return self._call(lambda: self.batch.score(prompts, probes, first_token=first_token))

    def extract(
        self,
        prompts: Sequence[TokenIds],
        sites: Sequence[Site],
        poolings: Sequence[Pooling] = (Pooling.LAST_1,),
        sampling: Sampling | None = None,
    ) -> Extraction:
        """Every layer's activations, and answers; runs between turns while prompts are being served."""
        return self._call(lambda: self.batch.extract(prompts, sites, poolings, sampling))

    def generate(self, prompts: Sequence[TokenIds], sampling: Sampling) -> list[Completion]:
        """Batched decoding; runs between turns while prompts are being served."""
        return self._call(lambda: self.batch.generate(prompts, sampling))

    def sample(
        self, prompts: Sequence[TokenIds], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[TracedAnswer]]:
        """Several answers of each prompt; runs between turns while prompts are being served."""
        return self._call(lambda: self.batch.sample(prompts, sampling, seeds))

    def next_token(self, prompts: Sequence[TokenIds], candidates: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities of candidates; runs between turns while prompts are being served."""
        return self._call(lambda: self.batch.next_token(prompts, candidates))

    async def answer(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        sampling: Sampling | None = None,
        gate: Gate | None = None,
        turn: Turn = FIRST_COME,
    ) -> AsyncGenerator[Update, None]:
        """As ``base.Engine.answer``."""
        if sampling is not None:
            check_sampling(sampling)
        outbox = self._outboxes.of(asyncio.get_running_loop())
        request = EngineRequest(prompt, probes, first_token, sampling, gate, outbox, turn)
        self._submit(request)
        try:
            async with aclosing(receive(request.inbox)) as updates:
                async for update in updates:
                    yield update
        finally:
            if not request.finished:
                request.cancelled = self._some_cancelled = True

    def close(self) -> None:
        """Finish the current forward pass, end the thread and free the model."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self.batch.close()

    def _submit(self, request: EngineRequest) -> None:
        with self._changed:
            if not self.alive:
                raise EngineError("the engine is closed or has failed; restart the service")
            self._queue.add(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _call(self, work: Callable[[], T]) -> T:
        """Run ``work`` while no other forward pass runs."""
        done: Future[T] = Future()
        with self._changed:
            serving = self._thread is not None and self.alive
            if serving:
                self._calls.append(lambda: _complete(done, work))
                self._changed.notify()
            else:
                self._calls_outside += 1
        if serving:
            return done.result()
        try:
            return work()
        finally:
            with self._changed:
                self._calls_outside -= 1
                self._changed.notify()

    # On the engine's thread.

    def _run(self) -> None:
        batch: list[EngineRequest] = []
        try:
            while True:
                calls, batch = self._next_turn()
                if self._closed:
                    return
                for call in calls:
                    call()
                started = time.monotonic()
                if batch:
                    self._prefill(batch)
                    self._outboxes.flush()
                self._rotation.turn(time.monotonic() - started)
        except BaseException:
            self._broken = True
            log.critical("the engine's thread failed; nothing more can be scored: restart the service", exc_info=True)
        finally:
            self._abandon(batch)

    def _next_turn(self) -> tuple[list[Callable[[], None]], list[EngineRequest]]:
        """The calls to run and the prompts to prefill now; both are empty if there are only answers, or on close."""
        with self._changed:
            while not self._closed and (self._calls_outside or not self._has_work()):
                self._changed.wait()
            self._wait_for_batch()
            if self._some_cancelled:  # searching a long queue in each turn would take longer than a small model's turn
                self._some_cancelled = False
                for request in self._queue.remove(lambda request: request.cancelled):
                    request.finish()
            calls, batch = list(self._calls), [] if self._closed else self._queue.next_batch(self._rotation.kv_held)
            if not self._closed:
                self._calls.clear()
            return calls, batch

    def _has_work(self) -> bool:
        return bool(self._calls or len(self._rotation) or len(self._queue))

    def _wait_for_batch(self) -> None:
        """Wait at most the batching delay; a single client never waits."""
        if len(self._rotation) or self._last_batch < 2:
            return
        until = time.monotonic() + self._max_wait_s
        while len(self._queue) < self._last_batch and not (self._closed or self._calls):
            if (remaining := until - time.monotonic()) <= 0:
                return
            self._changed.wait(remaining)

    def _prefill(self, batch: Sequence[EngineRequest]) -> None:
        started = time.monotonic()
        # In a fixed order, because an engine caches what it prepares for a list of probes.
        distinct = {id(probe): probe for request in batch for probe in request.probes}
        probes = [distinct[key] for key in sorted(distinct)]
        prompts = [request.prompt for request in batch]
        continuations: Sequence[Continuation | None] = [None] * len(batch)
        results: Sequence[PrefillResult]
        try:
            if batch[0].continues:
                begun = self.batch.begin(prompts, probes)
                continuations, results = begun, [continuation.prefill for continuation in begun]
            else:
                first_token = any(request.first_token for request in batch)
                results = self.batch.score(prompts, probes, first_token=first_token)
        except Exception as error:
            if len(batch) == 1:
                batch[0].finish(error)
                return
            for request in batch:  # each by itself, so that one prompt cannot fail the others
                if not request.cancelled:
                    self._prefill([request])
            return
        ended = time.monotonic()
        self.on_prefill(len(batch), sum(len(prompt) for prompt in prompts))
        self._last_batch = len(batch)
        for request, result, continuation in zip(batch, results, continuations, strict=True):
            own = _for_probes(result, probes, request.probes)
            request.send(Update(own, queue_s=started - request.queued, prefill_s=ended - started))
            if continuation is None:
                request.finish()
            elif request.cancelled or (request.gate is not None and request.gate.closes(own)):
                continuation.close()
                request.finish()
            else:
                self._rotation.add(request, continuation)

    def _abandon(self, batch: Sequence[EngineRequest]) -> None:
        """End all requests, after the engine was closed or failed during ``batch``."""
        error = EngineError("the engine was closed" if self._closed else "the engine's thread failed")
        with self._changed:
            waiting = self._queue.remove(lambda _: True)
            calls = list(self._calls)
            self._calls.clear()
        for request in (*batch, *waiting):
            request.finish(error)
        self._rotation.abandon(error)
        self._outboxes.flush()
        for call in calls:
            call()  # raises on a closed engine


def _complete(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


def _for_probes(result: PrefillResult, batch_probes: Sequence[Probes], probes: Sequence[Probes]) -> PrefillResult:
    """The part of a batch's result that belongs to one request's probes."""
    if len(batch_probes) == len(probes) == 1:
        return result
    place = {id(probe): index for index, probe in enumerate(batch_probes)}
    trajectories = tuple(result.trajectories[place[id(probe)]] for probe in probes)
    return PrefillResult(trajectories, result.first_token, result.prompt_tokens)
