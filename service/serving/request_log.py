"""One structured JSON log line per request.  Never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from service.errors import EngineError, HalluTracerError
from service.serving.judgement import AnswerEnd, Judgement

if TYPE_CHECKING:
    from service.serving.hooks import RequestTrace

log, access = logging.getLogger("hallutracer"), logging.getLogger("hallutracer.request")


@dataclass(slots=True)
class RequestRecord:
    """Filled while a request is served."""

    request_id: str
    method: str
    path: str
    status: int | None = None
    code: str | None = None  # the error's
    caller: str | None = None  # the key's name, where there are keys
    total_ms: float | None = None
    trace: RequestTrace | None = None  # where requests are traced
    judgement: Judgement | None = None  # None: the request was not admitted
    answers: Sequence[AnswerEnd] = ()

    @property
    def routine(self) -> bool:
        """Return whether it is a health check or a scrape."""
        return self.path == "/metrics" or self.path.startswith("/health")

    def write(self) -> None:
        """Log one line; health checks and scrapes at level debug."""
        access.log(
            logging.DEBUG if self.routine else logging.INFO, "request", extra={"record": self}
        )

    def fields(self) -> dict[str, Any]:
        """Return what is logged, without what is None or empty."""
        names = ("request_id", "method", "path", "status", "code", "caller")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        if (judgement := self.judgement) is not None:
            fields |= {
                "model": judgement.model,
                "bundle": judgement.bundle,
                "digest": judgement.digest,
            }
            fields |= {"policy": judgement.policy.name} | (
                self._numbers(judgement) if judgement.prompts else {}
            )
        fields |= {
            "total_ms": self.total_ms,
            "trace_id": None if self.trace is None else self.trace.id,
        }
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in fields.items()
            if value is not None and value != []
        }

    def _numbers(self, judgement: Judgement) -> dict[str, Any]:
        reports = judgement.reports
        timings = [prompt.timings for prompt in judgement.prompts]
        slowest_ms = {
            f"{name}_ms": 1e3 * max(map(attrgetter(name), timings))
            for name in ("queue", "prefill", "probe")
        }
        decodes = [answer.decode_s for answer in self.answers if answer.decode_s is not None]
        return {
            "threshold": judgement.threshold,
            "risks": [report.risk for report in reports],
            "decisions": [report.decision.value for report in reports],
            "prompt_tokens": sum(report.prompt_tokens for report in reports),
            "completion_tokens": sum(answer.tokens for answer in self.answers),
            **slowest_ms,
            "decode_ms": max(decodes) * 1e3 if decodes else None,
        }


def record_of(request: Request) -> RequestRecord:
    """Return the record that ``api.middleware.RequestFrame`` has made."""
    record = request.state.record
    assert isinstance(record, RequestRecord)
    return record


def log_failure(request_id: str, path: str, error: Exception) -> None:
    """Log with its cause an error that is the engine's or of no known kind; callers are told of no
    cause."""
    if isinstance(error, EngineError):
        log.error("request %s: the engine failed on %s", request_id, path, exc_info=error)
    elif not isinstance(error, HalluTracerError):
        log.error("request %s: unhandled error on %s", request_id, path, exc_info=error)


class JsonLines(logging.Formatter):
    """Every log record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback as text."""
        request = getattr(record, "record", None)
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **(request.fields() if isinstance(request, RequestRecord) else {"logger": record.name}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
