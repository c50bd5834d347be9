"""The running service: catalogue, access (the keys in force) and lifecycle, and what its requests
share."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from service.access.callers import OWNERS, Caller, Key, on_loopback
from service.access.keys import KeyRing
from service.audit.auditor import SERVICE, Auditor, Who, recorded
from service.engines.base import Engine
from service.engines.bridge import fulfil
from service.errors import AuditUnavailable, ClientGone, HalluTracerError, NotReady
from service.policies.guard import Action, Policy
from service.policies.policy import Policies, built_in
from service.serving.admission import Tokenizing
from service.serving.catalogue import Catalogue, Loaded, RolloutPlan, Scorers
from service.serving.dispatcher import ENDS, Dispatcher
from service.serving.judgement import Judgement, Retrievals
from service.serving.metrics import Metrics
from service.settings import ServiceSettings

if TYPE_CHECKING:
    from service.serving.hooks import AnswerStore, Tracing

log = logging.getLogger("hallutracer")
T = TypeVar("T")
Load = Callable[[], Scorers]
LoadAgain = Callable[[Engine], Scorers]
WATCH_S = 1.0
WATCH = Who(by="file")


@dataclass(frozen=True, eq=False)
class Access:
    """Who may call the service, and what each caller may loosen; the keys are read again while the
    service runs."""

    settings: ServiceSettings
    keys: KeyRing  # none: open to all that reach the port
    metrics: Metrics
    audit: Auditor | None

    @property
    def owned(self) -> bool:
        """Return whether this machine's programs and pages may choose what an operator may.

        Only they reach the service, which asks for no key, and the operator has not said what
        callers may."""
        return not (self.settings.callers_may or self.keys.closed) and on_loopback(
            self.settings.host
        )

    def caller(self, key: Key | None, address: str | None, *, here: bool) -> Caller:
        """Return the key's owner; without a key, whoever has the address, ``here``: of this
        machine."""
        everyone = frozenset(self.settings.callers_may)
        if key is not None:
            return Caller(key.name, everyone | key.may, key.policies)
        return Caller(address or "", OWNERS if self.owned and here else everyone)

    async def watch(self) -> None:
        """Read the file of named keys again whenever it changes, for as long as the service
        runs."""
        refused = False  # by the audit log, which may be written again soon
        while True:
            await asyncio.sleep(WATCH_S)
            if not (await asyncio.to_thread(self.keys.changed_on_disk) or refused):
                continue
            try:
                refused = not await self.reload(WATCH)
            except Exception:  # whatever it is, a key that is revoked later must be heard of
                log.exception("the keys could not be read again")
                refused = True

    async def reload(self, who: Who) -> bool:
        """Put the file's keys in force.  Whatever is wrong with it, those in force stay.

        Returns False where only the audit log is to blame: nothing is then added; what the file
        takes away is gone all the same."""
        async with self.keys.reading:
            try:
                keys, changes = await asyncio.to_thread(self.keys.read)
            except HalluTracerError as error:
                self._note(who, f"the keys in force stay: {error}")
                return True
            if any(changes):
                try:
                    async with recorded(self.audit, who, "keys.reload", changes._asdict()):
                        self.keys.use(keys)
                except AuditUnavailable as error:
                    self.keys.keep_common(keys)
                    self._note(who, f"no key was added or changed: {error}")
                    return False
                names = (", ".join(names) or "none" for names in changes)
                log.info("keys: added %s, removed %s, changed %s", *names)
            self._note(who, None)
            return True

    def _note(self, who: Who, problem: str | None) -> None:
        if problem is not None and (who != WATCH or problem != self.keys.problem):
            log.error("%s", problem)
        self.keys.problem = problem
        self.metrics.gauge("keys_stale", int(problem is not None))


@dataclass(eq=False, kw_only=True)
class Lifecycle:
    """Loading, readiness, reloading on the running engine, draining.

    ``load`` builds the scorers in a thread of its own; ``load_again`` on the running engine, None:
    it cannot."""

    settings: ServiceSettings
    metrics: Metrics
    catalogue: Catalogue
    load: Load
    load_again: LoadAgain | None
    left_out: Mapping[str, str]
    on_broken: Callable[[], None]  # the engine broke: only a new process helps
    audit: Auditor | None
    stopping: bool = False
    # why loading ended without scorers, or what broke the engine
    error: BaseException | None = None
    # which other processes are to be ready before this one is told to be, in words
    awaited: str | None = None
    reload_error: str | None = None  # why the newest reload changed nothing
    # when the first of those reloads failed that changed nothing, one after another
    failing_since: float | None = None
    # scoring requests since ``leave``: finished, unfinished, refused
    ended: Counter[str] = field(default_factory=Counter)
    _left_at: float | None = None  # on the monotonic clock
    # of what waits for others than the engine
    _limits: set[asyncio.Timeout] = field(default_factory=set)
    _dispatcher: Dispatcher | None = None
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> None:
        """Load in the background: live at once, ready once every bundle has matched its golden
        prompts."""
        try:
            loaded = await self._load(self.load)
            engine, settings = loaded.scorers[0].engine, self.settings
            self._dispatcher = Dispatcher(
                engine,
                self.metrics,
                max_queue=settings.max_queue,
                stall_s=settings.stall_s,
                on_broken=self._broken,
            )
        except Exception as error:
            self.error = error
            return
        self.catalogue.serve(loaded)
        log.info(
            "hallutracer ready: %s", loaded.scorers[0].in_words(self.catalogue.policy(None, None))
        )

    async def _load(self, load: Load) -> Loaded:
        return await asyncio.wrap_future(
            in_own_thread(lambda: self.catalogue.checked(load(), self.left_out))
        )

    async def reload(self, load: LoadAgain, who: Who = SERVICE) -> None:
        """Load other bundles on the running engine; requests under way end with the bundle they
        began with.

        One reload at a time, and in the audit log before it begins.  Raises AuditUnavailable and
        what ``load`` raises; the loaded bundles then stay."""
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
        """Load the bundles again where there is ``load_again``; return why they were not swapped,
        None: they were."""
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
        return self.check_ready()

    def _broken(self, error: BaseException) -> None:
        self.error = error
        self.on_broken()

    def leave(self) -> None:
        """Refuse new work; what runs goes on."""
        if self._left_at is None:
            self._left_at = time.monotonic()
        self.stopping = True

    def cut(self) -> None:
        """End what still runs: whoever waits for it gets NotReady.  On the event loop, after
        ``leave``."""
        if self._dispatcher is not None:
            self._dispatcher.give_up()
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def until_cut(self) -> AsyncIterator[None]:
        """Raise NotReady inside the block, which waits for no engine, once what still runs is
        ended."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise NotReady(ENDS) from None
        finally:
            self._limits.discard(limit)

    def count_ended(self, code: str | None, *, arrived_late: bool) -> None:
        """Count a scoring request that ended; ``arrived_late``: it came after ``leave``."""
        if self.stopping:
            cut_short = code in (NotReady.code, ClientGone.code)
            self.ended[
                "refused" if arrived_late else "unfinished" if cut_short else "finished"
            ] += 1

    def log_stopped(self) -> None:
        """Log what became of the requests since ``leave``, once all has ended."""
        counts = {name: self.ended[name] for name in ("finished", "unfinished", "refused")}
        seconds = 0.0 if self._left_at is None else time.monotonic() - self._left_at
        log.info("stopped", extra={"fields": counts | {"seconds": round(seconds, 3)}})

    def stop(self) -> None:
        """End what still runs, wait until the engine is idle, free the model; after ``leave``."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self.catalogue.scorers:
            self.catalogue.scorers[0].engine.close()
        self.catalogue.scorers, self.catalogue.loaded = (), Loaded()

    def check_not_full(self, caller: str) -> None:
        """Raise Overloaded where not even one more prompt may wait; whatever else is wrong is said
        elsewhere."""
        if self._dispatcher is not None and self._dispatcher.alive:
            self._dispatcher.check_space(caller)

    @property
    def is_ready(self) -> bool:
        """Return whether scores can be served."""
        try:
            self.check_serves()
        except NotReady:
            return False
        return True

    @property
    def serves(self) -> bool:
        """Return whether requests are taken."""
        try:
            self.check_ready()
        except NotReady:
            return False
        return True

    def check_alive(self) -> None:
        """Raise NotReady where only a new process helps; a service that loads or drains is
        alive."""
        if self.failure is not None:
            self.check_ready()

    def check_ready(self) -> Dispatcher:
        """Return where requests are admitted.  Raises NotReady with the reason unless scores can be
        served."""
        dispatcher = self._check_loaded()
        for monitor in self.catalogue.monitors.values():
            if (reason := monitor.violations.get("golden")) is not None:
                raise NotReady(f"the golden prompts do not give their risks any more: {reason}")
        if dispatcher.stalled:
            raise NotReady(
                f"prompts wait, and the engine has given nothing for {self.settings.stall_s:g} s"
            )
        return dispatcher

    def check_serves(self) -> None:
        """Raise NotReady with the reason where nothing can be scored, or no score could be told.

        Requests are taken all the same where only the audit log refuses, since one of them may find
        it mended, and where only other processes are awaited."""
        self.check_ready()
        if self.awaited is not None:
            raise NotReady(self.awaited)
        if self.audit is not None and (why := self.audit.refusing) is not None:
            raise NotReady(f"{why}; no decision is told without its line (--audit-required)")

    def _check_loaded(self) -> Dispatcher:
        if self.stopping:
            raise NotReady(ENDS)
        if self.failure is not None:
            what = (
                "loading failed"
                if self._dispatcher is None
                else "the engine broke, restart the service"
            )
            raise NotReady(f"{what}: {self.failure}", retry=False)
        if self._dispatcher is None:
            raise NotReady("the model and its bundles are still loading")
        return self._dispatcher


def in_own_thread(load: Callable[[], T]) -> Future[T]:
    """Return what a thread will give that ends with the loading, and does not hold up a process
    that is to stop.

    While a second thread that has run torch is there, OpenMP counts twice the threads, finds too
    few cores, stops spinning, and a forward pass of a small model takes 2.5 times as long."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever waits may be cancelled, the loading is not
    threading.Thread(target=fulfil, args=(done, load), name="load", daemon=True).start()
    return done


