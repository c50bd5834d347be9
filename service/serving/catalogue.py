"""The catalogue: the loaded bundles, which of them judges a request, and under which policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from probes_store.bundle import check_golden
from probes_store.errors import BundleError, GoldenMismatch
from probes_store.syntax import PIN
from service.access.callers import Caller
from service.errors import FeedbackUnavailable, NonFiniteReadout, NotAllowed, NotFound, RequestError
from service.feedback.rows import Tally
from service.judging.drift import DriftLimits
from service.policies.guard import OBSERVE, Action, Policy
from service.policies.policy import Policies
from service.scoring import Scorer
from service.serving.feedback import Feedback
from service.serving.metrics import Metrics
from service.serving.monitor import Monitor
from service.serving.rollout import Rollout, RolloutPlan, rolled_out
from service.settings import DEFAULT_MESSAGE, ServiceSettings

log = logging.getLogger("hallutracer")
Scorers = Mapping[str, Scorer]  # by the reference that each was loaded by; the first is the default


@dataclass(frozen=True)
class Loaded:
    """What one loading gave: all of it is served from one moment on."""

    scorers: tuple[Scorer, ...] = ()  # the first is the default
    aliases: Mapping[str, str] = field(default_factory=dict)  # name@alias -> name:version, as they were when loaded
    rollout: Rollout = Rollout()
    left_out: Mapping[str, str] = field(default_factory=dict)  # reference -> why it is not used
    tallies: Mapping[str, Tally] = field(default_factory=dict)  # digest -> what labels said before
    time: float = field(default_factory=time.time)


@dataclass(eq=False, kw_only=True)
class Catalogue:
    """Empty until the first loading is ``serve``d; used on the event loop, but for ``checked``."""

    settings: ServiceSettings
    metrics: Metrics
    policies: Policies
    plan: RolloutPlan = field(default_factory=RolloutPlan)
    aliases_of: Callable[[str], Mapping[str, int]] = lambda name: {}  # a bundle's alias -> version; read when it loads
    feedback: Feedback | None = None
    limits: DriftLimits = field(default_factory=DriftLimits)
    loaded: Loaded = field(default_factory=Loaded)
    monitors: Mapping[str, Monitor] = field(default_factory=dict)  # by "name:version"

    @property
    def scorers(self) -> Sequence[Scorer]:
        """Return the loaded scorers; the first is the default."""
        return self.loaded.scorers

    @property
    def rollout(self) -> Rollout:
        """Return canary and shadows."""
        return self.loaded.rollout

    def checked(self, found: Scorers, left_out: Mapping[str, str]) -> Loaded:
        """Return what can be served of ``found``; slow.  Where aliases cannot be read, those that were known stay.

        Raises RequestError where the default cannot do what the service's own policies ask.
        """
        scorers = tuple(found.values())
        self._check_own_policies(scorers[0])  # else each request would be refused
        rollout, unused = rolled_out(self.plan, found, self._check_own_policies)
        served = scorers[0].engine.identity.model
        for rule in self.policies.rules:
            if rule.model not in (None, served):
                log.warning("a rule for policy %r never fits: it names another model than %s", rule.policy, served)
        aliases: dict[str, str] = {}
        for name in {scorer.bundle.manifest.name for scorer in scorers}:
            try:
                aliases |= {f"{name}@{alias}": f"{name}:{version}" for alias, version in self.aliases_of(name).items()}
            except BundleError as error:
                before = self.loaded.aliases.items()
                aliases |= {alias: target for alias, target in before if alias.startswith(f"{name}@")}
                log.error("the aliases of %s were not read, those known before stay: %s", name, error)
        # An alias may have moved while its bundle was loaded: the operator's own references name what was loaded.
        aliases |= {name: scorer.bundle.reference for name, scorer in found.items()}
        for reference, reason in unused.items():
            log.error("bundle %s is left out: %s", reference, reason)
        return Loaded(scorers, aliases, rollout, {**left_out, **unused}, self._tallies(scorers))

    def _tallies(self, scorers: Sequence[Scorer]) -> dict[str, Tally]:
        """A new process knows the labels that earlier ones took."""
        found = dict[str, Tally]()
        for manifest in (scorer.bundle.manifest for scorer in scorers):
            try:
                if self.feedback is not None and manifest.guarantee is not None:
                    found[manifest.digest] = self.feedback.tally(manifest.digest)
            except FeedbackUnavailable as error:
                log.error("the labels of %s are not known before the next one comes: %s", manifest.digest, error)
        return found

    def _check_own_policies(self, scorer: Scorer) -> None:
        for name in (None, *(rule.policy for rule in self.policies.rules)):
            check_tells(scorer, self.policy(name, None))

    def serve(self, loaded: Loaded) -> None:
        """Have ``loaded`` judge every request from now on."""
        self.loaded, scorers = loaded, loaded.scorers
        monitors = {}
        for scorer in scorers:
            manifest, before = scorer.bundle.manifest, self.monitors.get(scorer.bundle.reference)
            if before is None or before.scorer.bundle.manifest.digest != manifest.digest:
                monitors[manifest.reference] = new = Monitor(scorer, self.limits, self._report)
                if (tally := loaded.tallies.get(manifest.digest)) is not None:
                    new.count(tally)
            else:  # it goes on with what it has seen
                before.scorer = scorer
                before.golden(None)  # they were replayed just now
                monitors[manifest.reference] = before
        self.monitors = monitors
        model, rollout = scorers[0].engine.identity.model, loaded.rollout
        self.metrics.rollout(
            model,
            scorers[0].bundle.reference,
            None if rollout.canary is None else rollout.canary.bundle.reference,
            [shadow.bundle.reference for shadow in rollout.shadows],
        )
        self.metrics.bundles((model, one.bundle.reference, one.bundle.manifest.digest) for one in scorers)
        self.metrics.guarantees(
            (model, one.bundle.reference, guarantee.alpha, guarantee.delta)
            for one in scorers
            if (guarantee := one.bundle.manifest.guarantee) is not None
        )

    def _report(self, monitor: Monitor) -> None:
        scorer = monitor.scorer
        model, reference = scorer.engine.identity.model, scorer.bundle.reference
        self.metrics.watched(model, reference, monitor.drift, monitor.violations)

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

    def in_force(self) -> list[dict[str, str]]:
        """Return the bundles and what each does, for the audit log."""
        return [
            {
                "bundle": scorer.bundle.reference,
                "digest": scorer.bundle.manifest.digest,
                "role": self.rollout.role(scorer, self.scorers[0]),
            }
            for scorer in self.scorers
        ]

    def scorer(self, bundle: str | None, model: str | None) -> Scorer:
        """Return the loaded scorer that a request names; the first one where it names none.

        An alias means what it meant when its bundle was loaded.  Raises NotFound.
        """
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
        """Return the scorer and the policy of a request; those of one ``session`` have the canary, or have it not.

        Raises NotFound, NotAllowed and RequestError.
        """
        scorer = self.scorer(bundle, model)
        if bundle is None:
            scorer = self.rollout.chosen(scorer, lambda: f"{caller.name}\n{session()}")
        served = scorer.engine.identity.model
        ruled = next((rule.policy for rule in self.policies.rules if rule.fits(route, served, caller.name)), None)
        wanted = self.policy(ruled if policy is None else policy, threshold)
        own = scorer if bundle is None else self.scorers[0]
        check_choice(scorer, wanted, own, self.policy(ruled, None), caller)
        return scorer, wanted

    @property
    def abstain_message(self) -> str:
        """Return what is said where no policy of the operator's says anything else."""
        return self.policies.named["gate"].message or DEFAULT_MESSAGE

    def policy(self, name: str | None, threshold: float | None) -> Policy:
        """Return the policy a request names, or the service's; thresholds: the request's, the policy's, the service's.

        Raises NotFound.
        """
        wanted, named = self.settings.policy if name is None else name, self.policies.named
        if wanted not in named:
            raise NotFound(f"policy {wanted!r} is not known here; known: {', '.join(sorted(named))}", param="policy")
        policy = named[wanted]
        return policy.at(self.settings.threshold if policy.threshold is None else None).at(threshold)


