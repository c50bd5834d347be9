"""hallutracer serve: validate the bundles, listen, load the model behind /health/ready."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from service.access.callers import on_loopback
from service.access.keys import KeyRing
from service.cli.access import load_keys
from service.cli.listening import in_url, known_hosts, listen, make_server
from service.cli.loading import LeaveOut, bundle_names, load_bundles, load_engine, load_scorers, open_store
from service.cli.options import BundleOptions, EngineChoice, FeedbackDatabase, UsageError
from service.cli.output import print_line
from service.cli.reload import load_again, on_hangup, replay, stamps, watch
from service.cli.tracing import TraceOptions
from service.options import Common
from service.policies.policy import load_policies
from service.settings import (
    DEFAULT_DRAWN,
    DEFAULT_MESSAGE,
    DEFAULT_SHARE,
    AbstainMessage,
    AuditLogFile,
    AuditRequired,
    KeysFile,
    PoliciesFile,
    Range,
    ServiceSettings,
    option,
    section,
)

if TYPE_CHECKING:
    from service.feedback.databases import Location
    from service.serving.feedback import Feedback
    from service.serving.metrics import Metrics
    from service.serving.rollout import RolloutPlan
    from service.serving.state import ServiceState

log = logging.getLogger("hallutracer")


@section("Access and policies", 35)
@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Who may call the service, and the policies it knows."""

    policies: PoliciesFile = None
    abstain_message: AbstainMessage = DEFAULT_MESSAGE
    api_key: Annotated[
        tuple[str, ...],
        option(
            "Bearer key, repeatable; guards every route but health and metrics.  Default, on loopback: none.",
            secret=True,
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        option(
            "File of bearer keys, one per line: KEY [name=NAME] [may=policy,threshold,bundle,feedback].  The name "
            "stands in the log; may: see --callers-may."
        ),
    ] = None
    keys: KeysFile = None
    allow_anonymous: Annotated[
        bool, option("Listen beyond loopback without keys: whoever reaches the port may use the service.")
    ] = False
    audit_log: AuditLogFile = None
    audit_required: AuditRequired = False

    def ring(self, policies: Collection[str] | None = None) -> KeyRing:
        """All keys; ``policies``: those that a key may name.  Raises what is wrong with a key or a file of keys."""
        plain = load_keys(self.api_key, self.api_key_file)
        return KeyRing([key.hashed() for key in plain], self.keys, policies)


@section("Rollout", 36)
@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """A new version of the probes beside the one that serves."""

    canary: Annotated[
        str | None,
        option("Bundle that judges --canary-share of the requests that name none, such as NAME@canary."),
    ] = None
    canary_share: Annotated[
        float,
        option("Share of the canary; requests of one x-session-id, or of one first question, stay together.",
               limits=Range(0, 1)),
    ] = DEFAULT_SHARE  # fmt: skip
    shadow: Annotated[
        tuple[str, ...],
        option("Bundle that reads every prompt on the same forward and decides nothing, repeatable; /metrics and "
               "/v1/bundles tell how far it disagrees."),
    ] = ()  # fmt: skip
    watch_s: Annotated[
        float,
        option("Look every so many seconds whether an alias has moved, and reload where one has; 0: at a SIGHUP and "
               "POST /v1/admin/reload only.", limits=Range(0)),
    ] = 0.0  # fmt: skip

    replay_s: Annotated[
        float,
        option("Replay the golden prompts so often while serving, and be not ready while they are off; 0: never.",
               limits=Range(0)),
    ] = 600.0  # fmt: skip

    @property
    def plan(self) -> RolloutPlan:
        """What the service is told."""
        from service.serving.rollout import RolloutPlan

        return RolloutPlan(self.canary, self.canary_share, self.shadow)


@section("Feedback", 37)
@dataclass(frozen=True, kw_only=True)
class FeedbackOptions:
    """Whether answers and what users say of them are kept, and where."""

    feedback_db: FeedbackDatabase = ""
    feedback_prompts: Annotated[bool, option("Keep the prompts too; needs --feedback-days.")] = False
    feedback_days: Annotated[
        float | None,
        option("Delete an answer's row, prompt and labels after so many days.  Default: never.",
               limits=Range(positive=True)),
    ] = None  # fmt: skip
    feedback_share: Annotated[
        float,
        option("Share of the unflagged answers that is drawn at random; a guarantee is held against labels of these "
               "alone, which 'hallutracer feedback' lists.", limits=Range(0, 1)),
    ] = DEFAULT_DRAWN  # fmt: skip

    def location(self) -> Location | None:
        """Where feedback is kept; None: nowhere.  Raises UsageError."""
        if not self.feedback_db:
            others = {
                "--feedback-prompts": self.feedback_prompts,
                "--feedback-days": self.feedback_days,
                "--feedback-share": self.feedback_share != DEFAULT_DRAWN,
            }
            for flag, given in others.items():
                if given:
                    raise UsageError(flag, "needs --feedback-db")
            return None
        if self.feedback_prompts and self.feedback_days is None:
            raise UsageError("--feedback-prompts", "needs --feedback-days: prompts are kept for a time, not for ever")
        from service.feedback.databases import location

        return location(self.feedback_db)

    def opened(self, where: Location, metrics: Metrics) -> Feedback:
        """The database, ready.  Raises FeedbackUnavailable."""
        from service.serving.feedback import Feedback

        return Feedback(
            where, metrics, prompts=self.feedback_prompts, days=self.feedback_days, share=self.feedback_share
        )


def serve(
    *,
    engine: EngineChoice = EngineChoice(),
    bundles: BundleOptions = BundleOptions(),
    settings: ServiceSettings = ServiceSettings(),
    access: AccessOptions = AccessOptions(),
    rollout: RolloutOptions = RolloutOptions(),
    feedback: FeedbackOptions = FeedbackOptions(),
    traces: TraceOptions = TraceOptions(),
    common: Common = Common(),
) -> None:
    """Serve POST /score: a risk for each prompt before its first answer token.

    Listens at once, is ready once the model is loaded and every bundle's golden prompts gave the recorded risks.
    Standard output is for people; standard error has one JSON line per request, which never holds a prompt.
    The options for capacity, access, rollout, feedback and traces: hallutracer serve --help-all.
    SIGHUP, or POST /v1/admin/reload, looks the bundles up again, because an alias may have moved, and swaps them
    without a pause; it also reads --keys again, which otherwise happens a second after the file has changed.

      hallutracer serve                          # tells risks, withholds nothing
      hallutracer serve --policy gate            # withholds what is too risky
      hallutracer serve --model ./my-model --bundle my-probe@production
      hallutracer serve --bundle my-probe --canary my-probe@canary --canary-share 0.1 --shadow my-probe:3
      hallutracer serve --host 0.0.0.0 --keys keys.toml --audit-log audit.jsonl --engine vllm
    """
    store = open_store(bundles)
    own, plan = bundle_names(engine.model, bundles), rollout.plan
    names = tuple(dict.fromkeys((*own, *plan.references)))
    # At the start what is named beside the default may be missing; later only the rollout's, for others have users.
    at_start = LeaveOut(names[1:])
    seen = stamps(store, names) if rollout.watch_s else {}
    opened = load_bundles(store, names, at_start)
    policies = load_policies(access.policies, access.abstain_message, settings.policy)
    keys = access.ring(policies.named)
    settings = replace(settings, allowed_hosts=known_hosts(settings, keyed=keys.closed))
    if not (keys.closed or access.allow_anonymous or on_loopback(settings.host)):
        raise UsageError(
            "--host",
            f"whoever reaches {settings.host} could use this service; give --keys, or --allow-anonymous",
        )
    if settings.protect_metrics and not keys.closed:
        raise UsageError("--protect-metrics", "needs --keys, --api-key or --api-key-file")
    for rule in policies.rules:
        rule.check_key(keys.names)
    if access.audit_required and access.audit_log is None:
        raise UsageError("--audit-required", "needs --audit-log")
    kept = feedback.location()
    tracing = traces.opened()
    loading = engine.engine_options

    from service.api.connections import places

    places(settings.max_connections)  # refused now, and not once the model is loaded
    listener = listen(settings.host, settings.port)
    address = f"http://{in_url(settings.host)}:{listener.getsockname()[1]}"

    from service.api.app import create_app
    from service.audit.auditor import Auditor
    from service.cli.greeting import first_line, greet
    from service.serving.state import ServiceState

    state = ServiceState(
        lambda: load_scorers(
            load_engine(
                engine,
                bundles=tuple(opened.values()),
                max_kv_tokens=settings.max_kv_tokens,
                max_wait_s=settings.max_wait_ms / 1e3,
                report=log.info,
            ),
            opened,
            log.info,
            at_start,
        ),
        store.aliases,
        settings,
        policies.named,
        policies.rules,
        plan,
        at_start.reasons,
        keys=keys,
        tracing=tracing,
    )

    if kept is not None:
        state.feedback = feedback.opened(kept, state.metrics)

    if access.audit_log is not None:
        metrics = state.metrics
        state.audit = Auditor(access.audit_log, required=access.audit_required, count=metrics.audit_lines)

    def loaded(state: ServiceState) -> None:
        if state.failure is not None:
            server.should_exit = True
            return
        gc.collect()
        gc.freeze()  # the model and its libraries stay: collections need not walk them again
        background.add(asyncio.get_running_loop().create_task(greet(state, address)))

        reload = on_hangup(state)
        if hangups:  # while it loaded
            reload()
        if rollout.watch_s:
            watch(state, lambda: stamps(store, names), seen, rollout.watch_s)
        if rollout.replay_s:
            replay(state, rollout.replay_s)

    def broken() -> None:
        server.should_exit = True  # with status 1, so that a supervisor starts the service again

    background: set[asyncio.Task[None]] = set()  # asyncio itself keeps no hold of a task
    state.on_broken = broken
    state.load_again = lambda engine: load_again(state, engine, store, names, set(plan.references) - set(own))
    server = make_server(create_app(state, loaded), settings, state.leave)
    for warning in common.warnings:
        log.warning(warning)
    if not keys.closed and not on_loopback(settings.host):
        called = ", ".join(settings.allowed_hosts)
        log.warning("whoever reaches %s may use this service: it asks for no key; it is called by an IP address or by "
                    "the names %s (--allowed-host)", settings.host, called)  # fmt: skip
    # uvicorn raises the signal that ended it once more: a service that drained in order has not failed.
    signal.signal(signal.SIGTERM, lambda *_: None)
    hangups: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: hangups.append(number))
    if hint := first_line(state):
        print_line(hint)
    print_line(f"listening on {address}, loading {loading.model} ...")
    server.run(sockets=[listener])
    if state.error is not None:
        raise state.error
