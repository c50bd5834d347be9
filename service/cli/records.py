"""hallutracer audit and feedback: what a service has written down, looked through."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from service.cli.options import FeedbackDatabase, Json, UsageError
from service.cli.output import print_json, print_line
from service.errors import HalluTracerError
from service.options import Common
from service.progress import note
from service.settings import option


def verify(
    *files: Annotated[Path, Parameter(help="The log; of a rotated one all files, oldest first.", show_env_var=False)],
    seen: Annotated[
        str | None, option("Digest that this command, or the service's log, once gave as the last line's.")
    ] = None,
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
        for count, text in (
            (found.missed, f"{found.missed} decisions could not be written at the time, and are missing"),
            (found.torn, f"{found.torn} lines were cut short by a crash or a full disk"),
            (found.no_head, f"{found.no_head} times its head file was gone: whether the lines before were all is not "
                            "known"),
            (found.continues, "the chain began in an earlier file"),
            (not found.end_known, "no head file beside it and no --seen: whether lines are gone from its end is not "
                                  "known"),
        ):  # fmt: skip
            if count:
                print_line(text)
        print_line(f"digest of the last line: sha256:{found.head}")
    if found.problems:
        shown = [*found.problems[:20], *(["..."] if len(found.problems) > 20 else [])]
        sys.stdout.flush()
        raise HalluTracerError("the audit log is not whole:\n  " + "\n  ".join(shown))


def feedback(*, feedback_db: FeedbackDatabase = "", common: Common = Common()) -> None:
    """List the answers that the service drew at random and that have no label yet, oldest first, as JSON lines.

    A guarantee is held against the labels of these alone, and an answer without one is taken for right: label them all,
    in this order, at POST /v1/feedback.  'given' is the prompt, where the service keeps prompts; the answer's text is
    kept by whoever asked.

      hallutracer feedback --feedback-db feedback.db
    """
    if not feedback_db:
        raise UsageError("--feedback-db", "name the database that the service was given")
    from service.feedback.databases import location
    from service.feedback.statements import to_label

    database, count = location(feedback_db).open(create=False), 0
    try:
        for answer in to_label(database):
            print_line(json.dumps(answer, ensure_ascii=False))
            count += 1
    finally:
        database.close()
    note(f"{count} answers wait for a label")


AUDIT_COMMANDS = ("The audit log of --audit-log.", {"verify": verify})
