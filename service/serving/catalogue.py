"""The catalogue: the loaded bundles, which of them judges a request, and under which policy.

A new version of the probes can stand beside the one that serves: a canary judges a share of
requests, a shadow watches.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

from probes_store.errors import BundleError, GoldenMismatch
from probes_store.syntax import PIN
from service.access.callers import Caller
from service.errors import (
    FeedbackUnavailable,
    HalluTracerError,
    NonFiniteReadout,
    NotAllowed,
    NotFound,
    WeightsChanged,
)
from service.feedback.rows import Tally
from service.judging.drift import DriftLimits
from service.policies.guard import OBSERVE, Action, Policy
from service.policies.policy import Policies
from service.scoring import Scorer
from service.serving.hooks import AnswerStore
from service.serving.judgement import Monitor
from service.serving.metrics import Metrics
from service.settings import DEFAULT_MESSAGE, DEFAULT_SHARE, ServiceSettings

log = logging.getLogger("hallutracer")
Scorers = Mapping[str, Scorer]  # by the reference that each was loaded by; the first is the default
Role = Literal["default", "canary", "shadow", "none"]


@dataclass(frozen=True)
class RolloutPlan:
    """What the operator asked for, by reference."""

    canary: str | None = None
    share: float = DEFAULT_SHARE  # of the requests that name no bundle
    shadows: tuple[str, ...] = ()
    # The draw's: nobody else can tell which sessions are the canary's. Replicas that draw alike
    # share one.
    secret: bytes = field(
        default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False
    )

    @property
    def references(self) -> tuple[str, ...]:
        """Return those loaded beside the bundles that requests may name; one that cannot be used is
        left out."""
        return tuple(dict.fromkeys(filter(None, (self.canary, *self.shadows))))


@dataclass(frozen=True, eq=False)
class Rollout:
    """The plan's loaded scorers."""

    canary: Scorer | None = None
    share: float = 0.0
    shadows: tuple[Scorer, ...] = ()
    secret: bytes = b""

    def chosen(self, default: Scorer, key: Callable[[], str]) -> Scorer:
        """Return the canary for its share of keys, else the default; which keys are its, only the
        secret tells.

        The canary's digest is hashed too, so that it is not the same callers who meet each new
        version first."""
        if self.canary is None or not self.share:
            return default
        text = f"{self.canary.bundle.manifest.digest}\n{key()}"
        key_of_hash = hashlib.sha256(self.secret).digest()  # BLAKE2 takes 64 bytes at most
        digest = hashlib.blake2b(
            text.encode("utf-8", "surrogatepass"), digest_size=8, key=key_of_hash
        ).digest()
        return self.canary if int.from_bytes(digest, "big") < self.share * 2**64 else default

    def role(self, scorer: Scorer, default: Scorer) -> Role:
        """Return what a loaded scorer does for requests that name no bundle."""
        if scorer is default:
            return "default"
        return "canary" if scorer is self.canary else "shadow" if scorer in self.shadows else "none"

    def watching(self, scorer: Scorer) -> tuple[Scorer, ...]:
        """Return the shadows of a request that ``scorer`` judges: other bundles, which read the
        same token ids."""
        own = scorer.bundle.manifest.digest  # two aliases may mean one bundle
        return tuple(
            shadow
            for shadow in self.shadows
            if shadow.bundle.manifest.digest != own
            and shadow.engine is scorer.engine
            and shadow.prompt_format == scorer.prompt_format
        )

    def shadowed(self, digest: str) -> bool:
        """Return whether the bundle is read as a shadow, beside what else it does: a canary may be
        one, too."""
        return any(shadow.bundle.manifest.digest == digest for shadow in self.shadows)


