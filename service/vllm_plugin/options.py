"""The plugin's options: the variables behind ``hallutracer serve``'s flags, since vLLM owns the command line.

Raises HalluTracerError naming the variable at fault, before a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from probes_store.bundle import Bundle
from probes_store.store import Store
from service.audit.file import AuditFile
from service.errors import HalluTracerError
from service.library.engine import open_store
from service.options import parse
from service.policies.guard import Action
from service.policies.policy import Policies, load_policies
from service.settings import (
    DEFAULT_MESSAGE,
    DEFAULT_STORE,
    AbstainMessage,
    AllowOpenStore,
    AuditLogFile,
    AuditRequired,
    BundleNames,
    CallersMay,
    DeadlineS,
    MaxQueue,
    MessageInContent,
    PoliciesFile,
    PolicyName,
    RequireSignature,
    ServiceSettings,
    StoreCache,
    StorePlace,
    Threshold,
    env,
    section,
)

log = logging.getLogger("hallutracer")


@section("vLLM plugin", 10)
@dataclass(frozen=True, kw_only=True)
class PluginVariables:
    """What the plugin reads; names, types and limits are those of ``hallutracer serve``."""

    bundle: BundleNames = ()
    store: StorePlace = DEFAULT_STORE
    store_cache: StoreCache = None
    require_signature: RequireSignature = None
    allow_open_store: AllowOpenStore = False
    policy: PolicyName = "observe"  # a running server answers as before until its operator decides otherwise
    policies: PoliciesFile = None
    abstain_message: AbstainMessage = DEFAULT_MESSAGE
    threshold: Threshold = None
    callers_may: CallersMay = ()
    message_in_content: MessageInContent = False
    audit_log: AuditLogFile = None
    audit_required: AuditRequired = False
    deadline_s: DeadlineS = ServiceSettings.deadline_s
    max_queue: MaxQueue = ServiceSettings.max_queue


@dataclass(frozen=True)
class PluginOptions:
    """What the plugin serves."""

    store: Store
    bundles: Mapping[str, Bundle]  # by the reference that was given
    policies: Policies
    settings: ServiceSettings
    audit_log: Path | None = None
    audit_required: bool = False


def read_options(environment: Mapping[str, str] | None = None) -> PluginOptions:
    """From ``PluginVariables``; a ``HALLUTRACER_`` variable that is none of them is logged with the nearest name."""
    variables, warnings = parse(PluginVariables, environment)
    for warning in warnings:
        log.warning(warning)
    if not variables.bundle:
        raise HalluTracerError(f"set {env('bundle')} to the bundle that reads this model, such as my-probe@production")
    store = open_store(
        variables.store,
        cache=variables.store_cache,
        require_signature=variables.require_signature,
        allow_open_store=variables.allow_open_store,
    )
    policies = _policies(load_policies(variables.policies, variables.abstain_message, variables.policy))
    settings = ServiceSettings(
        policy=variables.policy,
        threshold=variables.threshold,
        callers_may=variables.callers_may,
        deadline_s=variables.deadline_s,
        max_queue=variables.max_queue,
        message_in_content=variables.message_in_content,
    )
    bundles = {name: store.load(name) for name in variables.bundle}
    if variables.audit_log is not None:
        AuditFile(variables.audit_log).close()  # said now, and not once vLLM answers
    elif variables.audit_required:
        raise HalluTracerError(f"{env('audit-required')} needs {env('audit-log')}")
    return PluginOptions(store, bundles, policies, settings, variables.audit_log, variables.audit_required)


def _policies(found: Policies) -> Policies:
    """Raises HalluTracerError for what only our own service can do."""
    own = "needs HalluTracer's own service (hallutracer serve --engine vllm)"
    if found.rules:
        raise HalluTracerError(f"[[rule]] in the policies file {own}")
    for policy in found.named.values():
        if policy.action in (Action.ANNOTATE, Action.RETRIEVE, Action.FALLBACK):
            raise HalluTracerError(f"policy {policy.name!r}: action {policy.action.value!r} {own}")
    return found
