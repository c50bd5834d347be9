"""Named policies: the built-in ones and those of a TOML file.

[support]                       # "policy": "support"
action = "abstain"              # observe | annotate | abstain | block | retrieve | fallback
threshold = 0.4                 # optional: else the service's, else the bundle's
message = "Let me ask a colleague."   # optional, with annotate, abstain and retrieve
withhold_outside = true         # optional, not with observe and annotate: also stop what lies outside training

[bigger]
action = "fallback"             # another server answers
upstream = "https://api.example.com/v1"
upstream_model = "large"
upstream_key_env = "BIG_KEY"    # optional: the environment variable with its key
upstream_timeout_s = 60         # optional

[[rule]]                        # the first that fits chooses, where a request names no policy
route = "/v1/chat/completions"  # optional, and so are model and key (its name)
policy = "bigger"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from service.access.routes import CHAT_ROUTE, PROMPT_ROUTES, canonical
from service.errors import HalluTracerError, RequestError
from service.policies.guard import BLOCK, GATE, OBSERVE, Action, Policy
from service.policies.upstreams import KEYS as UPSTREAM_KEYS
from service.policies.upstreams import read_upstream
from service.settings import DEFAULT_MESSAGE

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
KEYS = {"action", "threshold", "message", "withhold_outside", "withhold_no_fact"}
MESSAGES = {
    Action.ANNOTATE: "Caution: this answer may be wrong (risk {risk}).",
    Action.RETRIEVE: "I cannot tell this from memory. Fetch a passage about it and ask again.",
}
"""Where the file gives none; of abstain it is the service's own."""


def built_in(message: str = DEFAULT_MESSAGE) -> dict[str, Policy]:
    """``observe``, ``gate`` (abstains, saying ``message``) and ``block``."""
    return {policy.name: policy for policy in (OBSERVE, replace(GATE, message=message), BLOCK)}


@dataclass(frozen=True, slots=True)
class Rule:
    """Chooses a policy by what a request is, None: whatever it is."""

    policy: str
    route: str | None = None
    model: str | None = None
    key: str | None = None

    def check_key(self, names: Collection[str]) -> None:
        """Raise HalluTracerError where no key is called so: a misspelt rule would let through what it should not."""
        if self.key is not None and self.key not in names:
            known = f"keys are named {', '.join(sorted(names))}" if names else "there are no keys"
            raise HalluTracerError(f"a rule of the policies file names the key {self.key!r}; {known}", param="policies")

    def fits(self, route: str, model: str, key: str) -> bool:
        """Whether it applies to a request on ``route``, for ``model``, with the key of this name."""
        pairs = ((self.route, canonical(route)), (self.model, model), (self.key, key))
        return all(wanted in (None, own) for wanted, own in pairs)


@dataclass(frozen=True)
class Policies:
    """What an operator has defined."""

    named: Mapping[str, Policy]
    rules: tuple[Rule, ...] = ()


def load_policies(path: Path | None, message: str, default: str) -> Policies:
    """The built-in policies and the file's.  Raises HalluTracerError: no message, or no policy named ``default``."""
    if not message.strip():
        raise HalluTracerError("the abstain message must not be empty", param="abstain_message")
    known = Policies(built_in(message)) if path is None else read_policies(path, message)
    if default not in known.named:
        raise HalluTracerError(f"no policy {default!r}; there are {', '.join(sorted(known.named))}", param="policy")
    return known


def read_policies(path: Path, message: str = DEFAULT_MESSAGE) -> Policies:
    """The built-in policies and the file's; a table of a built-in name replaces it.

    Raises HalluTracerError naming the file, the table and the key at fault.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HalluTracerError(f"cannot read the policies file {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HalluTracerError(f"{path} is not TOML: {error}") from None
    rules = tables.pop("rule", [])
    named = built_in(message) | {name: _policy(path, name, table, message) for name, table in tables.items()}
    if not isinstance(rules, list):
        raise HalluTracerError(f"{path}: 'rule' is no policy's name; rules are written [[rule]]")
    return Policies(named, tuple(_rule(f"{path}, rule {place}", rule, named) for place, rule in enumerate(rules, 1)))


def _rule(where: str, table: Any, named: Mapping[str, Policy]) -> Rule:
    fields = [field.name for field in dataclass_fields(Rule)]
    if not isinstance(table, Mapping) or not all(isinstance(value, str) and value for value in table.values()):
        raise HalluTracerError(f"{where}: {', '.join(fields)} are non-empty strings")
    if unknown := sorted(set(table) - set(fields)):
        raise HalluTracerError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(fields)}")
    if table.get("policy") not in named:
        known = ", ".join(sorted(named))
        raise HalluTracerError(f"{where}: policy must be one of {known}, not {table.get('policy')!r}")
    if table.get("route", CHAT_ROUTE) not in PROMPT_ROUTES:
        raise HalluTracerError(f"{where}: route must be one of {', '.join(PROMPT_ROUTES)}, not {table['route']!r}")
    return Rule(**{name: canonical(value) if name == "route" else value for name, value in table.items()})


def _policy(path: Path, name: str, table: Any, message: str) -> Policy:
    where = f"{path}, policy [{name}]"
    if not NAME.fullmatch(name):
        raise HalluTracerError(f"{where}: a name has lower-case letters, digits, '.', '_' and '-', at most 64")
    if not isinstance(table, Mapping):
        raise HalluTracerError(f"{path}: {name!r} is outside a table; write [policy-name] above it")
    if unknown := sorted(set(table) - KEYS - UPSTREAM_KEYS):
        known = ", ".join(sorted(KEYS | UPSTREAM_KEYS))
        raise HalluTracerError(f"{where}: unknown key {unknown[0]!r}; known: {known}")
    if table.get("action") not in list(Action):
        raise HalluTracerError(f"{where}: action must be one of {', '.join(Action)}, not {table.get('action')!r}")
    action = Action(table["action"])
    threshold, own_message = table.get("threshold"), table.get("message")
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
        raise HalluTracerError(f"{where}: threshold must be a number in [0, 1], not {threshold!r}")
    if own_message is not None and (not isinstance(own_message, str) or not own_message.strip()):
        raise HalluTracerError(f"{where}: message must be a non-empty string")
    if own_message is not None and not action.says:
        speaking = ", ".join(one for one in Action if one.says)
        raise HalluTracerError(f"{where}: only actions {speaking} have a message; remove it or change the action")
    outside = table.get("withhold_outside")
    if not isinstance(outside, bool | None) or (outside and not action.withholds):
        raise HalluTracerError(
            f"{where}: withhold_outside must be true or false, and false with action {action.value!r}"
        )
    no_fact = table.get("withhold_no_fact", False)
    if not isinstance(no_fact, bool) or (no_fact and not action.withholds):
        raise HalluTracerError(
            f"{where}: withhold_no_fact must be true or false, and false with action {action.value!r}"
        )
    if misplaced := sorted(set(table) & UPSTREAM_KEYS) if action is not Action.FALLBACK else []:
        raise HalluTracerError(f"{where}: only action fallback has {misplaced[0]}; remove it or change the action")
    upstream = read_upstream(table, where) if action is Action.FALLBACK else None
    says = (own_message or MESSAGES.get(action, message)) if action.says else None
    try:
        return Policy(name, action, threshold, says, outside, no_fact, upstream)
    except RequestError as error:
        raise HalluTracerError(f"{where}: {error}") from None
