"""hallutracer serve: validate the bundles, listen, load the model behind /health/ready."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from service.cli import running
from service.cli.loading import (
    OptionalBundles,
    bundle_names,
    chosen_model,
    load_bundles,
    load_engine,
    load_scorers,
    open_store,
)
from service.cli.options import BundleOptions, EngineChoice
from service.cli.output import print_line
from service.cli.serve_options import (
    AccessOptions,
    AnnexOptions,
    RolloutOptions,
    takes_annex_options,
)
from service.options import Common
from service.settings import ServiceSettings

log = logging.getLogger("hallutracer")


@takes_annex_options
def serve(
    *,
    engine: EngineChoice = EngineChoice(),
    bundles: BundleOptions = BundleOptions(),
    settings: ServiceSettings = ServiceSettings(),
    access: AccessOptions = AccessOptions(),
    rollout: RolloutOptions = RolloutOptions(),
    common: Common = Common(),
    **of_annexes: AnnexOptions,
) -> None:
    """Serve POST /score: a risk for each prompt before its first answer token.

    Listens at once, is ready once the model is loaded and every bundle's golden prompts gave the
    recorded risks. Standard output is for people; standard error has one JSON line per request,
    which never holds a prompt. The options for capacity, access, rollout, feedback and traces:
    hallutracer serve --help-all. SIGHUP, or POST /v1/admin/reload, looks the bundles up again,
    because an alias may have moved, and swaps them without a pause; it also reads --keys again,
    which otherwise happens a second after the file has changed.

      hallutracer serve                          # tells risks, withholds nothing
      hallutracer serve --policy gate            # withholds what is too risky
      hallutracer serve --model ./my-model --bundle my-probe@production
      hallutracer serve --bundle my-probe --canary my-probe@canary --canary-share 0.1 \\
          --shadow my-probe:3
      hallutracer serve --host 0.0.0.0 --keys keys.toml --audit-log audit.jsonl --engine vllm"""
    store = open_store(bundles)
    served, plan = bundle_names(engine.model, bundles), rollout.plan
    names = tuple(dict.fromkeys((*served, *plan.references)))
    # At the start what stands beside the default may be damaged, and the rollout's may be missing;
    # later only the rollout's may be either, for others have users.
    at_start = OptionalBundles(names[1:], must_be_there=served)
    seen = running.stamps(store, names) if rollout.watch_s else {}
    opened = load_bundles(store, names, at_start)
    policies, keys = access.rules(settings.policy)
    settings = replace(settings, allowed_hosts=running.known_hosts(settings, keyed=keys.closed))
    open_to_all = access.check_open(settings.host, settings.protect_metrics, keys)
    access.check_audit()
    hooks = dict[str, Callable[..., Any]]()
    for options in of_annexes.values():
        hooks |= options.hooks()
    chosen = chosen_model(
        engine, tuple(opened.values())
    )  # refused before anybody is told that it listens

    from service.api.connections import places

    places(settings.max_connections)  # refused now, and not once the model is loaded
    listener = running.listen(settings.host, settings.port)
    address = f"http://{running.in_url(settings.host)}:{listener.getsockname()[1]}"

    from service.api.app import create_app
    from service.audit.auditor import Auditor
    from service.scoring import Scorer
    from service.serving.metrics import Metrics
    from service.serving.service import Service

    def load() -> dict[str, Scorer]:
        loaded = load_engine(
            engine,
            bundles=tuple(opened.values()),
            chosen=chosen,
            max_kv_tokens=settings.max_kv_tokens,
            max_wait_s=settings.max_wait_ms / 1e3,
            report=log.info,
        )
        return load_scorers(loaded, opened, log.info, at_start)

    def broken() -> None:
        server.should_exit = True  # with status 1, so that a supervisor starts the service again

    metrics, left_out = Metrics(), at_start.reasons
    audit: Auditor | None = None
    if access.audit_log is not None:
        audit = Auditor(access.audit_log, required=access.audit_required, count=metrics.audit_lines)
    service = Service(
        load,
        load_again=lambda on: running.load_again(
            left_out,
            on,
            store,
            names,
            set(plan.references) - set(served),
            service.catalogue.matching,
        ),
        left_out=left_out,
        aliases_of=store.aliases,
        settings=settings,
        policies=policies,
        plan=plan,
        keys=keys,
        metrics=metrics,
        audit=audit,
        on_broken=broken,
        **{field: make(metrics) for field, make in hooks.items()},
    )

    def loaded() -> None:
        if service.lifecycle.failure is not None:
            server.should_exit = True
            return
        gc.collect()
        gc.freeze()  # the model and its libraries stay: collections need not walk them again
        running.in_background(running.greet(service, address, say))
        reload = running.on_hangup(service, say)
        if hangups:  # while it loaded
            reload()
        if rollout.watch_s:
            running.watch(service, lambda: running.stamps(store, names), seen, rollout.watch_s, say)
        if rollout.replay_s:
            running.replay(service, rollout.replay_s)

    streams = ExitStack()
    say = streams.enter_context(running.standard_streams(metrics.log_lines))
    server = running.make_server(create_app(service, loaded), service.lifecycle)
    for warning in common.warnings:
        log.warning(warning)
    if open_to_all:
        log.warning(
            "whoever reaches %s may use this service: it asks for no key; it is called by an IP"
            " address or by the names %s (--allowed-host)",
            settings.host,
            ", ".join(settings.allowed_hosts),
        )
    # uvicorn raises the signal that ended it once more: a service that drained in order has not
    # failed.
    signal.signal(signal.SIGTERM, lambda *_: None)
    hangups: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: hangups.append(number))
    if hint := running.first_line(service):
        print_line(hint)
    print_line(f"listening on {address}, loading {chosen.model} ...")
    with streams:
        try:
            server.run(sockets=[listener])
        finally:  # Ctrl-C ends it with KeyboardInterrupt
            if service.lifecycle.error is None:
                service.lifecycle.log_stopped()
    if service.lifecycle.error is not None:
        raise service.lifecycle.error
