"""Named policies: the built-in ones and those of a TOML file.

[support]                       # "policy": "support"
action = "abstain"              # observe | abstain | block
threshold = 0.4                 # optional: else the service's, else the bundle's
message = "Let me ask a colleague."   # optional, with abstain: returned instead of an answer
withhold_outside = true         # optional, with abstain and block: also stop what lies outside training
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.errors import HalluTracerError, RequestError
from service.guard import BLOCK, GATE, OBSERVE, Action, Policy
from service.settings import DEFAULT_MESSAGE

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
KEYS = {"action", "threshold", "message", "withhold_outside"}


def built_in(message: str = DEFAULT_MESSAGE) -> dict[str, Policy]:
    """``observe``, ``gate`` (abstains, saying ``message``) and ``block``."""
    return {policy.name: policy for policy in (OBSERVE, replace(GATE, message=message), BLOCK)}


def load_policies(path: Path | None, message: str, default: str) -> dict[str, Policy]:
    """The built-in policies and the file's.  Raises HalluTracerError: no message, or no policy named ``default``."""
    if not message.strip():
        raise HalluTracerError("the abstain message must not be empty", param="abstain_message")
    known = built_in(message) if path is None else read_policies(path, message)
    if default not in known:
        raise HalluTracerError(f"no policy {default!r}; there are {', '.join(sorted(known))}", param="policy")
    return known


def read_policies(path: Path, message: str = DEFAULT_MESSAGE) -> dict[str, Policy]:
    """The built-in policies and the file's; a table of a built-in name replaces it.

    Raises HalluTracerError naming the file, the table and the key at fault.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HalluTracerError(f"cannot read the policies file {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HalluTracerError(f"{path} is not TOML: {error}") from None
    return built_in(message) | {name: _policy(path, name, table, message) for name, table in tables.items()}


def _policy(path: Path, name: str, table: Any, message: str) -> Policy:
    where = f"{path}, policy [{name}]"
    if not NAME.fullmatch(name):
        raise HalluTracerError(f"{where}: a name has lower-case letters, digits, '.', '_' and '-', at most 64")
    if not isinstance(table, Mapping):
        raise HalluTracerError(f"{path}: {name!r} is outside a table; write [policy-name] above it")
    if unknown := sorted(set(table) - KEYS):
        raise HalluTracerError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(KEYS))}")
    actions = ", ".join(Action)
    if table.get("action") not in list(Action):
        raise HalluTracerError(f"{where}: action must be one of {actions}, not {table.get('action')!r}")
    action = Action(table["action"])
    threshold, own_message = table.get("threshold"), table.get("message")
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
        raise HalluTracerError(f"{where}: threshold must be a number in [0, 1], not {threshold!r}")
    if own_message is not None and (not isinstance(own_message, str) or not own_message.strip()):
        raise HalluTracerError(f"{where}: message must be a non-empty string")
    if own_message is not None and action is not Action.ABSTAIN:
        raise HalluTracerError(f"{where}: only action 'abstain' has a message; remove it or change the action")
    outside = table.get("withhold_outside", False)
    if not isinstance(outside, bool) or (outside and action is Action.OBSERVE):
        raise HalluTracerError(f"{where}: withhold_outside must be true or false, and false with action 'observe'")
    try:
        return Policy(name, action, threshold, (own_message or message) if action is Action.ABSTAIN else None, outside)
    except RequestError as error:
        raise HalluTracerError(f"{where}: {error}") from None
