"""Named policies: the built-in ones and those of a TOML file; docs/serving.md shows one with every
field."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from probes_store.syntax import did_you_mean
from service.access.routes import PROMPT_ROUTES, canonical
from service.errors import HalluTracerError, first_problem
from service.policies.guard import (
    BLOCK,
    GATE,
    OBSERVE,
    TIMEOUT_S,
    Action,
    Policy,
    ToolTurns,
    Upstream,
)
from service.settings import DEFAULT_MESSAGE

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
Text = Annotated[str, Field(pattern=r"\S")]


def built_in(message: str = DEFAULT_MESSAGE) -> dict[str, Policy]:
    """Return ``observe``, ``gate`` (abstains, saying ``message``) and ``block``."""
    return {policy.name: policy for policy in (OBSERVE, replace(GATE, message=message), BLOCK)}


class Rule(BaseModel):
    """Chooses a policy by what a request is, None: whatever it is."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    policy: Text
    route: Text | None = None
    model: Text | None = None
    key: Text | None = None

    def check_key(self, names: Collection[str]) -> None:
        """Raise HalluTracerError where no key is called so: a misspelt rule would let through what
        it should not."""
        if self.key is not None and self.key not in names:
            known = f"keys are named {', '.join(sorted(names))}" if names else "there are no keys"
            raise HalluTracerError(
                f"a rule of the policies file names the key {self.key!r}; {known}", param="policies"
            )

    def fits(self, route: str, model: str, key: str) -> bool:
        """Return whether it applies to a request on ``route``, for ``model``, with the key of this
        name."""
        pairs = ((self.route, canonical(route)), (self.model, model), (self.key, key))
        return all(wanted in (None, actual) for wanted, actual in pairs)


@dataclass(frozen=True)
class Policies:
    """What an operator has defined."""

    named: Mapping[str, Policy]
    rules: tuple[Rule, ...] = ()

    @property
    def refusals(self) -> frozenset[str]:
        """Return what stands in for withheld answers, as ``asks_of`` takes it."""
        return frozenset(policy.message for policy in self.named.values() if policy.message)


def load_policies(path: Path | None, message: str, default: str) -> Policies:
    """Return the built-in policies and the file's.  Raises HalluTracerError: no message, or no
    ``default``."""
    if not message.strip():
        raise HalluTracerError("the abstain message must not be empty", param="abstain_message")
    known = Policies(built_in(message)) if path is None else read_policies(path, message)
    if default not in known.named:
        near = did_you_mean(default, sorted(known.named))
        listed = ", ".join(sorted(known.named))
        raise HalluTracerError(f"no policy {default!r}.  {near}There are {listed}", param="policy")
    return known


