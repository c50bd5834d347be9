"""The scripted engine behind a scheduler of its own: an OnlineEngine for tests of everything above the engines.

Takes prompts at any time, works on up to ``seats`` of them in each step, one token each, and steps in a thread as an
engine's own process would: a step that is held up does not hold up the loop.  All knobs are those of ``script``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from service.engines.base import (
    Completion,
    Continuation,
    Counters,
    Extraction,
    FirstToken,
    ModelIdentity,
    Onset,
    Sampling,
    TokenIds,
)
from service.engines.online import Gate, Update
from service.engines.scripted import ScriptedEngine
from service.errors import EngineError
from service.readout import Probes, Site
from service.risk import depth_mean, risk


@dataclass(eq=False)
class _Request:
    prompt: TokenIds
    probes: Sequence[Probes]
    first_token: bool
    sampling: Sampling | None
    gate: Gate | None
    queued: float
    news: asyncio.Queue[Update | Exception | None] = field(default_factory=asyncio.Queue)
    continuation: Continuation | None = None
    pieces: Iterator[str] | None = None
    aborted: bool = False


class ScriptedOnlineEngine:
    """Implements ``online.OnlineEngine`` on ``loop``, or on a loop in a thread of its own."""

    def __init__(
        self, script: ScriptedEngine, loop: asyncio.AbstractEventLoop | None = None, *, seats: int = 8
    ) -> None:
        self.script = script
        self.seats = seats
        self.cached_tokens = 0  # of every prompt, as told
        self.gates = True  # False: a gate is not looked at
        self.gates_all = False  # True: every answer with a gate is gated
        self.alive = True
        self.open = 0  # answers that were asked for and whose generators are not closed
        self.gated = 0
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._scheduler: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        if loop is None:
            loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=loop.run_forever, name="scripted", daemon=True)
            self._thread.start()
        self._loop = loop

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def identity(self) -> ModelIdentity:
        return self.script.identity

    @property
    def counters(self) -> Counters:
        return self.script.counters

    @property
    def max_batch_tokens(self) -> int:
        return self.script.max_batch_tokens

    def tokenize(self, text: str) -> list[int]:
        return self.script.tokenize(text)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.script.render_chat(messages)

    def detokenize(self, token_ids: TokenIds) -> str:
        return self.script.detokenize(token_ids)

    def check(self, prompts: Sequence[TokenIds]) -> None:
        self.script.check(prompts)

    def score(self, prompts: Sequence[TokenIds], probes: Sequence[Probes], *, first_token: bool = False) -> list[Onset]:
        assert threading.get_ident() != getattr(self._loop, "_thread_id", None), "on the engine's own loop"
        return self.script.score(prompts, probes, first_token=first_token)

    def extract(self, prompts: Sequence[TokenIds], sites: Sequence[Site]) -> Extraction:
        return self.script.extract(prompts, sites)

    def generate(self, prompts: Sequence[TokenIds], sampling: Sampling) -> list[Completion]:
        return self.script.generate(prompts, sampling)

    def close(self) -> None:
        """End the thread, where there is one."""
        self.script.close()
        self.alive = False
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(20)

    async def answer(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        sampling: Sampling | None = None,
        gate: Gate | None = None,
    ) -> AsyncGenerator[Update, None]:
        assert asyncio.get_running_loop() is self._loop
        if not self.alive:
            raise EngineError("the engine is gone")
        self.script.check([prompt])
        request = _Request(prompt, probes, first_token, sampling, gate, self._loop.time())
        self._waiting.append(request)
        self.open += 1
        if self._scheduler is None or self._scheduler.done():
            self._scheduler = self._loop.create_task(self._schedule())
        try:
            while (news := await request.news.get()) is not None:
                if isinstance(news, Exception):
                    raise news
                yield news
        finally:
            request.aborted = True
            self.open -= 1

    def lose(self) -> None:
        """Die: whoever waits is told, and so is whoever comes.  On the loop's thread."""
        self.alive = False
        for request in (*self._waiting, *self._running):
            request.news.put_nowait(EngineError("the engine is gone"))

    async def _schedule(self) -> None:
        """Step while there is anything to do."""
        while self._waiting or self._running:
            self._waiting = [request for request in self._waiting if not request.aborted]
            free = self.seats - len(self._running)
            batch = self._running + self._waiting[:free]
            self._running, self._waiting = batch, self._waiting[free:]
            told = await asyncio.to_thread(self._step, batch)
            for request, news, ended in told:
                if news is not None:
                    request.news.put_nowait(news)
                if ended:
                    request.news.put_nowait(None)
                if ended or request.aborted:
                    self._running.remove(request)
                    if request.continuation is not None:
                        request.continuation.close()

    def _step(self, batch: Sequence[_Request]) -> list[tuple[_Request, Update | Exception | None, bool]]:
        told: list[tuple[_Request, Update | Exception | None, bool]] = []
        for request in batch:
            if request.aborted:
                told.append((request, None, True))
                continue
            try:
                update, ended = self._decode(request) if request.continuation else self._prefill(request)
                told.append((request, update, ended))
            except Exception as error:
                told.append((request, error, True))
        return told

    def _prefill(self, request: _Request) -> tuple[Update, bool]:
        started = self._loop.time()
        script, prompt, probes = self.script, request.prompt, request.probes
        if request.sampling is None:
            (onset,) = script.score([prompt], probes, first_token=request.first_token)
        else:
            request.continuation = script.begin([prompt], probes)[0]
            onset = request.continuation.onset
        first = Update(
            onset=onset if request.first_token else replace(onset, first_token=None),
            cached_tokens=self.cached_tokens,
            queue_s=started - request.queued,
            prefill_s=self._loop.time() - started,
        )
        if request.sampling is None:
            return first, True
        if request.gate is not None and self._closes(request.gate, onset, script.first_token(prompt)):
            self.gated += 1
            return first, True
        assert request.continuation is not None
        request.pieces = request.continuation.decode(request.sampling, lambda: request.aborted)
        second, ended = self._decode(request)
        return replace(first, piece=second.piece, tokens=second.tokens, completion=second.completion), ended

    def _decode(self, request: _Request) -> tuple[Update, bool]:
        assert request.pieces is not None
        assert request.continuation is not None
        piece = next(request.pieces, None)
        if piece is None:
            return Update(completion=request.continuation.completion), True
        return Update(piece=piece, tokens=1), False

    def _closes(self, gate: Gate, onset: Onset, first: FirstToken) -> bool:
        signals = np.array([float(depth_mean(onset.trajectories[0])), first.log_max_prob, first.entropy])
        above = float(risk(signals, np.array(gate.weight), gate.intercept)) >= gate.threshold
        return self.gates_all or (self.gates and above)
