"""The plugin's options: the variables behind ``hallutracer serve``'s flags, since vLLM owns the
command line.

Raises HalluTracerError naming the variable at fault, before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from probes_store.bundle import Bundle
from probes_store.store import Store
from service import settings
from service.audit.file import AuditFile
from service.errors import HalluTracerError
from service.library.engine import check_store, open_store
from service.options import parse
from service.policies.guard import Action
from service.policies.policy import Policies, load_policies
from service.settings import DEFAULT_MESSAGE, NEVER_EMPTY, ServiceSettings, env, section

log = logging.getLogger("hallutracer")
TRUE = ("yes", "y", "1", "true", "t")  # as ``parse`` reads a switch


@section("vLLM plugin", 10)
@dataclass(frozen=True, kw_only=True)
class PluginVariables:
    """What the plugin reads; names, types and limits are those of ``hallutracer serve``."""

    bundle: settings.BundleNames = ()
    adapters: settings.AdapterFolders = ()
    store: settings.StorePlace = settings.DEFAULT_STORE
    store_cache: settings.StoreCache = None
    require_signature: settings.RequireSignature = None
    allow_open_store: settings.AllowOpenStore = False
    # a running server answers as before until its operator decides otherwise
    policy: settings.PolicyName = "observe"
    policies: settings.PoliciesFile = None
    abstain_message: settings.AbstainMessage = settings.DEFAULT_MESSAGE
    threshold: settings.Threshold = None
    callers_may: settings.CallersMay = ()
    message_in_content: settings.MessageInContent = False
    decoding: settings.Decoding = None
    audit_log: settings.AuditLogFile = None
    audit_required: settings.AuditRequired = False
    deadline_s: settings.DeadlineS = ServiceSettings.deadline_s
    max_queue: settings.MaxQueue = ServiceSettings.max_queue


@dataclass(frozen=True)
class PluginOptions:
    """What the plugin serves."""

    store: Store
    bundles: Mapping[str, Bundle]  # by the reference that was given
    policies: Policies
    settings: ServiceSettings
    audit_log: Path | None = None
    audit_required: bool = False
    adapters: tuple[Path, ...] = ()  # whose bundles are among these


def missing_bundle(environment: Mapping[str, str]) -> str | None:
    """Return why an engine must not start that no bundle reads: the environment asks for a gate.
    None: it does not.

    A policy that observes withholds nothing, so an engine without a bundle may start under it."""
    if environment.get(env("bundle")):
        return None
    asking = (
        [env("audit-required")]
        if environment.get(env("audit-required"), "").lower() in TRUE
        else []
    )
    if not _observes(environment):
        asking += [
            name for name in map(env, ("policy", "policies", "threshold")) if environment.get(name)
        ]
    if not asking:
        return None
    variable = asking[0]
    return (
        f"{_without_bundle(variable, environment)}: nothing would be withheld.  Set {env('bundle')}"
        f" to the bundle that reads this model, or unset {variable} for vLLM without risks"
    )


def unread(environment: Mapping[str, str]) -> str | None:
    """Return what to log where no bundle is named and somebody may have meant to observe; None:
    nothing."""
    if environment.get(env("bundle")):
        return None
    if environment.get(env("policy")):
        return f"no risk is told: {_without_bundle(env('policy'), environment)}"
    return _misspelt(environment)


def _observes(environment: Mapping[str, str]) -> bool:
    """Return whether a policy is named and observes; one that cannot be read might withhold."""
    name, file = environment.get(env("policy")), environment.get(env("policies"))
    if not name:
        return False
    try:
        policies = load_policies(Path(file) if file else None, DEFAULT_MESSAGE, name)
    except HalluTracerError:
        return name == Action.OBSERVE.value
    return policies.named[name].action is Action.OBSERVE


def _without_bundle(variable: str, environment: Mapping[str, str]) -> str:
    state = "is empty" if env("bundle") in environment else "is not"
    hint = _misspelt(environment)
    return f"{variable}={environment[variable]} is set and {env('bundle')} {state}" + (
        f" ({hint})" if hint else ""
    )


def _misspelt(environment: Mapping[str, str]) -> str | None:
    """Return the warning of a variable that was probably meant to name the bundle."""
    # Their values do not matter, and may be wrong.
    named = {name: "" for name in environment if name not in NEVER_EMPTY}
    warnings = parse(PluginVariables, named)[1]
    meant = [warning for warning in warnings if warning.endswith(f"mean {env('bundle')}?")]
    return meant[0] if meant else None


def read_options(environment: Mapping[str, str] | None = None) -> PluginOptions:
    """Return what ``PluginVariables`` say; any other ``HALLUTRACER_`` variable is logged with the
    nearest name."""
    variables, warnings = parse(PluginVariables, environment)
    for warning in warnings:
        log.warning(warning)
    if not variables.bundle:
        raise HalluTracerError(
            f"set {env('bundle')} to the bundle that reads this model, such as my-probe@production"
        )
    store = open_store(
        variables.store,
        cache=variables.store_cache,
        require_signature=variables.require_signature,
        allow_open_store=variables.allow_open_store,
    )
    try:
        check_store(variables.store)
    except HalluTracerError as error:
        raise HalluTracerError(f"{env('store')}: {error}") from None
    policies = load_policies(variables.policies, variables.abstain_message, variables.policy)
    needs = "needs HalluTracer's own service (hallutracer serve --engine vllm)"
    if policies.rules:
        raise HalluTracerError(f"[[rule]] in the policies file {needs}")
    for policy in policies.named.values():
        if policy.action in (Action.ANNOTATE, Action.RETRIEVE, Action.FALLBACK):
            raise HalluTracerError(
                f"policy {policy.name!r}: action {policy.action.value!r} {needs}"
            )
    names = (
        "policy",
        "threshold",
        "callers_may",
        "deadline_s",
        "max_queue",
        "message_in_content",
        "decoding",
    )
    served = ServiceSettings(**{name: getattr(variables, name) for name in names})
    bundles = {name: store.load(name) for name in variables.bundle}
    if next(iter(bundles.values())).manifest.model.adapter is not None:
        raise HalluTracerError(
            f"{env('bundle')}: {variables.bundle[0]} reads an adapter; name one of the model first"
        )
    if variables.audit_log is not None:
        AuditFile(variables.audit_log).close()  # said now, and not once vLLM answers
    elif variables.audit_required:
        raise HalluTracerError(f"{env('audit-required')} needs {env('audit-log')}")
    return PluginOptions(
        store,
        bundles,
        policies,
        served,
        variables.audit_log,
        variables.audit_required,
        tuple(map(Path, variables.adapters)),
    )