def read_policies(path: Path, message: str = DEFAULT_MESSAGE) -> Policies:
    """Return the built-in policies and the file's, which may replace them.  Raises
    HalluTracerError."""
    try:
        # "-sig": editors on Windows begin a file with a byte order mark
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise HalluTracerError(
            f"cannot read the policies file {path}: {error.strerror or error}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HalluTracerError(f"{path} is not TOML: {error}") from None
    rules = tables.pop("rule", [])
    named = built_in(message) | {
        name: _policy(path, name, table, message) for name, table in tables.items()
    }
    if not isinstance(rules, list):
        raise HalluTracerError(f"{path}: 'rule' is no policy's name; rules are written [[rule]]")
    return Policies(
        named,
        tuple(_rule(f"{path}, rule {number}", rule, named) for number, rule in enumerate(rules, 1)),
    )


class PolicyTable(BaseModel):
    """A policy's table in the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Annotated[Action, Field(strict=False)]
    threshold: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    message: Text | None = None
    withhold_outside: bool | None = None
    withhold_no_fact: bool = False
    recheck: bool = False
    stop_at: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    tools: ToolTurns = "let_through"
    passage_truth: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    upstream: Text | None = None
    upstream_model: Text | None = None
    upstream_key_env: Text | None = None
    upstream_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = TIMEOUT_S

    @model_validator(mode="after")
    def _belongs_to_its_action(self) -> PolicyTable:
        if self.message is not None and not self.action.has_message:
            speaking = ", ".join(action for action in Action if action.has_message)
            raise ValueError(
                f"only actions {speaking} have a message; remove it or change the action"
            )
        for field in ("withhold_outside", "withhold_no_fact"):
            if getattr(self, field) and not self.action.withholds:
                raise ValueError(f"{field} must be false with action {self.action.value!r}")
        for field in ("recheck", "stop_at"):
            if getattr(self, field) and self.action is Action.OBSERVE:
                raise ValueError(
                    f"{field} needs another action than 'observe', which lets every answer through"
                )
        if self.tools == "gate" and self.action is Action.OBSERVE:
            raise ValueError(
                "tools = 'gate' needs another action than 'observe', which lets every answer"
                " through"
            )
        if self.recheck and self.stop_at is not None:
            raise ValueError(
                "recheck holds an answer to its end and stop_at ends one under way: remove one of"
                " them"
            )
        upstream_fields = {field for field in self.model_fields_set if field.startswith("upstream")}
        if upstream_fields and self.action is not Action.FALLBACK:
            raise ValueError(
                f"only action fallback has {min(upstream_fields)}; remove it or change the action"
            )
        if self.action is Action.FALLBACK and (
            missing := {"upstream", "upstream_model"} - upstream_fields
        ):
            raise ValueError(f"action 'fallback' needs {min(missing)}")
        return self

    def sent_to(self) -> Upstream | None:
        """Return where a fallback sends a prompt.  Raises HalluTracerError: a missing key is told
        at start."""
        if self.upstream is None or self.upstream_model is None:
            return None
        url = self.upstream.rstrip("/")
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            raise HalluTracerError(
                "upstream must be an address up to /v1, such as https://api.example.com/v1"
            )
        upstream = Upstream(
            url, self.upstream_model, self.upstream_key_env, self.upstream_timeout_s
        )
        upstream.headers()
        return upstream


def _rule(where: str, table: Any, named: Mapping[str, Policy]) -> Rule:
    try:
        rule = Rule.model_validate(table)
    except ValidationError as error:
        raise HalluTracerError(f"{where}: {first_problem(error, Rule)}") from None
    for field, value, known in (
        ("policy", rule.policy, sorted(named)),
        ("route", rule.route, PROMPT_ROUTES),
    ):
        if value is not None and value not in known:
            raise HalluTracerError(
                f"{where}: {field} must be one of {', '.join(known)}, not {value!r}"
            )
    return rule.model_copy(update={"route": rule.route and canonical(rule.route)})


def _policy(path: Path, name: str, table: Any, message: str) -> Policy:
    where = f"{path}, policy [{name}]"
    if not NAME.fullmatch(name):
        raise HalluTracerError(
            f"{where}: a name has lower-case letters, digits, '.', '_' and '-', at most 64"
        )
    if not isinstance(table, dict):
        raise HalluTracerError(f"{path}: {name!r} is outside a table; write [policy-name] above it")
    try:
        parsed = PolicyTable.model_validate(table)
        upstream = parsed.sent_to()
    except ValidationError as error:
        raise HalluTracerError(f"{where}: {first_problem(error, PolicyTable)}") from None
    except HalluTracerError as error:
        raise HalluTracerError(f"{where}: {error}") from None
    says = (
        (parsed.message or parsed.action.message or message) if parsed.action.has_message else None
    )
    chosen = parsed.withhold_outside, parsed.withhold_no_fact, parsed.recheck, parsed.stop_at
    return Policy(
        name,
        parsed.action,
        parsed.threshold,
        says,
        *chosen,
        upstream,
        parsed.tools,
        parsed.passage_truth,
    )