@dataclass(eq=False, kw_only=True)
class Service:
    """Complete when it is constructed; ``load`` begins with ``lifecycle.start``."""

    load: Load = field(kw_only=False)
    load_again: LoadAgain | None = None
    # reference -> why; written by whoever loads
    left_out: Mapping[str, str] = field(default_factory=dict)
    aliases_of: Callable[[str], Mapping[str, int]] = lambda name: {}
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    policies: Policies = field(default_factory=lambda: Policies(built_in()))
    plan: RolloutPlan = field(default_factory=RolloutPlan)
    keys: KeyRing = field(default_factory=KeyRing)
    metrics: Metrics = field(default_factory=Metrics)
    feedback: AnswerStore | None = None  # None: nothing is stored, and no label taken
    audit: Auditor | None = None  # None: nothing is written
    tracing: Tracing | None = None  # None: no traces
    on_broken: Callable[[], None] = lambda: None
    retrievals: Retrievals = field(default_factory=Retrievals)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        settings, metrics = self.settings, self.metrics
        self.catalogue = Catalogue(
            settings=settings,
            metrics=metrics,
            policies=self.policies,
            plan=self.plan,
            aliases_of=self.aliases_of,
            feedback=self.feedback,
        )
        self.lifecycle = Lifecycle(
            settings=settings,
            metrics=metrics,
            catalogue=self.catalogue,
            load=self.load,
            load_again=self.load_again,
            left_out=self.left_out,
            on_broken=self.on_broken,
            audit=self.audit,
        )
        metrics.gauge("gate_configured", int(self._gates))
        self.access = Access(settings, self.keys, metrics, self.audit)
        # as many requests may be tokenized as prompts may wait
        self.tokenizing = Tokenizing(settings.max_queue)
        # Answers to bundles' own questions: by digest, number, and the policy with its threshold
        # that judged them.
        self.sampled: dict[tuple[str, int, Policy], Judgement] = {}

    @property
    def _gates(self) -> bool:
        """Return whether a request that chooses nothing may meet a policy that does not only
        observe."""
        names = {self.settings.policy, *(rule.policy for rule in self.policies.rules)}
        return any(self.policies.named[name].action is not Action.OBSERVE for name in names)

    @property
    def ready(self) -> Catalogue:
        """Return the catalogue, once scores can be served.  Raises NotReady."""
        self.lifecycle.check_ready()
        return self.catalogue

    async def reload(self, who: Who) -> tuple[str | None, Exception | None]:
        """Read the file of keys and the bundles again, each whatever becomes of the other.

        Returns why the file of keys is not in force, and why the bundles were not swapped; None
        where they are."""
        await self.access.reload(who)
        return self.access.keys.problem, await self.lifecycle.reload_bundles(who)

    def stop(self) -> None:
        """Refuse new work, end what still runs, free the model, write what waits."""
        self.lifecycle.leave()
        self.tokenizing.close()
        self.lifecycle.stop()
        for part in (self.feedback, self.audit, self.tracing, self.metrics):
            if part is not None:
                part.close()
