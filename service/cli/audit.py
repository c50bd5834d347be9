"""hallutracer audit: look whether an audit log is whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from service.cli.options import Json, UsageError
from service.cli.output import print_json, print_line
from service.errors import HalluTracerError
from service.options import Common
from service.settings import option

Seen = Annotated[str | None, option("Digest that this command, or the service's log, once gave as the last line's.")]


def verify(
    *files: Annotated[Path, Parameter(help="The log; of a rotated one all files, oldest first.", show_env_var=False)],
    seen: Seen = None,
    as_json: Json = False,
    common: Common = Common(),
) -> None:
    """Follow the chain of digests through an audit log; exit status 1 where a line was changed, removed or put in.

    Which line is the last one is read from the head file beside the log (.NAME.head).  Whoever can change both can
    write another log that is whole: note the printed digest where nobody can change it, and give it with --seen.

      hallutracer audit verify audit.jsonl.1 audit.jsonl --seen 5f0c..
    """
    from service.audit.verify import verify as follow

    if not files:
        raise UsageError("FILES", "name the audit log")
    found = follow(files, None if seen is None else seen.removeprefix("sha256:"))
    if as_json:
        print_json({**vars(found), "lines": found.lines, "whole": not found.problems})
    else:
        events = ", ".join(f"{count} {event}" for event, count in found.events.most_common())
        print_line(f"{found.lines} lines: {events or 'none'}")
        if found.missed:
            print_line(f"{found.missed} decisions could not be written at the time, and are missing")
        if found.torn:
            print_line(f"{found.torn} lines were cut short by a crash or a full disk")
        if found.no_head:
            print_line(f"{found.no_head} times its head file was gone: whether the lines before were all is not known")
        if found.continues:
            print_line("the chain began in an earlier file")
        if not found.end_known:
            print_line("no head file beside it and no --seen: whether lines are gone from its end is not known")
        print_line(f"digest of the last line: sha256:{found.head}")
    if found.problems:
        shown = [*found.problems[:20], *(["..."] if len(found.problems) > 20 else [])]
        sys.stdout.flush()
        raise HalluTracerError("the audit log is not whole:\n  " + "\n  ".join(shown))


COMMANDS = ("The audit log of --audit-log.", {"verify": verify})
