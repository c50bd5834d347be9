"""An ``Engine`` on any batch engine: one thread that runs batches of similar lengths and decodes callers in turn.

Each turn runs one forward pass for a batch and all of its bundles, ends requests whose gate closes, and decodes for as
long as that took.  A batch starts with the first prompt in the order of turns (``serving/fair_share``); those of
similar length join it.  A step of decoding takes one answer of each caller, then a second of each.

The thread starts with the first ``answer``.  Until then, as in training, synchronous calls run on the caller's thread:
when two threads have run torch, OpenMP stops spinning, which makes small forward passes 2.5 times slower."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import insort_right
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import ParamSpec, TypeVar

from service.engines import base
from service.engines.base import FIRST_COME, BatchEngine, EngineGate, PrefillResult, Sampling, TokenIds, Turn, Update
from service.engines.bridge import Outbox, Outboxes, receive
from service.engines.checks import check_sampling
from service.errors import EngineError
from service.readout import Probes
from service.settings import KV_TOKENS

log = logging.getLogger("hallutracer")
T = TypeVar("T")
P = ParamSpec("P")
MAX_PADDING = 1.25  # padded over real tokens in one forward pass
FREE_PADDING = 128  # padded tokens up to which the share of padding does not matter
MAX_CANDIDATES = 256  # waiting prompts among which a batch is chosen
KV_RESERVE = 8  # one of this many parts of the cache is for callers that hold nothing of it
MAX_TOGETHER = 32  # answers in a step of decoding


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One prompt inside a scheduler, from its arrival to its last token.  ``sampling`` None scores only."""

    prompt: TokenIds
    probes: Sequence[Probes]
    first_token: bool
    sampling: Sampling | None  # not None: its prefill keeps a KV cache
    gate: EngineGate | None
    outbox: Outbox
    turn: Turn = FIRST_COME
    answer_probes: Probes | None = None
    inbox: asyncio.Queue[Update | BaseException | None] = field(default_factory=asyncio.Queue)  # None: the end
    queued: float = field(default_factory=time.monotonic)
    cancelled: bool = False  # written by the consumer's loop, read by the engine's thread
    finished: bool = False  # written by the engine's thread
    continuation: base.Continuation | None = None  # while it is being decoded
    pieces: Iterator[str] = iter(())
    served: int = 0  # number of its latest step, over all answers

    @property
    def kv_tokens(self) -> int:
        """Maximum number of tokens in its KV cache."""
        return 0 if self.sampling is None else len(self.prompt) + self.sampling.max_tokens

    def send(self, update: Update) -> None:
        """Put an update into the outbox.  On the engine's thread."""
        self.outbox.put(self.inbox, update)

    def finish(self, error: BaseException | None = None) -> None:
        """Free the cache; put the end of the updates, or the error that ended them, into the outbox."""
        self.finished = True
        if self.continuation is not None:
            self.continuation.close()
        self.outbox.put(self.inbox, error)


