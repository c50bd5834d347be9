"""hallutracer doctor: whether `hallutracer serve` with the same options would serve, and what to do
if not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Parameter

from service.annexes.doctor import machine, model
from service.annexes.doctor.machine import Finding, fail, ok, run, summary, warn, worst
from service.audit.file import AuditFile
from service.cli.loading import OptionalBundles, bundle_names, load_engine, load_scorers, open_store
from service.cli.options import BundleOptions, EngineChoice, Json
from service.cli.output import print_json, print_line
from service.cli.running import listen
from service.cli.serve_options import (
    AccessOptions,
    RolloutOptions,
    takes_annex_options,
)
from service.errors import HalluTracerError
from service.library.engine import refuse_another_name
from service.options import Common
from service.settings import DEFAULT_STORE, ServiceSettings, option

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from service.annexes.feedback.options import FeedbackOptions
    from service.annexes.traces.options import TraceOptions


@takes_annex_options
def doctor(
    *,
    load: Annotated[
        bool,
        option("Load the model, too, and replay the bundles' golden prompts."),
        Parameter(negative=""),
    ] = False,
    as_json: Json = False,
    engine: EngineChoice = EngineChoice(),
    bundles: BundleOptions = BundleOptions(),
    settings: ServiceSettings = ServiceSettings(),
    access: AccessOptions = AccessOptions(),
    rollout: RolloutOptions = RolloutOptions(),
    common: Common = Common(),
    **of_annexes: Any,
) -> None:
    """Check that `hallutracer serve` with the same options would serve; one line for each check:
    ok, warn or fail.

    Looks at packages, model, bundles and whether they belong together, canary and shadows, whether
    drift would be seen, engine, port, keys, policies, audit log, GPU, memory, store, disk and
    clock.  It starts nothing and reads no weights, unless --load says so.  A fail or a warn names
    the cure.  The exit status is 1 where a check failed.  In a configuration file the table [serve]
    holds for it, too.

      hallutracer doctor
      hallutracer doctor --model ./my-model --bundle my-probe --load"""
    loaded: dict[str, Bundle] = {}
    store = open_store(bundles, to_read=False)
    findings: list[Finding] = []
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    plan, feedback = rollout.plan, of_annexes.get("feedback")

    def bundle_checks() -> Iterator[Finding]:
        served = bundle_names(engine.model, bundles)
        yield from model.check_bundles(store, served, plan.references, loaded)

    def model_checks() -> Iterator[Finding]:
        options = engine.options_for(list(loaded))
        refuse_another_name(options, list(loaded.values())[:1])  # as the start does
        yield from model.check_model(options, loaded, load)

    def rollout_checks() -> Iterator[Finding]:
        yield from model.check_rollout(plan, loaded, rollout.watch_s)
        judging = {bundle.reference: bundle for bundle in list(loaded.values())[:1]}
        if plan.canary in loaded:
            judging[loaded[plan.canary].reference] = loaded[plan.canary]
        yield from model.check_drift(judging.values(), rollout.replay_s)

    def folders() -> Iterator[Finding]:
        where = None if feedback is None else feedback.location()
        yield from machine.check_disk(
            model.folders(store, where.path if where and not where.is_postgres else None)
        )

    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("packages", machine.check_packages),
        ("engine", lambda: machine.check_engine(engine.engine, ranks)),
        (
            "options",
            lambda: (warn("options", text, "correct or unset it") for text in common.warnings),
        ),
        ("gpu", lambda: machine.check_gpu(engine.device, ranks)),
        ("cpu", lambda: machine.check_cpu(engine.threads)),
        ("store", lambda: model.check_store(store, named=bundles.store != DEFAULT_STORE)),
        ("bundle", bundle_checks),
        ("model", model_checks),
        ("rollout", rollout_checks),
        ("keys", lambda: _keys(settings, access)),
        ("policies", lambda: _policies(settings, access)),
        ("audit", lambda: _audit(access)),
        ("port", lambda: _port(settings)),
        ("feedback", lambda: () if feedback is None else _feedback(feedback)),
        ("traces", lambda: _traces(of_annexes["traces"]) if "traces" in of_annexes else ()),
        ("disk", folders),
        ("files", lambda: machine.check_files(settings.max_connections)),
        (
            "clock",
            lambda: machine.check_clock(
                max((bundle.manifest.created for bundle in loaded.values()), default=None)
            ),
        ),
        ("load", lambda: _loads(engine, loaded) if load and worst(findings) != "fail" else ()),
    ]
    for finding in run(checks):
        findings.append(finding)
        if not as_json:
            print_line(finding.line())
    status = worst(findings)
    if as_json:
        print_json({"status": status, "checks": [asdict(finding) for finding in findings]})
    else:
        print_line(summary(findings).line())
    if status == "fail":
        raise SystemExit(1)


def _keys(settings: ServiceSettings, access: AccessOptions) -> Iterator[Finding]:
    from service.access.keys import read_keys

    ring = access.ring()
    everybody = access.check_open(settings.host, settings.protect_metrics, ring)
    if ring.closed:
        yield ok("keys", f"{len(ring.names)}: {', '.join(sorted(ring.names))}")
        for key in () if access.keys is None else read_keys(access.keys):
            if key.revoked is not None or key.expired():
                state = "expired" if key.revoked is None else "revoked"
                cure = (
                    f"who uses it still needs another: hallutracer keys make NAME >> {access.keys}"
                )
                yield warn("keys", f"{key.name} is {state}", cure)
    elif everybody:
        yield warn(
            "keys",
            f"whoever reaches {settings.host} may use the service",
            "give --keys or --api-key-file",
        )
    else:
        yield ok("keys", "none; only this machine reaches the port")


def _audit(access: AccessOptions) -> Iterator[Finding]:
    access.check_audit()
    if (path := access.audit_log) is None:
        return
    if path.exists():
        AuditFile(path).close()  # writes nothing
        yield ok("audit", f"lines are appended to {path}")
    elif os.access(folder := path.absolute().parent, os.W_OK | os.X_OK):
        yield ok("audit", f"{path} will be made")
    else:
        yield fail(
            "audit", f"{folder} is no folder that can be written", "make it, or change its owner"
        )


def _policies(settings: ServiceSettings, access: AccessOptions) -> Iterator[Finding]:
    policies, _ = access.rules(settings.policy)
    yield ok(
        "policies", f"{', '.join(policies.named)}; {settings.policy} where a request names none"
    )


def _port(settings: ServiceSettings) -> Iterator[Finding]:
    try:
        listen(settings.host, settings.port).close()
    except HalluTracerError as error:
        if machine.answers_as_ours("127.0.0.1", settings.port):
            yield warn(
                "port",
                f"a HalluTracer service answers on port {settings.port} already",
                "that may be the one that you ask about; a second needs another --port",
            )
        else:
            yield fail("port", str(error))
    else:
        free = (
            f"{settings.port} on {settings.host} is free"
            if settings.port
            else f"any free one on {settings.host}"
        )
        yield ok("port", free)


def _traces(traces: TraceOptions) -> Iterator[Finding]:
    """An endpoint that takes no connection costs a service nothing but its traces, or its
    events."""
    if (tracing := traces.opened()) is None:
        return
    tracing.close()
    for name, endpoint in (
        ("traces", traces.otlp_traces_endpoint),
        ("events", traces.otlp_logs_endpoint),
    ):
        if endpoint is None:
            continue
        parts = urlsplit(endpoint)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname, port), 2).close()
        except OSError as error:
            cure = "start it, or correct the address"
            yield warn(name, f"no collector at {endpoint}: {error.strerror or error}", cure)
        else:
            yield ok(name, f"a collector takes connections at {endpoint}")


def _feedback(feedback: FeedbackOptions) -> Iterator[Finding]:
    where = feedback.location()
    if where is None:
        return
    yield from machine.check_extras(where.is_postgres)
    if where.is_postgres or where.path.exists():
        where.open(create=False).close()
        yield ok("feedback", f"{where} answers")
    else:
        yield ok("feedback", f"{where} will be made at the start")


def _loads(engine: EngineChoice, loaded: dict[str, Bundle]) -> Iterator[Finding]:
    began = time.monotonic()
    with closing(load_engine(engine, bundles=tuple(loaded.values()))) as running:
        scorers = load_scorers(running, loaded, leave_out=OptionalBundles(tuple(loaded)[1:]))
        names = ", ".join(scorer.bundle.reference for scorer in scorers.values())
        identity = running.identity
    yield ok(
        "load",
        f"{identity.model} ({identity.dtype}) in {time.monotonic() - began:.0f} s; the golden"
        f" prompts of {names} gave the recorded risks",
    )