def check_tells(scorer: Scorer, policy: Policy) -> None:
    """Raise RequestError where the policy asks what the bundle cannot tell."""
    if policy.withhold_outside and scorer.bundle.manifest.uncertainty is None:
        raise RequestError(
            f"policy {policy.name!r} withholds prompts outside training, and {scorer.bundle.reference} has no "
            "reference to tell them by: take another policy, or train the bundle again",
            param="policy",
        )


def untemplated(scorer: Scorer, policy: Policy) -> Policy:
    """Return the policy of a prompt that went through no chat template.

    Where training's prompts went through one, such a prompt is easily unlike all of them, and its risk says nothing: a
    policy that withholds then withholds what lies outside training, if the bundle can tell and the policy does not say
    ``withhold_outside = false``.
    """
    asks = policy.withhold_outside is None and policy.action.withholds
    tells = scorer.prompt_format == "chat" and scorer.bundle.manifest.uncertainty is not None
    return replace(policy, withhold_outside=True) if asks and tells else policy


def check_choice(scorer: Scorer, policy: Policy, own_scorer: Scorer, own: Policy, caller: Caller) -> None:
    """Raise NotAllowed where a choice could let an answer through that the operator's own rule withholds.

    ``scorer`` and ``policy`` apply to the request, ``own_scorer`` and ``own`` where it chooses nothing.
    Raises RequestError where the policy asks what the bundle cannot tell.
    """
    check_tells(scorer, policy)
    if caller.policies is not None and policy.name not in caller.policies:
        allowed = " or ".join(map(repr, caller.policies))
        message = f"requests of key {caller.name!r} are judged by {allowed} alone, not by {policy.name!r}"
        raise NotAllowed(message, param="policy", cure="name one of these, or have the operator change the keys file")
    if own.action is Action.OBSERVE:
        return
    looser = policy.action.strictness < own.action.strictness
    if looser and "policy" not in caller.may:
        raise NotAllowed(
            f"policy {policy.name!r} is less strict than this service's own, {own.name!r}",
            param="policy",
        )
    if scorer is not own_scorer and "bundle" not in caller.may:
        raise NotAllowed(
            f"requests here are judged by {own_scorer.bundle.reference}, and another bundle may let more through",
            param="bundle",
        )
    if looser:
        return
    if _outside(scorer, policy) < _outside(scorer, own) and "policy" not in caller.may:
        raise NotAllowed(f"policy {policy.name!r} lets prompts outside training through", param="policy")
    if policy.withhold_no_fact < own.withhold_no_fact and "policy" not in caller.may:
        raise NotAllowed(f"policy {policy.name!r} lets prompts that ask for no fact through", param="policy")
    highest, wanted = scorer.threshold(own), scorer.threshold(policy)
    if wanted > highest and "threshold" not in caller.may:
        raise NotAllowed(f"the threshold may be at most {highest:g} here, not {wanted:g}", param="threshold")


def _outside(scorer: Scorer, policy: Policy) -> int:
    """Return how much of what lies outside training is withheld: 0, 1 what went through no chat template, or 2 all."""
    return scorer.withholds_outside(policy) + scorer.withholds_outside(untemplated(scorer, policy))
