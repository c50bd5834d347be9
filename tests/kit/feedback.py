"""Answers and labels to store."""

from __future__ import annotations

import time
import uuid
from typing import Any

from service.feedback.databases import Database, Location
from service.feedback.rows import Answer, Given, Stored, write_answers, write_label

PROBES = "p" * 64


def answer(request_id: str = "r1", **changes: Any) -> Answer:
    given: dict[str, Any] = {
        "uid": uuid.uuid4().hex,
        "request_id": request_id,
        "index": 0,
        "caller": "ann",
        "time": time.time(),
        "route": "/v1/risk/score",
        "model": "m",
        "bundle": "one:1",
        "digest": "sha256:ab",
        "probes": PROBES,
        "policy": "observe",
        "threshold": 0.5,
        "risk": 0.25,
        "flagged": False,
        "decision": "continue",
        "signals": {"depth_mean": 0.125},
        "mark": "0" * 16,
    }
    return Answer(**given | changes)


def given(request_id: str = "r1", label: Any = "factual", **changes: Any) -> Given:
    fields: dict[str, Any] = {
        "index": 0,
        "caller": "ann",
        "any_caller": False,
        "comment": None,
        "time": time.time(),
    }
    return Given(request_id=request_id, label=label, **fields | changes)


def put(database: Database, *answers: Answer) -> None:
    with database.transaction():
        write_answers(database, answers)


def say(
    database: Database, request_id: str = "r1", label: str = "factual", **changes: Any
) -> Stored | None:
    with database.transaction():
        return write_label(database, given(request_id, label, **changes))


def rows(where: Location, sql: str) -> list[tuple[Any, ...]]:
    """Through a connection of its own: what is on disk."""
    database = where.open(create=False)
    try:
        return database.run(sql)
    finally:
        database.close()
