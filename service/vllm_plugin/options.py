"""The plugin's options: the variables behind ``hallutracer serve``'s flags, since vLLM owns the command line.

Raises HalluTracerError naming the variable at fault, before a model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from probes_store.bundle import Bundle
from probes_store.store import SHIPPED, Store
from service.errors import HalluTracerError, RequestError
from service.guard import Policy, check_threshold
from service.policies import DEFAULT_MESSAGE, built_in, read_policies
from service.settings import DEFAULT_STORE, ServiceSettings, env


@dataclass(frozen=True)
class PluginOptions:
    """What the plugin serves."""

    store: Store
    bundles: tuple[Bundle, ...]
    policies: Mapping[str, Policy]
    settings: ServiceSettings


def read_options(environment: Mapping[str, str] | None = None) -> PluginOptions:
    """From HALLUTRACER_BUNDLE (names, spaces between), _STORE, _POLICY, _POLICIES, _THRESHOLD, _ABSTAIN_MESSAGE,
    _DEADLINE_S and _MAX_QUEUE."""
    values = os.environ if environment is None else environment

    def value(flag: str, default: str) -> str:
        return values.get(env(flag), default)

    names = value("bundle", "").split()
    if not names:
        raise HalluTracerError(f"set {env('bundle')} to the bundle that reads this model, such as my-probe@production")
    store = Store(Path(value("store", str(DEFAULT_STORE))).expanduser(), fallbacks=[SHIPPED])
    message = value("abstain-message", DEFAULT_MESSAGE)
    policies = read_policies(Path(value("policies", "")), message) if value("policies", "") else built_in(message)
    # A server that has been answering goes on answering until somebody decides otherwise.
    policy = value("policy", "observe")
    if policy not in policies:
        raise HalluTracerError(f"{env('policy')} is {policy!r}; known: {', '.join(sorted(policies))}")
    defaults = ServiceSettings()
    settings = ServiceSettings(
        policy=policy,
        threshold=_threshold(value("threshold", "")),
        deadline_s=_number(env("deadline-s"), value("deadline-s", str(defaults.deadline_s))),
        max_queue=int(_number(env("max-queue"), value("max-queue", str(defaults.max_queue)))),
    )
    return PluginOptions(store, tuple(store.load(name) for name in names), policies, settings)


def _threshold(text: str) -> float | None:
    if not text:
        return None
    try:
        return check_threshold(_number(env("threshold"), text))
    except RequestError as error:
        raise HalluTracerError(f"{env('threshold')}: {error}") from None


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number > 0.0 and name != env("threshold"):
        raise HalluTracerError(f"{name} is {text!r}; it must be a positive number")
    return number
