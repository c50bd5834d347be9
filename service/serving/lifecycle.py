"""The lifecycle: loading, readiness, reloading on the running engine, draining."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from service.audit.auditor import Auditor, recorded
from service.audit.events import SERVICE, Who
from service.engines.base import Engine
from service.errors import NotReady
from service.serving.catalogue import Catalogue, Loaded, Scorers
from service.serving.dispatcher import Dispatcher
from service.serving.metrics import Metrics
from service.settings import ServiceSettings

T = TypeVar("T")
Load = Callable[[], Scorers]
LoadAgain = Callable[[Engine], Scorers]


@dataclass(eq=False, kw_only=True)
class Lifecycle:
    """``load`` builds the scorers in a thread of its own; ``load_again`` on the running engine, None: it cannot."""

    settings: ServiceSettings
    metrics: Metrics
    catalogue: Catalogue
    load: Load
    load_again: LoadAgain | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)  # reference -> why; written by whoever loads
    on_broken: Callable[[], None] = lambda: None  # the engine broke: only a new process helps
    audit: Auditor | None = None
    stopping: bool = False
    error: BaseException | None = None  # why loading ended without scorers, or what broke the engine
    reload_error: str | None = None  # why the newest reload changed nothing
    failing_since: float | None = None  # when the first of those reloads failed that changed nothing, one after another
    _dispatcher: Dispatcher | None = None
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> None:
        """Load in the background: live at once, ready once every bundle has matched its golden prompts."""
        try:
            loaded = await self._load(self.load)
            self._dispatcher = Dispatcher(
                loaded.scorers[0].engine,
                self.metrics,
                max_queue=self.settings.max_queue,
                stall_s=self.settings.stall_s,
                on_broken=self._broken,
            )
        except Exception as error:
            self.error = error
            return
        self.catalogue.serve(loaded)

    async def _load(self, load: Load) -> Loaded:
        return await asyncio.wrap_future(in_own_thread(lambda: self.catalogue.checked(load(), self.left_out)))

    async def reload(self, load: LoadAgain, who: Who = SERVICE) -> None:
        """Load other bundles on the running engine; requests under way end with the bundle they began with.

        One reload at a time, and in the audit log before it begins.  Raises AuditUnavailable and what ``load`` raises;
        the loaded bundles then stay.
        """
        async with self._reloading:
            self._check_loaded()
            engine = self.catalogue.scorers[0].engine
            try:
                before = {"before": self.catalogue.in_force()}
                async with recorded(self.audit, who, "bundles.reload", before) as outcome:
                    loaded = await self._load(lambda: load(engine))
                    self._check_loaded()  # it may have been stopped meanwhile
                    self.catalogue.serve(loaded)
                    outcome["after"] = self.catalogue.in_force()
            except Exception as error:
                self.reload_error = str(error)
                self.failing_since = self.failing_since or time.time()
                self.metrics.reloaded(False)
                raise
            self.reload_error = self.failing_since = None
            self.metrics.reloaded(True)

    async def reload_bundles(self, who: Who) -> Exception | None:
        """Load the bundles again, and return why they were not swapped; None where they were.

        Call where there is ``load_again``.
        """
        assert self.load_again is not None
        try:
            await self.reload(self.load_again, who)
        except Exception as error:  # whatever is wrong with them
            return error
        return None

    @property
    def failure(self) -> str | None:
        """Return the error that no waiting will mend, in words; None where there was none."""
        return None if self.error is None else f"{type(self.error).__name__}: {self.error}"

    @property
    def dispatcher(self) -> Dispatcher:
        """Return where requests are admitted.  Raises NotReady."""
        self.check_ready()
        assert self._dispatcher is not None
        return self._dispatcher

    def _broken(self, error: BaseException) -> None:
        self.error = error
        self.on_broken()

    def leave(self) -> None:
        """Refuse new work; what runs goes on."""
        self.stopping = True

    def stop(self) -> None:
        """Refuse new work, end what still runs, wait until the engine is idle, free the model."""
        self.leave()
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self.catalogue.scorers:
            self.catalogue.scorers[0].engine.close()
        self.catalogue.loaded = Loaded()

    def check_not_full(self, caller: str) -> None:
        """Raise Overloaded where not even one more prompt may wait; whatever else is wrong is said elsewhere."""
        if self._dispatcher is not None and self._dispatcher.alive:
            self._dispatcher.check_not_full(caller)

    @property
    def is_ready(self) -> bool:
        """Return whether scores can be served."""
        try:
            self.check_ready()
        except NotReady:
            return False
        return True

    def check_alive(self) -> None:
        """Raise NotReady where only a new process helps; a service that loads or drains is alive."""
        if self.failure is not None:
            self.check_ready()

    def check_ready(self) -> None:
        """Raise NotReady with the reason unless scores can be served."""
        dispatcher = self._check_loaded()
        for monitor in self.catalogue.monitors.values():
            if (reason := monitor.violations.get("golden")) is not None:
                raise NotReady(f"the golden prompts do not give their risks any more: {reason}")
        if dispatcher.stalled:
            raise NotReady(f"prompts wait, and the engine has given nothing for {self.settings.stall_s:g} s")

    def _check_loaded(self) -> Dispatcher:
        if self.stopping:
            raise NotReady("the service is shutting down")
        if self.failure is not None:
            what = "loading failed" if self._dispatcher is None else "the engine broke, restart the service"
            raise NotReady(f"{what}: {self.failure}")
        if self._dispatcher is None:
            raise NotReady("the model and its bundles are still loading")
        return self._dispatcher


def in_own_thread(load: Callable[[], T]) -> Future[T]:
    """Return what a thread will give that ends with the loading, and does not hold up a process that is to stop.

    While a second thread that has run torch is there, OpenMP counts twice the threads, finds too few cores, stops
    spinning, and a forward pass of a small model takes 2.5 times as long.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(load())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return done
