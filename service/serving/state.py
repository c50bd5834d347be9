"""What the running service holds: the loaded bundles on one engine, the dispatcher, policies, metrics; is it ready?"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from probes_store.errors import BundleError
from service.callers import Caller
from service.engines.base import Engine
from service.errors import NotFound, NotReady
from service.guard import Policy
from service.policies import Rule, built_in
from service.scoring import Scorer
from service.serving.choice import check_choice, check_tells
from service.serving.dispatcher import Dispatcher
from service.serving.feedback import Feedback
from service.serving.metrics import Metrics
from service.serving.retrievals import Retrievals
from service.serving.tokenizing import Tokenizing
from service.settings import DEFAULT_MESSAGE, ServiceSettings

log = logging.getLogger("hallutracer")
T = TypeVar("T")
Scorers = Mapping[str, Scorer]  # by the reference that each was loaded by; the first is the default
Load = Callable[[], Scorers]


@dataclass
class ServiceState:
    """``load`` builds the scorers in a thread of its own."""

    load: Load
    aliases_of: Callable[[str], Mapping[str, int]] = lambda name: {}  # a bundle's alias -> version; read when it loads
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    policies: Mapping[str, Policy] = field(default_factory=built_in)
    rules: Sequence[Rule] = ()  # the first that fits chooses where a request names no policy
    metrics: Metrics = field(default_factory=Metrics)
    scorers: list[Scorer] = field(default_factory=list)
    error: BaseException | None = None  # why loading ended without scorers, or what broke the engine
    on_broken: Callable[[], None] = lambda: None  # the engine broke: only a new process helps
    stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    retrievals: Retrievals = field(default_factory=Retrievals)
    feedback: Feedback | None = None  # None: nothing is kept, and no label taken
    _dispatcher: Dispatcher | None = None
    _aliases: dict[str, str] = field(default_factory=dict)  # name@alias -> name:version, as they were when loaded
    tokenizing: Tokenizing = field(init=False)

    def __post_init__(self) -> None:
        """As many requests may be tokenized as prompts may wait."""
        self.tokenizing = Tokenizing(self.settings.max_queue)

    async def start(self) -> None:
        """Load in the background: live at once, ready once every bundle has matched its golden prompts."""
        try:
            scorers, aliases = await asyncio.wrap_future(_in_own_thread(lambda: self._loaded(self.load)))
            self._dispatcher = Dispatcher(
                scorers[0].engine,
                self.metrics,
                max_queue=self.settings.max_queue,
                stall_s=self.settings.stall_s,
                on_broken=self._broken,
            )
        except Exception as error:
            self.error = error
            return
        self._serve(scorers, aliases)

    async def reload(self, load: Callable[[Engine], Scorers]) -> None:
        """Load other bundles on the running engine; requests under way end with the bundle they began with.

        Raises what ``load`` raises; the loaded bundles then stay.
        """
        self.check_ready()
        engine = self.scorers[0].engine
        self._serve(*await asyncio.wrap_future(_in_own_thread(lambda: self._loaded(lambda: load(engine)))))

    def _loaded(self, load: Load) -> tuple[list[Scorer], dict[str, str]]:
        """The scorers and the aliases of their bundles; where those cannot be read, the ones that were known."""
        loaded = load()
        scorers = list(loaded.values())
        for name in (None, *(rule.policy for rule in self.rules)):
            check_tells(scorers[0], self.policy(name, None))  # else each request would be refused
        served = scorers[0].engine.identity.model
        for rule in self.rules:
            if rule.model not in (None, served):
                log.warning("a rule for policy %r never fits: it names another model than %s", rule.policy, served)
        aliases: dict[str, str] = {}
        for name in {scorer.bundle.manifest.name for scorer in scorers}:
            try:
                found = {f"{name}@{alias}": f"{name}:{version}" for alias, version in self.aliases_of(name).items()}
            except BundleError as error:
                found = {alias: target for alias, target in self._aliases.items() if alias.startswith(f"{name}@")}
                log.error("the aliases of %s were not read, those known before stay: %s", name, error)
            aliases |= found
        # An alias may have moved while its bundle was loaded: the operator's own references name what was loaded.
        return scorers, aliases | {name: scorer.bundle.reference for name, scorer in loaded.items()}

    def _serve(self, scorers: list[Scorer], aliases: dict[str, str]) -> None:
        self.scorers, self._aliases = scorers, aliases
        self.metrics.bundles(
            (scorer.engine.identity.model, scorer.bundle.reference, scorer.bundle.manifest.digest) for scorer in scorers
        )
        self.metrics.guarantees(
            (scorer.engine.identity.model, scorer.bundle.reference, promise.alpha, promise.delta)
            for scorer in scorers
            if (promise := scorer.bundle.manifest.guarantee) is not None
        )

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
        if self.feedback is not None:
            self.feedback.close()
        self.metrics.close()

    def check_alive(self) -> None:
        """Raise NotReady where only a new process helps; a service that loads or drains is alive."""
        if self.failure is not None:
            self.check_ready()

    def check_not_full(self, caller: Caller) -> None:
        """Raise Overloaded where not even one more prompt may wait; whatever else is wrong is said elsewhere."""
        if self._dispatcher is not None and self._dispatcher.alive:
            self._dispatcher.check_not_full(caller.name)

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
        if self._dispatcher.stalled:
            raise NotReady(f"prompts wait, and the engine has given nothing for {self.settings.stall_s:g} s")

    def scorer(self, bundle: str | None, model: str | None) -> Scorer:
        """The loaded scorer a request names; the first one where it names none.

        An alias means what it meant when its bundle was loaded.  Raises NotReady and NotFound.
        """
        self.check_ready()
        identity = self.scorers[0].engine.identity
        if model is not None and not {model, "*"} & {identity.model, *self.settings.model_names}:
            names = ", ".join(map(repr, (identity.model, *self.settings.model_names)))
            raise NotFound(
                f"model {model!r} is not loaded; ask for {names} (--served-model-name adds names)", param="model"
            )
        if bundle is None:
            return self.scorers[0]
        wanted = self._aliases.get(bundle, bundle)
        for scorer in self.scorers:
            if wanted in (scorer.bundle.manifest.name, scorer.bundle.reference):
                return scorer
        loaded = ", ".join(scorer.bundle.reference for scorer in self.scorers)
        raise NotFound(f"bundle {bundle!r} is not loaded; loaded: {loaded}", param="bundle")

    def choose(
        self,
        caller: Caller,
        route: str,
        *,
        bundle: str | None,
        model: str | None,
        policy: str | None,
        threshold: float | None,
    ) -> tuple[Scorer, Policy]:
        """The scorer and the policy of a request.  Raises NotReady, NotFound and NotAllowed."""
        scorer = self.scorer(bundle, model)
        served = scorer.engine.identity.model
        ruled = next((rule.policy for rule in self.rules if rule.fits(route, served, caller.name)), None)
        wanted = self.policy(ruled if policy is None else policy, threshold)
        check_choice(scorer, wanted, self.scorers[0], self.policy(ruled, None), caller)
        return scorer, wanted

    @property
    def abstain_message(self) -> str:
        """What is said where no policy of the operator's says anything else."""
        return self.policies["gate"].message or DEFAULT_MESSAGE

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


def _in_own_thread(load: Callable[[], T]) -> Future[T]:
    """A thread that ends with the loading, and does not hold the process up if it is told to stop meanwhile.

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
