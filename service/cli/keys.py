"""hallutracer keys: make and list named keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from service.access.callers import Key, Right, now
from service.cli.options import Json, UsageError
from service.cli.output import note, print_json, print_line
from service.options import Common
from service.settings import KeysFile, option, section

Name = Annotated[str, Parameter(help="Of the key in the log: letters, digits, '_' and '-'.", show_env_var=False)]
SOON = timedelta(days=14)
LIMITS = ("policies", "may")


@section("Keys", 10)
@dataclass(frozen=True, kw_only=True)
class KeyStore:
    """Where keys are."""

    keys: KeysFile = None


@section("What the key opens", 20)
@dataclass(frozen=True, kw_only=True)
class KeyChoices:
    """The fields of a new key."""

    scope: Annotated[
        tuple[Literal["score", "observe", "admin"], ...],
        option("Routes that it opens, repeatable.  score: questions, answers and feedback.  observe: metrics.  admin: "
               "what changes the service.  score and observe also list models and bundles.  Default: score."),
    ] = ()  # fmt: skip
    may: Annotated[tuple[Right, ...], option("What its requests may loosen, as --callers-may; repeatable.")] = ()
    allow_policy: Annotated[
        tuple[str, ...], option("Policy that its requests may be judged by, repeatable.  Default: all.")
    ] = ()
    expires: Annotated[
        str, option("When it ends: days (90d), a date (2027-02-21, its first second in UTC) or never.")
    ] = "365d"

    def fields(self) -> dict[str, Any]:
        """As the file has them.  Raises UsageError."""
        return {
            "scopes": list(dict.fromkeys(self.scope)) or ["score"],
            "expires": _end(self.expires),
            "may": list(dict.fromkeys(self.may)) or None,
            "policies": list(dict.fromkeys(self.allow_policy)) or None,
        }


def make(name: Name, /, *, choices: KeyChoices = KeyChoices(), common: Common = Common()) -> None:
    """Make a key: print its table, to be added to the file of keys, and on standard error its secret, once.

    A running service reads the file within two seconds, or at a SIGHUP.  To revoke a key, add a line such as
    'revoked = 2027-02-21T00:00:00Z' to its table, which stays, so that its name in the logs means one key for ever.

      hallutracer keys make search-team >> keys.toml
      hallutracer keys make grafana --scope observe --expires never >> keys.toml
    """
    from service.access.keys import NAME, new_key

    if not NAME.fullmatch(name):
        raise UsageError("NAME", f"{name!r}: a name has lower-case letters, digits, '_' and '-', at most 64")
    secret, table = new_key(name, choices.fields())
    print_line(f"\n{table}")
    note(f"the secret of {name}, shown once:\n{secret}")


def list_keys(*, store: KeyStore = KeyStore(), as_json: Json = False, common: Common = Common()) -> None:
    """List keys: what each opens, until when, and its limits.  No secret is in the file."""
    from rich.console import Console
    from rich.table import Table

    from service.access.keys import read_keys

    if store.keys is None:
        raise UsageError("--keys", "name the file of keys, such as --keys keys.toml")
    rows = [_row(key) for key in read_keys(store.keys)]
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False)
    shown = ["name", "scopes", "state", "expires", *(name for name in LIMITS if any(row[name] for row in rows))]
    for name in shown:
        table.add_column(name.replace("_", " "), no_wrap=name not in LIMITS)
    for row in rows:
        expires = "never" if row["expires"] is None else row["expires"][:10]
        texts = {name: ", ".join(v) if isinstance(v, list) else str(v or "") for name, v in row.items()}
        table.add_row(*((texts | {"expires": expires})[name] for name in shown))
    Console(highlight=False).print(table)


def _row(key: Key) -> dict[str, Any]:
    return {
        "name": key.name,
        "scopes": sorted(key.scopes),
        "state": _state(key),
        "expires": key.expires and key.expires.isoformat(),
        "revoked": key.revoked and key.revoked.isoformat(),
        "may": sorted(key.may),
        "policies": None if key.policies is None else list(key.policies),
    }


def _state(key: Key) -> str:
    if key.revoked is not None:
        return "revoked"
    if key.expired():
        return "expired"
    return "ends soon" if key.expires is not None and key.expires - now() < SOON else "in force"


def _end(text: str) -> datetime | None:
    """Return when a key ends; None for never.  Raises UsageError."""
    today = now().replace(microsecond=0)
    try:
        if days := re.fullmatch(r"(\d{1,5})d", text):
            end = today + timedelta(days=int(days[1]))
        elif text == "never":
            return None
        else:
            end = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise UsageError("--expires", f"{text!r} is not like 90d, 2027-02-21 or never") from None
    if end <= today:
        raise UsageError("--expires", f"{text} is not in the future")
    return end


COMMANDS = ("Named keys of the service: make, list.", {"make": make, "list": list_keys})