def rolled_out(plan: RolloutPlan, loaded: Scorers) -> tuple[Rollout, dict[str, str]]:
    """Return the rollout of what was loaded, and why some of it is not used, by reference."""
    default = next(iter(loaded.values()))
    left_out: dict[str, str] = {}

    def usable(reference: str) -> list[Scorer]:
        if (scorer := loaded.get(reference)) is None:
            return []  # the loading has said why
        if scorer.prompt_format != default.prompt_format:
            left_out[reference] = (
                f"it was trained on {scorer.prompt_format} prompts and {default.bundle.reference}"
                f" on {default.prompt_format} ones: they do not read the same token ids"
            )
        elif scorer.bundle.manifest.digest == default.bundle.manifest.digest:
            left_out[reference] = f"it is {default.bundle.reference}, which judges already"
        else:
            return [scorer]
        return []

    canary = [] if plan.canary is None else usable(plan.canary)
    shadows = [scorer for name in plan.shadows for scorer in usable(name)]
    return Rollout(canary[0] if canary else None, plan.share, tuple(shadows), plan.secret), left_out


@dataclass(frozen=True)
class Loaded:
    """What one loading gave: all of it is served from one moment on."""

    scorers: tuple[Scorer, ...] = ()  # the first is the default
    # name@alias -> name:version, as they were when loaded
    aliases: Mapping[str, str] = field(default_factory=dict)
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
    # a bundle's alias -> version; read when it loads
    aliases_of: Callable[[str], Mapping[str, int]] = lambda name: {}
    feedback: AnswerStore | None = None
    limits: DriftLimits = field(default_factory=DriftLimits)
    loaded: Loaded = field(default_factory=Loaded)
    scorers: Sequence[Scorer] = ()  # the first is the default
    rollout: Rollout = Rollout()
    monitors: Mapping[str, Monitor] = field(default_factory=dict)  # by "name:version"

    def checked(self, found: Scorers, left_out: Mapping[str, str]) -> Loaded:
        """Return what can be served of ``found``; slow.  Where aliases cannot be read, those that
        were known stay."""
        scorers = tuple(found.values())
        rollout, unused = rolled_out(self.plan, found)
        served = scorers[0].engine.identity.model
        for rule in self.policies.rules:
            if rule.model not in (None, served):
                log.warning(
                    "a rule for policy %r never fits: it names another model than %s",
                    rule.policy,
                    served,
                )
        self.check_answers_read(scorers)
        aliases: dict[str, str] = {}
        for name in {scorer.bundle.manifest.name for scorer in scorers}:
            try:
                aliases |= {
                    f"{name}@{alias}": f"{name}:{version}"
                    for alias, version in self.aliases_of(name).items()
                }
            except BundleError as error:
                before = self.loaded.aliases.items()
                aliases |= {
                    alias: target for alias, target in before if alias.startswith(f"{name}@")
                }
                log.error(
                    "the aliases of %s were not read, those known before stay: %s", name, error
                )
        # An alias may have moved while its bundle was loaded: the operator's own references name
        # what was loaded.
        aliases |= {name: scorer.bundle.reference for name, scorer in found.items()}
        for reference, reason in unused.items():
            log.error("bundle %s is left out: %s", reference, reason)
        tallies: dict[str, Tally] = {}  # a new process knows the labels that earlier ones took
        for manifest in (scorer.bundle.manifest for scorer in scorers):
            try:
                if self.feedback is not None and manifest.guarantee is not None:
                    tallies[manifest.digest] = self.feedback.tally(manifest.digest)
            except FeedbackUnavailable as error:
                log.error(
                    "the labels of %s are not known before the next one comes: %s",
                    manifest.digest,
                    error,
                )
        return Loaded(scorers, aliases, rollout, {**left_out, **unused}, tallies)

    def check_answers_read(self, scorers: Sequence[Scorer]) -> None:
        """Raise HalluTracerError where a policy decides by an answer's tokens and a bundle cannot
        read them."""
        blind = next((scorer for scorer in scorers if scorer.answer_probes is None), None)
        policy = next(filter(attrgetter("reads_answers_for"), self.policies.named.values()), None)
        if blind is None or policy is None:
            return
        why = (
            "has no probes of answers: train it on answers (--labels generate, or rows that bring"
            " them)"
        )
        if blind.bundle.answer is not None:
            why = (
                "has probes of answers, which this engine does not read: restart the service, which"
                " starts one for it"
            )
        field = policy.reads_answers_for
        raise HalluTracerError(
            f"policy {policy.name!r} has {field}, and bundle {blind.bundle.reference} {why}; or "
            f"take {field} out of the policies file",
            param="policies",
        )

    def serve(self, loaded: Loaded) -> None:
        """Have ``loaded`` judge every request from now on."""
        self.loaded, self.rollout = loaded, loaded.rollout
        self.scorers = scorers = loaded.scorers
        monitors = {}
        for scorer in scorers:
            manifest = scorer.bundle.manifest
            monitor = self.monitors.get(manifest.reference)
            if monitor is None or monitor.scorer.bundle.manifest.digest != manifest.digest:
                monitor = Monitor(scorer, self.limits, self._report)
                if (tally := loaded.tallies.get(manifest.digest)) is not None:
                    monitor.count(tally)
            else:  # it goes on with what it has seen
                monitor.scorer = scorer
                monitor.golden(None)  # they were replayed just now
            monitors[manifest.reference] = monitor
        self.monitors = monitors
        model, rollout = scorers[0].engine.identity.model, loaded.rollout
        canary = None if rollout.canary is None else rollout.canary.bundle.reference
        shadows = [shadow.bundle.reference for shadow in rollout.shadows]
        self.metrics.rollout(model, scorers[0].bundle.reference, canary, shadows)
        self.metrics.bundles(
            (model, scorer.bundle.reference, scorer.bundle.manifest.digest) for scorer in scorers
        )
        guarantees = {
            scorer.bundle.reference: scorer.bundle.manifest.guarantee for scorer in scorers
        }
        self.metrics.guarantees(
            (model, reference, guarantee.alpha, guarantee.delta)
            for reference, guarantee in guarantees.items()
            if guarantee is not None
        )

    def _report(self, monitor: Monitor) -> None:
        model, reference = monitor.scorer.engine.identity.model, monitor.scorer.bundle.reference
        self.metrics.watched(model, reference, monitor.drift, monitor.violations)

    async def replay_golden(self) -> None:
        """Replay the golden prompts of every bundle that judges, among the requests; not ready
        while one is off."""
        for scorer in {self.scorers[0], self.rollout.canary or self.scorers[0]}:
            monitor = self.monitors[scorer.bundle.reference]
            try:
                prompts = scorer.bundle.golden.prompts()
                scorer.replayed([await scorer.last_report(prompt, OBSERVE) for prompt in prompts])
                monitor.golden(None)
            except (GoldenMismatch, NonFiniteReadout, WeightsChanged) as error:
                monitor.golden(str(error))

    @property
    def matching(self) -> list[Scorer]:
        """Return the scorers whose golden prompts gave the recorded risks when they were replayed
        last."""
        return [
            scorer
            for scorer in self.scorers
            if "golden" not in self.monitors[scorer.bundle.reference].violations
        ]

    def in_force(self) -> list[dict[str, str]]:
        """Return the bundles and what each does, for the audit log."""
        roles = [
            (scorer.bundle, self.rollout.role(scorer, self.scorers[0])) for scorer in self.scorers
        ]
        return [
            {"bundle": bundle.reference, "digest": bundle.manifest.digest, "role": role}
            for bundle, role in roles
        ]

    def scorer(self, bundle: str | None, model: str | None) -> Scorer:
        """Return the loaded scorer that a request names, else the first.  Raises NotFound."""
        # the default of each adapter, too
        models = {scorer.engine.identity.model: scorer for scorer in reversed(self.scorers)}
        base = self.scorers[0]
        models |= dict.fromkeys((base.engine.identity.model, *self.settings.model_names), base)
        if model is not None and model not in models and model in self._other_names(base):
            model = base.engine.identity.model
        if model is not None and not {model, "*"} & models.keys():
            listed = ", ".join(repr(name) for name in models)
            raise NotFound(
                f"model {model!r} is not loaded; ask for {listed} (--served-model-name adds names)",
                param="model",
            )
        own = models.get(model or "", base)
        if bundle is None:
            return own
        name, pin, digest = bundle.partition(PIN)
        aliases = self.loaded.aliases
        wanted = aliases.get(bundle) or aliases.get(name, name)
        for scorer in self.scorers:
            manifest = scorer.bundle.manifest
            if wanted in (manifest.name, manifest.reference):
                if pin and manifest.digest != f"sha256:{digest}":
                    break  # a pin checks, and does not search
                if (
                    model is not None
                    and scorer.engine.identity.adapter != own.engine.identity.adapter
                ):
                    raise NotFound(
                        f"bundle {bundle!r} does not read the model {model!r}", param="bundle"
                    )
                return scorer
        loaded = ", ".join(scorer.bundle.reference for scorer in self.scorers)
        raise NotFound(f"bundle {bundle!r} is not loaded; loaded: {loaded}", param="bundle")

    def _other_names(self, base: Scorer) -> set[str]:
        """Return what the default bundle's model is called elsewhere: as that bundle, which bears
        the short name of our own commands, or as bundles' manifests have it.  None of an adapter's:
        its model is another than that alone."""
        if base.engine.identity.adapter is not None:
            return set()
        own = [
            scorer.bundle.manifest
            for scorer in self.scorers
            if scorer.engine.identity.adapter is None
        ]
        return {base.bundle.manifest.name, *(manifest.model.name for manifest in own)}

    def choose(
        self,
        caller: Caller,
        route: str,
        *,
        bundle: str | None = None,
        model: str | None = None,
        policy: str | None = None,
        threshold: float | None = None,
        session: Callable[[], str] = str,
    ) -> tuple[Scorer, Policy]:
        """Return the scorer and the policy of a request; those of one ``session`` have the canary,
        or have it not.

        A policy that reads answers has no canary: one bundle's probes read an answer, and the
        default's must not miss any.  Raises NotFound, NotAllowed and RequestError."""
        scorer = self.scorer(bundle, model)
        served = scorer.engine.identity.model
        ruled = next(
            (rule.policy for rule in self.policies.rules if rule.fits(route, served, caller.name)),
            None,
        )
        wanted = self.policy(ruled if policy is None else policy, threshold)
        own = scorer if bundle is None else self.scorer(None, model)
        check_choice(scorer, wanted, own, self.policy(ruled, None), caller)
        if (
            bundle is not None
            or scorer is not self.scorers[0]
            or wanted.reads_answers_for is not None
        ):
            return scorer, wanted
        drawn = self.rollout.chosen(scorer, lambda: f"{caller.name}\n{session()}")
        if drawn is not scorer:
            check_choice(drawn, wanted, drawn, self.policy(ruled, None), caller)
        return drawn, wanted

    def second(self, scorer: Scorer, policy: Policy) -> Scorer | None:
        """Return the default bundle beside a canary that was drawn, under a policy that does more
        than observe.

        Otherwise a caller could ask in one session after the other until the canary lets the answer
        pass."""
        drawn = scorer is self.rollout.canary and policy.action is not Action.OBSERVE
        return self.scorers[0] if drawn else None

    @property
    def abstain_message(self) -> str:
        """Return what is said where no policy of the operator's says anything else."""
        return self.policies.named["gate"].message or DEFAULT_MESSAGE

    @property
    def refusals(self) -> frozenset[str]:
        """Return what stands in for withheld answers here, as ``asks_of`` takes it."""
        return self.policies.refusals | {self.abstain_message}

    def policy(self, name: str | None, threshold: float | None) -> Policy:
        """Return the policy a request names, or the service's; thresholds: the request's, the
        policy's, the service's.

        Raises NotFound."""
        wanted, named = self.settings.policy if name is None else name, self.policies.named
        if wanted not in named:
            raise NotFound(
                f"policy {wanted!r} is not known here; known: {', '.join(sorted(named))}",
                param="policy",
            )
        policy = named[wanted]
        return policy.at(self.settings.threshold if policy.threshold is None else None).at(
            threshold
        )


