"""The running service: its catalogue, access and lifecycle, and what its requests share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.access.keys import KeyRing
from service.audit.auditor import Auditor
from service.audit.events import Who
from service.judging.drift import DriftLimits
from service.policies.policy import Policies, built_in
from service.serving.access import Access
from service.serving.admission import Tokenizing
from service.serving.catalogue import Catalogue
from service.serving.feedback import Feedback
from service.serving.lifecycle import Lifecycle, Load, LoadAgain
from service.serving.metrics import Metrics
from service.serving.retrievals import Retrievals
from service.serving.rollout import RolloutPlan
from service.serving.sampled import Sampled
from service.settings import ServiceSettings

if TYPE_CHECKING:
    from service.serving.tracing import Tracing  # else OpenTelemetry would be imported for all


@dataclass(frozen=True, eq=False, kw_only=True)
class Service:
    """Complete when it is constructed; ``Service.of`` makes the parts."""

    settings: ServiceSettings
    metrics: Metrics
    catalogue: Catalogue
    access: Access
    lifecycle: Lifecycle
    tokenizing: Tokenizing
    sampled: Sampled
    retrievals: Retrievals
    feedback: Feedback | None  # None: nothing is stored, and no label taken
    audit: Auditor | None  # None: nothing is written
    tracing: Tracing | None  # None: no traces
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls,
        load: Load,
        *,
        load_again: LoadAgain | None = None,
        left_out: Mapping[str, str] | None = None,
        aliases_of: Callable[[str], Mapping[str, int]] = lambda name: {},
        settings: ServiceSettings | None = None,
        policies: Policies | None = None,
        plan: RolloutPlan | None = None,
        limits: DriftLimits | None = None,
        keys: KeyRing | None = None,
        metrics: Metrics | None = None,
        feedback: Feedback | None = None,
        audit: Auditor | None = None,
        tracing: Tracing | None = None,
        on_broken: Callable[[], None] = lambda: None,
    ) -> Service:
        """Return a service that ``load`` has not begun to load; ``lifecycle.start`` does.

        ``left_out`` are the references that loading leaves out, and why: ``load`` and ``load_again`` write it.
        """
        settings, metrics = settings or ServiceSettings(), metrics or Metrics()
        catalogue = Catalogue(
            settings=settings,
            metrics=metrics,
            policies=policies or Policies(built_in()),
            plan=plan or RolloutPlan(),
            aliases_of=aliases_of,
            feedback=feedback,
            limits=limits or DriftLimits(),
        )
        return cls(
            settings=settings,
            metrics=metrics,
            catalogue=catalogue,
            access=Access(settings, keys or KeyRing(), metrics, audit),
            lifecycle=Lifecycle(
                settings=settings,
                metrics=metrics,
                catalogue=catalogue,
                load=load,
                load_again=load_again,
                left_out={} if left_out is None else left_out,
                on_broken=on_broken,
                audit=audit,
            ),
            tokenizing=Tokenizing(settings.max_queue),  # as many requests may be tokenized as prompts may wait
            sampled=Sampled(settings.threshold),
            retrievals=Retrievals(),
            feedback=feedback,
            audit=audit,
            tracing=tracing,
        )

    @property
    def ready(self) -> Catalogue:
        """Return the catalogue, once scores can be served.  Raises NotReady."""
        self.lifecycle.check_ready()
        return self.catalogue

    async def reload(self, who: Who) -> tuple[str | None, Exception | None]:
        """Read the file of keys and the bundles again, each whatever becomes of the other.

        Returns why the file of keys is not in force, and why the bundles were not swapped; None where they are.
        """
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
