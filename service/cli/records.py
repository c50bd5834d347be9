"""hallutracer keys and audit: the files that an operator keeps beside a service."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from service.access.callers import Key, Right, now
from service.cli.options import Json, UsageError
from service.cli.output import print_json, print_line, print_table
from service.errors import HalluTracerError
from service.options import Common
from service.progress import note
from service.settings import KeysFile, option, section

Name = Annotated[
    str, Parameter(help="Of the key in the log: letters, digits, '_' and '-'.", show_env_var=False)
]
SOON = timedelta(days=14)


@section("What the key opens", 20)
@dataclass(frozen=True, kw_only=True)
class KeyChoices:
    """The fields of a new key."""

    scope: Annotated[
        tuple[Literal["score", "observe", "admin"], ...],
        option(
            "Routes that it opens, repeatable.  score: questions, answers and feedback.  observe:"
            " metrics.  admin: what changes the service.  score and observe also list models and"
            " bundles.  Default: score."
        ),
    ] = ()
    may: Annotated[
        tuple[Right, ...], option("What its requests may loosen, as --callers-may; repeatable.")
    ] = ()
    allow_policy: Annotated[
        tuple[str, ...],
        option("Policy that its requests may be judged by, repeatable.  Default: all."),
    ] = ()
    expires: Annotated[
        str,
        option("When it ends: days (90d), a date (2027-02-21, its first second in UTC) or never."),
    ] = "365d"


def make(name: Name, /, *, choices: KeyChoices = KeyChoices(), common: Common = Common()) -> None:
    """Make a key: print its lines for the file of --keys, which hold its digest only, and on
    standard error its secret.

    The secret is shown this once.  A running service reads the file within two seconds, or at a
    SIGHUP.  To revoke a key add the line 'revoked = 2026-12-01T09:00:00Z' to its table: its name in
    the logs then means one key for ever.

      hallutracer keys make search-team >> keys.toml
      hallutracer keys make grafana --scope observe --expires never >> keys.toml"""
    from service.access.keys import new_key

    fields = {
        "scopes": tuple(dict.fromkeys(choices.scope)) or ("score",),
        "expires": _end(choices.expires),
        "may": tuple(dict.fromkeys(choices.may)) or None,
        "policies": tuple(dict.fromkeys(choices.allow_policy)) or None,
    }
    try:
        secret, table = new_key(name, fields)
    except HalluTracerError as error:
        raise UsageError("NAME", error.message) from None
    print_line(f"\n{table}")
    note(f"the secret of {name}, shown once:\n{secret}")


def list_keys(*, keys: KeysFile = None, as_json: Json = False, common: Common = Common()) -> None:
    """List keys: what each opens, and until when.  No secret is in the file."""
    from service.access.keys import read_keys

    if keys is None:
        raise UsageError("--keys", "name the file of keys, such as --keys keys.toml")
    rows = [_row(key) for key in read_keys(keys)]
    if as_json:
        print_json(rows)
        return
    limits = [name for name in ("policies", "may") if any(map(itemgetter(name), rows))]
    shown = [row | {"expires": (row["expires"] or "never")[:10]} for row in rows]
    print_table(shown, ["name", "scopes", "state", "expires", *limits])


def _row(key: Key) -> dict[str, Any]:
    soon = key.expires is not None and key.expires - now() < SOON
    state = (
        "revoked"
        if key.revoked
        else "expired"
        if key.expired()
        else "ends soon"
        if soon
        else "in force"
    )
    return {
        "name": key.name,
        "scopes": sorted(key.scopes),
        "state": state,
        "expires": key.expires and key.expires.isoformat(),
        "revoked": key.revoked and key.revoked.isoformat(),
        "may": sorted(key.may),
        "policies": None if key.policies is None else list(key.policies),
    }


def _end(text: str) -> datetime | None:
    """Return when a key ends; None: never.  Raises UsageError."""
    if text == "never":
        return None
    today = now().replace(microsecond=0)
    try:
        days = re.fullmatch(r"(\d{1,5})d", text)
        end = (
            today + timedelta(int(days[1]))
            if days
            else datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
        )
    except (ValueError, OverflowError):
        raise UsageError("--expires", f"{text!r} is not like 90d, 2027-02-21 or never") from None
    if end <= today:
        raise UsageError("--expires", f"{text} is not in the future")
    return end


def verify(
    *files: Annotated[
        Path,
        Parameter(help="The log; of a rotated one all files, oldest first.", show_env_var=False),
    ],
    seen: Annotated[
        str | None,
        option("Digest that this command, or the service's log, once gave as the last line's."),
    ] = None,
    as_json: Json = False,
    common: Common = Common(),
) -> None:
    """Follow the chain of digests through an audit log; exit status 1 where a line was changed,
    removed or put in.

    Which line is the last one is read from the head file beside the log (.NAME.head).  Whoever can
    change both can write another log that is whole: note the printed digest where nobody can change
    it, and give it with --seen.

      hallutracer audit verify audit.jsonl.1 audit.jsonl --seen 5f0c.."""
    from service.audit.file import verify as follow

    if not files:
        raise UsageError("FILES", "name the audit log")
    report = follow(files, None if seen is None else seen.removeprefix("sha256:"))
    if as_json:
        print_json({**vars(report), "lines": report.lines, "whole": not report.problems})
    else:
        events = ", ".join(f"{count} {event}" for event, count in report.events.most_common())
        print_line(f"{report.lines} lines: {events or 'none'}")
        for count, text in (
            (
                report.missed,
                f"{report.missed} decisions could not be written at the time, and are missing",
            ),
            (report.torn, f"{report.torn} lines were cut short by a crash or a full disk"),
            (
                report.no_head,
                (
                    f"{report.no_head} times its head file was gone: whether the lines before were"
                    " all is not known"
                ),
            ),
            (report.continues, "the chain began in an earlier file"),
            (
                not report.end_known,
                (
                    "no head file beside it and no --seen: whether lines are gone from its end is"
                    " not known"
                ),
            ),
        ):
            if count:
                print_line(text)
        print_line(f"digest of the last line: sha256:{report.head}")
    if report.problems:
        shown = [*report.problems[:20], *(["..."] if len(report.problems) > 20 else [])]
        sys.stdout.flush()
        raise HalluTracerError("the audit log is not whole:\n  " + "\n  ".join(shown))


AUDIT_COMMANDS = ("The audit log of --audit-log.", {"verify": verify})
KEYS_COMMANDS = ("Named keys of the service: make, list.", {"make": make, "list": list_keys})