def untemplated(scorer: Scorer, policy: Policy) -> Policy:
    """Return the policy of a prompt that went through no chat template.

    Where training's did, its risk says little: a policy that withholds then withholds what is
    outside training, unless it says ``withhold_outside = false``."""
    asks = policy.withhold_outside is None and policy.action.withholds
    return (
        replace(policy, withhold_outside=True)
        if asks and scorer.prompt_format == "chat"
        else policy
    )


def check_choice(
    scorer: Scorer, policy: Policy, own_scorer: Scorer, own: Policy, caller: Caller
) -> None:
    """Raise NotAllowed where a choice could let an answer through that the operator's own rule
    withholds.

    ``scorer`` and ``policy`` apply to the request, ``own_scorer`` and ``own`` where it chooses
    nothing."""
    if caller.policies is not None and policy.name not in caller.policies:
        allowed = " or ".join(map(repr, caller.policies))
        message = (
            f"requests of key {caller.name!r} are judged by {allowed} alone, not by {policy.name!r}"
        )
        raise NotAllowed(
            message,
            param="policy",
            cure="name one of these, or have the operator change the keys file",
        )
    if own.action is Action.OBSERVE:
        return

    def refuse(
        param: Literal["policy", "threshold", "bundle"], message: str, *, looser: bool
    ) -> None:
        if looser and param not in caller.may:
            raise NotAllowed(message, param=param)

    named, other = f"policy {policy.name!r}", own_scorer.bundle.reference
    looser = policy.action.strictness < own.action.strictness
    refuse("policy", f"{named} is less strict than this service's own, {own.name!r}", looser=looser)
    judged = f"requests here are judged by {other}, and another bundle may let more through"
    refuse("bundle", judged, looser=scorer is not own_scorer)
    if looser:
        return
    # One that rechecks shows what its bundle's threshold for answers lets through.
    answer, ends = scorer.bundle.manifest.answer, policy.stop_at
    if policy.recheck and answer is not None:
        ends = answer.threshold
    for does, looser in (
        (
            "lets prompts outside training through",
            _outside(scorer, policy) < _outside(scorer, own),
        ),
        (
            "lets prompts that ask for no fact through",
            policy.withhold_no_fact < own.withhold_no_fact,
        ),
        ("takes more passages for true", policy.passage_truth > own.passage_truth),
        ("does not read the answer again", policy.recheck < own.recheck),
        (
            "does not end an answer as early",
            own.stop_at is not None and (ends is None or ends > own.stop_at),
        ),
        ("lets calls of tools through", own.tools == "gate" and policy.tools == "let_through"),
    ):
        refuse("policy", f"{named} {does}", looser=looser)
    # Without a number of its own a policy may have several: another must lie below the strictest of
    # them.
    most, wanted = scorer.threshold(own), scorer.threshold(policy)
    if policy.threshold is None and own.threshold is not None:
        wanted = scorer.bundle.manifest.loosest_threshold
    refuse(
        "threshold",
        f"the threshold may be at most {most:g} here, not {wanted:g}",
        looser=wanted > most,
    )


def _outside(scorer: Scorer, policy: Policy) -> int:
    """Return how much of what lies outside training is withheld: 0, 1 what went through no chat
    template, or 2 all."""
    return scorer.withholds_outside(policy) + scorer.withholds_outside(untemplated(scorer, policy))
