"""One structured JSON log line per request.  Never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.requests import Request

if TYPE_CHECKING:
    from service.serving.spans import RequestTrace

log = logging.getLogger("hallutracer")
access = logging.getLogger("hallutracer.request")


@dataclass(slots=True)
class RequestRecord:
    """Filled while a request is served; None and empty fields are not logged."""

    request_id: str
    method: str
    path: str
    status: int | None = None
    code: str | None = None  # the error's
    caller: str | None = None  # the key's name, where there are keys
    model: str | None = None
    bundle: str | None = None
    digest: str | None = None
    policy: str | None = None
    threshold: float | None = None
    risks: list[float] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    probe_ms: float | None = None
    decode_ms: float | None = None
    total_ms: float | None = None
    trace_id: str | None = None  # where requests are traced
    trace: RequestTrace | None = None  # not logged

    @property
    def routine(self) -> bool:
        """Whether it is a health check or a scrape."""
        return self.path == "/metrics" or self.path.startswith("/health")

    def write(self) -> None:
        """Log one line; health checks and scrapes at level debug."""
        access.log(logging.DEBUG if self.routine else logging.INFO, "request", extra={"record": self})


FIELDS = tuple(item.name for item in fields(RequestRecord) if item.name != "trace")


def record_of(request: Request) -> RequestRecord:
    """The record created by ``middleware.RequestFrame``."""
    record = request.state.record
    assert isinstance(record, RequestRecord)
    return record


class JsonLines(logging.Formatter):
    """Every log record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with a traceback as text."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        request = getattr(record, "record", None)
        if isinstance(request, RequestRecord):
            for name in FIELDS:
                value = getattr(request, name)
                if value is not None and value != []:
                    line[name] = round(value, 6) if isinstance(value, float) else value
        else:
            line["logger"] = record.name
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
