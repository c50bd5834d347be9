"""hallutracer keys: make, list and revoke named keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from service.access.callers import Key, Right, now
from service.cli.options import Json, UsageError
from service.cli.output import note, print_json, print_line
from service.options import Common
from service.settings import AT_LEAST_1, AuditLogFile, KeysFile, option, section

if TYPE_CHECKING:
    from collections.abc import Callable

Name = Annotated[str, Parameter(help="Of the key in the log: letters, digits, '_' and '-'.", show_env_var=False)]
SOON = timedelta(days=14)
LIMITS = ("requests_per_minute", "prompt_tokens_per_day", "policies", "may")


@section("Keys", 10)
@dataclass(frozen=True, kw_only=True)
class KeyStore:
    """Where keys are, and where it is written that they change."""

    keys: KeysFile = None
    audit_log: AuditLogFile = None

    @property
    def path(self) -> Path:
        """The file.  Raises UsageError."""
        if self.keys is None:
            raise UsageError("--keys", "name the file of keys, such as --keys keys.toml")
        return self.keys

    def audited(self, event: str, what: dict[str, Any]) -> Callable[[], None]:
        """Writes the change, before it happens.  Raises AuditUnavailable where it cannot: then nothing is changed."""
        from service.audit.events import change, shell_user
        from service.audit.file import AuditFile

        if self.audit_log is None:
            return lambda: None
        file = AuditFile(self.audit_log)
        return lambda: _appended(file, change(shell_user(), event, "done", what))


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
    requests_per_minute: Annotated[int | None, option("Then 429.  Default: no limit.", limits=AT_LEAST_1)] = None
    prompt_tokens_per_day: Annotated[int | None, option("Then 429.  Default: no limit.", limits=AT_LEAST_1)] = None

    def fields(self) -> dict[str, Any]:
        """As the file has them.  Raises UsageError."""
        return {
            "scopes": list(dict.fromkeys(self.scope)) or ["score"],
            "expires": _end(self.expires),
            "may": list(dict.fromkeys(self.may)) or None,
            "policies": list(dict.fromkeys(self.allow_policy)) or None,
            "requests_per_minute": self.requests_per_minute,
            "prompt_tokens_per_day": self.prompt_tokens_per_day,
        }


def new(
    name: Name,
    /,
    *,
    store: KeyStore = KeyStore(),
    choices: KeyChoices = KeyChoices(),
    common: Common = Common(),
) -> None:
    """Make a key and print its secret, once: the file holds only its digest.

    A running service reads the file within two seconds, or at a SIGHUP.  Limits are counted by each replica for itself.

      hallutracer keys new search-team --keys keys.toml
      hallutracer keys new grafana --keys keys.toml --scope observe --expires never
      hallutracer keys new trial --keys keys.toml --requests-per-minute 60 --prompt-tokens-per-day 200000 --expires 30d
    """
    from service.access.edit import add_key
    from service.access.key_file import NAME

    if not NAME.fullmatch(name):
        raise UsageError("NAME", f"{name!r}: a name has lower-case letters, digits, '_' and '-', at most 64")
    fields = choices.fields()
    audited = store.audited("keys.new", {"name": name} | {k: _plain(v) for k, v in fields.items() if v is not None})
    secret = add_key(store.path, name, fields, audited)
    note(f"key {name}, scopes {', '.join(fields['scopes'])}, {_until(fields['expires'])}; its secret is shown once:")
    print_line(secret)


def list_keys(*, store: KeyStore = KeyStore(), as_json: Json = False, common: Common = Common()) -> None:
    """List keys: what each opens, until when, and its limits.  No secret is in the file."""
    from rich.console import Console
    from rich.table import Table

    from service.access.key_file import read_keys

    found = read_keys(store.path)
    if as_json:
        print_json([_row(key) for key in found])
        return
    rows = [_row(key) for key in found]
    table = Table(box=None, pad_edge=False)
    shown = ["name", "scopes", "state", "expires", *(name for name in LIMITS if any(row[name] for row in rows))]
    for name in shown:
        table.add_column(name.replace("_", " "), no_wrap=name not in LIMITS)
    for row in rows:
        expires = "never" if row["expires"] is None else row["expires"][:10]
        texts = {name: ", ".join(v) if isinstance(v, list) else str(v or "") for name, v in row.items()}
        table.add_row(*((texts | {"expires": expires})[name] for name in shown))
    Console(highlight=False).print(table)


def revoke(name: Name, /, *, store: KeyStore = KeyStore(), common: Common = Common()) -> None:
    """Revoke a key: it opens nothing any more, from the moment at which a running service reads the file again.

    Its table stays, marked as revoked, so that its name in the logs means one key for ever.
    """
    from service.access.edit import revoke_key

    revoke_key(store.path, name, store.audited("keys.revoke", {"name": name}))
    print_line(f"{name} is revoked")


def _appended(file: Any, line: Any) -> None:
    try:
        file.append([line], sync=True)
    finally:
        file.close()


def _row(key: Key) -> dict[str, Any]:
    return {
        "name": key.name,
        "scopes": sorted(key.scopes),
        "state": _state(key),
        "expires": _plain(key.expires),
        "revoked": _plain(key.revoked),
        "may": sorted(key.may),
        "policies": None if key.policies is None else list(key.policies),
        "requests_per_minute": key.requests_per_minute,
        "prompt_tokens_per_day": key.prompt_tokens_per_day,
    }


def _state(key: Key) -> str:
    if key.revoked is not None:
        return "revoked"
    if key.expired():
        return "expired"
    return "ends soon" if key.expires is not None and key.expires - now() < SOON else "in force"


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _until(end: datetime | None) -> str:
    return "without an end" if end is None else f"until {end:%Y-%m-%d}"


def _end(text: str) -> datetime | None:
    """None: never.  Raises UsageError."""
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


COMMANDS = ("Named keys of the service: make, list, revoke.", {"new": new, "list": list_keys, "revoke": revoke})
