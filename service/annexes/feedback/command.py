"""hallutracer feedback: which answers wait for a label."""

from __future__ import annotations

import json

from service.cli.options import FeedbackDatabase, UsageError
from service.cli.output import print_line
from service.options import Common
from service.progress import note


def feedback(*, feedback_db: FeedbackDatabase = "", common: Common = Common()) -> None:
    """List the answers that the service drew at random and that have no label yet, oldest first, as
    JSON lines.

    A guarantee is held against the labels of these alone, and an answer without one is taken for
    right: label them all, in this order, at POST /v1/feedback.  'given' is the prompt, where the
    service keeps prompts; the answer's text is kept by whoever asked.

      hallutracer feedback --feedback-db feedback.db"""
    if not feedback_db:
        raise UsageError("--feedback-db", "name the database that the service was given")
    from service.feedback.databases import location
    from service.feedback.rows import to_label

    database, count = location(feedback_db).open(create=False), 0
    try:
        for answer in to_label(database):
            print_line(json.dumps(answer, ensure_ascii=False))
            count += 1
    finally:
        database.close()
    note(f"{count} answers wait for a label")