class RequestQueue:
    """Waiting requests by place, then arrival, under the owner's lock; and the answers being decoded, on its thread."""

    def __init__(self, max_batch_tokens: int, max_kv_tokens: int) -> None:
        self._max_batch_tokens, self._max_kv_tokens = max_batch_tokens, max_kv_tokens
        self._steps = count(1)
        self.waiting: list[EngineRequest] = []
        self.answering: list[EngineRequest] = []  # least recently served first

    def add(self, request: EngineRequest) -> None:
        """Add a request that waits."""
        insort_right(self.waiting, request, key=lambda waiting: waiting.turn.place)

    def next_batch(self) -> list[EngineRequest]:
        """Remove and return the next batch; empty if no request can start.  Who has left is removed.

        Requests that may be decoded form batches of their own; one larger than the whole cache runs alone."""
        self.waiting = [request for request in self.waiting if not request.cancelled]
        candidates = list(islice(self._startable(), MAX_CANDIDATES))
        if not candidates:
            return []
        first, batch = candidates[0], candidates[:1]
        longest = total = len(first.prompt)
        similar = [other for other in candidates[1:] if (other.sampling is None) == (first.sampling is None)]
        similar.sort(key=lambda request: abs(len(request.prompt) - len(first.prompt)))  # stable
        for request in similar:
            longest, total = max(longest, len(request.prompt)), total + len(request.prompt)
            padded = longest * (len(batch) + 1)
            if padded > self._max_batch_tokens or padded > max(FREE_PADDING, MAX_PADDING * total):
                break
            batch.append(request)
        taken = set(batch)
        self.waiting = [request for request in self.waiting if request not in taken]
        return batch

    def _startable(self) -> Iterator[EngineRequest]:
        blocked, held = False, Counter[str]()
        for answer in self.answering:
            held[answer.turn.caller] += answer.kv_tokens
        total = held.total()
        for request in self.waiting:
            if request.sampling is not None:
                caller = request.turn.caller
                limit = self._max_kv_tokens - (self._max_kv_tokens // KV_RESERVE if held[caller] else 0)
                # None overtakes a request that waits for space: a large one would starve.
                blocked = blocked or (total > 0 and total + request.kv_tokens > limit)
                if blocked:
                    continue
                held[caller] += request.kv_tokens
                total += request.kv_tokens
            yield request

    def next_step(self) -> list[EngineRequest]:
        """Return the answers whose turn it is, one of each caller, then a second of each; they go to the end."""
        latest = {answer.turn.caller: answer.served for answer in self.answering}
        before = Counter[str]()
        order: dict[EngineRequest, tuple[int, int]] = {}
        for answer in self.answering:
            order[answer] = before[answer.turn.caller], latest[answer.turn.caller]
            before[answer.turn.caller] += 1
        chosen = sorted(order, key=order.__getitem__)[:MAX_TOGETHER]
        for answer in chosen:
            answer.served = next(self._steps)
        self.answering.sort(key=lambda answer: answer.served)
        return chosen


class Scheduled:
    """Implements ``base.Engine`` on a batch engine, which it owns and closes."""

    scores_overtake_answers = True

    def __init__(self, batch: BatchEngine, *, max_kv_tokens: int = KV_TOKENS, max_wait_s: float = 0.0) -> None:
        """Own ``batch``; ``max_kv_tokens``: of all answers; ``max_wait_s``: for a batch as large as the last."""
        self.batch = batch
        self.identity, self.counters, self.special_tokens = batch.identity, batch.counters, batch.special_tokens
        self.max_batch_tokens: int = batch.max_batch_tokens
        self.reads_answers = batch.reads_answers
        self.tokenize, self.render_chat, self.detokenize = batch.tokenize, batch.render_chat, batch.detokenize
        self.spell, self.check, self.prepared = batch.spell, batch.check, batch.prepared
        # While prompts are being served, these run between turns.
        self.score, self.extract = self._between_turns(batch.score), self._between_turns(batch.extract)
        self.generate, self.sample = self._between_turns(batch.generate), self._between_turns(batch.sample)
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

    @property
    def torch_model(self) -> base.TorchModel | None:
        """The model's modules."""
        return self.batch.torch_model

    @property
    def alive(self) -> bool:
        """False after ``close``, and once the thread has failed."""
        return not (self._closed or self._broken)

    async def answer(
        self, prompt: TokenIds, probes: Sequence[Probes], *, first_token: bool = False,
        sampling: Sampling | None = None, gate: EngineGate | None = None, turn: Turn = FIRST_COME,
        answer_probes: Probes | None = None,
    ) -> AsyncGenerator[Update, None]:  # fmt: skip
        """Yield the updates of ``base.Engine.answer``."""
        if sampling is not None:
            check_sampling(sampling)
        outbox = self._outboxes.of(asyncio.get_running_loop())
        request = EngineRequest(prompt, probes, first_token, sampling, gate, outbox, turn, answer_probes)
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
            done: Future[T] = Future()

            def call() -> None:
                try:
                    done.set_result(method(*arguments, **options))
                except BaseException as error:
                    done.set_exception(error)

            with self._changed:
                serving = self._thread is not None and self.alive
                if serving:
                    self._calls.append(call)
                    self._changed.notify()
            if not serving:
                with self._running:
                    return method(*arguments, **options)
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
                    started = time.monotonic()
                    if batch:
                        self._prefill(batch)
                        self._outboxes.flush()
                    until = 2 * time.monotonic() - started
                    while answers := self._queue.next_step():
                        self._step(answers)
                        self._outboxes.flush()
                        if time.monotonic() >= until:
                            break
        except BaseException:
            self._broken = True
            log.critical("the engine's thread failed; nothing more can be scored: restart the service", exc_info=True)
        finally:
            self._abandon(batch)

    def _next_turn(self) -> tuple[list[Callable[[], None]], list[EngineRequest]]:
        """Return the calls to run and the prompts to prefill now; neither if there are only answers, or on close."""
        queue = self._queue
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._calls or queue.answering or queue.waiting)
            if not queue.answering and self._last_batch > 1:  # the batching delay; a single client never waits
                self._changed.wait_for(
                    lambda: self._closed or self._calls or len(queue.waiting) >= self._last_batch, self._max_wait_s
                )
            calls, self._calls = self._calls, []
            return calls, [] if self._closed else queue.next_batch()

    def _prefill(self, batch: Sequence[EngineRequest]) -> None:
        started = time.monotonic()
        # In a fixed order, because an engine caches what it prepares for a list of probes.
        distinct = {id(probe): probe for request in batch for probe in request.probes}
        columns = {key: column for column, key in enumerate(sorted(distinct))}
        probes = [distinct[key] for key in columns]
        prompts = [request.prompt for request in batch]
        continuations: Sequence[base.Continuation | None] = [None] * len(batch)
        results: Sequence[PrefillResult]
        try:
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
        prefill_s = time.monotonic() - started
        self.on_prefill(len(batch), sum(len(prompt) for prompt in prompts))
        self._last_batch = len(batch)
        for request, result, continuation in zip(batch, results, continuations, strict=True):
            request.continuation = continuation
            trajectories = tuple(result.trajectories[columns[id(probe)]] for probe in request.probes)
            own = PrefillResult(trajectories, result.first_token, result.prompt_tokens)
            request.send(Update(own, queue_s=started - request.queued, prefill_s=prefill_s))
            closed = request.gate is not None and request.gate.closes(own)
            if continuation is None or request.sampling is None or request.cancelled or closed:
                request.finish()
            else:
                continuation.answer_probes = request.answer_probes
                request.pieces = continuation.decode(request.sampling, partial(getattr, request, "cancelled"))
                self._queue.answering.insert(0, request)

    def _step(self, answers: Sequence[EngineRequest]) -> None:
        """Decode one token of each answer, and remove those that have ended."""
        running = [request for request in answers if not request.cancelled]
        failure: Exception | None = None
        try:
            self.batch.step_together([request.continuation for request in running])
        except Exception as error:  # their caches may hold half a step
            failure = error
        for request in running:
            try:
                if failure is not None:
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

    def _abandon(self, batch: Sequence[EngineRequest]) -> None:
        error = EngineError("the engine was closed" if self._closed else "the engine's thread failed")
        with self._changed:
            left = [*batch, *self._queue.waiting, *self._queue.answering]
            self._queue.waiting, self._queue.answering = [], []
            calls, self._calls = self._calls, []
        for request in left:
            if not request.finished:
                request.finish(error)
        self._outboxes.flush()
        for call in calls:
            call()  # raises on a closed engine
