"""What the running service holds: the loaded bundles on one engine, the dispatcher, policies, metrics; is it ready?"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from service.engines.base import Engine
from service.errors import NotFound, NotReady
from service.guard import Policy
from service.policies import built_in
from service.scoring import Scorer
from service.serving.dispatcher import Dispatcher
from service.serving.metrics import Metrics
from service.serving.tokenizing import Tokenizing
from service.settings import ServiceSettings

Load = Callable[[], list[Scorer]]


@dataclass
class ServiceState:
    """``load`` builds the scorers (first one: the default bundle) in a thread of its own."""

    load: Load
    resolve: Callable[[str], str] = lambda reference: reference  # name@alias -> name:version
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    policies: Mapping[str, Policy] = field(default_factory=built_in)
    metrics: Metrics = field(default_factory=Metrics)
    scorers: list[Scorer] = field(default_factory=list)
    error: BaseException | None = None  # why loading ended without scorers, or what broke the engine
    on_broken: Callable[[], None] = lambda: None  # the engine broke: only a new process helps
    stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _dispatcher: Dispatcher | None = None
    tokenizing: Tokenizing = field(init=False)

    def __post_init__(self) -> None:
        """As many requests may be tokenized as prompts may wait."""
        self.tokenizing = Tokenizing(self.settings.max_queue)

    async def start(self) -> None:
        """Load in the background: live at once, ready once every bundle has matched its golden prompts."""
        try:
            scorers = await asyncio.wrap_future(_in_own_thread(self.load))
            self._dispatcher = Dispatcher(
                scorers[0].engine, self.metrics, max_queue=self.settings.max_queue, on_broken=self._broken
            )
        except Exception as error:
            self.error = error
            return
        self._serve(scorers)

    async def reload(self, load: Callable[[Engine], list[Scorer]]) -> None:
        """Load other bundles on the running engine; requests under way end with the bundle they began with.

        Raises what ``load`` raises; the loaded bundles then stay.
        """
        self.check_ready()
        engine = self.scorers[0].engine
        self._serve(await asyncio.wrap_future(_in_own_thread(lambda: load(engine))))

    def _serve(self, scorers: list[Scorer]) -> None:
        self.scorers = scorers
        for scorer in scorers:
            manifest = scorer.bundle.manifest
            self.metrics.bundle(scorer.engine.identity.model, manifest.reference, manifest.digest)

    @property
    def failure(self) -> str | None:
        """The error that no waiting will mend, in words; None where there was none."""
        return None if self.error is None else f"{type(self.error).__name__}: {self.error}"

    @property
    def dispatcher(self) -> Dispatcher:
        """Where requests are admitted.  Raises NotReady."""
        self.check_ready()
        assert self._dispatcher is not None
        return self._dispatcher

    def _broken(self, error: BaseException) -> None:
        self.error = error
        self.on_broken()

    def stop(self) -> None:
        """Refuse new work, end what still runs, wait until the engine is idle, free the model."""
        self.stopping = True
        self.tokenizing.close()
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self.scorers:
            self.scorers[0].engine.close()
        self.scorers = []
        self.metrics.close()

    def check_alive(self) -> None:
        """Raise NotReady where only a new process helps; a service that loads or drains is alive."""
        if self.failure is not None:
            self.check_ready()

    def check_not_full(self) -> None:
        """Raise Overloaded where not even one more prompt may wait; whatever else is wrong is said elsewhere."""
        if self._dispatcher is not None and self._dispatcher.alive:
            self._dispatcher.check_not_full()

    @property
    def is_ready(self) -> bool:
        """Whether scores can be served."""
        try:
            self.check_ready()
        except NotReady:
            return False
        return True

    def check_ready(self) -> None:
        """Raise NotReady with the reason unless scores can be served."""
        if self.stopping:
            raise NotReady("the service is shutting down")
        if self.failure is not None:
            what = "loading failed" if self._dispatcher is None else "the engine broke, restart the service"
            raise NotReady(f"{what}: {self.failure}")
        if self._dispatcher is None:
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

    def policy(self, name: str | None, threshold: float | None) -> Policy:
        """The policy a request names, or the service's; thresholds: the request's, the policy's, the service's.

        Raises NotFound.
        """
        wanted = self.settings.policy if name is None else name
        if wanted not in self.policies:
            raise NotFound(
                f"policy {wanted!r} is not known here; known: {', '.join(sorted(self.policies))}", param="policy"
            )
        policy = self.policies[wanted]
        return policy.at(self.settings.threshold if policy.threshold is None else None).at(threshold)


def _in_own_thread(load: Load) -> Future[list[Scorer]]:
    """A thread that ends with the loading, and does not hold the process up if it is told to stop meanwhile.

    While a second thread that has run torch is there, OpenMP counts twice the threads, finds too few cores, stops
    spinning, and a forward pass of a small model takes 2.5 times as long.
    """
    done: Future[list[Scorer]] = Future()

    def run() -> None:
        try:
            done.set_result(load())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return done
