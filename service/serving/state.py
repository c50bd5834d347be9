"""What the running service holds: the loaded bundles on one engine, the dispatcher, policies, metrics; is it ready?"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from probes_store.errors import BundleError, GoldenMismatch
from probes_store.golden import check_golden
from probes_store.reference import PIN
from service.access.callers import Caller, on_loopback
from service.access.keys import KeyRing
from service.audit.auditor import Auditor, recorded
from service.audit.events import SERVICE, Who
from service.engines.base import Engine
from service.errors import FeedbackUnavailable, NonFiniteReadout, NotFound, NotReady
from service.feedback.rows import Tally
from service.judging.drift import DriftLimits
from service.policies.guard import OBSERVE, Policy
from service.policies.policy import Rule, built_in
from service.scoring import Scorer
from service.serving.choice import check_choice, check_tells
from service.serving.dispatcher import Dispatcher
from service.serving.feedback import Feedback
from service.serving.metrics import Metrics
from service.serving.monitor import Monitor
from service.serving.retrievals import Retrievals
from service.serving.rollout import Rollout, RolloutPlan, rolled_out
from service.serving.sampled import Sampled
from service.serving.tokenizing import Tokenizing
from service.settings import DEFAULT_MESSAGE, ServiceSettings

if TYPE_CHECKING:
    from service.serving.tracing import Tracing  # else OpenTelemetry would be imported for all

log = logging.getLogger("hallutracer")
T = TypeVar("T")
Scorers = Mapping[str, Scorer]  # by the reference that each was loaded by; the first is the default
Load = Callable[[], Scorers]


@dataclass(frozen=True)
class Loaded:
    """What one loading gave: all of it is served from one moment on."""

    scorers: tuple[Scorer, ...]
    aliases: Mapping[str, str]  # name@alias -> name:version, as they were when loaded
    rollout: Rollout = Rollout()
    left_out: Mapping[str, str] = field(default_factory=dict)  # reference -> why it is not used
    tallies: Mapping[str, Tally] = field(default_factory=dict)  # digest -> what labels said before
    time: float = field(default_factory=time.time)


@dataclass
class ServiceState:
    """``load`` builds the scorers in a thread of its own."""

    load: Load
    aliases_of: Callable[[str], Mapping[str, int]] = lambda name: {}  # a bundle's alias -> version; read when it loads
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    policies: Mapping[str, Policy] = field(default_factory=built_in)
    rules: Sequence[Rule] = ()  # the first that fits chooses where a request names no policy
    plan: RolloutPlan = field(default_factory=RolloutPlan)
    left_out: dict[str, str] = field(default_factory=dict)  # reference -> why; ``load`` writes it
    metrics: Metrics = field(default_factory=Metrics)
    loaded: Loaded = Loaded((), {})
    reload_error: str | None = None  # why the newest reload changed nothing
    failing_since: float | None = None  # when the first of those reloads failed that changed nothing, one after another
    error: BaseException | None = None  # why loading ended without scorers, or what broke the engine
    load_again: Callable[[Engine], Scorers] | None = None  # on the running engine; None: it cannot
    on_broken: Callable[[], None] = lambda: None  # the engine broke: only a new process helps
    stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    limits: DriftLimits = field(default_factory=DriftLimits)
    monitors: Mapping[str, Monitor] = field(default_factory=dict)  # by "name:version"
    retrievals: Retrievals = field(default_factory=Retrievals)
    sampled: Sampled = field(init=False)
    feedback: Feedback | None = None  # None: nothing is kept, and no label taken
    keys: KeyRing = field(default_factory=KeyRing)  # none: open to all that reach the port
    audit: Auditor | None = None  # None: nothing is written
    tracing: Tracing | None = None  # None: no traces
    _dispatcher: Dispatcher | None = None
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)
    tokenizing: Tokenizing = field(init=False)

    def __post_init__(self) -> None:
        """As many requests may be tokenized as prompts may wait."""
        self.tokenizing = Tokenizing(self.settings.max_queue)
        self.sampled = Sampled(self.settings.threshold)

    async def start(self) -> None:
        """Load in the background: live at once, ready once every bundle has matched its golden prompts."""
        try:
            loaded = await asyncio.wrap_future(in_own_thread(lambda: self._checked(self.load())))
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
        self._serve(loaded)

    async def reload(self, load: Callable[[Engine], Scorers], who: Who = SERVICE) -> None:
        """Load other bundles on the running engine; requests under way end with the bundle they began with.

        One reload at a time, and in the audit log before it begins.  Raises AuditUnavailable and what ``load`` raises;
        the loaded bundles then stay.
        """
        async with self._reloading:
            self._check_loaded()
            engine = self.scorers[0].engine
            try:
                async with recorded(self.audit, who, "bundles.reload", {"before": self._in_force()}) as outcome:
                    loaded = await asyncio.wrap_future(in_own_thread(lambda: self._checked(load(engine))))
                    self._check_loaded()  # it may have been stopped meanwhile
                    self._serve(loaded)
                    outcome["after"] = self._in_force()
            except Exception as error:
                self.reload_error = str(error)
                self.failing_since = self.failing_since or time.time()
                self.metrics.reloaded(False)
                raise
            self.reload_error = self.failing_since = None
            self.metrics.reloaded(True)

    def _in_force(self) -> list[dict[str, str]]:
        """For the audit log."""
        return [
            {
                "bundle": scorer.bundle.reference,
                "digest": scorer.bundle.manifest.digest,
                "role": self.rollout.role(scorer, self.scorers[0]),
            }
            for scorer in self.scorers
        ]

    def _checked(self, found: Scorers) -> Loaded:
        """The scorers and the aliases of their bundles; where those cannot be read, the ones that were known."""
        scorers = tuple(found.values())
        self._check_tells(scorers[0])  # else each request would be refused
        rollout, unused = rolled_out(self.plan, found, self._check_tells)
        served = scorers[0].engine.identity.model
        for rule in self.rules:
            if rule.model not in (None, served):
                log.warning("a rule for policy %r never fits: it names another model than %s", rule.policy, served)
        aliases: dict[str, str] = {}
        for name in {scorer.bundle.manifest.name for scorer in scorers}:
            try:
                known = {f"{name}@{alias}": f"{name}:{version}" for alias, version in self.aliases_of(name).items()}
            except BundleError as error:
                before = self.loaded.aliases
                known = {alias: target for alias, target in before.items() if alias.startswith(f"{name}@")}
                log.error("the aliases of %s were not read, those known before stay: %s", name, error)
            aliases |= known
        # An alias may have moved while its bundle was loaded: the operator's own references name what was loaded.
        aliases |= {name: scorer.bundle.reference for name, scorer in found.items()}
        for reference, reason in unused.items():
            log.error("bundle %s is left out: %s", reference, reason)
        return Loaded(scorers, aliases, rollout, self.left_out | unused, self._tallies(scorers))

    def _tallies(self, scorers: Sequence[Scorer]) -> dict[str, Tally]:
        """A new process knows the labels that earlier ones took."""
        found = dict[str, Tally]()
        for digest in (one.bundle.manifest.digest for one in scorers if one.bundle.manifest.guarantee is not None):
            try:
                if self.feedback is not None:
                    found[digest] = self.feedback.tally(digest)
            except FeedbackUnavailable as error:
                log.error("the labels of %s are not known before the next one comes: %s", digest, error)
        return found

    def _check_tells(self, scorer: Scorer) -> None:
        for name in (None, *(rule.policy for rule in self.rules)):
            check_tells(scorer, self.policy(name, None))

    def _serve(self, loaded: Loaded) -> None:
        self.loaded, scorers = loaded, loaded.scorers
        monitors = {}
        for scorer in scorers:
            before = self.monitors.get(scorer.bundle.reference)
            if before is None or before.scorer.bundle.manifest.digest != scorer.bundle.manifest.digest:
                monitors[scorer.bundle.reference] = new = Monitor(scorer, self.limits, self._tell)
                if (tally := loaded.tallies.get(scorer.bundle.manifest.digest)) is not None:
                    new.count(tally)
            else:  # it goes on with what it has seen
                before.scorer = scorer
                before.golden(None)  # they were replayed just now
                monitors[scorer.bundle.reference] = before
        self.monitors = monitors
        rollout = loaded.rollout
        self.metrics.rollout(
            scorers[0].engine.identity.model,
            scorers[0].bundle.reference,
            None if rollout.canary is None else rollout.canary.bundle.reference,
            [shadow.bundle.reference for shadow in rollout.shadows],
        )
        self.metrics.bundles(
            (scorer.engine.identity.model, scorer.bundle.reference, scorer.bundle.manifest.digest) for scorer in scorers
        )
        self.metrics.guarantees(
            (scorer.engine.identity.model, scorer.bundle.reference, promise.alpha, promise.delta)
            for scorer in scorers
            if (promise := scorer.bundle.manifest.guarantee) is not None
        )

    def _tell(self, monitor: Monitor) -> None:
        scorer = monitor.scorer
        self.metrics.watched(scorer.engine.identity.model, scorer.bundle.reference, monitor.drift, monitor.void)

    async def replay_golden(self) -> None:
        """Replay the golden prompts of every bundle that judges, among the requests; not ready while one is off."""
        for scorer in {self.scorers[0], self.rollout.canary or self.scorers[0]}:
            monitor = self.monitors[scorer.bundle.reference]
            try:
                reports = [await scorer.last_report(prompt, OBSERVE) for prompt in scorer.bundle.golden.prompts()]
                trajectories = np.stack([report.logits for report in reports])
                risks = np.array([report.risk for report in reports])
                deviation = check_golden(scorer.bundle, trajectories, risks, dtype=scorer.engine.identity.dtype)
            except (GoldenMismatch, NonFiniteReadout) as error:
                monitor.golden(str(error))
            else:
                scorer.golden = deviation
                monitor.golden(None)

    @property
    def scorers(self) -> Sequence[Scorer]:
        """The loaded scorers; the first is the default."""
        return self.loaded.scorers

    @property
    def rollout(self) -> Rollout:
        """Canary and shadows."""
        return self.loaded.rollout

    @property
    def owned(self) -> bool:
        """Whether this machine's programs and pages may choose what an operator may.

        Only they reach the service, which asks for no key, and the operator has not said what callers may.
        """
        return not (self.settings.callers_may or self.keys.closed) and on_loopback(self.settings.host)

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

    def leave(self) -> None:
        """Refuse new work; what runs goes on."""
        self.stopping = True

    def stop(self) -> None:
        """Refuse new work, end what still runs, wait until the engine is idle, free the model."""
        self.leave()
        self.tokenizing.close()
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self.scorers:
            self.scorers[0].engine.close()
        self.loaded = Loaded((), {})
        if self.feedback is not None:
            self.feedback.close()
        if self.audit is not None:
            self.audit.close()
        if self.tracing is not None:
            self.tracing.close()
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
        dispatcher = self._check_loaded()
        for monitor in self.monitors.values():
            if "golden" in monitor.void:
                raise NotReady(f"the golden prompts do not give their risks any more: {monitor.void['golden']}")
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
        name, pin, digest = bundle.partition(PIN)
        aliases = self.loaded.aliases
        wanted = aliases.get(bundle) or aliases.get(name, name)
        for scorer in self.scorers:
            manifest = scorer.bundle.manifest
            if wanted in (manifest.name, manifest.reference):
                if pin and manifest.digest != f"sha256:{digest}":
                    break  # a pin checks, and does not search
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
        session: Callable[[], str] = str,
    ) -> tuple[Scorer, Policy]:
        """The scorer and the policy of a request; those of one ``session`` have the canary, or have it not.

        Raises NotReady, NotFound and NotAllowed.
        """
        scorer = self.scorer(bundle, model)
        if bundle is None:
            scorer = self.rollout.chosen(scorer, lambda: f"{caller.name}\n{session()}")
        served = scorer.engine.identity.model
        ruled = next((rule.policy for rule in self.rules if rule.fits(route, served, caller.name)), None)
        wanted = self.policy(ruled if policy is None else policy, threshold)
        own = scorer if bundle is None else self.scorers[0]
        check_choice(scorer, wanted, own, self.policy(ruled, None), caller)
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


def in_own_thread(load: Callable[[], T]) -> Future[T]:
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
