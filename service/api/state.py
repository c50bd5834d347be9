"""What the running service holds: one engine, its scorers, one worker thread, and whether it is ready.

The engine is used from this one thread only, so the event loop never waits for a forward pass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import TypeVar

from service.errors import NotFound, NotReady
from service.scoring import Scorer
from service.settings import ServiceSettings

T = TypeVar("T")
Load = Callable[[], list[Scorer]]


@dataclass
class ServiceState:
    """``load`` builds the scorers (first one: the default bundle); it runs in the worker thread."""

    load: Load
    resolve: Callable[[str], str] = lambda reference: reference  # name@alias -> name:version
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    scorers: list[Scorer] = field(default_factory=list)
    error: Exception | None = None  # why loading ended without scorers
    stopping: Event = field(default_factory=Event)
    _worker: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
    )

    async def start(self) -> None:
        """Load in the background: live at once, ready once every bundle has matched its golden prompts."""
        try:
            self.scorers = await asyncio.get_running_loop().run_in_executor(self._worker, self.load)
        except Exception as error:
            self.error = error

    @property
    def failure(self) -> str | None:
        """The loading error in words; None where there was none."""
        return None if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def stop(self) -> None:
        """Refuse new work, end running decodes at their next token, wait for the worker, free the model."""
        self.stopping.set()
        self._worker.shutdown(wait=True, cancel_futures=True)
        if self.scorers:
            self.scorers[0].engine.close()
        self.scorers = []

    def check_ready(self) -> None:
        """Raise NotReady with the reason unless scores can be served."""
        if self.stopping.is_set():
            raise NotReady("the service is shutting down")
        if self.failure is not None:
            raise NotReady(f"loading failed: {self.failure}")
        if not self.scorers:
            raise NotReady("the model and its bundles are still loading")

    def scorer(self, bundle: str | None, model: str | None) -> Scorer:
        """The loaded scorer a request names; the first one where it names none.

        Raises NotReady, NotFound, and what ``resolve`` raises for an alias that is not there.
        """
        self.check_ready()
        identity = self.scorers[0].engine.identity
        if model is not None and model != identity.model:
            raise NotFound(f"model {model!r} is not loaded; this service runs {identity.model!r}", param="model")
        if bundle is None:
            return self.scorers[0]
        wanted = self.resolve(bundle) if "@" in bundle else bundle
        for scorer in self.scorers:
            if wanted in (scorer.bundle.manifest.name, scorer.bundle.reference):
                return scorer
        loaded = ", ".join(scorer.bundle.reference for scorer in self.scorers)
        raise NotFound(f"bundle {bundle!r} is not loaded; loaded: {loaded}", param="bundle")

    async def run(self, work: Callable[[], T]) -> tuple[T, float, float]:
        """Run ``work`` on the engine's thread; returns its result, ms waited and ms worked."""
        queued = time.perf_counter()

        def timed() -> tuple[T, float, float]:
            started = time.perf_counter()
            result = work()
            return result, (started - queued) * 1e3, (time.perf_counter() - started) * 1e3

        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, timed)
        except (asyncio.CancelledError, RuntimeError):
            # Queued work that the worker's shutdown dropped; a real cancellation or failure goes on as it is.
            self.check_ready()
            raise
